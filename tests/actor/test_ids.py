"""Names of actors and procs."""

from __future__ import annotations

from typing import Any

import pytest
from sample_actors import Log
from support import DEADLINE

from monarch_slurm.actor import ActorAddr, ProcId, ProcMesh, Uid, context, this_proc
from monarch_slurm.wire import dumps, loads


def test_uids() -> None:
    anonymous, instance, singleton = Uid.anonymous(), Uid.instance("a_b-1"), Uid.singleton("root")
    assert anonymous != Uid.anonymous()
    assert instance != Uid.instance("a_b-1")
    assert (anonymous.label, instance.label, singleton.label) == ("", "a_b-1", "root")
    assert [uid.is_instance for uid in (anonymous, instance, singleton)] == [True, True, False]
    assert [uid.is_singleton for uid in (anonymous, instance, singleton)] == [False, False, True]
    assert str(singleton) == "root"
    for uid in (anonymous, instance, singleton):
        assert Uid.from_string(str(uid)) == uid == loads(dumps(uid))
        assert hash(Uid.from_string(str(uid))) == hash(uid)
        assert ProcId.from_string(str(ProcId(uid))).uid == uid


@pytest.mark.parametrize("text", ["", "a<", "a<>", "a b", "a<b>c", "<a><b>"])
def test_texts_that_are_no_uid(text: str) -> None:
    with pytest.raises(ValueError, match="is no uid"):
        Uid.from_string(text)


@pytest.mark.parametrize("text", ["", "a@h", "a.b", "a.b@", "a b.c@h"])
def test_texts_that_are_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        ActorAddr.from_string(text)


def test_every_actor_has_a_name_of_its_own(grid: ProcMesh) -> None:
    logs: Any = grid.spawn("some name", Log)
    names = [ActorAddr.from_string(name) for *_, name in logs.ranks.call().get(DEADLINE).values()]
    assert len({str(name) for name in names}) == 4
    assert {name.label for name in names} == {"some_name"}
    assert [name.proc_label for name in names] == [f"grid-{rank}" for rank in range(4)]
    assert len({name.proc_id for name in names}) == 4
    assert not any(name.is_root or name.pid for name in names)
    root = context().actor_instance
    assert root.actor_id.is_root
    assert root.proc_id == "client"


def test_an_instance_knows_what_it_has_spawned(grid: ProcMesh) -> None:
    root = context().actor_instance
    local: Any = this_proc().spawn("child_of_root", Log)
    assert grid in root._children
    names = [
        child._name.get() for child in root._children if child._name is not None and not isinstance(child, ProcMesh)
    ]
    assert local._name.get() in names
    local.stop().get(DEADLINE)
    assert local._name.get() not in [getattr(child, "_ref", None) and child._name.get() for child in root._children]
