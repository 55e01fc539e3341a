"""Where a run is started from decides nothing about what it imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from planted_modules import imported, plant
from support import DEADLINE, REPOSITORY


def test_a_run_that_is_started_in_a_folder_of_planted_modules(tmp_path: Path) -> None:
    folder, mark = tmp_path / "shared", tmp_path / "mark"
    folder.mkdir()
    plant(folder, mark)
    console_script = [sys.executable, "-c", "import sys; del sys.path[0]; from monarch_slurm.cli import main; main()"]
    options = ["--local", "--replicas", "2", "--model", "tiny", "--tokens", "1000", "--reference", "none"]
    done = subprocess.run(
        [*console_script, "train", *options, "--out", str(tmp_path / "runs")],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=4 * DEADLINE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert imported(mark) == []
