"""Another user of the node attacks a program with actors and a Communicator: it notices, and nothing of it changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import Program, socket_folders
from victims import attack, family, listeners, only_root, unlisted

pytestmark = [pytest.mark.slow, only_root]

VICTIM = """
    import logging, os, pathlib, sys, time
    import torch
    from monarch_slurm.actor import Actor, endpoint, this_host
    from monarch_slurm.collectives import Communicator
    from monarch_slurm.controller import publish

    class Worker(Actor):
        @endpoint
        def total(self, group, value: float) -> float:
            tensor = torch.full((3,), value)
            group.local().all_reduce(tensor).wait(60)
            return tensor[0].item()

    if __name__ == "__main__":
        publish(pathlib.Path("job"), address="127.0.0.1")
        procs = this_host().spawn_procs({"gpus": 2})
        group = Communicator.create(procs, backend="gloo")
        workers = procs.spawn("worker", Worker)
        print("totals", list(workers.total.call(group, 21.0).get(60).values()))
        while not pathlib.Path("attacked").exists():
            time.sleep(0.05)
        print("after", list(workers.total.call(group, 21.0).get(60).values()))
        group.close()
        procs.stop().get(60)
        print("done")
"""


def test_another_user_of_the_node_changes_nothing(program: Callable[[str], Program], tmp_path: Path) -> None:
    victim = program(VICTIM)
    totals = victim.expect("totals")
    pids = family(victim.process.pid)
    listening = listeners(pids)
    assert {listener.process for listener in listening} >= {"controller", "proc"}
    assert unlisted(listening) == []
    assert attack(listening, pids, [tmp_path, *map(Path, socket_folders())]) == {}

    Path(victim.stdout.parent, "attacked").touch()
    assert victim.expect("after") == totals == "[42.0, 42.0]"
    victim.expect("done")
    assert victim.wait() == 0
    assert "refused" in victim.errors()
    assert "Traceback" not in victim.errors()
