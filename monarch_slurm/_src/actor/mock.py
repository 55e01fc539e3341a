"""At home in `monarch_slurm.actor.mock`."""

from monarch_slurm.actor.mock import (
    get_actor_class,
    get_actor_mock_registry_state,
    patch_actor,
    patch_tensor_engine,
    set_actor_mock_registry_state,
)

__all__ = [
    "get_actor_class",
    "get_actor_mock_registry_state",
    "patch_actor",
    "patch_tensor_engine",
    "set_actor_mock_registry_state",
]
