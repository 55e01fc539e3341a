"""At home in `monarch_slurm.actor`."""

from monarch_slurm.actor import (
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    Context,
    Instance,
    Port,
    PortReceiver,
    context,
    current_actor_name,
    current_rank,
    current_size,
)

__all__ = [
    "Actor",
    "ActorError",
    "ActorMesh",
    "Channel",
    "Context",
    "Instance",
    "Port",
    "PortReceiver",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
]
