"""News of the end of a process, for those that wait for nothing else from it."""

from __future__ import annotations

from collections.abc import Callable

from monarch_slurm.actor.replies import VALUE
from monarch_slurm.actor.runtime import Runtime
from monarch_slurm.wire import CONTROLLER, Address, Message


def watch_process(runtime: Runtime, process: Address, on_lost: Callable[[str], None]) -> Callable[[], None]:
    """Call ``on_lost`` with the reason once ``process`` is known to be gone, at once if it is already.

    Args:
        runtime: of this process.
        process: which.
        on_lost: called on any thread, the I/O thread mostly: it must not block.

    Returns:
        A function that ends the watch.
    """
    replies = runtime.replies
    number = replies.expect({0: (process, None)}, lambda *_: None, lambda _, reason: on_lost(reason))
    known = runtime.why_down(process, None)
    if known is not None:
        replies.lose([process], lambda *_, known=known: known)
    elif process.host != CONTROLLER.host:
        # Makes the two contacts; and if the process has ended already, this is answered with how.
        runtime.send(Message("watch", process, runtime.address))

    def end() -> None:
        replies.take(number, 0, VALUE, [])

    return end
