"""Orderly ends: cleanups run, in order, within their time; and procs that do not want to end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from recorded_faults import Faults
from sample_actors import AsyncCleaner, Cleaner, Dier, Log, Parent
from support import DEADLINE, REPOSITORY, Program, hold, wait_gone, wait_until

from monarch_slurm.actor import ProcMesh, SupervisionError, context
from monarch_slurm.config import configured


@pytest.fixture
def hasty() -> Iterator[None]:
    """Short time-outs, so that tests of what hangs are quick."""
    with configured(process_exit_timeout=0.6, cleanup_timeout=0.2):
        yield


def cleanups(folder: Path) -> dict[int, str]:
    return {int(path.name.rpartition("-")[2]): path.read_text() for path in folder.glob("cleanup-*")}


@pytest.mark.parametrize("kind", [Cleaner, AsyncCleaner])
def test_stop_of_actors_runs_their_cleanup(grid: ProcMesh, tmp_path: Path, kind: type[Any]) -> None:
    cleaners: Any = grid.spawn("cleaner", kind, str(tmp_path))
    pids = cleaners.pid.call().get(DEADLINE).values()
    assert cleaners.stop("enough of it").get(DEADLINE) is None
    assert set(cleanups(tmp_path)) == set(pids)
    assert all(text.startswith("None") for text in cleanups(tmp_path).values())
    error = cleaners.pid.call().exception(DEADLINE)
    assert isinstance(error, SupervisionError)
    assert "stopped: enough of it" in str(error)
    assert cleaners.stop().get(DEADLINE) is None


def test_stop_handles_what_was_sent_before_it(grid: ProcMesh) -> None:
    logs: Any = grid.spawn("log", Log)
    pending = [logs.add.call(number) for number in range(200)]
    logs.stop()
    assert [future.get(DEADLINE).values() for future in pending] == [[number] * 4 for number in range(200)]


def test_stop_of_a_slice_leaves_the_rest(grid: ProcMesh, faults: Faults) -> None:
    logs: Any = grid.spawn("log", Log)
    logs.slice(x=0).stop().get(DEADLINE)
    assert logs.slice(x=1).add.call(1).get(DEADLINE).values() == [1, 1]
    assert isinstance(logs.slice(x=0).add.call(1).exception(DEADLINE), SupervisionError)
    # The failures of those that were not stopped still count.
    logs.slice(x=1, y=0).fail.broadcast()
    assert faults.wait()[0].crashed_ranks == (2,)
    logs.stop().get(DEADLINE)


def test_concurrent_tasks_end_before_cleanup(grid: ProcMesh, tmp_path: Path) -> None:
    cleaner: Any = grid.slice(x=0, y=0).spawn("cleaner", AsyncCleaner, str(tmp_path))
    cleaner.wait_for_ever.broadcast()
    waiting = cleaner.wait_for_ever.call_one()
    cleaner.pid.call_one().get(DEADLINE)
    cleaner.stop().get(DEADLINE)
    assert list(cleanups(tmp_path).values()) == ["None 1"]
    assert "BaseException" in str(waiting.exception(DEADLINE))


def test_a_failed_actor_cleans_up_with_its_error(grid: ProcMesh, tmp_path: Path, faults: Faults) -> None:
    cleaner: Any = grid.slice(x=0, y=0).spawn("cleaner", Cleaner, str(tmp_path))
    cleaner.fail.broadcast()
    faults.wait()
    assert list(cleanups(tmp_path).values()) == ["ValueError('on purpose')"]


def test_a_cleanup_that_raises_is_a_failure(grid: ProcMesh, tmp_path: Path, faults: Faults) -> None:
    cleaner: Any = grid.slice(x=0, y=0).spawn("cleaner", Cleaner, str(tmp_path), "raise")
    cleaner.stop().get(DEADLINE)
    assert "raised in cleanup" in faults.wait()[0].report()


@pytest.mark.parametrize("kind", [Cleaner, AsyncCleaner])
def test_a_cleanup_that_hangs_is_given_up(
    spawn: Callable[..., ProcMesh], tmp_path: Path, faults: Faults, hasty: None, kind: type[Any]
) -> None:
    cleaner: Any = spawn().spawn("cleaner", kind, str(tmp_path), "hang")
    cleaner.stop().get(DEADLINE)
    assert "__cleanup__ has not ended within 0.2 s (setting cleanup_timeout)" in faults.wait()[0].report()


def test_stop_of_procs_cleans_up_first(spawn: Callable[..., ProcMesh], tmp_path: Path) -> None:
    mesh = spawn(per_host={"n": 3})
    cleaners: Any = mesh.spawn("cleaner", Cleaner, str(tmp_path))
    pids = cleaners.work.call().get(DEADLINE).values()
    stopped = mesh.stop()
    assert stopped.get(DEADLINE) is None
    assert mesh.stop().get(DEADLINE) is None
    assert set(cleanups(tmp_path)) == set(pids)
    wait_gone(*pids)
    with pytest.raises(RuntimeError, match="`ProcMesh` has already been stopped"):
        mesh.spawn("late", Log)
    with pytest.raises(RuntimeError, match="`ProcMesh` has already been stopped"):
        mesh.slice(n=0).spawn("late", Log)
    error = cleaners.work.call().exception(DEADLINE)
    assert "stopped" in str(error)


def test_stop_of_a_slice_of_procs(spawn: Callable[..., ProcMesh], faults: Faults) -> None:
    mesh = spawn(per_host={"n": 3})
    logs: Any = mesh.spawn("log", Log)
    pids = logs.pid.call().get(DEADLINE).values()
    mesh.slice(n=1).stop().get(DEADLINE)
    wait_gone(pids[1])
    assert logs.slice(n=slice(0, 3, 2)).add.call(1).get(DEADLINE).values() == [1, 1]
    os.kill(pids[2], signal.SIGKILL)
    assert faults.wait()[0].crashed_ranks == (2,)
    assert len(faults.failures) == 1


def test_what_an_actor_owns_is_gone_before_its_cleanup(spawn: Callable[..., ProcMesh], tmp_path: Path) -> None:
    mesh = spawn()
    parent: Any = mesh.spawn("parent", Parent, str(tmp_path))
    pids = parent.start.call_one(2).get(DEADLINE)
    parent.remember.call_one(pids).get(DEADLINE)
    mesh.stop().get(DEADLINE)
    (text,) = [path.read_text() for path in tmp_path.glob("parent-*")]
    assert text == "None []"


def test_the_end_of_a_mesh_is_also_the_end_of_what_its_actors_own_with_cleanups(
    spawn: Callable[..., ProcMesh], tmp_path: Path
) -> None:
    mesh = spawn(per_host={"n": 2})
    parents: Any = mesh.spawn("parent", Parent)
    pids = [pid for some in parents.start.call(2, Cleaner, str(tmp_path)).get(DEADLINE).values() for pid in some]
    mesh.stop().get(DEADLINE)
    assert set(cleanups(tmp_path)) == set(pids)
    wait_gone(*pids)


def test_a_proc_that_holds_the_gil_is_killed_in_time(spawn: Callable[..., ProcMesh], hasty: None) -> None:
    mesh = spawn(per_host={"n": 2})
    diers: Any = mesh.spawn("dier", Dier)
    pids = diers.pid.call().get(DEADLINE).values()
    hung = diers.slice(n=0).hold_gil.call_one()
    wait_until(lambda: psutil.Process(pids[0]).status() == psutil.STATUS_SLEEPING)
    mesh.stop().get(DEADLINE)
    wait_gone(*pids)
    assert isinstance(hung.exception(DEADLINE), SupervisionError)


def test_a_proc_that_is_stopped_by_a_signal_is_killed_in_time(spawn: Callable[..., ProcMesh], hasty: None) -> None:
    mesh = spawn()
    dier: Any = mesh.spawn("dier", Dier)
    pid = dier.pid.call_one().get(DEADLINE)
    hold(pid)
    mesh.stop().get(DEADLINE)
    wait_gone(pid)


def test_stop_before_the_procs_have_started(spawn: Callable[..., ProcMesh]) -> None:
    mesh = spawn(per_host={"n": 2})
    log: Any = mesh.spawn("log", Log)
    mesh.stop().get(DEADLINE)
    assert isinstance(log.add.call(1).exception(DEADLINE), SupervisionError)
    assert isinstance(mesh.initialized.exception(DEADLINE), SupervisionError | None)  # None: they were quicker


async def _use(mesh: ProcMesh) -> list[int]:
    async with mesh:
        return list((await mesh.spawn("log", Log).pid.call()).values())


def test_procs_end_with_their_async_with_block(spawn: Callable[..., ProcMesh]) -> None:
    mesh = spawn(per_host={"n": 2})
    wait_gone(*asyncio.run(_use(mesh)))
    with pytest.raises(RuntimeError, match="already been stopped"):
        asyncio.run(_use(mesh))


@pytest.mark.slow
def test_a_hundred_rounds_leave_no_descriptor_no_thread_no_process(spawn: Callable[..., ProcMesh]) -> None:
    client_pid = os.getpid()
    warm: Any = spawn().spawn("log", Log)
    agent_pid = psutil.Process(warm.pid.call_one().get(DEADLINE)).ppid()

    def count() -> list[int]:
        return [
            len(os.listdir(f"/proc/{client_pid}/fd")),
            len(os.listdir(f"/proc/{client_pid}/task")),
            len(os.listdir(f"/proc/{agent_pid}/fd")),
            len(os.listdir(f"/proc/{agent_pid}/task")),
            len(psutil.Process(agent_pid).children()),
        ]

    before = count()
    owned = context().actor_instance.runtime.owned
    others = set(owned.actors)  # of earlier tests in this process
    for _ in range(100):
        mesh = spawn(per_host={"n": 2})
        mesh.spawn("log", Log).pid.call().get(DEADLINE)
        mesh.stop().get(DEADLINE)
    wait_until(
        lambda: all(now <= then for now, then in zip(count(), before, strict=True)), f"{before} again: {count()}"
    )
    assert {mesh.name for mesh in owned.procs.values()} <= {"anon", "grid"}
    assert owned.actors.keys() <= others


PRELOADING = """
    import time
    from pathlib import Path
    from monarch_slurm.actor import this_host
    from monarch_slurm.config import configure

    configure(preload="takes_long")
    procs = this_host().spawn_procs(dict(gpus=2))
    while not Path("importing").exists():
        time.sleep(0.01)
    {how}
    print("over")
"""


@pytest.mark.parametrize("how", ["procs.stop().get()", "pass"], ids=["stop", "end of the program"])
def test_procs_end_although_their_zygote_is_not_ready(tmp_path: Path, how: str) -> None:
    (tmp_path / "takes_long.py").write_text(
        "import time\nfrom pathlib import Path\nPath('importing').touch()\ntime.sleep(100_000)\n"
    )
    program = Program(tmp_path, PRELOADING.format(how=how), env={"PYTHONPATH": f"{REPOSITORY}:{tmp_path}"})
    try:
        program.expect("over")
        assert program.wait() == 0, program.errors()
        assert "has not ended" not in program.errors()
        assert "is lost" not in program.errors()
        program.check_gone()
    finally:
        program.close()
