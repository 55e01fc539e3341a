"""ZeroMQ sockets as this package uses them: nothing is dropped, strangers get nothing parsed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import zmq
import zmq.utils.z85
from zmq.utils.monitor import parse_monitor_message

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.wire.frames import MAX_HEADER_BYTES, MAX_PART_BYTES
from monarch_slurm.wire.keys import Invitation, JobKeys
from monarch_slurm.wire.limits import descriptor_limit, open_socket
from monarch_slurm.wire.loop import Loop
from monarch_slurm.wire.ports import none_free, ports_to_try

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = MAX_HEADER_BYTES + MAX_PART_BYTES
"""Larger frames are refused before there is memory for them, whoever announces them."""

HANDSHAKE_MS = 30_000
"""A listener hangs up on whoever has not proved itself until then. It is long: an honest agent on a busy machine gets
little CPU. A stranger costs one descriptor meanwhile, and one line in the log at most."""

DIAL_HANDSHAKE_MS = 60_000
"""Whoever dials waits longer than the listener does: if it hung up earlier and dialled again, a listener that was
stopped would find a queue of connections that nobody wants any more."""

BACKLOG = 4096
"""Connections that may wait to be taken, as all hosts dial within a moment; the kernel allows net.core.somaxconn."""

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
KNOCK_LOG_SECONDS = 10.0


class BindError(MonarchSlurmError):
    """An address or port cannot be listened on."""


def _prepare(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    # Without a high-water mark ZeroMQ neither drops nor blocks.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


def make_router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return a ROUTER that reports unknown peers instead of dropping what is for them."""
    socket = open_socket(context, zmq.ROUTER)
    _prepare(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return socket


def make_dealer(context: zmq.Context[zmq.Socket[bytes]], identity: str) -> zmq.Socket[bytes]:
    """Return a DEALER that a ROUTER knows as ``identity``."""
    socket = open_socket(context, zmq.DEALER)
    _prepare(socket)
    socket.setsockopt(zmq.HANDSHAKE_IVL, DIAL_HANDSHAKE_MS)
    socket.setsockopt(zmq.ROUTING_ID, identity.encode())
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    return socket


def only_this_user(socket: zmq.Socket[bytes]) -> None:
    """Let only processes of this user talk over the Unix sockets that ``socket`` will listen at."""
    socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())


def bind_tcp(socket: zmq.Socket[bytes], ip: str, keys: JobKeys, port: int = 0) -> str:
    """Listen on ``port`` of ``ip`` (0: an ephemeral one) with CURVE; return the address. `Gatekeeper` decides who may
    talk.
    """
    if ":" in ip:
        socket.setsockopt(zmq.IPV6, 1)
        ip = f"[{ip}]"
    guard_with_curve(socket, keys)
    for choice in [port] if port else ports_to_try():
        try:
            socket.bind(f"tcp://{ip}:{choice or '*'}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or port or not choice:
                raise BindError(f"cannot listen on tcp://{ip}:{choice or '*'}: {error.strerror}") from None
        else:
            return socket.getsockopt_string(zmq.LAST_ENDPOINT)
    raise BindError(none_free(ip))


def guard_with_curve(socket: zmq.Socket[bytes], keys: JobKeys) -> None:
    """Let only those talk who dial with the keys of `connect_tcp`; before the socket listens."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.server_public.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, b"monarch_slurm")
    socket.setsockopt(zmq.BACKLOG, BACKLOG)


def connect_tcp(socket: zmq.Socket[bytes], invitation: Invitation) -> None:
    """Dial the controller of ``invitation`` with CURVE."""
    if "[" in invitation.address:
        socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.CURVE_SERVERKEY, invitation.server_public.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, invitation.agent_public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, invitation.agent_secret.encode())
    socket.connect(invitation.address)


def bind(socket: zmq.Socket[bytes], address: str) -> None:
    """Listen at ``address``.

    Raises:
        BindError: that cannot be.
    """
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise BindError(f"cannot listen on {address}: {error.strerror}") from None


class Gatekeeper:
    """Answers ZeroMQ's question (ZAP, RFC 27) whether a peer may talk: only with the job's agent key.

    libzmq asks before it hands on a single byte of a peer. Peers that do not get as far as that question (no CURVE, a
    wrong server key, no ZeroMQ at all) are refused by libzmq, and counted here. Everything belongs on the I/O loop that
    reads ``guarded``.

    Args:
        guarded: the socket whose peers are asked about.
        keys: the job's keys.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        guarded: zmq.Socket[bytes],
        keys: JobKeys,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._questions = context.socket(zmq.REP)
        self._questions.setsockopt(zmq.LINGER, 0)
        self._questions.bind(ZAP_ENDPOINT)
        self._failures = guarded.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_ACCEPT_FAILED
        )
        self._guarded = guarded
        self._agent_key = zmq.utils.z85.decode(keys.agent_public)
        self._clock = clock
        self._last_log = float("-inf")
        self.refused = 0
        """Connections so far that ended without a proof of membership."""

    def attach(self, loop: Loop) -> None:
        """Serve on ``loop``."""
        for socket, serve in ((self._questions, self._answer), (self._failures, self._note_failures)):
            loop.add_reader(int(socket.getsockopt(zmq.FD)), serve)
            serve()

    def close(self) -> None:
        """Close the sockets; before ``guarded`` is closed, and when the loop does not run any more."""
        self._guarded.disable_monitor()
        self._questions.close()

    def _answer(self) -> None:
        while _readable(self._questions):
            version, request, domain, address, _identity, mechanism, *credentials = self._questions.recv_multipart()
            allowed = mechanism == b"CURVE" and credentials == [self._agent_key] and domain == b"monarch_slurm"
            code, text = (b"200", b"OK") if allowed else (b"400", b"no key of this job")
            self._questions.send_multipart([version, request, code, text, b"agent" if allowed else b"", b""])
            if not allowed:
                self._refused(f"{address.decode(errors='replace')} ({mechanism.decode(errors='replace')})")

    def _note_failures(self) -> None:
        while _readable(self._failures):
            event = parse_monitor_message(self._failures.recv_multipart())["event"]
            if event == zmq.EVENT_ACCEPT_FAILED:
                self._cannot_accept()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._unfinished()
            else:
                self._refused("somebody who does not speak as an agent of this job does")

    def _cannot_accept(self) -> None:
        if self._is_due():
            logger.error("cannot take another host's connection: %s", descriptor_limit("each host takes one"))

    def _unfinished(self) -> None:
        # What came was not wrong: it was a port scanner, a stranger that hung up first, an agent that has ended or got
        # too little CPU, or somebody who looks whether this process still listens (`monarch_slurm.host.doorbell`).
        self.refused += 1
        logger.info("a connection ended before its other end had proved that it holds this job's key")

    def _refused(self, who: str) -> None:
        self.refused += 1
        if self._is_due():
            logger.warning(
                "refused a connection of %s: it does not hold this job's key; %d refused so far", who, self.refused
            )

    def _is_due(self) -> bool:
        due = self._clock() - self._last_log >= KNOCK_LOG_SECONDS
        if due:
            self._last_log = self._clock()
        return due


def _readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
