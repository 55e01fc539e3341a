"""The console of a running program: how another terminal of the same user on the same machine talks to it.

The program listens on an abstract Unix socket, which leaves no file behind, whatever ends the program. The kernel tells
either end who the other is (SO_PEERCRED), so nobody but the program's own user gets a byte read, and a name that
somebody else has taken is not believed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.wire.admission import StrangerLog
from monarch_slurm.wire.guarded_listener import SHORTAGE_SECONDS, SHORTAGES, ShortageLog
from monarch_slurm.wire.limits import LimitError
from monarch_slurm.wire.loop import Loop
from monarch_slurm.wire.origin import Origin
from monarch_slurm.wire.plain import UnpackError, pack, unpack
from monarch_slurm.wire.task_limits import start_thread

logger = logging.getLogger(__name__)

MAX_PACKET_BYTES = 256 * 2**20
MAX_SESSIONS = 8
_BACKLOG = 128
CONNECT_SECONDS = 3.0
"""What the other end waits for a program to answer."""

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
_LISTENING = 0x10000


class ConsoleError(MonarchSlurmError):
    """A running program cannot be talked to."""


class Session:
    """One connection to a console, of either end: maps of plain values, in order. Reads and writes block."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, packet: Mapping[str, Any]) -> None:
        """Send a packet.

        Raises:
            OSError: the other end is gone.
        """
        data = pack(packet)
        with self._sending:
            self._connection.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> dict[str, Any] | None:
        """Return the next packet; None once the other end is gone.

        Raises:
            TimeoutError: nothing came within the time set with `set_timeout`.
            ConsoleError: what came is no packet.
        """
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > MAX_PACKET_BYTES:
            raise ConsoleError(f"a packet of {length} bytes; {MAX_PACKET_BYTES} are allowed")
        data = self._read(length)
        if data is None:
            return None
        try:
            packet = unpack(data)
        except UnpackError as error:
            raise ConsoleError(f"not a packet: {error!r}") from None
        if not isinstance(packet, dict):
            raise ConsoleError(f"not a packet but {type(packet).__name__}")
        return packet

    def fileno(self) -> int:
        """The connection's descriptor, to wait on."""
        return self._connection.fileno()

    def set_timeout(self, seconds: float | None) -> None:
        """Set how long `receive` waits."""
        self._connection.settimeout(seconds)

    def close(self) -> None:
        """Hang up; a thread that waits in `receive` gets None."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            try:
                data = self._connection.recv(min(size - len(parts), 2**20))
            except ConnectionError:
                return None
            if not data:
                return None
            parts += data
        return bytes(parts)


Handler = Callable[[Session, dict[str, Any]], None]


class Console:
    """Listens for terminals, and serves each on a thread of its own.

    A terminal is sent ``about`` first. Its first packet names a service (``{"service": ...}``), whose handler serves
    the session until it returns.

    Args:
        about: what the program says of itself.
        handlers: the services.
    """

    def __init__(self, loop: Loop, about: dict[str, Any], handlers: dict[str, Handler]) -> None:
        self._loop = loop
        self._about = about
        self._handlers = handlers
        self._sessions: set[Session] = set()
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind(f"\0{_prefix()}{os.getpid()}-{os.urandom(4).hex()}")
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._strangers = StrangerLog("this program's console", f"belong to other users than uid {os.getuid()}")
        self._shortages = ShortageLog("the console can take no connection now, and tries again")
        loop.call_soon(self._listen)

    def _listen(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Stop listening and hang up. When the loop does not run any more."""
        self._closed = True
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._strangers.flush()
        for session in list(self._sessions):
            session.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # it has hung up again, or this process has no descriptor left
            if error.errno in SHORTAGES:
                self._shortages.note(error.errno)
                self._loop.remove_reader(self._listener.fileno())  # or this loop would do nothing else
                self._loop.call_later(SHORTAGE_SECONDS, self._listen)
            return
        uid, _ = _peer(connection)
        if uid not in (os.getuid(), 0):
            self._strangers.note(Origin("", uid))
            connection.close()
            return
        if len(self._sessions) >= MAX_SESSIONS:
            connection.close()
            return
        connection.setblocking(True)
        session = Session(connection)
        self._sessions.add(session)
        try:
            start_thread(threading.Thread(target=self._serve, args=(session,), name="monarch-console", daemon=True))
        except LimitError as error:
            logger.warning("a terminal is not served: %s", error)
            self._sessions.discard(session)
            session.close()

    def _serve(self, session: Session) -> None:
        try:
            session.send(self._about)
            request = session.receive()
            if request is not None:
                handler = self._handlers.get(str(request.get("service")))
                if handler is None:
                    session.send({"error": f"this program has no service {request.get('service')!r}"})
                else:
                    handler(session, request)
        except (OSError, ConsoleError) as error:
            logger.debug("a console session ended: %s", error)
        finally:
            self._sessions.discard(session)
            session.close()


def find_consoles() -> list[str]:
    """Return the names of the consoles of this user's programs on this machine, in the order of their making."""
    prefix = f"@{_prefix()}"
    with open("/proc/net/unix") as file:
        rows = [line.split() for line in file.readlines()[1:]]
    return [row[7][1:] for row in rows if len(row) == 8 and row[7].startswith(prefix) and int(row[3], 16) & _LISTENING]


def connect_console(name: str) -> tuple[Session, dict[str, Any] | None, int]:
    """Connect to a console; return the session, what the program says of itself, and its pid.

    A program that does not answer within `CONNECT_SECONDS` seconds says nothing of itself (None).

    Raises:
        ConsoleError: it has ended, or belongs to somebody else.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    connection.settimeout(CONNECT_SECONDS)
    try:
        connection.connect(f"\0{name}")
        uid, pid = _peer(connection)
    except OSError as error:
        connection.close()
        raise ConsoleError(f"the program has ended: {error.strerror}") from None
    session = Session(connection)
    if uid != os.getuid():
        session.close()
        raise ConsoleError(f"the socket {name} belongs to uid {uid}, not to you (uid {os.getuid()}): not talking to it")
    try:
        about = session.receive()
    except TimeoutError:
        return session, None, pid
    if about is None:
        session.close()
        raise ConsoleError("the program has hung up: it ends, or too many terminals talk to it")
    session.set_timeout(None)
    return session, about, pid


def _prefix() -> str:
    return f"monarch-slurm/{os.getuid()}/"


def _peer(connection: socket.socket) -> tuple[int, int]:
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return uid, pid
