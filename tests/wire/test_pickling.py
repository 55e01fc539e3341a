from __future__ import annotations

import enum
import gc
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_slurm.config import configured
from monarch_slurm.wire import dumps, loads
from monarch_slurm.wire.pickling import OUT_OF_BAND_BYTES, TooLargeError, from_bytes, to_bytes

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
)


@given(values)
def test_values_come_out_as_they_went_in(value: Any) -> None:
    assert loads(dumps(value)) == value
    assert loads([bytes(frame) for frame in dumps(((value,), {"key": value}))]) == ((value,), {"key": value})
    assert from_bytes(to_bytes(value)) == value


def test_large_buffers_leave_the_stream() -> None:
    array = np.arange(OUT_OF_BAND_BYTES, dtype=np.uint8)
    frames = dumps({"array": array, "small": array[:10].copy()})
    assert len(frames) == 2
    assert len(frames[0]) < 1000
    again = loads(frames)["array"]
    assert (again == array).all()
    again[0] = 99  # it is writable, and nobody else's
    assert array[0] == 0


def test_a_dump_is_a_snapshot() -> None:
    array = np.zeros(OUT_OF_BAND_BYTES, dtype=np.uint8)
    frames = dumps(array)
    array[:] = 1
    assert not loads(frames).any()


def test_buffers_that_are_not_contiguous() -> None:
    array = np.arange(4 * OUT_OF_BAND_BYTES).reshape(4, -1)[:, ::2]
    assert (loads(dumps(array)) == array).all()


def test_subclasses_of_plain_types_keep_their_class() -> None:
    class Colour(enum.IntEnum):
        RED = 1

    class Text(str):
        __slots__ = ("note",)

    red = loads(dumps(Colour.RED))
    assert red.name == "RED"
    text = Text("x")
    text.note = "kept"
    assert loads(dumps(((text,), {})))[0][0].note == "kept"


def test_what_does_not_pickle_raises_its_own_error() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        dumps(x for x in ())
    with pytest.raises(TypeError, match="cannot pickle"):
        dumps(((1, (x for x in ())), {}))


def test_values_beyond_the_limit_are_refused_where_they_are_sent() -> None:
    with configured(max_frame_length=OUT_OF_BAND_BYTES + 5):
        assert loads(dumps(np.zeros(OUT_OF_BAND_BYTES + 5, dtype=np.uint8))).nbytes == OUT_OF_BAND_BYTES + 5
        with pytest.raises(TooLargeError, match="setting max_frame_length"):
            dumps(np.zeros(OUT_OF_BAND_BYTES + 6, dtype=np.uint8))


def test_functions_that_travel_by_value_keep_the_name_of_their_file() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def outer():\n  def inner(): raise ValueError\n  return inner", "/a/model.py", "exec"), namespace)
    for copied in (loads(dumps(namespace["outer"])), from_bytes(to_bytes(namespace["outer"]))):
        assert copied.__code__.co_filename == copied().__code__.co_filename == "/a/model.py"


def test_what_was_pickled_can_be_collected_with_what_refers_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # what others have left
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    for value in (ValueError(1), lambda: told, [1, {"a": object()}]):
        cycle: list[object] = [dumps(value)]
        cycle.append(cycle)
        del cycle
    gc.collect()
    assert not told
