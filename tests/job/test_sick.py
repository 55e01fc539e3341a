from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monarch_slurm.job.request import NodeSpec, SlurmRequest
from monarch_slurm.job.sick import (
    NOT_STARTED_SECONDS,
    SICK_FILE,
    SILENT_SECONDS,
    UNFIT_SECONDS,
    leave_out_sick,
    note_joined,
    note_sick,
    note_silent,
    sick_nodes,
)


class Sinfo:
    """A cluster of nodes in the given states and partitions."""

    def __init__(self, **nodes: str) -> None:
        self.lines = ""
        for name, text in nodes.items():
            state, _, partition = text.partition(" ")
            self.lines += f"{name}|{state}|{partition or 'debug*'}|8|1000|(null)|(null)|none\n"

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        assert command[0] == "sinfo"
        return subprocess.CompletedProcess(command, 0, self.lines, "")


FOUR = Sinfo(n1="idle", n2="idle", n3="allocated", n4="mixed")
GPU_AND_CPU = Sinfo(
    c1="idle cpu", c2="idle cpu", g1="idle gpu", g2="idle gpu", g3="idle gpu", g4="idle gpu", g5="down* gpu"
)


def excluded(base: Path, nodes: int = 2, run: Sinfo = FOUR, **kwargs: Any) -> str | None:
    return leave_out_sick(SlurmRequest(nodes, "job", "python", **kwargs), base, lambda text: None, run).exclude


def left_out(base: Path, now: float) -> set[str]:
    return set(sick_nodes(base, now))


def test_the_time_follows_from_the_evidence(tmp_path: Path) -> None:
    assert sick_nodes(tmp_path) == {}
    note_silent(tmp_path, "n1", "nothing was heard from it for 3 s", now=0.0)
    note_sick(tmp_path, {"n2": "its agent did not start"}, NOT_STARTED_SECONDS, now=0.0)
    note_sick(tmp_path, {"n3": "GPU 3 does not answer"}, now=0.0)
    assert left_out(tmp_path, SILENT_SECONDS[0] - 1) == {"n1", "n2", "n3"}
    assert left_out(tmp_path, SILENT_SECONDS[0]) == {"n2", "n3"}
    assert left_out(tmp_path, NOT_STARTED_SECONDS) == {"n3"}
    assert left_out(tmp_path, UNFIT_SECONDS) == set()
    assert (tmp_path / SICK_FILE).stat().st_mode & 0o777 == 0o600


def test_a_node_that_joins_again_is_well_and_one_that_is_silent_again_is_left_out_for_longer(tmp_path: Path) -> None:
    for silences, seconds in enumerate((*SILENT_SECONDS, SILENT_SECONDS[-1]), 1):
        at = 1000.0 * silences
        note_silent(tmp_path, "n1", "silent", now=at)
        assert left_out(tmp_path, at + seconds - 1) == {"n1"}
        assert left_out(tmp_path, at + seconds) == set()
        note_joined(tmp_path, "n1", now=at + 5)
        assert left_out(tmp_path, at + 6) == set()
    assert "silent, 4 times within a day" in (tmp_path / SICK_FILE).read_text()


def test_joining_again_is_no_answer_to_a_failed_check(tmp_path: Path) -> None:
    note_sick(tmp_path, {"n1": "GPU 3 does not answer"}, now=0.0)
    note_silent(tmp_path, "n1", "silent", now=1.0)
    note_joined(tmp_path, "n1", now=2.0)
    node = sick_nodes(tmp_path, now=SILENT_SECONDS[1])["n1"]
    assert (node.why, node.silences) == ("GPU 3 does not answer", 1)


def test_they_are_excluded_besides_those_of_the_user_who_is_told(tmp_path: Path) -> None:
    note_sick(tmp_path, {"n2": "no memory", "elsewhere": "silent"})
    assert excluded(tmp_path) == "n2"
    assert excluded(tmp_path, exclude="n1") == "n[1-2]"
    assert excluded(tmp_path, exclude="n2") == "n2"
    assert excluded(tmp_path, nodelist="n[1-2]") is None
    assert excluded(tmp_path, avoid=False) is None
    told: list[str] = []
    leave_out_sick(SlurmRequest(2, "job", "python"), tmp_path, told.append, FOUR)
    assert len(told) == 1
    assert told[0].startswith("leaving out nodes that were lost or not fit: n2 (no memory; until ")
    assert "elsewhere" not in told[0]
    assert "--no-avoid" in told[0]


def test_only_nodes_that_slurm_can_give_count(tmp_path: Path) -> None:
    note_sick(tmp_path, {"n2": "no memory"})
    assert excluded(tmp_path, nodes=3) == "n2"
    assert excluded(tmp_path, nodes=3, spares=1) is None
    for state in ("down", "down*", "drained", "draining", "idle*", "reserved", "maint", "fail"):
        assert excluded(tmp_path, nodes=3, run=Sinfo(n1="idle", n2="idle", n3="idle", n4=state)) is None
    assert excluded(tmp_path, nodes=3, run=Sinfo(n1="idle", n2="idle", n3="idle", n4="idle other")) is None
    told: list[str] = []
    leave_out_sick(SlurmRequest(4, "job", "python"), tmp_path, told.append, FOUR)
    assert told[0].startswith("using nodes that were lost or not fit, because Slurm has too few others: n2 (no memory;")


def test_as_many_as_can_be_spared_are_left_out_the_worst_first(tmp_path: Path) -> None:
    note_silent(tmp_path, "n1", "silent")
    note_sick(tmp_path, {"n2": "no memory"})
    note_silent(tmp_path, "n3", "silent")
    assert excluded(tmp_path, nodes=3) == "n2"
    assert excluded(tmp_path, nodes=2) == "n[2-3]"  # of two that were silent, the one that was later


def test_no_node_serves_two_components(tmp_path: Path) -> None:
    def excluded(*specs: NodeSpec, run: Sinfo = GPU_AND_CPU, **kwargs: Any) -> list[str | None]:
        request = SlurmRequest(sum(spec.nodes for spec in specs), "job", "python", components=specs, **kwargs)
        return [spec.exclude for spec in leave_out_sick(request, tmp_path, lambda text: None, run).components]

    note_sick(tmp_path, {"c1": "silent", "g1": "silent"})
    cpu = NodeSpec(1, partition="cpu")
    assert excluded(cpu, NodeSpec(2), partition="gpu") == ["c1", "g1"]
    assert excluded(cpu, NodeSpec(1, exclude="g4"), NodeSpec(1), partition="gpu") == ["c1", "g[1,4]", "g1"]
    assert excluded(cpu, NodeSpec(2, nodelist="g[1-2]"), partition="gpu") == ["c1", None]
    assert excluded(NodeSpec(2, partition="cpu"), NodeSpec(2, spares=1), partition="gpu") == [None, "g1"]
    assert excluded(cpu, NodeSpec(2), NodeSpec(2), partition="gpu") == ["c1", None, None]
    # three components of one partition, whose nodes are silent, down and well: they get what there is
    three = (NodeSpec(1), NodeSpec(1), NodeSpec(1))
    assert excluded(*three, partition="gpu", run=Sinfo(g1="idle gpu", g2="idle gpu", g3="idle gpu", g4="down gpu")) == [
        None,
        None,
        None,
    ]


def test_a_silent_slurm_and_a_file_that_makes_no_sense_exclude_nothing(tmp_path: Path) -> None:
    note_sick(tmp_path, {"n2": "silent"})
    assert excluded(tmp_path, run=Sinfo()) is None
    for text in ("[", "[]", '{"n2": 3}', '{"n2": {}}'):
        (tmp_path / SICK_FILE).write_text(text)
        assert sick_nodes(tmp_path) == {}
