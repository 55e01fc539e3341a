from __future__ import annotations

import pytest

from monarch_slurm.collectives.partition import groups_along

SIZES = {"hosts": 2, "gpus": 3}


@pytest.mark.parametrize(
    ("dims", "groups"),
    [
        (["gpus"], [[0, 1, 2], [3, 4, 5]]),
        (["hosts"], [[0, 3], [1, 4], [2, 5]]),
        (["hosts", "gpus"], [[0, 1, 2, 3, 4, 5]]),
        (["gpus", "hosts"], [[0, 3, 1, 4, 2, 5]]),
    ],
)
def test_groups(dims: list[str], groups: list[list[int]]) -> None:
    assert groups_along(SIZES, dims) == groups


@pytest.mark.parametrize("dims", [[], ["gpus", "gpus"], ["racks"]])
def test_wrong_dims(dims: list[str]) -> None:
    with pytest.raises(ValueError, match="different dimensions of"):
        groups_along(SIZES, dims)
