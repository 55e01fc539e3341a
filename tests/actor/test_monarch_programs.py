"""Programs that are written for Monarch: they run here with their imports changed, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support import Program

from monarch_slurm.actor import make_worker_key

FOLDER = Path(__file__).parent / "monarch_programs"

OUTPUTS = {
    "custom_job": """
        {hosts: 2, gpus: 2} [True, True, True, True]
        code 3
        no such hosts
        loader 0
        trainers [None, None]
    """,
    "ping_pong": """
        served 0 6
        served 1 6
        (['ping0', 'ping1', 'ping2', 'ping3'], {})
    """,
    "parameter_server": """
        bytes 24
        far off False
    """,
    "owned_meshes": """
        ['steps: [0, 1]', 'steps: [0, 1]']
        failed: True
        ['steps: [0, 1]', 'steps: [0, 1]']
        [0, 1]
        registered 6
    """,
    "pipeline": """
        [[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
        overlapped True
        ['2:0', '2:1', '2:2']
        plain on 0
        {False} {stages: 2} {}
        5s
    """,
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_program_runs_with_its_imports_changed(program: Callable[..., Program], name: str, tmp_path: Path) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    # ``import monarch.actor`` makes the name ``monarch``, which the program then uses.
    text = re.sub(
        r"^import monarch\.actor$", "import monarch_slurm.actor\nimport monarch_slurm as monarch", text, flags=re.M
    )
    text = re.sub(r"^from monarch\.", "from monarch_slurm.", text, flags=re.MULTILINE)
    running = program(text, env={"MONARCH_SLURM_WORKER_KEY": str(make_worker_key(tmp_path / "key"))})
    assert running.wait() == 0, running.errors()
    assert running.output().split("\n") == [line.strip() for line in OUTPUTS[name].strip().split("\n")] + [""]
    assert "Traceback" not in running.errors()
