"""The base class of actors."""

from __future__ import annotations

import functools
import logging
from typing import Any

from monarch_slurm.actor.errors import MeshFailure
from monarch_slurm.actor.mesh_trait import MeshTrait
from monarch_slurm.actor.ndslice import Slice
from monarch_slurm.actor.shape import Shape
from monarch_slurm.actor.undeliverable import UndeliverableMessageEnvelope

_NO_MESH = "an actor is no mesh; slice the mesh that spawn() returned"


class Actor(MeshTrait):
    """Subclass this, decorate methods with `endpoint`, and spawn it on a proc mesh: one instance runs in each proc.

    An instance handles one message at a time. When it owns meshes, ``__supervise__(failure)`` is called for their
    failures; a true result means handled, anything else makes this actor fail in turn. ``__cleanup__(error)`` runs when
    it ends; ``error`` is None for a graceful stop.
    """

    @functools.cached_property
    def logger(self) -> logging.Logger:
        """A logger of the class's name, at DEBUG."""
        logger = logging.getLogger(type(self).__name__)
        logger.setLevel(logging.DEBUG)
        return logger

    def __supervise__(self, failure: MeshFailure) -> Any:
        """Handle the failure of a mesh that this actor owns; return whether it is handled."""

    def __cleanup__(self, exc: Exception | None) -> Any:
        """Tidy up before the actor ends."""

    def _handle_undeliverable_message(self, message: UndeliverableMessageEnvelope) -> Any:
        """Decide what becomes of a message of this actor, sent with ``broadcast`` or `send`, that has come to nobody.

        A true result drops it; anything else makes this actor fail. An actor without this method hears nothing.
        """
        return False

    _handle_undeliverable_message._monarch_doc_stub = True  # type: ignore[attr-defined]
    __supervise__._monarch_doc_stub = True  # type: ignore[attr-defined]
    __cleanup__._monarch_doc_stub = True  # type: ignore[attr-defined]

    @property
    def _ndslice(self) -> Slice:
        raise NotImplementedError(_NO_MESH)

    @property
    def _labels(self) -> tuple[str, ...]:
        raise NotImplementedError(_NO_MESH)

    def _new_with_shape(self, shape: Shape) -> Any:
        raise NotImplementedError(_NO_MESH)

    @property
    def initialized(self) -> Any:
        """Belongs to the mesh that spawn() returned."""
        raise NotImplementedError("an actor is no mesh; ask the mesh that spawn() returned")

    def stop(self, reason: str = "stopped by client") -> Any:
        """Belongs to the mesh that spawn() returned."""
        raise NotImplementedError("use context().actor_instance.stop() inside of an actor")
