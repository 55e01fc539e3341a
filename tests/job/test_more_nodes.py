from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from monarch_slurm.job import NodeSpec
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.more_nodes import small_request
from monarch_slurm.job.request import SlurmRequest
from monarch_slurm.job.requested import new_request_folder


def asked(nodes: tuple[str, ...] = ("n1", "n2", "n3"), **kwargs: Any) -> SlurmRequest:
    return small_request(SlurmRequest(3, "train", "python", **kwargs), nodes)


def test_one_node_like_the_others_but_none_of_them() -> None:
    small = asked(partition="mi300", gpus_per_node=8, spares=1, requeue=True, exclude="n7", env={"A": "b"})
    assert (small.all_nodes, small.job_name, small.requeue) == (1, "train-more", False)
    assert (small.partition, small.gpus_per_node, small.env) == ("mi300", 8, {"A": "b"})
    assert small.exclude == "n[1-3,7]"


def test_one_node_of_the_kind_of_the_lost_one() -> None:
    kinds = (NodeSpec(2, mem="1G"), NodeSpec(1, partition="cpu", slurm_args=["-C", "big", "-w", "n3"], spares=1))
    request = SlurmRequest(3, "train", "python", components=kinds, partition="mi300", gpus_per_node=8, mem="2G")
    small = small_request(request.of_kind(1), ("n1", "n2", "n3", "n4"))
    assert (small.all_nodes, small.components, small.partition) == (1, (), "cpu")
    assert (small.mem, small.gpus_per_node, small.constraint) == ("2G", 8, "big")
    assert small.exclude == "n[1-4]"


def test_each_request_has_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    first, second = new_request_folder(folder).path, new_request_folder(folder).path
    assert (first.name, second.name) == ("1", "2")
    assert first.stat().st_mode & 0o777 == 0o700


def test_what_names_nodes_is_for_the_first_job_alone() -> None:
    assert asked(nodelist="n[1-3]", dependency="afterok:1").nodelist is None
    assert asked(dependency="afterok:1").dependency is None


@pytest.mark.parametrize(
    ("given", "kept", "excluded"),
    [
        (("--switches=1", "-w n[1-3]"), ("--switches=1",), "n[1-3]"),
        (("-wn1", "--nodelist", "n1", "-L", "a b"), ("-L", "a b"), "n[1-3]"),
        (("--exclude=n[8-9]",), (), "n[1-3,8-9]"),
        (("--tmp=1G", "--dependency=singleton"), ("--tmp=1G",), "n[1-3]"),
    ],
)
def test_options_of_sbatch(given: tuple[str, ...], kept: tuple[str, ...], excluded: str) -> None:
    small = asked(slurm_args=given)
    assert (small.slurm_args, small.exclude, small.nodelist, small.dependency) == (kept, excluded, None, None)
