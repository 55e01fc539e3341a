"""The variables that torchrun sets, in every proc of a mesh: for actors that make a process group themselves."""

from __future__ import annotations

from monarch_slurm.actor import ProcMesh
from monarch_slurm.collectives import StoreActor
from monarch_slurm.spmd.network import AddrType
from monarch_slurm.spmd.spmd_actor import SPMDActor


def setup_torch_elastic_env(
    proc_mesh: ProcMesh,
    master_addr: str | None = None,
    master_port: int | None = None,
    use_ipaddr: AddrType | None = None,
) -> None:
    """Set ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and the others in all procs, before `torch.distributed` is used.

    Process groups that rely on them (``env://``) meet at a store in the first proc, and nothing listens for that.

    Args:
        master_addr: address and ``master_port`` that programs are told; None takes the first proc's host, and a port
            that is free there now.
        use_ipaddr: see `SPMDActor.get_host_port`.

    Raises:
        AssertionError: only one of address and port is given.
    """
    actors = _spawn(proc_mesh, master_addr, master_port)
    if master_addr is None or master_port is None:
        master_addr, master_port = _first(proc_mesh, actors).get_host_port.call_one(use_ipaddr).get()
    actors.setup_env.call(master_addr, master_port, _store(proc_mesh)).get()
    actors.stop().get()


async def setup_torch_elastic_env_async(
    proc_mesh: ProcMesh,
    master_addr: str | None = None,
    master_port: int | None = None,
    use_ipaddr: AddrType | None = None,
) -> None:
    """Do what `setup_torch_elastic_env` does, in asyncio."""
    actors = _spawn(proc_mesh, master_addr, master_port)
    if master_addr is None or master_port is None:
        master_addr, master_port = await _first(proc_mesh, actors).get_host_port.call_one(use_ipaddr)
    await actors.setup_env.call(master_addr, master_port, _store(proc_mesh))
    await actors.stop()


def _spawn(proc_mesh: ProcMesh, master_addr: str | None, master_port: int | None) -> SPMDActor:
    if (master_addr is None) != (master_port is None):
        raise AssertionError("master_addr and master_port belong together: give both or none")
    return proc_mesh.spawn("torch_elastic_env", SPMDActor)


def _store(proc_mesh: ProcMesh) -> StoreActor:
    """Spawn the store where the procs meet, in the first of them; it ends with it."""
    first: ProcMesh = proc_mesh.slice(**dict.fromkeys(proc_mesh.sizes, 0))
    return first.spawn("store", StoreActor)


def _first(proc_mesh: ProcMesh, actors: SPMDActor) -> SPMDActor:
    first: SPMDActor = actors.slice(**dict.fromkeys(proc_mesh.sizes, 0))
    return first
