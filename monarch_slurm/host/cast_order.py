"""What comes to a host by two ways, put back into the order in which the controller sent it.

A message goes to a host over the controller's own connection, or is the host's share of a cast that comes down the tree
of agents. Each way may be late, and a share may come twice, or over another way than the one before. So

- a share tells the number of its cast, that of the host's share before it, and how many direct messages the controller
  had sent before it to this host;
- before a direct message that follows a cast, a *barrier* in the direct stream tells the number of that cast.

Whatever the ways do, each share is handed on once, and everything in the order sent. The controller orders what comes
from a host in the same way: there the shares are entries of folded answers (`folds`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from monarch_slurm.wire import Message


@dataclass
class _Share:
    number: int
    directs: int
    message: Message


class CastOrder:
    """The order of what comes to one host, or from one. No I/O.

    Args:
        deliver: called with each message when it is its turn.
    """

    def __init__(self, deliver: Callable[[Message], None]) -> None:
        self._deliver = deliver
        self.last = 0
        """Number of the last share that has been delivered, and with it all before."""
        self.directs = 0
        """Direct messages that have been delivered."""
        self._shares: dict[int, _Share] = {}
        """Shares whose turn has not come, by the number of the one before."""
        self._held: deque[int | Message] = deque()
        """The direct stream from the barrier on that it waits at."""

    def direct(self, message: Message) -> None:
        """A direct message has come."""
        if self._held:
            self._held.append(message)
        else:
            self.directs += 1
            self._deliver(message)
            if self._shares:
                self.go_on()

    def is_idle(self) -> bool:
        """Return whether nothing waits for its turn."""
        return not self._held and not self._shares

    def went_by(self) -> bool:
        """A direct message has come while nothing waited, and was handed on by who took it, on any thread.

        Returns:
            Whether a share has come meanwhile, so that `go_on` has to be called.
        """
        self.directs += 1
        return bool(self._shares)

    def barrier(self, number: int) -> None:
        """What comes directly from here on was sent after the cast ``number``."""
        if number > self.last:
            self._held.append(number)

    def share(self, number: int, after: int, directs: int, message: Message) -> None:
        """The share of the cast ``number`` has come; ``after`` is the one before, ``directs`` what went before it."""
        if number > self.last:
            self._shares[after] = _Share(number, directs, message)
            self.go_on()

    def go_on(self) -> None:
        """Hand on what waits, if it is its turn."""
        going = True
        while going:
            going = False
            share = self._shares.get(self.last)
            if share is not None and share.directs <= self.directs:
                del self._shares[self.last]
                self.last = share.number
                self._deliver(share.message)
                going = True
            while self._held:
                first = self._held[0]
                if isinstance(first, int):
                    if first > self.last:
                        break
                    self._held.popleft()
                else:
                    self._held.popleft()
                    self.directs += 1
                    self._deliver(first)
                going = True
