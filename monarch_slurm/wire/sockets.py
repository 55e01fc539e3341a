"""ZeroMQ sockets as this package uses them: nothing is dropped, strangers get nothing parsed."""

from __future__ import annotations

import errno
import os
import socket as sockets

import zmq

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.wire.frames import MAX_HEADER_BYTES, MAX_PART_BYTES
from monarch_slurm.wire.keys import Invitation, JobKeys
from monarch_slurm.wire.limits import open_socket
from monarch_slurm.wire.ports import none_free, ports_to_try

MAX_FRAME_BYTES = MAX_HEADER_BYTES + MAX_PART_BYTES
"""Larger frames are refused before there is memory for them, whoever announces them."""

HANDSHAKE_MS = 10_000
"""A listener hangs up on whoever has not proved itself until then."""

DIAL_HANDSHAKE_MS = 60_000
"""Whoever dials waits longer than the listener does: if it hung up earlier and dialled again, a listener that was
stopped would find a queue of connections that nobody wants any more."""

BACKLOG = 4096
"""Connections that may wait to be taken, as all hosts dial within a moment; the kernel allows net.core.somaxconn."""

SILENT_SECONDS = 10
"""How long the kernel keeps a connection that says nothing, before this process hears of it."""

ZAP_ENDPOINT = "inproc://zeromq.zap.01"


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
    guard_with_curve(socket, keys)
    for choice in [port] if port else ports_to_try():
        try:
            return bind_listener(socket, listen_quietly(ip, choice))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port or not choice:
                url = f"tcp://{f'[{ip}]' if ':' in ip else ip}:{choice or '*'}"
                raise BindError(f"cannot listen on {url}: {error.strerror}") from None
    raise BindError(none_free(ip))


def listen_quietly(ip: str, port: int) -> sockets.socket:
    """Return a socket that listens on ``port`` of ``ip`` (0: an ephemeral one); see `keep_silent_ones`.

    Raises:
        OSError: it cannot be listened on.
    """
    listener = sockets.socket(sockets.AF_INET6 if ":" in ip else sockets.AF_INET, sockets.SOCK_STREAM)
    try:
        listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        listener.bind((ip, port))
        keep_silent_ones(listener)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def keep_silent_ones(listener: sockets.socket) -> None:
    """Have the kernel keep connections until their peers, who speak first, have said something."""
    listener.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_DEFER_ACCEPT, SILENT_SECONDS)
    listener.setblocking(False)  # others than ZeroMQ may take what waits there, see `Gatekeeper`


def bind_listener(socket: zmq.Socket[bytes], listener: sockets.socket) -> str:
    """Have ZeroMQ take the connections of the TCP socket ``listener``, which it owns from here on; return the address.

    Raises:
        BindError: that cannot be.
    """
    ip, port = listener.getsockname()[:2]
    if ":" in ip:
        socket.setsockopt(zmq.IPV6, 1)
        ip = f"[{ip}]"
    socket.setsockopt(zmq.USE_FD, listener.fileno())
    try:
        bind(socket, f"tcp://{ip}:{port}")
    except BindError:
        listener.close()
        raise
    finally:
        socket.setsockopt(zmq.USE_FD, -1)
    listener.detach()
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def guard_with_curve(socket: zmq.Socket[bytes], keys: JobKeys) -> None:
    """Let only those talk who dial with the keys of `connect_tcp`; before the socket listens."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.server_public.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, b"monarch_slurm")
    socket.setsockopt(zmq.BACKLOG, BACKLOG)  # of Unix sockets, where ZeroMQ itself listens


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
