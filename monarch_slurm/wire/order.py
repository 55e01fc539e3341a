"""What a thread that reads takes itself, and what it leaves to the I/O loop: all of it happens in one order."""

from __future__ import annotations

import logging
from collections.abc import Callable

from monarch_slurm.wire.frames import Message
from monarch_slurm.wire.link import MessageHandler
from monarch_slurm.wire.loop import Loop

logger = logging.getLogger(__name__)

QuickHandler = Callable[[str, Message], bool]


class Order:
    """The order of what comes to a process. For the thread that reads, which may be the loop's."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        # Calls that a reader has left to the loop, and those of them that the loop has made.
        self._handed = self._handled = 0

    def hand_on(self, name: str, message: Message, on_quick: QuickHandler, on_message: MessageHandler) -> None:
        """Have a message taken: here by ``on_quick``, if it will and nothing is left to the loop; else on the loop's
        thread by ``on_message``.
        """
        if self._handed != self._handled or not self._take_quickly(name, message, on_quick):
            self.hand_over(lambda: on_message(name, message))

    def _take_quickly(self, name: str, message: Message, on_quick: QuickHandler) -> bool:
        try:
            return on_quick(name, message)
        except Exception:  # as the loop does: one broken message must not cost the process this link
            logger.exception("a message could not be taken")
            return True

    def hand_over(self, call: Callable[[], None]) -> None:
        """Make a call on the loop's thread, after those that were handed over before."""
        if self._handed == self._handled and self._loop.is_here():
            self._loop.guard(call)
            return
        self._handed += 1

        def make() -> None:
            try:
                call()
            finally:
                self._handled += 1

        self._loop.call_soon(make)
