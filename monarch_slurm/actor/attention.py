"""What the thread of an actor sees to while it blocks in `Future.get`: the actor's end, failures of what it owns.

An actor that waits for something which only its ``__supervise__`` can repair would otherwise wait forever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Attention:
    """What one actor's thread has to see to between two looks at the future that it waits for.

    Args:
        attend: does what is due, on the thread of the actor; raises to end the wait.
        is_due: returns whether something is.
    """

    def __init__(self, attend: Callable[[], None], is_due: Callable[[], bool]) -> None:
        self.attend = attend
        self.is_due = is_due
        self.waker: Callable[[], None] | None = None
        """Ends the pause of the thread while it waits."""

    def call(self) -> None:
        """Something is due. For any thread."""
        waker = self.waker
        if waker is not None:
            waker()

    def install(self) -> None:
        """Attend on the running thread from here on."""
        _of_threads[threading.get_ident()] = self

    def remove(self) -> None:
        """Attend no more; the thread ends."""
        _of_threads.pop(threading.get_ident(), None)


_of_threads: dict[int, Attention] = {}


def attention() -> Attention | None:
    """Return what the running thread has to see to; None if no actor runs on it."""
    return _of_threads.get(threading.get_ident())
