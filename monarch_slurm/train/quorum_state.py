"""Which replicas a run has, who of them asks for a quorum, and what they are answered. Pure: times in, answers out.

What `monarch_slurm.train.quorum_rules` leaves open is decided here: who counts as alive. The supervisors say which
start of a replica runs and which has ended, within milliseconds, so nobody waits for the dead. Waited for are

- before the first quorum: all replicas of the run, but those whose first trainers have ended;
- later: the living members of the last quorum, and nobody who is still starting.

A quorum actor that takes the place of a failed one begins with nothing but its *epoch*, which no other one of the run
has. Supervisors and members then report what they know. A member of the last quorum that has asked, but whose answer
was lost with the old actor, gets that answer again from what the others report. Numbers of quorums begin with the
epoch, so that none is ever used again for other members.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.train.quorum_rules import Asking, Member, Quorum, Waiting, decide, donors, quorum_of

EPOCH_SHIFT = 32
"""Quorums of one epoch have numbers from ``epoch << EPOCH_SHIFT`` on."""


class MemberRefusedError(MonarchSlurmError):
    """A process asked for a quorum that no supervisor of the run has announced, or not any more."""


class UncommittedStepError(MonarchSlurmError):
    """A member claims a state that the run cannot have: nobody has committed that step."""


def member_name(replica: int, generation: int) -> str:
    """Return the id of one start of a replica; as text these are in the order of the replicas."""
    return f"replica_{replica:06d}:{generation}"


def parse_member_name(name: str) -> tuple[int, int]:
    """Return replica and generation of a `member_name`."""
    replica, _, generation = name.removeprefix("replica_").partition(":")
    return int(replica), int(generation)


@dataclass(frozen=True)
class RankKeys:
    """The secrets of the state transfers of one rank in one quorum, 32 bytes each.

    Attributes:
        send: for each member that this rank gives its state to, by id.
        receive: for the state that it gets; empty if it gets none.
    """

    send: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    receive: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Answer:
    """What a member is answered.

    Attributes:
        quorum: the quorum that it is a member of.
        keys: for each of its ranks; empty if nobody gets a state.
    """

    quorum: Quorum
    keys: tuple[RankKeys, ...] = ()


@dataclass(frozen=True)
class Settled:
    """What has come of the questions so far.

    Attributes:
        answers: by the id of the member.
        waiting: why the others wait; None if nobody does.
    """

    answers: dict[str, Answer] = field(default_factory=dict)
    waiting: Waiting | None = None


class QuorumState:
    """The state of a quorum actor.

    Args:
        replicas: how many replicas the run has.
        min_replicas: the fewest members of a quorum.
        join_timeout: see `monarch_slurm.train.quorum_rules.decide`.
        epoch: number of this actor in the run, from 0.
        committed_step: committed syncs of the run, as far as its manager knows.
        secret: what the keys of state transfers are made of; the same in all epochs of a run.
    """

    def __init__(
        self,
        replicas: int,
        min_replicas: int,
        join_timeout: float,
        *,
        epoch: int = 0,
        committed_step: int = 0,
        secret: bytes = b"",
    ) -> None:
        self._replicas, self._min_replicas, self._join_timeout = replicas, min_replicas, join_timeout
        self._epoch, self._secret = epoch, secret
        self._serial = self._id = epoch << EPOCH_SHIFT
        self._newest_step = committed_step + (epoch > 0)  # what was committed last may still be on its way to us
        self._running: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._asking: dict[str, Asking] = {}
        self._held: dict[str, tuple[int, int]] = {}
        """Id and serial of the last quorum of those who ask."""
        self._previous: Quorum | None = None

    def register(self, replica: int, generation: int, committed_step: int) -> None:
        """A supervisor starts a replica for the ``generation``-th time; earlier starts of it have ended."""
        before = self._running.get(replica, generation)
        if generation < before:
            return
        self._running[replica] = generation
        if generation > before:
            self.end(replica, generation - 1)
        self._newest_step = max(self._newest_step, committed_step)

    def end(self, replica: int, generation: int) -> None:
        """This start of a replica, and every one before, has ended."""
        self._ended[replica] = max(self._ended.get(replica, -1), generation)
        self._forget_dead(replica)

    def report(self, replica: int, generation: int, quorum: Quorum) -> None:
        """A living member knows ``quorum`` of an earlier epoch: the last one that it was in.

        Raises:
            MemberRefusedError: it is not registered.
        """
        self._check(replica, generation)
        self._newest_step = max(self._newest_step, quorum.max_step + 1)
        if self._previous is None or quorum.serial > self._previous.serial:
            self._previous = quorum

    def ask(self, replica: int, generation: int, member: Member, held: tuple[int, int], now: float) -> None:
        """A member asks for a quorum; `settle` has the answer.

        Args:
            replica: index of the replica.
            generation: its start.
            member: what it asks with.
            held: id and serial of the last quorum that it was in, or (-1, -1).
            now: the present time in seconds, of any clock.

        Raises:
            MemberRefusedError: it is not registered.
            UncommittedStepError: it claims a step that nobody has committed.
        """
        self._check(replica, generation)
        if member.step > self._newest_step:
            raise UncommittedStepError(
                f"{member.id} claims to have the state of sync {member.step}, but the run cannot have committed more "
                f"than {self._newest_step}; nobody gets that state"
            )
        self._asking[member.id] = Asking(member, now)
        self._held[member.id] = held

    def settle(self, now: float) -> Settled:
        """Return the answers that are due; whoever is answered asks no more."""
        answers = self._lost_answers()
        if not self._asking:
            return Settled(answers)
        verdict = decide(self._asking, self.alive(), self._previous, self._min_replicas, self._join_timeout, now)
        if isinstance(verdict, Waiting):
            return Settled(answers, verdict)
        self._serial += 1
        # Members that do not all know the last quorum have no process group in common.
        common = {self._held[member.id][0] for member in verdict}
        before = self._previous if self._previous is not None and common == {self._previous.id} else None
        quorum = quorum_of(verdict, before, self._id + 1, self._serial)
        self._id = max(self._id, quorum.id)
        self._previous = quorum
        self._newest_step = max(self._newest_step, quorum.max_step + 1)
        answers |= {name: self._answer(quorum, name) for name in quorum.ids}
        for name in quorum.ids:
            self._forget(name)
        self._asking = {name: replace(asked, since=now) for name, asked in self._asking.items()}
        left = f"{', '.join(self._asking)} came too late for the last quorum"
        return Settled(answers, Waiting(left) if self._asking else None)

    def alive(self) -> set[str]:
        """Return the ids of the replicas that a quorum counts on."""
        alive = set(self._asking)
        if self._previous is not None:
            return alive | {name for name in self._previous.ids if not self._is_dead(name)}
        unheard = (replica for replica in range(self._replicas) if replica not in self._ended)
        return alive | {member_name(replica, self._running.get(replica, 0)) for replica in unheard}

    def _lost_answers(self) -> dict[str, Answer]:
        """Return the answers of the last quorum for those who ask since before it and have not got theirs."""
        last, answers = self._previous, {}
        if last is None or last.serial >> EPOCH_SHIFT == self._epoch:
            return {}
        for name, asked in list(self._asking.items()):
            if last.member(name) == asked.member and self._held[name][1] < last.serial:
                answers[name] = self._answer(last, name)
                self._forget(name)
        return answers

    def _answer(self, quorum: Quorum, name: str) -> Answer:
        if len({member.step for member in quorum.members}) == 1:
            return Answer(quorum)
        (ranks,) = {member.world_size for member in quorum.members}
        return Answer(quorum, tuple(self._keys(quorum, name, rank) for rank in range(ranks)))

    def _keys(self, quorum: Quorum, name: str, rank: int) -> RankKeys:
        send, receive = {}, b""
        for receiver_place, donor_place in donors(quorum, rank).items():
            receiver, donor = quorum.ids[receiver_place], quorum.ids[donor_place]
            text = f"{quorum.serial} {donor} {receiver} {rank}"
            key = hmac.digest(self._secret, text.encode(), hashlib.sha256)
            if donor == name:
                send[receiver] = key
            if receiver == name:
                receive = key
        return RankKeys(send, receive)

    def _check(self, replica: int, generation: int) -> None:
        running = self._running.get(replica, -1)
        name = member_name(replica, generation)
        if running < 0:
            raise MemberRefusedError(f"{name} may not take part: no supervisor has started replica {replica}")
        if generation != running:
            raise MemberRefusedError(f"{name} may not take part: the supervisor runs generation {running} of it")
        if self._is_dead(name):
            raise MemberRefusedError(f"{name} may not take part: its supervisor has reported its end")

    def _is_dead(self, name: str) -> bool:
        replica, generation = parse_member_name(name)
        return self._ended.get(replica, -1) >= generation or self._running.get(replica, generation) > generation

    def _forget_dead(self, replica: int) -> None:
        for name in list(self._asking):
            if parse_member_name(name)[0] == replica and self._is_dead(name):
                self._forget(name)

    def _forget(self, name: str) -> None:
        self._asking.pop(name, None)
        self._held.pop(name, None)
