"""Waits of an actor that cannot end: for itself, or for an actor that waits for it.

An actor that waits within a message takes no other. So it waits in vain for an answer to a call that is in its own
hand: one that is queued, or that it is handling. And two actors wait in vain if each has the other's call in hand.
The second case is exact only if the other's wait has no limit, or one that ends later. The other is asked for that,
once a wait has lasted a while, and only if it waits for an answer from here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from monarch_slurm.actor.attention import FIRST_LOOK_SECONDS
from monarch_slurm.actor.errors import ActorDeadlockError
from monarch_slurm.actor.replies import VALUE, name_of
from monarch_slurm.wire import Address, Message, dumps, loads

if TYPE_CHECKING:
    from monarch_slurm.actor.cell import Cell
    from monarch_slurm.actor.future import Future
    from monarch_slurm.actor.layout import ActorRef
    from monarch_slurm.actor.messages import Call, PortAddress

_MAX_AWAIT_LOOK_SECONDS = 5.0
"""Between two looks at what an event loop awaits."""

_MAX_ASKED = 8
"""Processes that are asked at a time."""


class CallsInHand:
    """The calls that one actor has taken and not answered. For any thread."""

    def __init__(self, is_explicit: Callable[[Call], bool]) -> None:
        self._is_explicit = is_explicit
        self.queued: set[PortAddress] = set()
        self.handled: Call | None = None
        """The call that the actor is in; others may be handled beside it."""

    def __contains__(self, port: PortAddress) -> bool:
        return port in self.queued or port in self._being_handled()

    def _being_handled(self) -> list[PortAddress]:
        call = self.handled
        # A port that the endpoint was given may be answered by any thread.
        return [call.port] if call is not None and call.port is not None and not self._is_explicit(call) else []

    def begin(self, call: Call) -> None:
        """The actor begins to handle a queued call."""
        self.handled = call
        if call.port is not None:
            self.queued.discard(call.port)

    def by_caller(self) -> dict[str, list[int]]:
        """Return the numbers of the ports that the calls are answered to, by the name of the process."""
        found: dict[str, list[int]] = {}
        for host, proc, number in [*self.queued.copy(), *self._being_handled()]:
            found.setdefault(name_of(Address(host, proc)), []).append(number)
        return found


class Wait:
    """One wait of an actor, after it has lasted a while.

    Args:
        end: time (`time.monotonic`) at which the wait is over; None: no limit is known.
    """

    def __init__(self, cell: Cell, future: Future[Any], end: float | None) -> None:
        self._cell = cell
        self._future = future
        self._end = end
        self._interval = FIRST_LOOK_SECONDS
        self._asked: list[int] = []
        self._answers: list[tuple[Address, ActorRef, int, float | None]] = []
        self.due = 0.0
        """When to look again."""

    def look(self) -> ActorDeadlockError | None:
        """Return the error of this wait if it cannot end."""
        now = time.monotonic()
        self.due = now + self._interval
        self._interval *= 2
        number = self._future._port
        if number is None or self._future._done:
            return None
        if self._is_in_vain((*self._cell.runtime.address, number), number):
            return ActorDeadlockError(
                f"{self._describe()}, and waits for itself: it handles one message at a time, so it does not handle "
                "this call before the wait is over. Call the method directly (`self`), or return before you wait"
            )
        for process, ref, theirs, end in self._answers:
            is_last = end is None or (self._end is not None and end > self._end)
            if is_last and self._is_in_vain((*process, theirs), number):
                return ActorDeadlockError(
                    f"{self._describe()}, which waits for an answer from here: actor {ref.name!r} in proc "
                    f"{process.proc} and this actor wait for each other. Each handles one message at a time. Let one "
                    "of them return before it waits, or make the endpoints of one of them concurrent_endpoints"
                )
        if self._end is None or now < self._end:
            self._ask(number)
        return None

    def _is_in_vain(self, call: PortAddress, number: int) -> bool:
        """Return whether ``call`` is in hand, and the port ``number`` has no result without what depends on it."""
        if call not in self._cell.in_hand:
            return False
        return not self._future._any_answer or len(self._cell.runtime.replies.sources(number)) == 1

    def _describe(self) -> str:
        what = self._future._what
        called = what() if callable(what) else what
        return f"{self._cell.instance.display} waits in {self._cell.doing}() for {called}"

    def _ask(self, number: int) -> None:
        self.close()
        calls = self._cell.in_hand.by_caller()
        if not calls:
            return
        runtime = self._cell.runtime
        asked = [source for source in runtime.replies.sources(number) if name_of(source[0]) in calls]
        for process, ref in asked[:_MAX_ASKED]:
            if ref is not None:
                port = runtime.replies.expect({0: (process, ref)}, self._hear(process, ref), lambda *_: None)
                self._asked.append(port)
                fields = {"mesh": ref.mesh, "port": port, "call": number, "by": calls[name_of(process)]}
                runtime.send(Message("waits", process, runtime.address, fields))

    def _hear(self, process: Address, ref: ActorRef) -> Callable[[int, str, Any], None]:
        asked_at = time.monotonic()

        def answered(_rank: int, _status: str, frames: Any) -> None:
            answer = loads(frames)
            if answer is not None:
                number, seconds = answer
                end = None if seconds is None else asked_at + seconds
                self._answers.append((process, ref, number, end))

        return answered

    def close(self) -> None:
        """Wait for no answer of others any more."""
        asked, self._asked, self._answers = self._asked, [], []
        for port in asked:
            self._cell.runtime.replies.forget(port)


def tell(cell: Cell, message: Message) -> None:
    """Answer whether an actor waits for nothing but the answer to a call of its that the asker has in hand."""
    fields = message.fields
    port = (*message.src, fields["call"])

    def answer(future: Future[Any] | None, end: float | None) -> None:
        number = future._port if future is not None and not future._done else None
        found = None
        if number is not None and number in fields["by"] and port in cell.in_hand:
            sources = cell.runtime.replies.sources(number)
            if len(sources) == 1:  # an error of another one would end the wait
                found = number, None if end is None else max(0.0, end - time.monotonic())
        cell.runtime.post((*message.src, fields["port"]), 0, VALUE, dumps(found))

    cell.tell_wait(answer)


class Awaits:
    """What the event loop of one actor awaits. On its thread.

    Args:
        serving: returns the task that handles messages, one at a time.
    """

    def __init__(self, cell: Cell, serving: Callable[[], asyncio.Task[Any] | None]) -> None:
        self._cell = cell
        self._serving = serving
        self._futures: dict[asyncio.Future[Any], Future[Any]] = {}
        self._waits: dict[asyncio.Future[Any], Wait] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._interval = FIRST_LOOK_SECONDS

    def begin(self, local: asyncio.Future[Any], future: Future[Any]) -> None:
        """``local`` stands for ``future`` on the running loop."""
        serving = self._serving()
        if future._port is None or serving is None or serving.get_loop() is not local.get_loop():
            return
        self._futures[local] = future
        if self._timer is None:
            self._timer = local.get_loop().call_later(self._interval, self._look)

    def end(self, local: asyncio.Future[Any]) -> None:
        """Nobody waits for ``local`` any more."""
        self._futures.pop(local, None)
        wait = self._waits.pop(local, None)
        if wait is not None:
            wait.close()

    def _look(self) -> None:
        self._timer = None
        awaited = [local for local in self._awaited(self._serving()) if local in self._futures]
        known = self._interval if awaited and all(local in self._waits for local in awaited) else 0.0
        self._interval = min(max(FIRST_LOOK_SECONDS, 2 * known), _MAX_AWAIT_LOOK_SECONDS)
        for local in awaited:
            wait = self._waits.setdefault(local, Wait(self._cell, self._futures[local], None))
            error = wait.look()
            if error is not None and not local.done():
                local.set_exception(error)
        if self._futures:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._look)

    def _awaited(self, task: asyncio.Future[Any] | None) -> Iterator[asyncio.Future[Any]]:
        """Yield the futures without which ``task`` does not continue, as far as asyncio tells."""
        if isinstance(task, asyncio.Task):
            yield from self._awaited(getattr(task, "_fut_waiter", None))
        elif task is not None and not task.done():
            yield task
            for child in getattr(task, "_children", ()):  # of asyncio.gather
                yield from self._awaited(child)

    def only(self) -> Future[Any] | None:
        """Return the future that the message in hand awaits, if nothing but its result can end that as far as asyncio
        tells: there is no timer, and no other task that might cancel it.
        """
        tasks, waiter = set(), self._serving()
        while isinstance(waiter, asyncio.Task):
            tasks.add(waiter)
            waiter = getattr(waiter, "_fut_waiter", None)
        loop = asyncio.get_running_loop()
        timers = getattr(loop, "_scheduled", None)
        if waiter is None or timers is None or asyncio.all_tasks() - tasks:
            return None
        if any(timer is not self._timer and not timer.cancelled() for timer in timers):
            return None
        return self._futures.get(waiter)
