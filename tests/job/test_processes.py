from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from monarch_slurm.job.folder import FOLDER_VARIABLE
from monarch_slurm.job.processes import _environment, find_processes

BECOMES_ANOTHER = """
import os, sys
count, text = int(sys.argv[1]), sys.argv[2]
if count:
    os.execv(sys.executable, [sys.executable, "-S", "-c", text, str(count - 1), text])
"""


def test_a_process_is_found_while_it_becomes_another_program(tmp_path: Path) -> None:
    """In the middle of an execve(2) the kernel shows no environment."""
    command = [sys.executable, "-S", "-c", BECOMES_ANOTHER, "15", BECOMES_ANOTHER]
    item = f"{FOLDER_VARIABLE}={tmp_path}".encode()
    with subprocess.Popen(command, env={FOLDER_VARIABLE: str(tmp_path)}) as process:
        seen = []
        while process.poll() is None:
            seen.append(item in _environment(process.pid))
    assert seen == sorted(seen, reverse=True), "it was there, then not, and then again"
    assert (process.returncode, seen.count(True) > 100) == (0, True)


def test_a_process_without_an_environment_is_no_obstacle(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"], env={}) as process:
        assert _environment(process.pid) == {b""}
        assert process.pid not in find_processes(tmp_path)
        process.kill()
