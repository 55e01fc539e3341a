from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from monarch_slurm.wire import dumps
from monarch_slurm.wire.pickle_fault import explain


class Holder:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


class Refuses:
    def __reduce__(self) -> Any:
        raise ValueError("not me")


def fault_of(**parts: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - looked at by whoever calls
        dumps(parts)
    explain(caught.value, parts, "an argument of log.add()")
    return caught.value


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda lock: lock, "x"),
        (lambda lock: [1, {"a": (lock,)}], "x[1]['a'][0]"),
        (lambda lock: Holder(model=Holder(good=1, lock=lock)), "x.model.lock"),
        (lambda lock: {Holder(lock=lock): 1}, "x"),
        (lambda lock: {1: 2, "k": Holder(parts=[lock])}, "x['k'].parts[0]"),
    ],
)
def test_the_part_at_fault_is_named(make: Any, path: str) -> None:
    error = fault_of(fine=[1, 2], x=make(threading.Lock()), y=threading.Lock())
    assert str(error) == f"cannot pickle '_thread.lock' object ({path}, an argument of log.add())"


def test_an_exception_of_the_users_stays_what_it_is() -> None:
    error = fault_of(x=Holder(part=Refuses()))
    assert type(error) is ValueError
    assert str(error) == "not me"
    if sys.version_info >= (3, 11):
        assert "x.part, an argument of log.add()" in error.__notes__[0]


def test_values_without_end() -> None:
    endless: list[Any] = []
    endless += [endless, threading.Lock()]
    assert "(x[0][0]" in str(fault_of(x=endless))
    deep: Any = threading.Lock()
    for _ in range(100):
        deep = [deep]
    assert "(x[0][0]" in str(fault_of(x=deep))
