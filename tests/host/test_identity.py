from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from monarch_slurm.host.identity import SUPERVISED_VARIABLE, ending_signals

KEEPS = """
import os, signal, subprocess, sys
from monarch_slurm.host.identity import ending_signals
assert ending_signals() == (signal.SIGHUP,)
os.kill(os.getpid(), signal.SIGTERM)
look = "import signal; print(signal.getsignal(signal.SIGTERM).name)"
assert subprocess.check_output([sys.executable, "-c", look]) == b"SIG_DFL\\n"
print("lives")
"""


def test_sigterm_is_not_for_what_is_supervised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SUPERVISED_VARIABLE, raising=False)
    assert ending_signals() == (signal.SIGTERM, signal.SIGHUP)
    monkeypatch.setenv(SUPERVISED_VARIABLE, "1")
    done = subprocess.run([sys.executable, "-c", KEEPS], capture_output=True, text=True, check=False)
    assert done.stdout == "lives\n", done.stderr
