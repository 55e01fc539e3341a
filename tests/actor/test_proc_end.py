"""The orderly end of procs: Python is finalised; and what ps shows of procs while they run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support import Program

ENDS = """
    import atexit, os, sys, threading, time, weakref
    from pathlib import Path
    from monarch_slurm.actor import *

    class Worker(Actor):
        def __init__(self, note):
            import noted
            noted.begin(note)

        @endpoint
        def title(self) -> int:
            return os.getpid()
"""
NOTED = """
import atexit, os, threading, time, weakref

def write(note, what):
    with open(note, "a") as file:
        file.write(what + "\\n")

class WithDel:
    def __init__(self, note):  # by then open() is gone, as in any Python program
        self.fd, self.write = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), os.write
    def __del__(self):
        self.write(self.fd, b"__del__\\n")

def begin(note):
    global held
    held = WithDel(note)
    atexit.register(write, note, "atexit")
    finalizer = weakref.finalize(held, write, note, "finalize")
    def last():
        time.sleep(0.2)
        write(note, "thread")
    threading.Thread(target=last, daemon=False).start()
    threading.Thread(target=time.sleep, args=[1000], daemon=True).start()
    threading.Thread(target=eval, args=["all(not x for x in iter(int, 1))", {}], daemon=True).start()
"""


@pytest.mark.parametrize("preload", ["", "noted", "torch"])
def test_python_is_finalised_when_a_proc_is_stopped(
    program: Callable[..., Program], tmp_path: Path, preload: str
) -> None:
    note = tmp_path / "note"
    (tmp_path / "noted.py").write_text(NOTED)
    running = program(
        ENDS
        + f"""
    procs = this_host().spawn_procs({{"n": 1}})
    pid = procs.spawn("worker", Worker, {str(note)!r}).title.call_one().get(60)
    procs.stop().get(60)
    print("ended", not os.path.exists(f"/proc/{{pid}}"), flush=True)
""",
        env={"MONARCH_SLURM_PRELOAD": preload, "PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"},
    )
    assert running.expect("ended") == "True"
    assert running.wait() == 0
    assert sorted(note.read_text().split()) == ["__del__", "atexit", "finalize", "thread"]
    assert note.read_text().startswith("thread\n")  # Python waits for threads that are no daemons first
    assert running.errors() == ""


def test_a_proc_whose_finalisation_hangs_is_killed_in_time(program: Callable[..., Program]) -> None:
    running = program(
        """
        import atexit, os, time
        from monarch_slurm.actor import *

        class Worker(Actor):
            def __init__(self):
                atexit.register(time.sleep, 1000)

            @endpoint
            def pid(self) -> int:
                return os.getpid()

        procs = this_host().spawn_procs({"n": 2})
        pids = procs.spawn("worker", Worker).pid.call().get(60).values()
        print("pids", *pids, flush=True)
        procs.stop().get(60)
        print("stopped", flush=True)
        """,
        env={"MONARCH_SLURM_PROCESS_EXIT_TIMEOUT": "1"},
    )
    running.expect("stopped")
    assert running.wait() == 0
    running.check_gone()


def test_ps_and_top_tell_procs_apart(program: Callable[..., Program]) -> None:
    running = program(
        """
        import os, socket
        from monarch_slurm.actor import *

        class Worker(Actor):
            @endpoint
            def pid(self) -> int:
                return os.getpid()

        procs = this_host().spawn_procs({"n": 3}, name="trainers")
        pids = procs.spawn("worker", Worker).pid.call().get(60).values()
        print("host", socket.gethostname(), flush=True)
        print("pids", *pids, flush=True)
        import signal
        signal.pause()
        """
    )
    host = running.expect("host")
    for rank, pid in enumerate(running.expect("pids").split()):
        process = psutil.Process(int(pid))
        title = " ".join(process.cmdline()).strip()
        assert title.startswith("monarch_slurm proc trainers"), title
        assert title.endswith(f"rank {rank} on {host}"), title
        assert process.name().startswith(f"ms-{rank}-trainers")
        assert process.environ()["PATH"]  # it lies behind the command line, and is not written over
    names = {" ".join(psutil.Process(pid).cmdline()).strip() for pid in running.family}
    assert "monarch_slurm zygote" in names
