"""The command line as a whole: what starting it costs."""

from __future__ import annotations

import subprocess
import sys

HEAVY = (
    "torch",
    "numpy",
    "zmq",
    "submitit",
    "cloudpickle",
    "rich",
    "psutil",
    "monarch_slurm.actor",
    "monarch_slurm.job",
)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom monarch_slurm.cli.main import cli\n"
        "cli(['--help'], standalone_mode=False)\n"
        f"print('imported:', *[name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "imported:"
    assert "train " in done.stdout
