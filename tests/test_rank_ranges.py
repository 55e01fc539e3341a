from __future__ import annotations

from monarch_slurm.rank_ranges import ranges


def test_numbers_as_ranges() -> None:
    assert ranges([5, 0, 1, 2]) == "0-2,5"
