"""Lines of procs on their way to the program that spawned them."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support import DEADLINE, Program, wait_until
from talking_actors import Talker

from monarch_slurm.actor import ProcMesh, this_host
from monarch_slurm.config import configured

Spawn = Callable[..., ProcMesh]


def test_lines_and_records_come_to_the_program(spawn: Spawn, capsys: pytest.CaptureFixture[str]) -> None:
    procs = spawn(per_host={"gpus": 2}, name="talkers")
    talkers = procs.spawn("talker", Talker)

    async def drive() -> None:
        await procs.logging_option(stream_to_client=True)
        await talkers.say.call("hello")
        await procs.logging_option(stream_to_client=False)

    asyncio.run(drive())
    printed = capsys.readouterr()
    mesh = procs._layout.mesh
    host = this_host().host_names[0]
    assert sorted(printed.out.splitlines()) == [f"[{host} {mesh} {rank}] out hello {rank}" for rank in (0, 1)]
    errors = printed.err.splitlines()
    assert sum("err hello" in line for line in errors) == 2
    assert sum("INFO talker: " in line and "record hello" in line for line in errors) == 2


def test_equal_lines_are_one_and_turning_it_off_loses_none(spawn: Spawn, capsys: pytest.CaptureFixture[str]) -> None:
    procs = spawn(per_host={"gpus": 4})
    talkers = procs.spawn("talker", Talker)

    async def drive() -> None:
        await procs.logging_option(stream_to_client=True, aggregate_window_sec=1000, level=logging.ERROR)
        for number in range(50):
            await talkers.say.call(f"number-{number}")
        await procs.logging_option(stream_to_client=False, level=logging.ERROR)
        await talkers.say.call("unseen")

    asyncio.run(drive())
    printed = capsys.readouterr()
    assert [line.rpartition(" ")[0] for line in printed.out.splitlines()] == [
        f"[4 similar log lines] out number-{number}" for number in range(50)
    ]
    assert printed.err.splitlines() == [f"[4 similar log lines] err number-{number}" for number in range(50)]


def test_a_window_ends_by_itself(spawn: Spawn, capsys: pytest.CaptureFixture[str]) -> None:
    procs = spawn(per_host={"gpus": 2})
    talkers = procs.spawn("talker", Talker)
    asyncio.run(_option(procs, stream_to_client=True, aggregate_window_sec=1))
    talkers.say.call("late").get(DEADLINE)
    seen: list[str] = []

    def there() -> bool:
        seen.append(capsys.readouterr().out)
        return "[2 similar log lines] out late" in "".join(seen)

    wait_until(there)


def test_a_slice_is_asked_alone(spawn: Spawn, capsys: pytest.CaptureFixture[str]) -> None:
    procs = spawn(per_host={"gpus": 3})
    talkers = procs.spawn("talker", Talker)
    asyncio.run(_option(procs.slice(gpus=1), stream_to_client=True))
    talkers.say.call("hello").get(DEADLINE)
    asyncio.run(_option(procs.slice(gpus=1)))
    assert [line[-7:] for line in capsys.readouterr().out.splitlines()] == ["hello 1"]


def test_from_the_first_line_by_a_setting(spawn: Spawn, capsys: pytest.CaptureFixture[str]) -> None:
    assert not this_host().stream_logs
    with configured(enable_log_forwarding=True, prefix_with_rank=False):
        assert this_host().stream_logs
        procs = spawn(bootstrap=lambda: print("bootstrapped"))
        procs.spawn("talker", Talker).say.call("hello").get(DEADLINE)
        procs.stop().get(DEADLINE)
        asyncio.run(_option(procs))  # the news of the end has come; so have the lines
        assert capsys.readouterr().out.splitlines() == ["bootstrapped", "out hello 0"]


def test_arguments_that_make_no_sense(spawn: Spawn) -> None:
    procs = spawn()
    with pytest.raises(RuntimeError, match="cannot set aggregate window without streaming to client"):
        asyncio.run(_option(procs, aggregate_window_sec=3))
    for level in (-1, 256):
        with pytest.raises(ValueError, match="Invalid logging level"):
            asyncio.run(_option(procs, level=level))


async def _option(procs: ProcMesh, **options: int) -> None:
    await procs.logging_option(**options)  # type: ignore[arg-type]


PROGRAM = """
    import asyncio, os, sys
    sys.path.append({tests!r})
    from talking_actors import Talker
    from monarch_slurm.actor import this_host

    procs = this_host().spawn_procs({{"gpus": 2}})
    talkers = procs.spawn("talker", Talker)
    asyncio.run(procs.logging_option(stream_to_client=True, aggregate_window_sec=1000))
    talkers.say.call("hello").get()
    {end}
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("procs.stop().get()", 0), ("", 0), ("talkers.vanish.broadcast(); talkers.say.call('').get()", 1)],
)
def test_the_end_of_a_program_loses_no_line(program: Callable[..., Program], end: str, status: int) -> None:
    running = program(PROGRAM.format(tests=str(Path(__file__).parent), end=end))
    assert running.wait() == status
    assert "[2 similar log lines] out hello" in running.output()
    assert "[2 similar log lines] err hello" in running.errors()
    if status:
        assert "last words" in running.errors()


def test_procs_go_on_when_nobody_reads_and_are_told_of_when_somebody_does(
    spawn: Spawn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    class Stuck:
        """A terminal that is stopped for a while."""

        def __init__(self) -> None:
            self.text: list[str] = []

        def write(self, text: str) -> None:
            assert gate.wait(DEADLINE)
            self.text.append(text)

        def flush(self) -> None:
            return

    stuck = Stuck()
    procs = spawn()
    talkers = procs.spawn("talker", Talker)
    asyncio.run(_option(procs, stream_to_client=True))
    monkeypatch.setattr(sys, "stdout", stuck)
    talkers.flood.call_one(40_000, 1000).get(DEADLINE)  # 40 MB: far more than may be on the way
    gate.set()
    asyncio.run(_option(procs))
    monkeypatch.undo()
    errors = capsys.readouterr().err
    left_out = sum(int(line[1:].split()[0]) for line in errors.splitlines() if "were left out here" in line)
    printed = "".join(stuck.text).count("\n")
    assert left_out > 0
    assert printed + left_out == 40_000


def test_a_notebook_cell_has_its_lines_below_it(spawn: Spawn, capsys: pytest.CaptureFixture[str]) -> None:
    ipython = pytest.importorskip("IPython.core.interactiveshell")
    shell = ipython.InteractiveShell.instance()
    try:
        procs = spawn(per_host={"gpus": 2})
        talkers = procs.spawn("talker", Talker)
        shell.user_ns["talkers"] = talkers
        asyncio.run(_option(procs, stream_to_client=True, aggregate_window_sec=1000))
        asyncio.run(_option(procs, stream_to_client=True, aggregate_window_sec=1000))
        capsys.readouterr()
        shell.run_cell("talkers.say.call('cell').get(30); None")
        assert "[2 similar log lines] out cell" in capsys.readouterr().out
        assert len([call for call in shell.events.callbacks["post_run_cell"] if "log_options" in call.__module__]) == 1
    finally:
        ipython.InteractiveShell.clear_instance()
