"""Large frames whose bytes come after their message, in pieces, from another machine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.wire.bulk import Bulk, Late, PlainBuffer
from monarch_slurm.wire.frames import Message, WireError
from monarch_slurm.wire.large_buffers import Buffer
from monarch_slurm.wire.memory_files import MemoryFile, address_of, copy_memory, pool


class LostPayloadError(MonarchSlurmError, ConnectionError):
    """A message came, and the connection ended before all of its large buffers did."""


class Arriving(Late):
    """One large frame. For any thread; the pieces come one after the other.

    Args:
        size: in bytes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0
        self._error = ""
        self._source: object = None
        self._writing = threading.Lock()
        """Held while a piece is written: the file is given back only when nobody writes to it."""
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._waiting: list[Callable[[], None]] = []
        self._frame: PlainBuffer | Bulk = b""
        self._file: MemoryFile | None = None
        try:
            self._file = pool().take(size)
        except OSError:  # this process has no descriptor left for it
            self._frame = bytearray(size)

    def __len__(self) -> int:
        return self._size

    def write(self, at: int, data: memoryview) -> bool:
        """Take the next piece; return whether it was the last.

        Raises:
            WireError: it is not the next one.
        """
        with self._writing:
            if at == 0 and self._source is not None and not self._done.is_set():
                self._source, self._at = None, 0  # its channel has ended, and its sender begins once more
            self._check(None, at, len(data))
            self._copy(at, data)
            self._at += len(data)
        return self.finish(None)

    def fill(self, source: object, at: int, size: int, write: Callable[[memoryview], None]) -> bool:
        """Have ``write`` put the next piece into memory of ``size`` bytes; return whether it was the last.

        Then `finish` has to be called. What ``write`` raises is passed on; nothing has come then.

        Args:
            source: what the frame comes by. Of a frame, all pieces come by one.

        Raises:
            WireError: it is not the next one.
        """
        with self._writing:
            if at == self._at == 0:
                self._source = source
            self._check(source, at, size)
            room = memoryview(self._frame)[at : at + size] if self._file is None else self._file.room(at, size)  # type: ignore[arg-type]
            if room is None:
                room = memoryview(bytearray(size))
                write(room)
                self._copy(at, room)
            else:
                write(room)
            self._at += size
            return self._at == self._size

    def expects(self, at: int, size: int) -> bool:
        """Return whether a piece may be the next one."""
        return at == self._at and at + size <= self._size

    def finish(self, source: object) -> bool:
        """Return whether all of it is here, by ``source``; whoever waits for it is called now."""
        with self._writing:
            if self._source is not source or self._at < self._size or self._done.is_set():
                return False
            if self._file is not None:
                self._frame = Bulk(self._file.open_again(), self._size)
            self._give_back()
        self._end("")
        return True

    def fail(self, why: str) -> None:
        """Note that the rest does not come."""
        with self._writing:
            if self._done.is_set():
                return
            self._give_back()
        self._end(f"{self._at} of {self._size} bytes of a large buffer had come when {why}")

    def _check(self, source: object, at: int, size: int) -> None:
        if self._source is not source or at != self._at or at + size > self._size or not size or self._done.is_set():
            raise WireError(f"{size} bytes at {at} of a frame of {self._size}, of which {self._at} have come")

    def _copy(self, at: int, data: memoryview) -> None:
        if self._file is not None:
            self._file.write(at, data)
        else:
            with address_of(data) as source, address_of(self._frame) as to:  # type: ignore[arg-type]
                copy_memory(to + at, source, len(data))

    def _give_back(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            pool().keep(file)

    def _end(self, error: str) -> None:
        self._error = error
        with self._lock:
            self._done.set()
            waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def is_done(self) -> bool:
        """Return whether all of it is here, or its end is known to be lost."""
        return self._done.is_set()

    def is_lost(self) -> bool:
        """Return whether some of it will never come."""
        return bool(self._error)

    def when_done(self, call: Callable[[], None]) -> None:
        """Call ``call`` once it is done: now, or on the thread that ends it."""
        with self._lock:
            if not self._done.is_set():
                self._waiting.append(call)
                return
        call()

    def whole(self) -> PlainBuffer | Bulk:
        """Wait, and return the frame.

        Raises:
            LostPayloadError: some of it will never come.
        """
        self._done.wait()
        if self._error:
            raise LostPayloadError(self._error)
        return self._frame


def late_frames(frames: Sequence[Buffer]) -> list[Arriving]:
    """Return those of ``frames`` that have not come yet, or never will."""
    return [frame for frame in frames if isinstance(frame, Arriving) and (frame.is_lost() or not frame.is_done())]


def when_whole(frames: Sequence[Buffer], call: Callable[[], None]) -> None:
    """Call ``call`` when all ``frames`` are here, or one is lost: now, or on the thread that brings them."""
    late = late_frames(frames)
    if not late or late[0].is_lost():
        call()
    else:
        late[0].when_done(lambda: when_whole(frames, call))


Receiver = TypeVar("Receiver", bound=Hashable)


class Holding(Generic[Receiver]):
    """Messages that wait until those before them to the same receiver are whole. For any thread.

    Args:
        send: called with a receiver and a message when it is its turn; the messages of a receiver in order.
    """

    def __init__(self, send: Callable[[Receiver, Message], None]) -> None:
        self._send = send
        self._lock = threading.RLock()
        self._queues: dict[Receiver, deque[Message]] = {}

    def hold(self, receiver: Receiver, message: Message) -> bool:
        """Keep a message if it is not its turn; false: it can be sent at once."""
        if receiver not in self._queues and not late_frames(message.body):
            return False
        with self._lock:
            queue = self._queues.setdefault(receiver, deque())
            queue.append(message)
            first = len(queue) == 1
        if first:
            when_whole(message.body, lambda: self._go_on(receiver))
        return True

    def last_of(self, peer: Any) -> Receiver | None:
        """Return the receiver that began to wait last, among those that are tuples which begin with ``peer``."""
        if not self._queues:
            return None
        with self._lock:
            return next((key for key in reversed(self._queues) if isinstance(key, tuple) and key[0] == peer), None)

    def forget(self, receiver: Receiver) -> list[Message]:
        """Return what a receiver would have got, and send it no more."""
        with self._lock:
            return list(self._queues.pop(receiver, ()))

    def _go_on(self, receiver: Receiver) -> None:
        with self._lock:
            queue = self._queues.get(receiver)
            while queue:
                late = late_frames(queue[0].body)
                if late and not late[0].is_lost():
                    break
                message = queue.popleft()
                if not late:
                    self._send(receiver, message)
            if queue:
                body = queue[0].body
            else:
                self._queues.pop(receiver, None)
                return
        when_whole(body, lambda: self._go_on(receiver))
