"""What callers get to see of exceptions of all kinds."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from support import DEADLINE

from monarch_slurm.actor import Actor, ActorError, Channel, ProcMesh, concurrent_endpoint, endpoint
from monarch_slurm.actor.errors import MAX_TRACEBACK_CHARS


class Holder:
    def __init__(self) -> None:
        self.parts = {"lock": threading.Lock()}


class OddError(Exception):
    """Cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Raiser(Actor):
    @endpoint
    def noted(self) -> None:
        error = ValueError("the error")
        if hasattr(error, "add_note"):
            error.add_note("a note beside it")
        raise error

    @endpoint
    def context(self) -> None:
        try:
            {}["the context"]
        except KeyError:
            raise ValueError("the error")  # noqa: B904 - its context is what is tested

    @endpoint
    def group(self) -> None:
        raise ExceptionGroup("several", [ValueError("one"), KeyError("other")])  # type: ignore[name-defined,unused-ignore]  # noqa: F821

    @endpoint
    def recurse(self, depth: int) -> int:
        return self._recurse(depth, "x" * 50)

    def _recurse(self, depth: int, text: str) -> int:
        return 1 + self._recurse(depth - 1, text + str(depth)) if depth else int("no number")

    @endpoint
    def long_text(self, length: int) -> None:
        raise ValueError("y" * length)

    @endpoint
    def odd(self) -> None:
        raise OddError

    @endpoint
    def stop_iteration(self) -> None:
        raise StopIteration("the end")

    @endpoint
    def hold(self, holder: Any, *more: Any, **named: Any) -> Any:
        return Holder()


class AsyncRaiser(Actor):
    @endpoint
    async def stop_iteration(self) -> None:
        raise StopAsyncIteration("the end")

    @concurrent_endpoint
    async def later(self) -> Any:
        return Holder()


@pytest.fixture(scope="module")
def raiser(grid: ProcMesh) -> Any:
    return grid.slice(x=0, y=0).spawn("raiser", Raiser)


def error_of(future: Any) -> ActorError:
    error = future.exception(DEADLINE)
    assert isinstance(error, ActorError), error
    return error


def test_notes_and_contexts_come_along(raiser: Any) -> None:
    error = error_of(raiser.noted.call_one())
    if sys.version_info >= (3, 11):
        assert "a note beside it" in str(error)
        assert error.exception.__notes__ == ["a note beside it"]
    text = str(error_of(raiser.context.call_one()))
    assert "KeyError: 'the context'" in text
    assert "During handling of the above exception" in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no groups of exceptions")
def test_groups_of_exceptions(raiser: Any) -> None:
    error = error_of(raiser.group.call_one())
    assert [type(one) for one in error.exception.exceptions] == [ValueError, KeyError]  # type: ignore[attr-defined]
    assert "ValueError: one" in str(error)


def test_huge_texts_are_bounded(raiser: Any) -> None:
    for future in (raiser.recurse.call_one(200), raiser.recurse.call_one(100_000), raiser.long_text.call_one(10**6)):
        assert len(str(error_of(future))) < MAX_TRACEBACK_CHARS + 1000


def test_exceptions_that_cannot_say_what_they_are(raiser: Any) -> None:
    assert "OddError" in str(error_of(raiser.odd.call_one()))


def test_exceptions_that_mean_something_to_python_are_errors_like_others(raiser: Any, grid: ProcMesh) -> None:
    assert isinstance(error_of(raiser.stop_iteration.call_one()).exception, StopIteration)
    asynchronous: Any = grid.slice(x=0, y=0).spawn("async_raiser", AsyncRaiser)
    assert isinstance(error_of(asynchronous.stop_iteration.call_one()).exception, StopAsyncIteration)
    assert "(result.parts['lock'], what async_raiser.later() returned)" in str(
        error_of(asynchronous.later.call_one()).exception
    )


def test_what_does_not_pickle_is_named(raiser: Any, grid: ProcMesh) -> None:
    what = r"cannot pickle '_thread\.lock' object \({}, an argument of raiser\.hold\(\)\)"
    with pytest.raises(TypeError, match=what.format(r"holder\.parts\['lock'\]")):
        raiser.hold.call_one(Holder())
    with pytest.raises(TypeError, match=what.format(r"more\[1\]")):
        raiser.hold.broadcast(1, 2, threading.Lock())
    with pytest.raises(TypeError, match=what.format(r"named\['a'\]\[0\]")):
        raiser.hold.choose(1, a=[threading.Lock()])
    error = error_of(raiser.hold.call_one(1))
    assert "(result.parts['lock'], what raiser.hold() returned)" in str(error.exception)
    port, _ = Channel.open()
    with pytest.raises(TypeError, match=r"\(value\[0\], sent to a port\)"):
        port.send([threading.Lock()])
    with pytest.raises(TypeError, match=r"\(args\[0\]\.parts\['lock'\], to spawn 'x' with\)"):
        grid.spawn("x", Spawned, Holder())


class Spawned(Actor):
    def __init__(self, holder: Any) -> None:
        self.holder = holder
