"""Actor meshes: what spawn returns, a reference that endpoints are called on."""

from __future__ import annotations

import functools
from typing import Any, Generic, TypeVar

from monarch_slurm.actor.context import context, publish
from monarch_slurm.actor.endpoint import Endpoint, EndpointProperty, NotAnEndpoint, endpoints_of
from monarch_slurm.actor.future import Future
from monarch_slurm.actor.guests import check_own
from monarch_slurm.actor.layout import ActorRef
from monarch_slurm.actor.mesh_trait import ShapedMesh
from monarch_slurm.actor.shape import Shape
from monarch_slurm.config import settings

A = TypeVar("A")


class ActorMesh(ShapedMesh, Generic[A]):
    """Actors of one class, one per proc. Its endpoints are attributes; slices share the actors. It can be pickled."""

    def __init__(
        self,
        actor_class: type[A],
        ref: ActorRef,
        shape: Shape,
        ready: Future[None] | None = None,
        program: str = "",
    ) -> None:
        self._program = program
        self._class = actor_class
        self._ref = ref
        self._mesh_shape = shape
        self._ready = ready

    @property
    def _shape(self) -> Shape:
        return self._mesh_shape

    def _new_with_shape(self, shape: Shape) -> ActorMesh[A]:
        return ActorMesh(self._class, self._ref, shape, self._ready, self._program)

    @property
    def _name_text(self) -> str:
        return self._ref.name

    @property
    def _name(self) -> Future[str]:
        """The mesh's unique name, which a `MeshFailure` has as ``mesh_name``."""
        return Future._of(self._ref.mesh)

    @property
    def initialized(self) -> Future[None]:
        """Resolves to None when every actor's ``__init__`` is through; raises `SupervisionError` when one failed.

        Raises:
            RuntimeError: this is a reference that came from another process.
        """
        if self._ready is None:
            raise RuntimeError("only the process that spawned a mesh can wait for its initialization")
        return self._ready

    def stop(self, reason: str = "stopped by client") -> Future[None]:
        """Stop the actors once they have handled what was sent before; resolves when all have ended. Begins at once.

        Raises:
            RuntimeError: they belong to another program.
        """
        check_own(self._program, "stop actors")
        future: Future[None] = Future._pending()
        future._what = f"stop() of actors {self._ref.name!r}"
        runtime = context().actor_instance.runtime
        timeout = settings().stop_actor_timeout
        runtime.stop_actors(self._ref, self._shape.ndslice, reason, timeout, lambda: future._resolve(lambda: None))
        return future

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        actor_class: Any = self._class
        attribute = _attribute(actor_class, name)
        if isinstance(attribute, EndpointProperty):
            return Endpoint(self, name, attribute._method, attribute._explicit_response_port)
        if attribute is None:
            raise AttributeError(f"{self._class.__qualname__!r} has no endpoint or method {name!r}")
        if callable(attribute):
            return NotAnEndpoint(self, name)
        raise AttributeError(
            f"{name!r} of {self._class.__qualname__!r} lives in the actors; add an endpoint that returns it"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorMesh, (self._class, self._ref, self._mesh_shape, None, publish(self._program))

    def __repr__(self) -> str:
        return f"ActorMesh(class={self._class}, shape={self._shape}, name={self._ref.mesh!r})"


@functools.lru_cache(maxsize=4096)
def _attribute(actor_class: type, name: str) -> Any:
    """Return what instances of the class have under that name, unbound; its metaclass, ABCMeta, has more."""
    return next((vars(base)[name] for base in actor_class.__mro__ if name in vars(base)), None)


def check_class(actor_class: type) -> None:
    """Make sure that no endpoint hides a member of `ActorMesh`.

    Raises:
        ValueError: one does.
    """
    for name in endpoints_of(actor_class):
        if _attribute(ActorMesh, name) is not None:
            raise ValueError(
                "ActorMesh has an attribute that collides with an endpoint name: "
                f"{name!r} of {actor_class.__qualname__}"
            )
