"""The controller's connections with its agents: Unix streams with those of its own machine, ZeroMQ with the others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection
from pathlib import Path

import zmq

from monarch_slurm.wire.arriving import Holding
from monarch_slurm.wire.frames import Address, Message
from monarch_slurm.wire.keys import Invitation, write_invitation
from monarch_slurm.wire.link import FaultHandler, Link, MessageHandler, UnknownPeerError
from monarch_slurm.wire.loop import Loop
from monarch_slurm.wire.order import QuickHandler
from monarch_slurm.wire.runtime_dir import make_runtime_dir, remove_runtime_dir
from monarch_slurm.wire.stream_link import ClosedHandler, StreamLink

CONTROLLER_SOCKET = "controller.sock"

_NEWS = frozenset(("proc_down", "host_down", "procs_restart", "host_moved"))


class AgentLinks:
    """One link to the controller's loop, two kinds of connections. A peer has one of them for as long as it lives.

    Args:
        router: for agents of other machines; owned from here on.
        on_message, on_fault, on_closed, on_quick: see `StreamLink`; the last two are for agents of this machine only.
        endpoints: returns the addresses where ``router`` listens.
    """

    def __init__(
        self,
        loop: Loop,
        router: zmq.Socket[bytes],
        on_message: MessageHandler,
        on_fault: FaultHandler,
        on_closed: ClosedHandler,
        on_quick: QuickHandler,
        endpoints: Callable[[], Collection[str]],
    ) -> None:
        self._far = Link(loop, router, on_message, on_fault, endpoints=endpoints)
        self.near = StreamLink(loop, on_message, on_fault, on_closed, on_quick, peer_kind="host")
        self._holding = Holding(self._send_near)
        self._lock = threading.Lock()
        self._folder: Path | None = None

    def near_path(self) -> str:
        """Return the path of the Unix socket where agents of this machine join; it is made with the first call.

        Raises:
            SocketPathError: there is no folder for it.
            BindError: it cannot be listened on.
        """
        with self._lock:
            if self._folder is None:
                self._folder = make_runtime_dir()
                self.near.listen(self._folder / CONTROLLER_SOCKET)
            return str(self._folder / CONTROLLER_SOCKET)

    def publish(self, invitation: Invitation) -> None:
        """Put ``invitation`` beside the Unix socket, for programs of this user on this machine."""
        write_invitation(Path(self.near_path()).parent, invitation)

    def with_socket(self, use: Callable[[zmq.Socket[bytes]], str]) -> str:
        """See `Link.with_socket`."""
        return self._far.with_socket(use)

    def send(self, message: Message, peer: str) -> None:
        """Send ``message``. For any thread; keeps the order of one thread.

        Raises:
            UnknownPeerError: there is no connection with ``peer``.
        """
        if not self.near.knows(peer):
            self._far.send(message, peer)
            return
        # News of the end of a process comes behind what it has sent.
        receiver = self._holding.last_of(peer) if message.kind in _NEWS else (peer, message.dst)
        if receiver is None or not self._holding.hold(receiver, message):
            self.near.send(message, peer)

    def _send_near(self, receiver: tuple[str, Address | None], message: Message) -> None:
        with contextlib.suppress(UnknownPeerError):  # that host is lost, and who waits for it is told so
            self.near.send(message, receiver[0])

    def machine_silence(self, peer: str) -> float | None:
        """See `Link.machine_silence`."""
        return self._far.machine_silence(peer)

    def forget(self, peer: str) -> None:
        """Have nothing to do any more with ``peer``, which is gone. On the loop's thread."""
        self.near.forget(peer)
        self._far.forget(peer)

    def close(self) -> None:
        """Close all sockets. When the loop does not run any more."""
        self.near.close(linger_ms=200)
        self._far.close()
        if self._folder is not None:
            remove_runtime_dir(self._folder)
