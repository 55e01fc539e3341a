"""Children that a process forks: they inherit its sockets, and must not use them."""

from __future__ import annotations

import os
from collections.abc import Callable

from monarch_slurm.wire import Message

Transmit = Callable[[Message], None]


def not_in_forks(transmit: Transmit) -> Transmit:
    """Return ``transmit`` for this process alone. In children that it forks it raises RuntimeError: what they send
    would come between the messages of their parent.
    """
    allowed = [True]
    os.register_at_fork(after_in_child=allowed.clear)

    def send(message: Message) -> None:
        if not allowed:
            raise RuntimeError(
                f"process {os.getpid()} was forked from one that has actors or a client, and cannot use them: have it "
                "end in os._exit or exec, and let its parent make the calls"
            )
        transmit(message)

    return send
