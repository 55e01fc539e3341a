from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monarch_slurm.job.request import NodeSpec, SlurmRequest
from monarch_slurm.job.sick import SICK_FILE, SICK_SECONDS, leave_out_sick, note_sick, sick_nodes


def sinfo(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    assert command[0] == "sinfo"
    return subprocess.CompletedProcess(command, 0, "n1\nn2\nn3\nn4\n", "")


def excluded(base: Path, nodes: int = 2, **kwargs: Any) -> str | None:
    return leave_out_sick(SlurmRequest(nodes, "job", "python", **kwargs), base, sinfo).exclude


def test_sick_nodes_are_left_out_for_a_while(tmp_path: Path) -> None:
    assert sick_nodes(tmp_path) == {}
    assert excluded(tmp_path) is None
    note_sick(tmp_path, {"n2": "silent"}, now=1000.0)
    note_sick(tmp_path, {"n3": "no memory"}, now=2000.0)
    assert sick_nodes(tmp_path, now=3000.0) == {"n2": "silent", "n3": "no memory"}
    assert sick_nodes(tmp_path, now=1500.0 + SICK_SECONDS) == {"n3": "no memory"}
    assert (tmp_path / SICK_FILE).stat().st_mode & 0o777 == 0o600


def test_they_are_excluded_besides_those_of_the_user(tmp_path: Path) -> None:
    note_sick(tmp_path, {"n2": "silent", "elsewhere": "silent"})
    assert excluded(tmp_path) == "n2"
    assert excluded(tmp_path, exclude="n1") == "n[1-2]"
    assert excluded(tmp_path, exclude="n2") == "n2"
    assert excluded(tmp_path, nodelist="n[1-2]") is None


def test_too_few_others(tmp_path: Path) -> None:
    note_sick(tmp_path, {"n2": "silent"})
    assert excluded(tmp_path, nodes=3) == "n2"
    assert excluded(tmp_path, nodes=3, spares=1) is None
    assert excluded(tmp_path, nodes=4) is None


def test_each_kind_of_nodes_has_its_own(tmp_path: Path) -> None:
    def two_partitions(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, "c1\nc2\n" if "cpu" in command else "g1\ng2\ng3\ng4\n", "")

    def excluded(*specs: NodeSpec, **kwargs: Any) -> list[str | None]:
        request = SlurmRequest(sum(spec.nodes for spec in specs), "job", "python", components=specs, **kwargs)
        return [spec.exclude for spec in leave_out_sick(request, tmp_path, two_partitions).components]

    note_sick(tmp_path, {"c1": "silent", "g1": "silent"})
    cpu = NodeSpec(1, partition="cpu")
    assert excluded(cpu, NodeSpec(2), partition="gpu") == ["c1", "g1"]
    assert excluded(cpu, NodeSpec(2, exclude="g4"), NodeSpec(1), partition="gpu") == ["c1", "g4", "g1"]
    assert excluded(cpu, NodeSpec(2, nodelist="g[1-2]"), partition="gpu") == ["c1", None]
    assert excluded(NodeSpec(2, partition="cpu"), NodeSpec(2, spares=1), partition="gpu") == [None, "g1"]
    assert excluded(cpu, NodeSpec(2), NodeSpec(2), partition="gpu") == ["c1", None, None]


def test_a_file_that_makes_no_sense(tmp_path: Path) -> None:
    (tmp_path / SICK_FILE).write_text("[")
    assert sick_nodes(tmp_path) == {}
