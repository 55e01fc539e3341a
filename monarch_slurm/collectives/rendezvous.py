"""How the ranks of a communicator find each other: one makes an invitation, the control plane carries it."""

from __future__ import annotations

import secrets
import socket
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from monarch_slurm.actor import context
from monarch_slurm.collectives.errors import CollectiveError
from monarch_slurm.collectives.store_actor import StoreActor
from monarch_slurm.wire.ports import listen_tcp

_SECRET_BYTES = 32


@dataclass(frozen=True)
class Invitation:
    """What the ranks of a new communicator have in common. Whoever has it can join: send it over the control plane.

    Args:
        backend: ``ccl`` (RCCL or NCCL) or ``gloo``.
        token: NCCL's unique id; for gloo a secret, which ranks prove to each other that they have.
        name: of the communicator in the store; for gloo only, like what follows.
        address: an address of the inviting rank's host, which tells the others which network to take.
        store: the `StoreActor` where the ranks meet.
    """

    backend: str
    token: bytes = field(repr=False)
    name: str = ""
    address: str = ""
    store: Any = field(default=None, repr=False)


class CommunicatorKeys:
    """The keys by which the ranks of one gloo communicator, and of those split from it, have met."""

    def __init__(self, store: Any, name: str) -> None:
        self._store = store
        self._name = name

    def close(self) -> None:
        """Delete them; the communicator cannot be joined or split any more. Returns at once."""
        self._store.ask.broadcast("delete_prefix", f"{self._name}/")

    def __repr__(self) -> str:
        return f"CommunicatorKeys({self._name!r})"


def invite(backend: str, address: str = "127.0.0.1") -> tuple[Invitation, CommunicatorKeys | None]:
    """Make an invitation on one rank: in an actor, or in the program itself.

    For gloo the actor that calls this owns the store where the ranks meet, which ends with it. Nothing listens for it.

    Args:
        backend: ``ccl`` or ``gloo``.
        address: an address of this host that the other ranks reach, for gloo. NCCL finds its own.

    Returns:
        The invitation; and for gloo what to close once the communicator is neither joined nor split any more.

    Raises:
        MonarchSlurmError: RCCL or NCCL is not there.
        CollectiveError: ``address`` is none of this host's.
        RuntimeError: this thread belongs to no actor, and not to the program itself.
    """
    if backend == "ccl":
        from monarch_slurm.gpu.libraries import ccl_library

        return Invitation("ccl", ccl_library().unique_id()), None
    if backend != "gloo":
        raise ValueError(f"backend {backend!r}: ccl or gloo expected")
    try:
        listen_tcp(address, 1).close()
    except OSError as error:
        raise CollectiveError(f"cannot serve at {address}: {error}; give an address of this host") from error
    store, name = _own_store(), secrets.token_hex(8)
    return Invitation("gloo", secrets.token_bytes(_SECRET_BYTES), name, address, store), CommunicatorKeys(store, name)


def _own_store() -> Any:
    """Return the store of the running actor, spawned in its process with the first call."""
    instance = context().actor_instance
    with _lock:
        store = _stores.get(instance)
        if store is None:
            store = _stores[instance] = instance.proc.spawn("store", StoreActor)
        return store


_lock = threading.Lock()
_stores: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def own_address(peer: str) -> str:
    """Return the address of this host on the way to ``peer``; nothing is sent."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
