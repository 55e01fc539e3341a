from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support import DEADLINE, REPOSITORY, wait_gone


def run(tmp_path: Path, body: str) -> subprocess.Popen[str]:
    """A program whose guarded function is ``body``."""
    script = tmp_path / "guarded.py"
    head = "import os, signal, subprocess, sys\nfrom monarch_slurm.host.guardian import guard\n"
    main = (
        "if __name__ == '__main__':\n    code = guard(agent)\n    print('code', code, flush=True)\n    sys.exit(code)\n"
    )
    script.write_text(head + "def agent():\n" + textwrap.indent(textwrap.dedent(body), "    ") + main)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("body", "code", "errors"),
    [
        ("return 0\n", 0, ""),
        ("return 3\n", 3, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)\n", 137, ""),
        ("raise ValueError('a fault')\n", 1, "ValueError: a fault"),
        ("from monarch_slurm.errors import ConfigError\nraise ConfigError('do this')\n", 1, "error: do this\n"),
    ],
)
def test_exit_codes(tmp_path: Path, body: str, code: int, errors: str) -> None:
    process = run(tmp_path, body)
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == code
    assert out == f"code {code}\n"
    assert errors in err
    assert err == "" or errors


def test_what_the_agent_leaves_behind_is_ended(tmp_path: Path) -> None:
    process = run(
        tmp_path,
        """
        sleep = ["sleep", "1000"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        print(subprocess.Popen(sleep, **quiet).pid, flush=True)
        print(subprocess.Popen(sleep, start_new_session=True, **quiet).pid, flush=True)
        orphan = "setsid sleep 1000 >/dev/null 2>&1 & echo $!"
        print(subprocess.check_output(["sh", "-c", orphan], text=True).strip(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    out, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 137
    wait_gone(*(int(line) for line in out.splitlines()[:3]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(tmp_path: Path, number: int) -> None:
    process = run(
        tmp_path,
        f"""
        told, tell = os.pipe()  # no Event: the thread that waits for one may hold its lock when the signal comes
        signal.signal({int(number)}, lambda *_: os.write(tell, b"x"))
        print("ready", flush=True)
        os.read(told, 1)
        return 5
        """,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == 5
