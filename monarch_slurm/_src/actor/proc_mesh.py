"""At home in `monarch_slurm.actor.proc_mesh`."""

from monarch_slurm.actor import ProcMesh, get_or_spawn_controller
from monarch_slurm.actor.proc_mesh import (
    get_active_proc_meshes,
    register_proc_mesh_spawn_callback,
    unregister_proc_mesh_spawn_callback,
)

__all__ = [
    "ProcMesh",
    "get_active_proc_meshes",
    "get_or_spawn_controller",
    "register_proc_mesh_spawn_callback",
    "unregister_proc_mesh_spawn_callback",
]
