"""Which procs of a mesh start again when one has failed. Pure: events and times in, verdicts out."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, get_args

from monarch_slurm.actor.budget import RestartBudget, RestartLimit

Strategy = Literal["one_for_one", "one_for_all", "rest_for_one"]


@dataclass(frozen=True)
class RestartPolicy:
    """What becomes of the procs of a mesh when one of them fails; for ``spawn_procs(restart=...)``.

    Attributes:
        strategy: what starts again: ``"one_for_one"`` the proc that failed, ``"one_for_all"`` every proc of the mesh,
            ``"rest_for_one"`` the one that failed and those of higher rank. Those that have not failed are killed.
        max_restarts: failures that are answered so within any ``within`` seconds; with the next one the policy is over,
            and it and all later ones are ordinary failures. A host's end is one failure, of however many procs.
        within: seconds.
        backoff: seconds to wait before the second restart in a row, doubled with each further one, up to 30 s. A proc
            that has run for 5 s ends the row.

    Raises:
        ValueError: a value makes no sense.
    """

    strategy: Strategy = "one_for_one"
    max_restarts: int = 3
    within: float = 60.0
    backoff: float = 0.0

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            raise ValueError(f"restart strategy {self.strategy!r}: one of {', '.join(get_args(Strategy))} expected")
        if isinstance(self.max_restarts, bool) or not isinstance(self.max_restarts, int) or self.max_restarts < 0:
            raise ValueError(f"max_restarts is {self.max_restarts!r}; a whole number, 0 or more, expected")
        if not 0 < self.within < math.inf:
            raise ValueError(f"within is {self.within!r}; seconds, more than 0, expected")
        if not 0 <= self.backoff < math.inf:
            raise ValueError(f"backoff is {self.backoff!r}; seconds, 0 or more, expected")

    def affected(self, ranks: Collection[int], count: int) -> set[int]:
        """Return the ranks of a mesh of ``count`` procs that start again when ``ranks`` have failed."""
        if self.strategy == "one_for_one":
            return set(ranks)
        return set(range(0 if self.strategy == "one_for_all" else min(ranks), count))


@dataclass(frozen=True)
class Verdict:
    """What follows from a failure.

    Attributes:
        restarted: ranks that have ended and are going to start again.
        killed: ranks that are to be killed, to start again.
        given_up: ranks that do not start again.
    """

    restarted: frozenset[int] = frozenset()
    killed: frozenset[int] = frozenset()
    given_up: frozenset[int] = frozenset()


@dataclass
class _Group:
    """Ranks that start again together, once all of them have ended and the time has come."""

    ranks: set[int]
    ending: set[int]
    due: float


@dataclass
class Restarts:
    """The restarts of one mesh of ``count`` procs."""

    policy: RestartPolicy
    count: int
    over: bool = False
    """The limit was reached: nothing starts again any more but what waits to."""
    _groups: list[_Group] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    """Ranks that have ended for good, or were told to."""

    def __post_init__(self) -> None:
        limit = RestartLimit(self.policy.max_restarts, self.policy.within)
        self._budget = RestartBudget(limit, self.policy.backoff)

    def failed(self, ranks: Collection[int], now: float) -> Verdict:
        """Take the end of ``ranks``, which is one failure, unless it was waited for."""
        fresh = set(ranks) - self.gone
        awaited = set()
        for group in self._groups:
            awaited |= group.ending & fresh
            group.ending -= fresh
            fresh -= group.ranks
        if not fresh:
            return Verdict(restarted=frozenset(awaited))
        wait = None if self.over else self._budget.use(now)
        if wait is None:
            self.over = True
            self.gone |= fresh
            return Verdict(restarted=frozenset(awaited), given_up=frozenset(fresh))
        affected = self.policy.affected(fresh, self.count) - self.gone
        group = _Group(affected, affected - fresh, now + wait)
        pending = [other for other in self._groups if other.ranks & affected]
        self._groups = [other for other in self._groups if other not in pending]
        waiting: set[int] = set()
        for other in pending:
            waiting |= other.ranks
            group.ending -= other.ranks - other.ending
            group.ranks |= other.ranks
            group.ending |= other.ending
            group.due = max(group.due, other.due)
        self._groups.append(group)
        return Verdict(frozenset(awaited | fresh), frozenset(affected - waiting - fresh))

    def end(self, ranks: Collection[int]) -> None:
        """These ranks end for good, as somebody wishes."""
        self.gone |= set(ranks)
        for group in self._groups:
            group.ranks -= set(ranks)
            group.ending -= set(ranks)

    @property
    def left(self) -> int:
        """Number of ranks that have not ended for good."""
        return self.count - len(self.gone)

    def start(self, now: float) -> set[int]:
        """Return the ranks that are to start now; they count as running from here on."""
        ready = [group for group in self._groups if not group.ending and group.due <= now]
        self._groups = [group for group in self._groups if group not in ready]
        return {rank for group in ready for rank in group.ranks}

    def next_start(self) -> float | None:
        """Return when ranks will be due that wait for nothing but their time."""
        return min((group.due for group in self._groups if not group.ending and group.ranks), default=None)
