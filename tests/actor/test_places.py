"""Who runs where: contexts, ranks, actors that spawn actors and procs."""

from __future__ import annotations

import os
from typing import Any

import pytest
from sample_actors import Caller, Log, Parent
from support import DEADLINE, wait_gone

from monarch_slurm.actor import (
    HostMesh,
    ProcMesh,
    context,
    current_actor_name,
    current_rank,
    current_size,
    this_host,
    this_proc,
)


def test_the_client() -> None:
    here = context().actor_instance
    assert (str(here), here.name, here.creator) == ("<root>", "root", None)
    assert str(current_rank()) == "{}"
    assert current_size() == {}
    assert str(this_host().extent) == "{}"
    assert (len(this_host()), len(this_proc()), str(this_proc().extent)) == (1, 1, "{}")
    assert current_actor_name() == str(here.actor_id) == "client.client@controller"
    with pytest.raises(RuntimeError, match="the root actor is this program"):
        here.stop()


def test_meshes_look_like_what_they_are(grid: ProcMesh) -> None:
    assert str(grid.extent) == "{x: 2, y: 2}"
    logs: Any = grid.spawn("a", Log)
    assert repr(logs).startswith("ActorMesh(class=<class 'sample_actors.Log'>, shape={x=2,y=2}")
    assert repr(grid).startswith("<ProcMesh grid-")
    assert "HostMesh" in repr(this_host())
    assert logs.initialized.get(DEADLINE) is None
    assert grid.initialized.get(DEADLINE)
    assert grid.slice(x=0) == grid.slice(x=0)
    assert this_host() == this_host()
    logs.stop().get(DEADLINE)


def test_ranks_are_relative_to_the_slice_and_instances_are_not(grid: ProcMesh) -> None:
    logs: Any = grid.spawn("a", Log)
    rank, own, size, text, name = logs.slice(x=1).ranks.call().get(DEADLINE).item(y=0)
    assert (rank, own, size) == ("{'y': 0/2}", "{'x': 1/2, 'y': 0/2}", {"y": 2})
    assert text == "<root>.<sample_actors.Log a{'x': 1/2, 'y': 0/2}>"
    assert name.startswith("a<")
    rank, own, size, *_ = logs.slice(x=1, y=1).ranks.call_one().get(DEADLINE)
    assert (rank, own, size) == ("{}", "{'x': 1/2, 'y': 1/2}", {})
    sliced: Any = grid.slice(y=1).spawn("b", Log)
    rank, own, size, text, _ = sliced.ranks.call().get(DEADLINE).item(x=1)
    assert (rank, own, size) == ("{'x': 1/2}", "{'x': 1/2}", {"x": 2})
    assert text == "<root>.<sample_actors.Log b{'x': 1/2}>"
    logs.stop().get(DEADLINE)
    sliced.stop().get(DEADLINE)


def test_an_actor_in_the_clients_own_process() -> None:
    log: Any = this_proc().spawn("here", Log, "first")
    assert log.pid.call_one().get(DEADLINE) == os.getpid()
    assert log.add.call_one("x").get(DEADLINE) == "x"
    assert log.get.call_one().get(DEADLINE) == ["first", "x"]
    log.stop().get(DEADLINE)
    error = log.get.call_one().exception(DEADLINE)
    assert "stopped" in str(error)


def test_an_actor_spawns_in_its_own_proc(grid: ProcMesh) -> None:
    parent: Any = grid.slice(x=0, y=0).spawn("parent", Parent)
    assert parent.start_here.call_one().get(DEADLINE) == [["here"], "{}", "{}"]
    parent.stop().get(DEADLINE)


def test_an_actor_spawns_procs_which_outlive_the_call_and_not_their_owner(grid: ProcMesh) -> None:
    parents: Any = grid.slice(x=0).spawn("parent", Parent)
    pids = [pid for some in parents.start.call(2).get(DEADLINE).values() for pid in some]
    assert len(set(pids)) == 4
    children = parents.slice(y=1).mesh.call_one().get(DEADLINE)
    assert children.pid.call().get(DEADLINE).values() == pids[2:]
    _, _, _, text, _ = children.ranks.call().get(DEADLINE).item(n=1)
    assert text == "<root>.<sample_actors.Parent parent{'y': 1/2}>.<sample_actors.Log child{'n': 1/2}>"
    parents.stop().get(DEADLINE)
    wait_gone(*pids)
    error = children.pid.call().exception(DEADLINE)
    assert "stopped" in str(error)


def test_procs_can_be_sent_to_an_actor_which_owns_what_it_spawns_there(grid: ProcMesh) -> None:
    caller: Any = grid.slice(x=0, y=0).spawn("caller", Caller)
    mesh = caller.spawn_on.call_one(grid.slice(x=1), "first").get(DEADLINE)
    assert mesh.get.call().get(DEADLINE).values() == [["first"]] * 2
    with pytest.raises(RuntimeError, match="only the process that spawned a mesh"):
        mesh.initialized  # noqa: B018
    caller.stop().get(DEADLINE)
    error = mesh.get.call().exception(DEADLINE)
    assert "stopped" in str(error)


def test_host_of_a_proc(grid: ProcMesh) -> None:
    host = grid.slice(x=0, y=1).host_mesh
    assert isinstance(host, HostMesh)
    assert host == this_host()
    assert this_proc().host_mesh == this_host()
    with pytest.raises(NotImplementedError):
        grid.host_mesh  # noqa: B018
    with pytest.raises(RuntimeError, match="cannot shut down hosts through a slice"):
        host.shutdown()
