"""Which replicas take part in a sync, and who of them gives its state to whom. Pure: times in, verdicts out.

The rules are those of TorchFT's Lighthouse and manager servers (``src/lighthouse.rs`` and ``src/manager.rs`` of
`TorchFT <https://github.com/pytorch/torchft>`_), whose manager and algorithms are used on top of them;
``tests/train/test_quorum_rules.py`` compares both on random histories. They differ in one point: TorchFT forms a quorum
of fewer than ``min_replicas`` members, or of none, when ``shrink_only`` leaves no more. Here it does not form.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Member:
    """A replica as it asks for a quorum.

    Attributes:
        id: name of this start of the replica. The order of the names as text is the order of the ranks.
        step: committed syncs that its state has.
        world_size: its ranks.
        shrink_only: do not take replicas into the quorum that were not in the one before.
        commit_failures: syncs in a row that it could not commit.
        store: where its peers can meet; only handed on.
        metadata: for each of its ranks, how the state of that rank can be fetched. Left out of quorums in which all
            members have the same state.
    """

    id: str
    step: int
    world_size: int = 1
    shrink_only: bool = False
    commit_failures: int = 0
    store: Any = field(default=None, compare=False, repr=False)
    metadata: tuple[str, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Quorum:
    """The replicas that take part in a sync.

    Attributes:
        id: members of one id form one process group. It stays the same while the members do and all of them commit.
        serial: number of this quorum; no other one of the run has it.
        members: in the order of their ranks.
    """

    id: int
    serial: int
    members: tuple[Member, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the members."""
        return tuple(member.id for member in self.members)

    @property
    def max_step(self) -> int:
        """The step of the newest state that a member has."""
        return max(member.step for member in self.members)

    def member(self, name: str) -> Member | None:
        """Return the member of that name, None if it is not in the quorum."""
        return next((member for member in self.members if member.id == name), None)


@dataclass(frozen=True)
class Asking:
    """A replica that waits for a quorum since ``since`` (seconds, of any clock)."""

    member: Member
    since: float


@dataclass(frozen=True)
class Waiting:
    """No quorum yet.

    Attributes:
        reason: for people.
        until: when time alone changes the verdict, in seconds of the same clock; None if it never does.
    """

    reason: str
    until: float | None = None


def decide(
    asking: Mapping[str, Asking],
    alive: Collection[str],
    previous: Quorum | None,
    min_replicas: int,
    join_timeout: float,
    now: float,
) -> tuple[Member, ...] | Waiting:
    """Return the members of the next quorum in the order of their ranks, or why there is none yet.

    Args:
        asking: who asks for a quorum, by name.
        alive: names of the replicas that count as alive. Whoever asks and is not among them is left out.
        previous: the quorum before; None before the first.
        min_replicas: the fewest members that a quorum may have.
        join_timeout: seconds, from the first that asks, that a quorum waits for those who are alive and do not ask.
        now: the present time, in seconds of the clock of `Asking.since`.
    """
    present = {name: asked for name, asked in asking.items() if name in alive}
    candidates = tuple(present[name].member for name in sorted(present))
    before = set(previous.ids) if previous is not None else set()
    if previous is not None and any(member.shrink_only for member in candidates):
        candidates = tuple(member for member in candidates if member.id in before)
    if before and before <= present.keys():
        return candidates  # nobody of the last quorum is missed: wait for nobody else
    if len(candidates) < min_replicas:
        return Waiting(f"{len(candidates)} of at least {min_replicas} replicas ask for a quorum")
    if len(present) <= len(alive) // 2:
        return Waiting(f"{len(present)} of {len(alive)} living replicas ask for a quorum; more than half are needed")
    missing = sorted(set(alive) - present.keys())
    due = min(asked.since for asked in present.values()) + join_timeout
    if missing and now < due:
        return Waiting(f"waiting for {', '.join(missing)}", due)
    return candidates


def is_same_group(previous: Quorum | None, members: tuple[Member, ...]) -> bool:
    """Return whether ``members`` can use the process group of ``previous``: the same replicas, and nothing failed."""
    return (
        previous is not None
        and previous.ids == tuple(member.id for member in members)
        and not any(member.commit_failures for member in members)
    )


def quorum_of(members: tuple[Member, ...], previous: Quorum | None, number: int, serial: int) -> Quorum:
    """Return a quorum of ``members``; its id is that of ``previous`` if its process group serves, else ``number``."""
    kept = previous is not None and is_same_group(previous, members)
    if len({member.step for member in members}) == 1:
        members = tuple(replace(member, metadata=()) for member in members)
    return Quorum(previous.id if previous is not None and kept else number, serial, members)


@dataclass(frozen=True)
class RankQuorum:
    """A quorum as one rank of a member needs it. The names are those that TorchFT's manager reads.

    Attributes:
        quorum_id: `Quorum.id`.
        replica_rank: place of the member among the members.
        replica_world_size: number of members.
        max_step: `Quorum.max_step`.
        max_replica_rank: place of the member among those who have the newest state; None if it does not have it.
        max_world_size: number of those who have it.
        heal: the rank has to get the state of a donor.
        recover_src_replica_rank: place of the donor; None if it needs none.
        recover_dst_replica_ranks: places of those to whom this rank is the donor.
        store_address: where the ranks of this number meet to connect, `Member.store`.
        replica_ids: `Quorum.ids`.
    """

    quorum_id: int
    replica_rank: int
    replica_world_size: int
    max_step: int
    max_replica_rank: int | None
    max_world_size: int
    heal: bool
    recover_src_replica_rank: int | None
    recover_dst_replica_ranks: list[int]
    store_address: Any
    replica_ids: list[str]


def donors(quorum: Quorum, rank: int, init_sync: bool = False) -> dict[int, int]:
    """Return the place of the donor for the place of each member whose rank ``rank`` has to get a state.

    Those who need a state take the donors in turn; ranks of different numbers begin with different donors, which
    spreads the load over their machines.

    Args:
        quorum: the quorum.
        rank: number of a rank inside of its replica.
        init_sync: at step 0 all get the state of one member, as their parameters may differ.
    """
    newest = [place for place, member in enumerate(quorum.members) if member.step == quorum.max_step]
    primary = newest[rank % len(newest)]
    force = init_sync and quorum.max_step == 0
    receivers = [
        place
        for place, member in enumerate(quorum.members)
        if member.step != quorum.max_step or (force and place != primary)
    ]
    able = [place for place in range(len(quorum.members)) if place not in receivers]
    return {place: able[(i + rank) % len(able)] for i, place in enumerate(receivers)}


def for_rank(quorum: Quorum, name: str, rank: int, init_sync: bool = False) -> RankQuorum:
    """Return ``quorum`` as rank ``rank`` of the member ``id`` needs it.

    Raises:
        ValueError: the quorum has no such member.
    """
    place = quorum.ids.index(name)
    newest = [member for member in quorum.members if member.step == quorum.max_step]
    names = [member.id for member in newest]
    assigned = donors(quorum, rank, init_sync)
    return RankQuorum(
        quorum_id=quorum.id,
        replica_rank=place,
        replica_world_size=len(quorum.members),
        max_step=quorum.max_step,
        max_replica_rank=names.index(name) if name in names else None,
        max_world_size=len(newest),
        heal=place in assigned,
        recover_src_replica_rank=assigned.get(place),
        recover_dst_replica_ranks=[receiver for receiver, donor in assigned.items() if donor == place],
        store_address=newest[rank % len(newest)].store,
        replica_ids=list(quorum.ids),
    )
