"""Questions between the transfer managers of two processes, over the job's authenticated control plane.

Addresses, ports, keys and secrets travel here and nowhere else. Bodies are msgpack; a question has a deadline, and ends
at once when the other process is known to be gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from monarch_slurm.actor.replies import VALUE
from monarch_slurm.actor.runtime import Runtime
from monarch_slurm.actor.watching import watch_process
from monarch_slurm.rdma import errors
from monarch_slurm.rdma.engine import remaining
from monarch_slurm.rdma.errors import NoDirectWayError, PeerLostError, RDMAError, RDMATimeoutError
from monarch_slurm.wire import Address, pack, unpack
from monarch_slurm.wire.bulk import in_place
from monarch_slurm.wire.large_buffers import Buffer

Fields = dict[str, Any]
Answer = Callable[[Address, Fields], Fields]


class Control:
    """Asks and answers.

    Args:
        runtime: of this process.
        answers: for each kind of question, what answers it; called on a thread of its own, with who asks.
        spawn: runs a function on a thread.
    """

    def __init__(
        self, runtime: Runtime, answers: dict[str, Answer], spawn: Callable[[Callable[[], None]], None]
    ) -> None:
        self._runtime = runtime
        self._answers = answers
        self._spawn = spawn
        self.port = runtime.replies.open_channel(self._asked)

    def ask(self, owner: Address, port: int, kind: str, fields: Fields, deadline: float) -> Fields:
        """Return the answer of the process ``owner``, whose manager listens on ``port``.

        Raises:
            PeerLostError: that process has ended.
            RDMATimeoutError: no answer until ``deadline`` (on the monotonic clock).
            RDMAError: what the other side could not do.
        """
        came = threading.Event()
        got: list[Fields] = []
        why: list[str] = []

        def on_reply(_: int, __: str, frames: Sequence[Buffer]) -> None:
            if frames:
                got.append(unpack(frames[0]))
            came.set()

        def on_lost(_: int, reason: str) -> None:
            why.append(reason)
            came.set()

        replies = self._runtime.replies
        number = replies.expect({0: (owner, None)}, on_reply, on_lost)
        known = self._runtime.why_down(owner, None)
        if known is not None:
            replies.lose([owner], lambda *_, known=known: known)
        here = (*self._runtime.address, number)
        self._runtime.post((*owner, port), 0, VALUE, [pack([kind, here, fields])])
        try:
            answered = came.wait(remaining(deadline))
        except RDMATimeoutError:
            answered = False
        if not answered:
            replies.take(number, 0, VALUE, [])  # nobody waits for it any more
            raise RDMATimeoutError(f"process {owner} did not answer within the transfer's timeout (asked for {kind!r})")
        if why:
            raise PeerLostError(f"the owner of the buffer is gone: {why[0]}")
        answer = got[0]
        if "error" in answer:
            error = getattr(errors, answer["error"], RDMAError)(answer["text"])
            if isinstance(error, NoDirectWayError):
                error.lasting = answer["lasting"]
            raise error
        return answer

    def watch(self, process: Address, on_lost: Callable[[str], None]) -> None:
        """Call ``on_lost`` with the reason once ``process`` is known to be gone."""
        watch_process(self._runtime, process, on_lost)

    def _asked(self, _: int, __: str, frames: Sequence[Buffer]) -> None:
        body = bytes(in_place(frames[0]))
        self._spawn(lambda: self._answer(body))

    def _answer(self, body: bytes) -> None:
        kind, (host, proc, port), fields = unpack(body)
        try:
            answer = self._answers[kind](Address(host, proc), fields)
        except RDMAError as error:
            lasting = getattr(error, "lasting", False)
            answer = {"error": type(error).__name__, "text": str(error), "lasting": lasting}
        except Exception as error:  # whatever it was, the one who asks must not wait for it
            answer = {"error": "RDMAError", "text": f"{kind!r} failed at the owner: {error!r}"}
        self._runtime.post((host, proc, port), 0, VALUE, [pack(answer)])
