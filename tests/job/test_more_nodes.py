from __future__ import annotations

from typing import Any

import pytest

from monarch_slurm.job.more_nodes import small_request
from monarch_slurm.job.request import SlurmRequest


def asked(nodes: tuple[str, ...] = ("n1", "n2", "n3"), **kwargs: Any) -> SlurmRequest:
    return small_request(SlurmRequest(3, "train", "python", **kwargs), nodes)


def test_one_node_like_the_others_but_none_of_them() -> None:
    small = asked(partition="mi300", gpus_per_node=8, spares=1, requeue=True, exclude="n7", env={"A": "b"})
    assert (small.all_nodes, small.job_name, small.requeue) == (1, "train-more", False)
    assert (small.partition, small.gpus_per_node, small.env) == ("mi300", 8, {"A": "b"})
    assert small.exclude == "n[1-3,7]"


def test_what_names_nodes_is_for_the_first_job_alone() -> None:
    assert asked(nodelist="n[1-3]", dependency="afterok:1").nodelist is None
    assert asked(dependency="afterok:1").dependency is None


@pytest.mark.parametrize(
    ("given", "kept", "excluded"),
    [
        (("--constraint=mi300", "-w n[1-3]"), ("--constraint=mi300",), "n[1-3]"),
        (("-wn1", "--nodelist", "n1", "-C", "a b"), ("-C", "a b"), "n[1-3]"),
        (("--exclude=n[8-9]", "-x", "n6", "-N3", "--array=1-2"), (), "n[1-3,6,8-9]"),
        (("--comment=a b", "--dependency=singleton"), ("--comment=a b",), "n[1-3]"),
    ],
)
def test_options_of_sbatch(given: tuple[str, ...], kept: tuple[str, ...], excluded: str) -> None:
    small = asked(slurm_args=given)
    assert (small.slurm_args, small.exclude) == (kept, excluded)
