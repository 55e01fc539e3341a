from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monarch_slurm.durations import format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds", "canonical"),
    [
        ("30s", 30, "30s"),
        ("60s", 60, "1m"),
        ("90s", 90, "1m 30s"),
        ("1h30m", 5400, "1h 30m"),
        (" 1 hour  30 mins ", 5400, "1h 30m"),
        ("500ms", 0.5, "500ms"),
        ("2d 1us", 172800.000001, "2days 1us"),
        ("1week", 604800, "7days"),
        ("0", 0, "0s"),
        ("0s", 0, "0s"),
    ],
)
def test_durations(text: str, seconds: float, canonical: str) -> None:
    assert parse_duration(text) == seconds
    assert format_duration(parse_duration(text)) == canonical


@pytest.mark.parametrize("text", ["", " ", "30", "s", "-1s", "1.5s", "3 fortnights", "1h, 2m", "1h x", "soon"])
def test_texts_that_are_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="Invalid duration format"):
        parse_duration(text)


@given(st.integers(0, 10**15))
@example(309_062_952_355_741)
def test_what_is_formatted_can_be_parsed(microseconds: int) -> None:
    assert parse_duration(format_duration(microseconds / 10**6)) == microseconds / 10**6
