"""Endpoints: methods of actors that can be called from elsewhere, and the ways to call them."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar, overload

from monarch_slurm.actor.context import context
from monarch_slurm.actor.errors import ActorError
from monarch_slurm.actor.future import Future
from monarch_slurm.actor.guests import dumps_for, runtime_of
from monarch_slurm.actor.messages import EXPLICIT_PORT, PLAIN_METHOD, PortAddress
from monarch_slurm.actor.ndslice import Slice
from monarch_slurm.actor.replies import VALUE, CountDown, lost_error
from monarch_slurm.actor.undeliverable import UndeliverableMessageEnvelope
from monarch_slurm.actor.value_mesh import ValueMesh
from monarch_slurm.wire import loads
from monarch_slurm.wire.arriving import when_whole
from monarch_slurm.wire.pickle_fault import explain

if TYPE_CHECKING:
    from monarch_slurm.actor.actor_mesh import ActorMesh
    from monarch_slurm.actor.context import Instance
    from monarch_slurm.actor.port import Port
    from monarch_slurm.actor.runtime import Runtime

NO_TENSORS = "there are no distributed tensors here; exchange tensors with endpoints, RDMABuffer or torch.distributed"

R = TypeVar("R")
A = TypeVar("A")


class EndpointProperty:
    """What `endpoint` makes of a method: on a spawned mesh the attribute is an `Endpoint`."""

    def __init__(
        self,
        method: Callable[..., Any],
        propagate: Any = None,
        explicit_response_port: bool = False,
        instrument: bool = True,
        concurrent: bool = False,
    ) -> None:
        self._method = method
        self._propagator = propagate
        self._explicit_response_port = explicit_response_port
        self._instrument = instrument
        self._concurrent = concurrent
        self.__doc__ = method.__doc__
        self.__name__ = method.__name__
        self.__wrapped__ = method

    def __get__(self, instance: object, owner: type | None = None) -> EndpointProperty:
        return self


@overload
def endpoint(method: Callable[..., Any]) -> Any: ...
@overload
def endpoint(*, propagate: Any = None, explicit_response_port: bool = False, instrument: bool = True) -> Any: ...
def endpoint(
    method: Callable[..., Any] | None = None,
    *,
    propagate: Any = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
) -> Any:
    """Make a method callable from other processes. All endpoints of a class are ``def``, or all are ``async def``.

    Args:
        propagate: accepted for compatibility; used by distributed tensors only.
        explicit_response_port: the method gets a `Port` as first argument after ``self`` and answers through it, later
            and from any thread if it likes; its return value is ignored.
        instrument: each call is a `monarch_slurm.actor.span`, where anybody can see it.
    """
    if method is None:
        return lambda method: EndpointProperty(method, propagate, explicit_response_port, instrument)
    return EndpointProperty(method, propagate, explicit_response_port, instrument)


def concurrent_endpoint(
    method: Callable[..., Any] | None = None,
    *,
    propagate: Any = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
) -> Any:
    """Like `endpoint`, for ``async def`` methods whose calls may overlap: the next message is taken while this one
    awaits.

    Raises:
        ValueError: the method is not async, or is an endpoint already.
    """

    def wrap(method: Callable[..., Any]) -> EndpointProperty:
        if isinstance(method, EndpointProperty):
            raise ValueError("concurrent_endpoint does not wrap @endpoint: use it alone")  # noqa: TRY004 - what Monarch raises
        if not inspect.iscoroutinefunction(method):
            raise ValueError("concurrent_endpoint can only wrap async endpoints")
        return EndpointProperty(method, propagate, explicit_response_port, instrument, concurrent=True)

    return wrap if method is None else wrap(method)


def endpoints_of(actor_class: type) -> dict[str, EndpointProperty]:
    """Return the endpoints of a class and its bases by name."""
    return {
        name: attribute
        for name in dir(actor_class)
        if isinstance(attribute := inspect.getattr_static(actor_class, name), EndpointProperty)
    }


def uses_loop(actor_class: type) -> bool:
    """Return whether the actors of a class run on an event loop.

    Raises:
        ValueError: it mixes async and sync endpoints, or its hooks do not fit its endpoints.
    """
    endpoints = endpoints_of(actor_class)
    kinds = {name: inspect.iscoroutinefunction(found._method) for name, found in endpoints.items()}
    if len(set(kinds.values())) > 1:
        names = {kind: sorted(name for name, k in kinds.items() if k is kind) for kind in (True, False)}
        raise ValueError(
            f"{actor_class.__qualname__} mixes both async and sync endpoints; make all of them `async def` or none. "
            f"async: {names[True]}, sync: {names[False]}"
        )
    asynchronous = any(kinds.values())
    for hook in ("__cleanup__", "__supervise__", "_handle_undeliverable_message"):
        method = getattr(actor_class, hook, None)
        if method is None or getattr(method, "_monarch_doc_stub", False):
            continue
        hook_async = inspect.iscoroutinefunction(method)
        if endpoints and not asynchronous and hook_async:
            raise ValueError(f"{actor_class.__qualname__} has sync endpoints, so its {hook} cannot be async")
        if asynchronous and not hook_async and hook == "__cleanup__":
            raise ValueError(f"{actor_class.__qualname__} has async endpoints, so its {hook} must be async")
    return asynchronous


class NotAnEndpoint:
    """A method of a spawned class that has no `endpoint` decorator; `as_endpoint` can still call it."""

    def __init__(self, mesh: ActorMesh[Any], name: str) -> None:
        self._mesh = mesh
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Raise: it cannot be called."""
        raise RuntimeError(
            f"Actor class {self._mesh._class.__qualname__!r}: {self._name} is not annotated as an endpoint. "
            f"To call it as one, decorate it with @endpoint or use as_endpoint(mesh.{self._name})"
        )


class Endpoint(Generic[R]):
    """An endpoint of a mesh or a slice of one. How it is called decides who gets the message and what comes back."""

    def __init__(
        self, mesh: ActorMesh[Any], name: str, method: Callable[..., Any], explicit: bool, plain: int = 0
    ) -> None:
        self._mesh = mesh
        self._name = name
        self._explicit = explicit
        self._plain = plain
        self._method = method

    def call(self, *args: Any, **kwargs: Any) -> Future[ValueMesh[R]]:
        """Send to every actor; the result has one value per rank.

        The future raises `ActorError` if an actor raised, `SupervisionError` if one cannot answer.

        Raises:
            TypeError: the arguments do not fit the method, or do not pickle.
        """
        shape = self._mesh._shape
        extent_shape = shape.extent.region
        count = len(shape)
        future: Future[Any] = Future._pending()
        values: list[Any] = [None] * count
        one_answered = CountDown(
            count, lambda: future._resolve(lambda: ValueMesh(extent_shape, [loads(value) for value in values]))
        )

        def arrived(rank: int, frames: Any) -> None:
            values[rank] = frames
            one_answered()

        future._what = lambda: f"{self}: {count - one_answered.left} of {count} actors have answered"
        future._port = self._send_expecting(args, kwargs, shape.ndslice, arrived, future._fail_with)
        return future

    def call_one(self, *args: Any, **kwargs: Any) -> Future[R]:
        """Send to the only actor of the mesh and get its value.

        Raises:
            ValueError: the mesh has more actors than one.
            TypeError: the arguments do not fit the method, or do not pickle.
        """
        count = len(self._mesh._shape)
        if count != 1:
            raise ValueError(f"call_one requires exactly 1 actor, but mesh has {count}")
        return self._ask(self._mesh, args, kwargs)

    def choose(self, *args: Any, **kwargs: Any) -> Future[R]:
        """Send to one actor of the mesh, picked at random, and get its value."""
        shape = self._mesh._shape
        place = random.randrange(len(shape))  # noqa: S311 - load balance, no secret
        return self._ask(self._mesh, args, kwargs, place)

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Future[R]]:
        """Send to every actor; return an iterator of futures in the order in which the answers arrive."""
        shape = self._mesh._shape
        futures: list[Future[Any]] = [Future._pending() for _ in range(len(shape))]
        order = iter(futures)
        port = self._send_expecting(
            args,
            kwargs,
            shape.ndslice,
            lambda rank, frames: next(order)._resolve(lambda: loads(frames)),
            lambda error: next(order)._fail_with(error),
        )
        for future in futures:
            future._what, future._port, future._any_answer = self.__str__, port, True
        return iter(futures)

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Send to every actor and return at once. An exception there has nowhere to go, and fails that actor."""
        self._send(args, kwargs, None)

    def rref(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: there are no distributed tensors here.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(NO_TENSORS)

    def _ask(self, mesh: ActorMesh[Any], args: Any, kwargs: Any, place: int | None = None) -> Future[R]:
        future: Future[Any] = Future._pending()
        future._what = self.__str__
        rank = place or 0
        ranks = [(rank, mesh._shape.ndslice.get(rank))]
        future._port = self._send_expecting(
            args,
            kwargs,
            ranks,
            lambda _, frames: future._resolve(lambda: loads(frames)),
            future._fail_with,
        )
        return future

    def __str__(self) -> str:
        return f"{self._mesh._name_text}.{self._name}()"

    def __repr__(self) -> str:
        return f"<Endpoint {self} of {self._mesh!r}>"

    def _send_expecting(
        self,
        args: Any,
        kwargs: Any,
        ranks: Slice | list[tuple[int, int]],
        on_value: Callable[[int, Any], None],
        on_error: Callable[[Callable[[], BaseException]], None],
    ) -> int:
        """Send, and return the number of the port that takes the answers."""
        runtime = runtime_of(self._mesh._program)
        body = self._encode(runtime, args, kwargs)

        def reply(rank: int, status: str, frames: Any) -> None:
            if status == VALUE:
                when_whole(frames, lambda: on_value(rank, frames))
            else:
                when_whole(frames, lambda: on_error(lambda: _remote_error(frames)))

        def lost(rank: int, reason: str) -> None:
            on_error(lambda: lost_error(reason, str(self)))

        ref = self._mesh._ref
        port = runtime.expect_from(ref, ref.layout, ranks, reply, lost)
        self._cast(runtime, [base for _, base in ranks] if isinstance(ranks, list) else None, body, port)
        return port[2]

    def _send(self, args: Any, kwargs: Any, port: PortAddress | None, only: list[int] | None = None) -> None:
        sender = context().actor_instance
        runtime = runtime_of(self._mesh._program)
        body = self._encode(runtime, args, kwargs)
        receipt = self._ask_for_receipt(runtime, sender, only) if sender.body.hears_undeliverable else None
        self._cast(runtime, only, body, port, receipt)

    def _ask_for_receipt(self, runtime: Runtime, sender: Instance, only: list[int] | None) -> PortAddress:
        """Have ``sender`` told if the message does not come to one of its receivers."""
        ref, ndslice = self._mesh._ref, self._mesh._shape.ndslice
        bases = list(ndslice) if only is None else only

        def lost(rank: int, reason: str) -> None:
            dest = f"{ref.describe(ndslice.get(rank))}.{self._name}()"
            sender.body.undeliverable(UndeliverableMessageEnvelope(sender.display, dest, reason))

        ranks = [(ndslice.index(base), base) for base in bases]
        return runtime.expect_from(ref, ref.layout, ranks, lambda *_: None, lost)

    def _encode(self, runtime: Runtime, args: Any, kwargs: Any) -> list[Any]:
        hidden = 2 if self._explicit else 1  # self, and the port where the endpoint asks for one
        signature, least, most = _signature(self._method)
        if kwargs or not least <= len(args) + hidden <= most:
            signature.bind(*(None,) * hidden, *args, **kwargs)
        try:
            return dumps_for(runtime, (args, kwargs))
        except Exception as error:
            named = signature.bind(*(None,) * hidden, *args, **kwargs).arguments
            explain(error, dict(list(named.items())[hidden:]), f"an argument of {self}")
            raise

    def _cast(
        self,
        runtime: Runtime,
        only: list[int] | None,
        body: list[Any],
        port: PortAddress | None,
        receipt: PortAddress | None = None,
    ) -> None:
        ref, ndslice = self._mesh._ref, self._mesh._shape.ndslice
        fields = {
            "op": "call",
            "mesh": ref.mesh,
            "method": self._name,
            "port": port,
            "view": [self._mesh._shape.labels, ndslice.offset, ndslice.sizes, ndslice.strides],
            "plain": self._plain,
        }
        if receipt is not None:
            fields["receipt"] = receipt
        runtime.cast(ref.layout, only if only is not None else ndslice, fields, body)


def _remote_error(frames: Any) -> BaseException:
    error = loads(frames)
    return error if isinstance(error, BaseException) else ActorError(RuntimeError(repr(error)))


@functools.lru_cache(maxsize=4096)
def _signature(method: Callable[..., Any]) -> tuple[inspect.Signature, int, int]:
    """Return the signature, and how few and how many arguments fit for certain when all are given by place."""
    signature = inspect.signature(method)
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature.parameters.values()
    if any(p.kind is inspect.Parameter.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        return signature, 1, 0
    places = [p for p in parameters if p.kind in by_place]
    return signature, sum(p.default is p.empty for p in places), len(places)


def as_endpoint(not_an_endpoint: Any, *, propagate: Any = None, explicit_response_port: bool = False) -> Endpoint[Any]:
    """Return an endpoint for a method of a spawned mesh that has no decorator.

    Raises:
        ValueError: ``not_an_endpoint`` is no method of a spawned mesh.
    """
    if not isinstance(not_an_endpoint, NotAnEndpoint):
        raise ValueError("expected an method of a spawned actor")  # noqa: TRY004 - what Monarch raises
    mesh, name = not_an_endpoint._mesh, not_an_endpoint._name
    method = inspect.getattr_static(mesh._class, name)
    plain = PLAIN_METHOD | (EXPLICIT_PORT if explicit_response_port else 0)
    return Endpoint(mesh, name, method, explicit_response_port, plain)


def send(
    endpoint: Endpoint[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    port: Port[Any] | None = None,
    selection: Literal["all", "choose"] = "all",
) -> None:
    """Send a message whose answers, one per actor, go to ``port``."""
    shape = endpoint._mesh._shape
    only = None if selection == "all" else [random.choice(shape.ranks())]  # noqa: S311 - load balance, no secret
    answers_to = port._seen_from(runtime_of(endpoint._mesh._program)) if port is not None else None
    endpoint._send(args, kwargs, answers_to, only)


class Accumulator(Generic[R, A]):
    """Folds the answers of a mesh in the order of arrival: ``combine(combine(identity, first), second)`` and so on."""

    def __init__(self, endpoint: Endpoint[R], identity: A, combine: Callable[[A, R], A]) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._combine = combine

    def accumulate(self, *args: Any, **kwargs: Any) -> Future[A]:
        """Send to every actor now; the fold runs when the future is first looked at."""
        answers = list(self._endpoint.stream(*args, **kwargs))
        total: Future[Any] = Future._pending()

        def fold() -> Any:
            value: Any = self._identity
            for answer in answers:
                value = self._combine(value, answer.get())
            return value

        if answers:
            total._what, total._port = answers[0]._what, answers[0]._port
        one_arrived = CountDown(len(answers), lambda: total._resolve(fold))
        for answer in answers:
            answer._on_done(one_arrived)
        return total
