"""What the thread of an actor sees to while it blocks in `Future.get`: the actor's end, failures of what it owns.

An actor that waits for something which only its ``__supervise__`` can repair would otherwise wait forever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_slurm.actor.future import Future
    from monarch_slurm.actor.waits import Awaits, Wait

FIRST_LOOK_SECONDS = 1.0
"""A wait of an actor that has lasted so long is looked at: it may be one that cannot end."""


class Attention:
    """What one actor's thread has to see to between two looks at the future that it waits for.

    Args:
        attend: does what is due, on the thread of the actor; raises to end the wait.
        is_due: returns whether something is.
        watch: returns what looks at a wait for a future until a time (None: no limit) that has lasted a while.
    """

    def __init__(
        self,
        attend: Callable[[], None],
        is_due: Callable[[], bool],
        watch: Callable[[Future[Any], float | None], Wait],
    ) -> None:
        self.attend = attend
        self.is_due = is_due
        self.watch = watch
        self.blocking: tuple[Future[Any], float | None] | None = None
        """The future that the thread waits for, and until when."""
        self.awaits: Awaits | None = None
        """What the actor's event loop awaits, if it has one."""
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
