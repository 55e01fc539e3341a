from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import DEADLINE, Program, wait_until

from monarch_slurm.cli.stack_groups import CONTROLLER_RANK, Rank, group_ranks
from monarch_slurm.host.stacks import Frame, Stacks, Thread

PROGRAM = """
    import ctypes, os, time
    from monarch_slurm.actor import Actor, endpoint, this_host

    class Worker(Actor):
        @endpoint
        def pid(self):
            return os.getpid()

        @endpoint
        def work(self, how):
            if how == "gil":
                self.hold()
            self.wait_for_data()

        def hold(self):
            ctypes.PyDLL(None).sleep(1000)

        def wait_for_data(self):
            time.sleep(1000)

    procs = this_host().spawn_procs({"gpus": 5}, name="trainers")
    workers = procs.spawn("worker", Worker)
    print("pids", *[pid for _, pid in workers.pid.call().get()])
    workers.slice(gpus=0).work.call_one("gil")
    answers = workers.slice(gpus=slice(1, 3)).work.call("wait")
    print("ready")
    if os.environ.get("HOLD"):
        ctypes.PyDLL(None).sleep(1000)
    answers.get()
"""


def stacks(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "monarch_slurm", "stacks", *options], capture_output=True, text=True, timeout=DEADLINE
    )


def by_rank(program: Program) -> dict[Any, Any]:
    ran = stacks("--pid", str(program.process.pid), "--json")
    assert ran.returncode == 0, ran.stderr
    (answer,) = json.loads(ran.stdout)
    return {entry["rank"] if entry["mesh"] != CONTROLLER_RANK else CONTROLLER_RANK: entry for entry in answer["ranks"]}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started = []

    def run(**env: str) -> Program:
        started.append(Program(tmp_path, PROGRAM, env=env))
        return started[-1]

    yield run
    for program in started:
        program.close()


def test_hung_ranks_are_seen_with_the_others(start: Any) -> None:
    program = start()
    pids = [int(pid) for pid in program.expect("pids").split()]
    program.expect("ready")
    os.kill(pids[3], signal.SIGSTOP)

    def seen() -> Any:
        ranks = by_rank(program)
        texts = {rank: json.dumps(entry) for rank, entry in ranks.items()}
        there = "hold" in texts[0] and "wait_for_data" in texts[1] and "wait_for_data" in texts[2]
        return ranks if there and "SIGSTOP" in texts[3] else None

    ranks = wait_until(seen)
    assert [ranks[rank]["pid"] for rank in range(5)] == pids
    assert "holds the GIL" in ranks[0]["note"]
    assert ranks[1]["note"] == ranks[2]["note"] == ranks[4]["note"] == ""
    assert ranks[CONTROLLER_RANK]["pid"] == program.process.pid

    text = stacks("--pid", str(program.process.pid)).stdout
    assert "2 ranks: trainers" in text
    assert " 1-2 (on " in text
    assert "in wait_for_data" in text
    assert "sync_cell" not in text
    assert "in get" in text, "what the controller waits in"


def test_a_controller_that_holds_the_gil_is_seen_itself(start: Any) -> None:
    program = start(HOLD="1")
    program.expect("ready")

    def seen() -> str:
        text = stacks("--pid", str(program.process.pid), "--all-threads").stdout
        return text if "in <module>" in text and "does not answer" in text else ""

    text = wait_until(seen)
    assert "program.py" in text
    assert "monarch_slurm/wire/loop.py" in text, "its other threads, too"


def test_no_program_is_an_error_without_a_traceback() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        ran = stacks("--pid", str(other.pid))
        assert other.stdin is not None
        other.stdin.close()
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"error: no program of yours with pid {other.pid} runs on ")


def rank(number: int, *functions: str, note: str = "", mesh: str = "w") -> Rank:
    threads = [Thread(number, frames=[Frame("/model.py", 7, function) for function in functions])] if functions else []
    return Rank(f"n{number // 8}", mesh, number, Stacks(100 + number, threads, note))


def test_ranks_with_equal_stacks_are_one_group_and_the_odd_ones_come_first() -> None:
    ranks = [rank(n, "step", "backward") for n in range(16) if n != 9] + [rank(9, "step", "load")]
    ranks.append(rank(0, "main", mesh=CONTROLLER_RANK))
    groups = group_ranks(ranks, all_threads=False)
    assert [group.title for group in groups] == [
        "controller (pid 100 on n0)",
        "1 rank: w 9 (on n1, pid 109)",
        "15 ranks: w 0-8,10-15 (on 2 hosts)",
    ]
    assert groups[1].lines == ["  /model.py:7 in step", "  /model.py:7 in load"]


def test_a_rank_without_stacks_shows_why() -> None:
    (group,) = group_ranks([rank(1, note="it is stopped")], all_threads=False)
    assert group.lines == ["it is stopped"]
    (idle,) = group_ranks([rank(1)], all_threads=False)
    assert "idle" in idle.lines[0]
