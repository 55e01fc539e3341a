"""TCP connections through one connection of packets: what a program outside of a cluster's network reaches it by.

Each end listens, accepts TCP connections and has the other end dial for them. What goes through is not looked at: the
processes at both ends of a connection authenticate each other. A connection has proved itself when it was sent more
than a stranger is (`STRANGER_BYTES`); until then it counts against the limits of `monarch_slurm.wire.admission`. A
sender waits when `WINDOW_BYTES` are on their way, so a slow connection delays no other one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from monarch_slurm.wire.admission import PROOF_SECONDS, Admission, StrangerLog
from monarch_slurm.wire.gatekeeper import STRANGER_BYTES
from monarch_slurm.wire.guarded_listener import SHORTAGES, ShortageLog
from monarch_slurm.wire.origin import origin_of
from monarch_slurm.wire.task_limits import start_thread

logger = logging.getLogger(__name__)

WINDOW_BYTES = 1 << 20
_READ_BYTES = 64 * 1024
_DIAL_SECONDS = 10.0

Target = tuple[str, int]
"""Host and port."""


class _Connection:
    """One TCP connection at this end."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[bytes] = asyncio.Queue()
        self.on_the_way = 0
        self.sent = 0
        """Bytes that the process which has connected was sent."""
        self.room = asyncio.Event()


class Tunnel:
    """One end, on a thread of its own.

    Args:
        send: sends a packet, a map of plain values, to the other end; for any thread, and in order.
        first: ``0`` at one end, ``1`` at the other: numbers of connections are even at one, odd at the other.
        default: where connections lead whose opener has not said so; asked on the tunnel's thread.
    """

    def __init__(
        self, send: Callable[[dict[str, Any]], None], first: int, default: Callable[[], Target] | None
    ) -> None:
        self._send = send
        self._numbers = itertools.count(first, 2)
        self._default = default
        self._connections: dict[int, _Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._note_exception)
        self._admission: Admission[int] = Admission(is_proved=self._is_proved)
        self._strangers = StrangerLog("a tunnel's port", "did not prove themselves to the process at its other end")
        self._shortages = ShortageLog("a tunnel can take no connection now, and tries again")
        start_thread(threading.Thread(target=self._loop.run_forever, name="monarch-tunnel", daemon=True))

    def listen(self, ip: str, to: Target | None) -> int:
        """Listen at an ephemeral port of ``ip``, which is returned; connections lead ``to``, or to the other end's
        default.

        Raises:
            OSError: it cannot be listened at.
        """

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            number = next(self._numbers)
            if not self._admit(number, writer):
                return
            self._connections[number] = _Connection()
            self._send({"op": "open", "id": number, "to": to})
            await self._carry(number, reader, writer)

        async def start() -> int:
            server = await asyncio.start_server(accepted, ip, 0)
            port: int = server.sockets[0].getsockname()[1]
            return port

        return asyncio.run_coroutine_threadsafe(start(), self._loop).result()

    def take(self, packet: dict[str, Any]) -> None:
        """Take a packet of the other end. For any thread, in order."""
        self._loop.call_soon_threadsafe(self._take, packet)

    def close(self) -> None:
        """End all connections and listeners."""

        self._strangers.flush()

        def end() -> None:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.call_soon(self._loop.stop)

        self._loop.call_soon_threadsafe(end)

    def _admit(self, number: int, writer: asyncio.StreamWriter) -> bool:
        """Return whether the connection ``number`` may stay; others may have to go for it."""
        try:
            origin = origin_of(writer.get_extra_info("socket"))
        except OSError:  # it has hung up already
            writer.close()
            return False
        gone = self._admission.enter(number, origin, self._loop.time())
        self._loop.call_later(PROOF_SECONDS, self._end_late)
        for other, whose in gone:
            self._strangers.note(whose)
            self._hang_up(other)
        if any(other == number for other, _ in gone):
            writer.close()
            return False
        return True

    def _end_late(self) -> None:
        for number, origin in self._admission.overdue(self._loop.time()):
            self._strangers.note(origin)
            self._hang_up(number)

    def _is_proved(self, number: int) -> bool:
        connection = self._connections.get(number)
        return connection is not None and connection.sent > STRANGER_BYTES

    def _hang_up(self, number: int) -> None:
        connection = self._connections.get(number)
        if connection is not None:
            connection.arrived.put_nowait(b"")

    def _note_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in SHORTAGES:  # asyncio tries again after a second
            self._shortages.note(error.errno)
        else:
            loop.default_exception_handler(context)

    def _take(self, packet: dict[str, Any]) -> None:
        operation, number = packet["op"], packet.get("id", -1)
        connection = self._connections.get(number)
        if operation == "open":
            self._connections[number] = _Connection()
            self._start(self._dial(number, packet["to"]))
        elif connection is None:
            return  # it was closed at this end
        elif operation == "data":
            connection.arrived.put_nowait(packet["data"])
        elif operation == "ack":
            connection.on_the_way -= packet["bytes"]
            connection.room.set()
        elif operation == "close":
            connection.arrived.put_nowait(b"")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _dial(self, number: int, to: Target | None) -> None:
        try:
            if to is None and self._default is None:
                raise OSError("nowhere to go")  # noqa: TRY301 - told as what cannot be dialled
            host, port = to or (self._default or tuple)()
            reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), _DIAL_SECONDS)
        except (OSError, asyncio.TimeoutError, ValueError) as error:
            logger.debug("a connection through the tunnel to %s cannot be made: %s", to, error)
            self._connections.pop(number, None)
            self._send({"op": "close", "id": number})
            return
        await self._carry(number, reader, writer)

    async def _carry(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = self._connections[number]
        sending = self._loop.create_task(self._read(number, connection, reader))
        try:
            while data := await connection.arrived.get():
                writer.write(data)
                connection.sent += len(data)
                await writer.drain()
                self._send({"op": "ack", "id": number, "bytes": len(data)})
        except OSError:
            pass  # it has hung up
        finally:
            sending.cancel()
            del self._connections[number]
            self._admission.forget(number)
            writer.close()
            self._send({"op": "close", "id": number})

    async def _read(self, number: int, connection: _Connection, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                connection.on_the_way += len(data)
                self._send({"op": "data", "id": number, "data": data})
                while connection.on_the_way >= WINDOW_BYTES:
                    connection.room.clear()
                    await connection.room.wait()
        connection.arrived.put_nowait(b"")
