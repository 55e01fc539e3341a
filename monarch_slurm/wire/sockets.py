"""ZeroMQ sockets as this package uses them: nothing is dropped, strangers get nothing parsed."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.utils.z85

from monarch_slurm.config import settings
from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.wire.keys import Invitation, JobKeys

logger = logging.getLogger(__name__)

MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path (``sun_path`` of unix(7), less the closing zero)."""

HANDSHAKE_MS = 10_000
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
KNOCK_LOG_SECONDS = 10.0


class SocketPathError(MonarchSlurmError):
    """A folder for Unix sockets cannot be used."""


class BindError(MonarchSlurmError):
    """An address or port cannot be listened on."""


def make_runtime_dir() -> Path:
    """Make and return a private folder (mode 0700) for this process's Unix sockets.

    Raises:
        SocketPathError: it cannot be made there, or the paths of sockets in it would be too long.
    """
    configured = settings().runtime_dir
    base = Path(configured or os.environ.get("XDG_RUNTIME_DIR") or "/tmp")  # noqa: S108 - mkdtemp makes the name
    if not configured and (not base.is_dir() or not os.access(base, os.W_OK)):
        base = Path("/tmp")  # noqa: S108
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"ms-{os.getuid()}-", dir=base))
    except OSError as error:
        raise SocketPathError(
            f"cannot make a folder for sockets in {base}: {error.strerror}; set MONARCH_SLURM_RUNTIME_DIR to a short, "
            "writable local folder"
        ) from None
    try:
        check_socket_path(folder / "agent.sock")
    except SocketPathError:
        folder.rmdir()
        raise
    return folder


def check_socket_path(path: Path) -> str:
    """Return the ``ipc://`` address of ``path``.

    Raises:
        SocketPathError: the path is too long for a Unix socket.
    """
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        raise SocketPathError(
            f"the socket path {path} has {length} bytes, and Unix sockets allow {MAX_SOCKET_PATH}; set "
            "MONARCH_SLURM_RUNTIME_DIR to a short folder such as /tmp"
        )
    return f"ipc://{path}"


def check_private(folder: Path) -> None:
    """Make sure that ``folder`` is a real folder of ours that nobody else can enter.

    Raises:
        SocketPathError: it is not.
    """
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise SocketPathError(f"{folder} is not a private folder of yours (mode 0700); refusing to use sockets in it")


def _prepare(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    # Without a high-water mark ZeroMQ neither drops nor blocks.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, settings().max_frame_length)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


def make_router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return a ROUTER that reports unknown peers instead of dropping what is for them."""
    socket = context.socket(zmq.ROUTER)
    _prepare(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return socket


def make_dealer(context: zmq.Context[zmq.Socket[bytes]], identity: str) -> zmq.Socket[bytes]:
    """Return a DEALER that a ROUTER knows as ``identity``."""
    socket = context.socket(zmq.DEALER)
    _prepare(socket)
    socket.setsockopt(zmq.ROUTING_ID, identity.encode())
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    return socket


def bind_ipc(socket: zmq.Socket[bytes], path: Path) -> str:
    """Listen on the Unix socket ``path``, for processes of this user only; return the address."""
    check_private(path.parent)
    address = check_socket_path(path)
    socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
    _bind(socket, address)
    return address


def bind_tcp(socket: zmq.Socket[bytes], ip: str, keys: JobKeys) -> str:
    """Listen on an ephemeral port of ``ip`` with CURVE; return the address. `Gatekeeper` decides who may talk."""
    if ":" in ip:
        socket.setsockopt(zmq.IPV6, 1)
        ip = f"[{ip}]"
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.server_public.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, b"monarch_slurm")
    _bind(socket, f"tcp://{ip}:*")
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def connect_tcp(socket: zmq.Socket[bytes], invitation: Invitation) -> None:
    """Dial the controller of ``invitation`` with CURVE."""
    if "[" in invitation.address:
        socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.CURVE_SERVERKEY, invitation.server_public.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, invitation.agent_public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, invitation.agent_secret.encode())
    socket.connect(invitation.address)


def _bind(socket: zmq.Socket[bytes], address: str) -> None:
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise BindError(f"cannot listen on {address}: {error.strerror}") from None


class Gatekeeper:
    """Answers ZeroMQ's question (ZAP, RFC 27) whether a peer may talk: only with the job's agent key.

    libzmq asks before it hands on a single byte of a peer. `serve` belongs on the I/O loop that reads `socket`.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], keys: JobKeys, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)
        self._agent_key = zmq.utils.z85.decode(keys.agent_public)
        self._clock = clock
        self._last_log = float("-inf")
        self.refused = 0

    def serve(self) -> None:
        """Answer every question that has arrived."""
        while self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            version, request, domain, address, _identity, mechanism, *credentials = self.socket.recv_multipart()
            # ipc sockets have no domain set and are guarded by their folder and the peer's uid (see bind_ipc).
            allowed = mechanism == b"CURVE" and credentials == [self._agent_key] and domain == b"monarch_slurm"
            code, text = (b"200", b"OK") if allowed else (b"400", b"no key of this job")
            self.socket.send_multipart([version, request, code, text, b"agent" if allowed else b"", b""])
            if not allowed:
                self._knocked(address.decode(errors="replace"), mechanism.decode(errors="replace"))

    def _knocked(self, address: str, mechanism: str) -> None:
        self.refused += 1
        if self._clock() - self._last_log >= KNOCK_LOG_SECONDS:
            self._last_log = self._clock()
            logger.warning(
                "refused a connection from %s (%s) that does not hold this job's key; %d refused so far",
                address, mechanism, self.refused,
            )  # fmt: skip
