from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from monarch_slurm.host.places import Places


def test_a_host_stands_for_all_whose_place_it_has() -> None:
    places = Places()
    assert places.now("a") == "a"
    places.move("a", "b")
    places.move("b", "c")
    assert [places.now(host) for host in "abc"] == ["c", "c", "c"]
    assert places.standing_for("c") == {"a", "b", "c"}
    assert places.standing_for("b") == {"b"}
    known = Places()
    known.update(places.table())
    assert known.standing_for("c") == {"a", "b", "c"}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_any_moves_end_at_a_host_that_stands_for_itself(moves: list[tuple[int, int]]) -> None:
    places = Places()
    for old, new in moves:
        places.move(str(old), str(new))
    for host in map(str, range(6)):
        now = places.now(host)
        assert places.now(now) == now
        assert host in places.standing_for(now)
