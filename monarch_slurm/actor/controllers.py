"""Actors of which a program has one per name. They run in the program's own process, and are found from everywhere."""

from __future__ import annotations

import logging
from typing import Any, TypeVar, cast

from monarch_slurm.actor.actor import Actor
from monarch_slurm.actor.actor_mesh import ActorMesh
from monarch_slurm.actor.context import Instance, context
from monarch_slurm.actor.endpoint import endpoint
from monarch_slurm.actor.errors import ActorError, MeshFailure
from monarch_slurm.actor.future import Future
from monarch_slurm.actor.host_mesh import this_proc
from monarch_slurm.actor.layout import ActorRef, ProcLayout
from monarch_slurm.actor.messages import creator_to_fields, ref_to_fields
from monarch_slurm.actor.owned import OwnedActors
from monarch_slurm.actor.proc_mesh import check_arguments
from monarch_slurm.actor.shape import Shape
from monarch_slurm.wire import CONTROLLER, Message, dumps

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Actor)


class Controllers(Actor):
    """Owns all of them, and remembers which have failed."""

    _is_system_actor = True

    def __init__(self) -> None:
        self._meshes: dict[str, Any] = {}
        self._failures: dict[str, str] = {}

    @endpoint
    def get_or_spawn(self, name: str, actor_class: type[Actor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the mesh of the only controller ``name``."""
        if name not in self._meshes:
            self._meshes[name] = this_proc().spawn(name, actor_class, *args, **kwargs)
        mesh = self._meshes[name]
        failure = self._failures.get(mesh._name.get())
        if failure is not None:
            raise ValueError(f"Failure on {name}: {failure}")
        return mesh

    def __supervise__(self, failure: MeshFailure) -> bool:
        """Remember the failure: it is told to those who ask for the controller from now on, as to those who call it."""
        logger.error("a controller has failed: %s", failure.report())
        self._failures[failure.mesh_name] = failure.report()
        return True


_HERE = ProcLayout("client", (CONTROLLER.host,), 1)
_CLASS_NAME = f"{Controllers.__module__}.{Controllers.__qualname__}"
_REF = ActorRef("controllers-0", "controllers", _HERE, Shape.unity(), "<root>", _CLASS_NAME)

MESH = _REF.mesh
"""Id of the actor mesh that has them, the same in every program."""


def spawn_controllers(root: Instance) -> None:
    """Start the actor that has the controllers. On the client's loop, when the first message for it comes."""
    root.runtime.own_actors(OwnedActors(_REF, Controllers, root, {0}))
    fields = {
        "op": "spawn",
        "mesh": MESH,
        "owner": CONTROLLER,
        "ref": ref_to_fields(_REF),
        "creator": creator_to_fields(root),
        "asynchronous": False,
        "ready": None,
    }
    root.runtime.handle(Message("cast", CONTROLLER, CONTROLLER, fields, dumps((Controllers, (), {}))))


def get_or_spawn_controller(name: str, Class: type[T], *args: Any, **kwargs: Any) -> Future[T]:  # noqa: N803 - Monarch's name
    """Return a future of the only actor ``name`` of this program; the first call spawns it, in the program's process.

    It can be called from any process of the program. Later calls get the same actor, whatever class and arguments they
    name.

    Raises:
        ValueError: ``Class`` is no Actor, or its endpoints do not fit together; from the future: that actor has
            failed (in an actor, as an `ActorError` that holds the ValueError).
        TypeError: the arguments do not fit its ``__init__``, or do not pickle.
    """
    check_arguments(Class, args, kwargs)
    controllers: Any = ActorMesh(Controllers, _REF, Shape.unity())
    found: Future[T] = controllers.get_or_spawn.call_one(name, Class, args, kwargs)
    if context().actor_instance.creator is not None:
        return found
    future: Future[T] = Future._pending()
    future._what = found._what

    def outcome() -> T:
        try:
            return found.get()
        except ActorError as error:
            raise cast(Exception, error.exception) from None

    found._on_done(lambda: future._resolve(outcome))
    return future
