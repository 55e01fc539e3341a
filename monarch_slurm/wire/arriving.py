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
    """One large frame. Pieces are written by one thread; the rest is for any thread.

    Args:
        size: in bytes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0
        self._error = ""
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
        if at != self._at or at + len(data) > self._size or not len(data):
            raise WireError(f"{len(data)} bytes at {at} of a frame of {self._size}, of which {self._at} have come")
        if self._file is not None:
            self._file.write(at, data)
        else:
            with address_of(data) as source, address_of(self._frame) as to:  # type: ignore[arg-type]
                copy_memory(to + at, source, len(data))
        self._at += len(data)
        if self._at < self._size:
            return False
        if self._file is not None:
            self._frame = Bulk(self._file.open_again(), self._size)
        self._end("")
        return True

    def fail(self, why: str) -> None:
        """Note that the rest does not come."""
        if not self._done.is_set():
            self._end(f"{self._at} of {self._size} bytes of a large buffer had come when {why}")

    def _end(self, error: str) -> None:
        self._error = error
        file, self._file = self._file, None
        if file is not None:
            pool().keep(file)
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
