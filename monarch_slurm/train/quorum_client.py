"""A trainer's side of quorums over the job's messages: it asks the actor of its replica, and waits."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from monarch_slurm.train.quorum import MemberActor, RankAnswer, RankAsk


class QuorumClient:
    """Asks for one rank. For any thread, though it is made on that of an actor.

    Args:
        member: the actor of the replica.
        rank: number of the rank.
        ranks: how many the replica has.
        while_waiting: called every ``tick`` seconds while a quorum is waited for, on the thread that waits.
        tick: seconds.
    """

    def __init__(
        self,
        member: MemberActor,
        rank: int,
        ranks: int,
        while_waiting: Callable[[], None],
        tick: float,
    ) -> None:
        self._member, self._rank, self._ranks = member, rank, ranks
        self._while_waiting, self._tick = while_waiting, tick
        self._context = contextvars.copy_context()  # TorchFT asks on a thread of its own, which belongs to no actor

    def quorum(self, ask: RankAsk, timeout: timedelta) -> RankAnswer:
        """Return the next quorum, once all ranks of the replica have asked and it has formed.

        Raises:
            TimeoutError: that took too long.
            MemberRefusedError: this start of the replica is none of the run, or not any more.
            UncommittedStepError: the run cannot have committed the step that is claimed.
            SupervisionError: the proc of rank 0 has ended.
        """
        future = self._call(self._member.quorum, self._rank, ask)
        end = time.monotonic() + timeout.total_seconds()
        while True:
            left = end - time.monotonic()
            try:
                answer: RankAnswer = future.get(max(0.0, min(left, self._tick)))
            except TimeoutError:
                if left <= self._tick:
                    raise
                self._while_waiting()
            else:
                return answer

    def should_commit(self, vote: bool, timeout: timedelta) -> bool:
        """Return whether all ranks of the replica vote for it; all of them have to call it.

        Raises:
            TimeoutError: a rank has not voted.
            SupervisionError: the proc of rank 0 has ended.
        """
        if self._ranks == 1:
            return vote
        return bool(self._call(self._member.should_commit, self._rank, vote).get(timeout.total_seconds()))

    def announce(self, serial: int, sha256: str) -> None:
        """Announce the hash of the state that this rank gives in a quorum. For any thread."""
        self._call(self._member.announce, serial, self._rank, sha256)

    def announced(self, serial: int, donor: str, timeout: float) -> str:
        """Return the hash that the same rank of the member ``donor`` has announced, once it has.

        Raises:
            TimeoutError: it has not, for ``timeout`` seconds.
            MemberRefusedError: the donor has ended.
            SupervisionError: the proc of rank 0 has ended.
        """
        return str(self._call(self._member.announced, serial, donor, self._rank).get(timeout))

    def leave(self) -> None:
        """Take part no more: nobody is to wait for this replica."""
        if self._rank == 0:
            self._call(self._member.leave)

    def _call(self, endpoint: Any, *arguments: Any) -> Any:
        return self._context.copy().run(endpoint.call_one, *arguments)
