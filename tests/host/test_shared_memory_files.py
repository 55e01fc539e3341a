from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import Program, wait_gone, wait_until

from monarch_slurm.host.shared_memory_files import SharedMemoryFiles

SHM = Path("/dev/shm")

LEAVES = """
    import os, signal, subprocess, sys
    from multiprocessing import shared_memory
    from monarch_slurm.actor import *
    import monarch_slurm.actor as public
    public.unhandled_fault_hook = lambda failure: None

    class Leaver(Actor):
        @endpoint
        def leave(self) -> list[str]:
            mine = f"torch_{os.getpid()}_1_0"
            open(f"/dev/shm/{mine}", "wb").write(b"x" * 4096)
            child = subprocess.Popen([sys.executable, "-c", (
                "import os, time; name = f'torch_{os.getpid()}_1_0'; open(f'/dev/shm/{name}', 'wb').write(b'x'); "
                "print(name, flush=True); time.sleep(1000)")], stdout=subprocess.PIPE, text=True)
            self.block = shared_memory.SharedMemory(create=True, size=4096)
            return [str(os.getpid()), mine, child.stdout.readline().strip(), self.block.name]

    if __name__ == "__main__":
        procs = this_host().spawn_procs({"n": 1})
        pid, *names = procs.spawn("leaver", Leaver).leave.call_one().get(60)
        print("left", pid, *names, flush=True)
        sys.stdin.read()
"""


def test_what_killed_procs_leave_in_shared_memory_is_removed(program: Callable[..., Program]) -> None:
    running = program(LEAVES.replace("sys.stdin.read()", "signal.pause()"))
    pid, *names = running.expect("left").split()
    paths = [SHM / name for name in names]
    assert all(path.exists() for path in paths), names
    os.kill(int(pid), signal.SIGKILL)
    for path in paths:
        wait_until(lambda path=path: not path.exists(), f"{path} is removed")  # type: ignore[misc]


@pytest.mark.parametrize("victim", ["agent", "program"])
def test_what_is_left_by_a_killed_agent_or_program_is_removed(program: Callable[..., Program], victim: str) -> None:
    running = program(LEAVES.replace("sys.stdin.read()", "signal.pause()"))
    pid, *names = running.expect("left").split()
    if victim == "agent":
        stat = Path(f"/proc/{pid}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
    else:
        running.signal(signal.SIGKILL)
    for name in names:
        wait_until(lambda name=name: not (SHM / name).exists(), f"{name} is removed")  # type: ignore[misc]
    running.process.kill()
    wait_gone(int(pid))


def test_only_segments_of_noted_processes_that_nobody_uses_are_removed(tmp_path: Path) -> None:
    files = SharedMemoryFiles(tmp_path)
    began = time.time()
    for name in ("torch_11_5_0", "torch_12_5_0", "torch_13_5_0", "torch_1_5_0", "psm_11", "torch_11", "xtorch_11_5_0"):
        (tmp_path / name).write_bytes(b"x" * 4096)
    fd = os.open(tmp_path / "torch_12_5_0", os.O_RDWR)
    mapped = mmap.mmap(fd, 4096)
    os.close(fd)
    files.note(11, began)
    files.note(12, began)
    files.note(13, began - 7200, began - 3600)  # the file is that of a later process with the same pid
    files.sweep()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"torch_12_5_0", "torch_13_5_0", "torch_1_5_0", "psm_11", "torch_11", "xtorch_11_5_0"}
    mapped.close()
    files.sweep()
    assert not (tmp_path / "torch_12_5_0").exists()
