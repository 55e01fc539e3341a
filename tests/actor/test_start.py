"""Programs that start with ignored or blocked signals, closed descriptors, or refused system calls."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import DEADLINE, REPOSITORY

PROGRAM = """
import os, signal, sys
import monarch_slurm.actor as public
from monarch_slurm.actor import Actor, endpoint, this_host

public.unhandled_fault_hook = lambda failure: None


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        print("printed by a proc")
        print("and its errors", file=sys.stderr)
        return os.getpid()


def work(told):
    with this_host().spawn_procs({"n": 2}) as procs:
        workers = procs.spawn("worker", Worker)
        pids = workers.pid.call().get(60).values()
        os.kill(pids[0], signal.SIGKILL)
        told.append("lost: " + str(workers.pid.call().exception(60)).partition("Killed")[1])
        procs.stop().get(60)
    told.append("stopped")


if __name__ == "__main__":
    told = []
    try:
        work(told)
    except BaseException as error:
        told.append(f"{type(error).__name__}: {error}")
    finally:
        with open(sys.argv[1], "w") as file:
            file.write(", ".join(told))
"""

START = """
import os, signal, sys
what, how = sys.argv[1:3]
for text in how.split(","):
    if what == "ignored":
        signal.signal(int(text), signal.SIG_IGN)
    elif what == "blocked":
        signal.pthread_sigmask(signal.SIG_BLOCK, [int(text)])
    elif what == "closed" and text:
        os.close(int(text))
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""


def run(folder: Path, *before: str, program: str = PROGRAM) -> tuple[str, str]:
    """Run the program by the command ``before``; return what it tells, and what it prints."""
    script, result, output = folder / "program.py", folder / "result", folder / "output"
    script.write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with open(output, "wb") as file:
        ended = subprocess.run(
            [*before, str(script), str(result)],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, timeout=2 * DEADLINE, check=False,
            start_new_session=True,
        )  # fmt: skip
    assert ended.returncode == 0, output.read_text()
    return result.read_text(), output.read_text()


SIGNALS = ["SIGCHLD", "SIGPIPE", "SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGALRM", "SIGCONT"]


@pytest.mark.parametrize(
    ("what", "name"),
    [*(("ignored", name) for name in SIGNALS), ("blocked", "SIGCHLD"), ("blocked", "SIGTERM"), ("blocked", "SIGINT")],
)
def test_any_signal_may_be_ignored_or_blocked(tmp_path: Path, what: str, name: str) -> None:
    number = str(int(getattr(signal, name)))
    told, printed = run(tmp_path, sys.executable, "-c", START, what, number)
    assert told == "lost: Killed, stopped"
    assert "Traceback" not in printed


def test_all_signals_may_be_blocked_at_once(tmp_path: Path) -> None:
    numbers = ",".join(str(int(number)) for number in signal.valid_signals())
    told, printed = run(tmp_path, sys.executable, "-c", START, "blocked", numbers)
    assert told == "lost: Killed, stopped"
    assert "Traceback" not in printed


@pytest.mark.parametrize("fds", [fds for n in range(4) for fds in itertools.combinations("012", n)])
def test_any_standard_descriptor_may_be_closed(tmp_path: Path, fds: tuple[str, ...]) -> None:
    told, printed = run(tmp_path, sys.executable, "-c", START, "closed", ",".join(fds))
    assert told == "lost: Killed, stopped"
    assert "Traceback" not in printed
    assert ("printed by a proc" in printed) is ("1" not in fds)
    assert ("and its errors" in printed) is ("2" not in fds)


FAILING = """
import sys
from monarch_slurm.actor import Actor, endpoint, this_host, current_rank
import time


class Worker(Actor):
    @endpoint
    def die(self) -> None:
        import os
        os._exit(7)


if __name__ == "__main__":
    open(sys.argv[1], "w").write("begun")
    this_host().spawn_procs({"n": 1}).spawn("worker", Worker).die.broadcast()
    time.sleep(1000)
"""


@pytest.mark.parametrize(("what", "how"), [("ignored", "2"), ("blocked", "2"), ("closed", "1,2"), ("closed", "2")])
def test_a_failure_that_nobody_handles_ends_the_program(tmp_path: Path, what: str, how: str) -> None:
    """SIGINT, by which the main thread is told, may be ignored: so for background jobs of a script."""
    script, output = tmp_path / "program.py", tmp_path / "output"
    script.write_text(FAILING)
    with open(output, "wb") as file:
        ended = subprocess.run(
            [sys.executable, "-c", START, what, how, str(script), str(tmp_path / "result")],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=2 * DEADLINE, check=False,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, start_new_session=True,
        )  # fmt: skip
    assert ended.returncode == 1, output.read_text()
    assert "Traceback" not in output.read_text()
    assert what == "closed" or "Exited(code=7)" in output.read_text()


WITHOUT = REPOSITORY / "tests" / "without_system_calls.py"
OTHERS = "pidfd_send_signal,pidfd_getfd,close_range,process_vm_readv,process_vm_writev,set_mempolicy,io_uring_setup"


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM], ids=["ENOSYS", "EPERM"])
@pytest.mark.parametrize("names", ["pidfd_open", f"pidfd_open,{OTHERS}", "clone3"])
def test_system_calls_that_a_kernel_or_a_container_may_refuse(tmp_path: Path, names: str, error: int) -> None:
    if (names, error) == ("clone3", errno.EPERM):
        pytest.skip("glibc itself starts no thread then")
    told, printed = run(tmp_path, sys.executable, str(WITHOUT), str(error), names, sys.executable)
    assert told == "lost: Killed, stopped"
    assert "Traceback" not in printed


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM], ids=["ENOSYS", "EPERM"])
@pytest.mark.parametrize("name", ["memfd_create", "eventfd2"])
def test_a_system_call_that_is_needed_is_named_at_once(tmp_path: Path, name: str, error: int) -> None:
    told, _ = run(tmp_path, sys.executable, str(WITHOUT), str(error), name, sys.executable)
    assert told.startswith("MissingSystemCallError: Linux ")
    assert f"refuses {name.rstrip('2')} (Linux " in told
    assert os.strerror(error) in told


def test_doctor_tells_what_is_refused() -> None:
    command = [sys.executable, str(WITHOUT), str(errno.EPERM), "memfd_create,pidfd_open"]
    doctor = subprocess.run(
        [*command, sys.executable, "-m", "monarch_slurm", "doctor", "--no-gpus"],
        capture_output=True, text=True, timeout=DEADLINE, check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert doctor.returncode == 3, doctor.stderr
    assert "BAD   system calls: memfd_create (Linux 3.17): Operation not permitted" in doctor.stdout
    assert "warn  system calls: pidfd_open (Linux 5.3): Operation not permitted" in doctor.stdout
    assert "no    actors: the kernel refuses memfd_create (Linux 3.17)" in doctor.stdout
    assert "Traceback" not in doctor.stderr
