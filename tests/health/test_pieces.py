"""Facts go over mixed lines of output, whatever else is printed."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from monarch_slurm.health import Pieces, lines_of

FACTS = st.dictionaries(st.text(max_size=9), st.text(max_size=900) | st.integers() | st.none(), max_size=5)


@given(st.lists(FACTS, max_size=4), st.lists(st.text(max_size=50), max_size=5), st.randoms(use_true_random=False))
def test_lines_in_any_order(some: list[dict[str, Any]], noise: list[str], order: random.Random) -> None:
    lines = [line for facts in some for line in lines_of(facts)]
    assert all(len(line) < 900 and "\n" not in line for line in lines)
    mixed = [*lines, *noise]
    order.shuffle(mixed)
    pieces = Pieces()
    found = [facts for line in mixed if (facts := pieces.add(line)) is not None]
    assert sorted(map(repr, found)) == sorted(map(repr, some))


def test_other_json_is_no_piece() -> None:
    pieces = Pieces()
    assert [pieces.add(line) for line in ("[]", "7", '{"a": 1}', '["x", 1]', "")] == [None] * 5
