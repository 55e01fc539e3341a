"""Quorums over the job's own messages: the actor that decides, and one in each replica where its ranks meet.

Nothing listens for this: who is no process of the job cannot ask, answer or overhear. See
`monarch_slurm.train.quorum_state` for what is decided.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any

from monarch_slurm.actor import Actor, Port, SupervisionError, endpoint
from monarch_slurm.collectives import StoreActor
from monarch_slurm.train.config import TrainConfig
from monarch_slurm.train.events import Event, event
from monarch_slurm.train.quorum_rules import Member, Quorum, RankQuorum, for_rank
from monarch_slurm.train.quorum_state import (
    Answer,
    MemberRefusedError,
    QuorumState,
    RankKeys,
    UncommittedStepError,
    member_name,
)
from monarch_slurm.train.versions import installed_versions


class QuorumActor(Actor):
    """Forms the quorums of a run.

    Args:
        config: the run.
        epoch: number of this actor in the run, from 0; no two have the same.
        committed_step: committed syncs of the run so far.
        secret: 32 random bytes, the same in all epochs; see `monarch_slurm.train.quorum_state.QuorumState`.
        events: where the manager of the run takes events.
    """

    def __init__(
        self, config: TrainConfig, epoch: int, committed_step: int, secret: bytes, events: Port[Event]
    ) -> None:
        self._config, self._events = config, events
        self._state = QuorumState(
            config.replicas,
            config.min_replicas,
            config.join_timeout,
            epoch=epoch,
            committed_step=committed_step,
            secret=secret,
        )
        self._ports: dict[str, Port[Answer]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._hashes = _Announcements()

    @endpoint
    async def versions(self) -> dict[str, str]:
        """Return versions of what trains; see `installed_versions`."""
        return installed_versions(self._config)

    @endpoint
    async def register(self, replica: int, generation: int, committed_step: int) -> None:
        """Take it from a supervisor that it starts a replica; see `QuorumState.register`."""
        self._state.register(replica, generation, committed_step)
        self._settle()

    @endpoint
    async def end(self, replica: int, generation: int) -> None:
        """Take it from a supervisor, or from the member itself, that it has ended."""
        self._state.end(replica, generation)
        self._hashes.end(member_name(replica, generation))
        self._settle()

    @endpoint
    async def report(self, replica: int, generation: int, quorum: Quorum) -> None:
        """Take it from a member that it was in ``quorum``; see `QuorumState.report`."""
        try:
            self._state.report(replica, generation, quorum)
        except MemberRefusedError as error:
            self.logger.warning("%s", error)
        self._settle()

    @endpoint(explicit_response_port=True)  # type: ignore[untyped-decorator]
    async def ask(
        self, port: Port[Answer], replica: int, generation: int, member: Member, held: tuple[int, int]
    ) -> None:
        """Answer with the next quorum of a member, once there is one; see `QuorumState.ask`."""
        try:
            self._state.ask(replica, generation, member, held, time.monotonic())
        except MemberRefusedError as error:
            self.logger.warning("%s", error)
            port.exception(error)
            return
        except UncommittedStepError as error:
            self._events.send(event("quorum_refused", replica=replica, generation=generation, error=str(error)))
            port.exception(error)
            return
        self._ports[member.id] = port
        self._settle()

    @endpoint
    async def announce(self, serial: int, donor: str, rank: int, sha256: str) -> None:
        """Take it from a donor which state it gives in the quorum of that serial."""
        self._hashes.announce((serial, donor, rank), sha256)

    @endpoint(explicit_response_port=True)  # type: ignore[untyped-decorator]
    async def announced(self, port: Port[str], serial: int, donor: str, rank: int) -> None:
        """Answer with the hash that a donor has announced, once it has."""
        self._hashes.ask((serial, donor, rank), port)

    def _settle(self) -> None:
        """Answer whom there is an answer for, and look again when time alone makes one."""
        now = time.monotonic()
        settled = self._state.settle(now)
        for name, answer in settled.answers.items():
            self._ports.pop(name).send(answer)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if settled.waiting is not None and settled.waiting.until is not None:
            pause = max(0.0, settled.waiting.until - now)
            self._timer = asyncio.get_running_loop().call_later(pause, self._out_of_time, settled.waiting.reason)

    def _out_of_time(self, reason: str) -> None:
        self.logger.warning("%s: no longer than the join time-out of %g s", reason, self._config.join_timeout)
        self._settle()


class _Announcements:
    """Hashes of states that donors have announced, and who waits for one. A key is (serial, donor, rank)."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, int], str] = {}
        self._waiting: dict[tuple[int, str, int], list[Port[str]]] = {}

    def announce(self, key: tuple[int, str, int], sha256: str) -> None:
        self._known = {known: value for known, value in self._known.items() if known[0] >= key[0] - 1}
        self._known[key] = sha256
        for port in self._waiting.pop(key, ()):
            port.send(sha256)

    def ask(self, key: tuple[int, str, int], port: Port[str]) -> None:
        if key in self._known:
            port.send(self._known[key])
        else:
            self._waiting.setdefault(key, []).append(port)

    def end(self, donor: str) -> None:
        """Nobody waits for a donor that has ended."""
        for key in [key for key in self._waiting if key[1] == donor]:
            for port in self._waiting.pop(key):
                port.exception(MemberRefusedError(f"{donor} has ended before it announced what it sends"))


@dataclass(frozen=True)
class RankAsk:
    """What a rank asks for a quorum with; see `monarch_slurm.train.quorum_rules.Member`."""

    step: int
    metadata: str
    shrink_only: bool
    commit_failures: int


@dataclass(frozen=True)
class RankAnswer:
    """A quorum for one rank.

    Attributes:
        rank: what the rank needs to know of it.
        serial: number of the quorum.
        id: name of the member.
        keys: the secrets of its transfers.
        donor: id of the member that this rank gets the state of; empty if it needs none.
        metadata: where that state can be fetched.
    """

    rank: RankQuorum
    serial: int
    id: str
    keys: RankKeys = field(default_factory=RankKeys)
    donor: str = ""
    metadata: str = field(default="", repr=False)


class MemberActor(Actor):
    """Where the ranks of one replica meet, in the proc of their rank 0: they ask once for all of them.

    Args:
        replica: index of the replica.
        generation: how often it was started before.
        ranks: number of its ranks.
        quorum: the actor that decides.
        store: where ranks of its peers can meet to connect.
    """

    def __init__(
        self, replica: int, generation: int, ranks: int, quorum: QuorumActor, store: StoreActor | None = None
    ) -> None:
        self._replica, self._generation, self._ranks = replica, generation, ranks
        self._id = member_name(replica, generation)
        self._quorum, self._store = quorum, store
        self._moved = asyncio.Event()
        self._asks: dict[int, tuple[Port[RankAnswer], RankAsk]] = {}
        self._votes: dict[int, tuple[Port[bool], bool]] = {}
        self._last: Quorum | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @endpoint
    async def quorum_moved(self, quorum: QuorumActor) -> None:
        """Ask another actor from now on: the one before has ended."""
        self._quorum = quorum
        if self._last is not None:
            quorum.report.broadcast(self._replica, self._generation, self._last)
        self._moved.set()

    @endpoint(explicit_response_port=True)  # type: ignore[untyped-decorator]
    async def quorum(self, port: Port[RankAnswer], rank: int, ask: RankAsk) -> None:
        """Answer with the next quorum, once all ranks have asked and it has formed."""
        self._asks[rank] = port, ask
        if len(self._asks) == self._ranks:
            asks, self._asks = self._asks, {}
            self._start(self._ask_for_all(asks))

    @endpoint(explicit_response_port=True)  # type: ignore[untyped-decorator]
    async def should_commit(self, port: Port[bool], rank: int, vote: bool) -> None:
        """Answer whether all ranks have voted for it, once they have."""
        self._votes[rank] = port, vote
        if len(self._votes) == self._ranks:
            votes, self._votes = self._votes, {}
            decision = all(vote for _, vote in votes.values())
            for answer_to, _ in votes.values():
                answer_to.send(decision)

    @endpoint
    async def announce(self, serial: int, rank: int, sha256: str) -> None:
        """Announce the hash of the state that a rank gives."""
        self._quorum.announce.broadcast(serial, self._id, rank, sha256)

    @endpoint(explicit_response_port=True)  # type: ignore[untyped-decorator]
    async def announced(self, port: Port[str], serial: int, donor: str, rank: int) -> None:
        """Answer with the hash that a donor has announced, once it has."""
        self._start(self._ask_hash(port, serial, donor, rank))

    @endpoint
    async def leave(self) -> None:
        """The replica takes part no more: nobody is to wait for it."""
        self._quorum.end.broadcast(self._replica, self._generation)

    async def _ask_for_all(self, asks: dict[int, tuple[Port[RankAnswer], RankAsk]]) -> None:
        ranks = [ask for _, (_, ask) in sorted(asks.items())]
        member = Member(
            self._id,
            ranks[0].step,
            self._ranks,
            any(ask.shrink_only for ask in ranks),
            max(ask.commit_failures for ask in ranks),
            self._store,
            tuple(ask.metadata for ask in ranks),
        )
        try:
            answer = await self._ask(member)
        except (MemberRefusedError, UncommittedStepError) as error:
            for port, _ in asks.values():
                port.exception(error)
            return
        self._last = answer.quorum
        for rank, (port, _) in asks.items():
            port.send(self._for_rank(answer, rank))

    async def _ask(self, member: Member) -> Answer:
        held = (self._last.id, self._last.serial) if self._last is not None else (-1, -1)
        while True:
            quorum = self._quorum
            self._moved.clear()
            try:
                answer: Answer = await quorum.ask.call_one(self._replica, self._generation, member, held)
            except SupervisionError:
                if self._quorum is quorum:
                    await self._moved.wait()
            else:
                return answer

    async def _ask_hash(self, port: Port[str], serial: int, donor: str, rank: int) -> None:
        try:
            port.send(await self._quorum.announced.call_one(serial, donor, rank))
        except (MemberRefusedError, SupervisionError) as error:
            port.exception(error)

    def _for_rank(self, answer: Answer, rank: int) -> RankAnswer:
        found = for_rank(answer.quorum, self._id, rank)
        plain = RankAnswer(found, answer.quorum.serial, self._id)
        if not answer.keys:
            return plain
        source = found.recover_src_replica_rank
        if source is None:
            return replace(plain, keys=answer.keys[rank])
        donor = answer.quorum.members[source]
        return replace(plain, keys=answer.keys[rank], donor=donor.id, metadata=donor.metadata[rank])

    def _start(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
