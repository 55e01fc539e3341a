"""Other classes in the place of actor classes, in this process and in those that it spawns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from support import DEADLINE

from monarch_slurm._src.actor.mock import get_actor_class, patch_actor, patch_tensor_engine
from monarch_slurm.actor import Actor, ProcMesh, endpoint, this_host, this_proc


class Real(Actor):
    @endpoint
    def name(self) -> str:
        return "real"


class Mock(Actor):
    @endpoint
    def name(self) -> str:
        return "mock"


class Other(Actor):
    @endpoint
    def name(self) -> str:
        return "other"


class Parent(Actor):
    @endpoint
    def child(self) -> str:
        return str(this_proc().spawn("child", Real).name.call_one().get(DEADLINE))

    @endpoint
    def grandchild(self) -> str:
        procs = this_host().spawn_procs()
        parent = procs.spawn("parent", Parent)
        name = str(parent.child.call_one().get(DEADLINE))
        procs.stop().get(DEADLINE)
        return name


def spawned() -> str:
    actor: Any = this_proc().spawn("real", Real)
    name = str(actor.name.call_one().get(DEADLINE))
    actor.stop().get(DEADLINE)
    return name


def test_nested_patches_are_taken_back() -> None:
    assert spawned() == "real"
    with patch_actor(Real, Mock) as mock:
        assert mock is Mock
        assert spawned() == "mock"
        with patch_actor(Real, Other):
            assert spawned() == "other"
        assert spawned() == "mock"
    assert spawned() == "real"
    with pytest.raises(KeyError), patch_actor(Real, Mock):
        raise KeyError
    assert get_actor_class(Real) is Real


def test_decorated_functions_and_async_blocks() -> None:
    patched = patch_actor(Real, Mock)(spawned)
    assert (patched(), patched(), spawned()) == ("mock", "mock", "real")

    @patch_actor(Real, Mock)
    async def inside() -> type[Actor]:
        return get_actor_class(Real)

    async def block() -> type[Actor]:
        async with patch_actor(Real, Other):
            return get_actor_class(Real)

    assert (asyncio.run(inside()), asyncio.run(block()), get_actor_class(Real)) == (Mock, Other, Real)


@pytest.mark.parametrize("bootstrap", [None, lambda: None])
def test_procs_and_what_they_spawn_have_the_mocks(
    spawn: Callable[..., ProcMesh], bootstrap: Callable[[], None] | None
) -> None:
    with patch_actor(Real, Mock):
        patched: Any = spawn(bootstrap=bootstrap).spawn("parent", Parent)
    plain: Any = spawn(bootstrap=bootstrap).spawn("parent", Parent)
    assert patched.child.call_one().get(DEADLINE) == "mock"
    assert patched.grandchild.call_one().get(DEADLINE) == "mock"
    assert plain.child.call_one().get(DEADLINE) == "real"


def test_there_is_no_tensor_engine_to_replace() -> None:
    with pytest.raises(NotImplementedError):
        patch_tensor_engine(Real)
