"""The client that the tests of this folder share, and a fault hook that records instead of ending the program."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from recorded_faults import Faults
from support import DEADLINE

import monarch_slurm.actor as public
from monarch_slurm.actor import ProcMesh, context, this_host


@pytest.fixture(autouse=True)
def _root_faults(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    recorder = Faults()
    monkeypatch.setattr(public, "unhandled_fault_hook", recorder)
    yield recorder
    if "faults" not in request.fixturenames:
        assert not recorder.failures


@pytest.fixture
def faults(_root_faults: Faults) -> Faults:
    return _root_faults


@pytest.fixture
def spawn() -> Iterator[Callable[..., ProcMesh]]:
    """Spawns procs that are stopped after the test."""
    meshes: list[ProcMesh] = []

    def spawn_procs(**kwargs: object) -> ProcMesh:
        mesh = this_host().spawn_procs(**kwargs)  # type: ignore[arg-type]
        meshes.append(mesh)
        return mesh

    yield spawn_procs
    for mesh in reversed(meshes):
        mesh.stop().get(DEADLINE)
    owned = context().actor_instance.runtime.owned
    assert not {mesh._layout.mesh for mesh in meshes} & set(owned.procs)


@pytest.fixture(scope="module")
def grid() -> Iterator[ProcMesh]:
    """Four procs, x by y, for all tests of a module."""
    mesh = this_host().spawn_procs({"x": 2, "y": 2}, name="grid")
    yield mesh
    mesh.stop().get(DEADLINE)
