"""Programs of the pages that need a cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from slurm_nodes import ROOT, Cluster


def program(page: str, number: int) -> str:
    text = (ROOT / "site" / page).read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[number].replace(
        '"gpus": 8', '"gpus": 2'
    )


def test_a_job_whose_program_calls_the_hosts_of_its_allocation(cluster: Cluster) -> None:
    submit = program("slurm.md", 0)
    assert 'partition="mi300", gpus_per_node=8, ' in submit
    submit = submit.replace('partition="mi300", gpus_per_node=8, ', "").replace('{"trainers": 4}', '{"trainers": 2}')
    Path("submit.py").write_text(
        submit.replace("python train.py", f"{sys.executable} train.py") + "\nprint(job.job_id)\n"
    )
    Path("train.py").write_text(program("salloc.md", 0) + "print('procs', dict(procs.sizes), flush=True)\n")
    done = subprocess.run([sys.executable, "submit.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    followed = subprocess.run(
        [sys.executable, "-m", "monarch_slurm", "logs", "--follow", done.stdout.strip()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "procs {'hosts': 2, 'gpus': 2}" in followed.stdout, followed.stdout + followed.stderr
