"""Communicators over the dimensions of a mesh of procs, made and ended by the program that owns the mesh.

`keeper`, whose actor holds the communicators of one proc, stands on top of this module.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from monarch_slurm.actor import SupervisionError
from monarch_slurm.collectives.communicator import Communicator
from monarch_slurm.collectives.errors import CollectiveError
from monarch_slurm.collectives.partition import groups_along
from monarch_slurm.collectives.rendezvous import Invitation
from monarch_slurm.native_build import gpu_platform

ANSWER_S = 10.0
"""How long a proc may take for what takes no time."""

_here: dict[str, Communicator] = {}  # of this process, by name; filled by its keeper


class MeshCommunicator:
    """Communicators over a mesh: one for each place in the dimensions that they do not span. It can be pickled.

    Make it with `Communicator.create`; actors call `local` for their proc's end. When a proc dies, its peers abort by
    themselves and every waiter is told which rank it was; the owner of the mesh calls `remake`. Of a proc that hangs
    the owner tells them by `abort`. Nothing here waits for a proc without a deadline.
    """

    def __init__(self, name: str, keepers: Any, groups: list[list[int]], backend: str, timeout_s: float) -> None:
        self._name = name
        self._keepers = keepers
        self._groups = groups
        self._joined = groups  # whose places are the ranks of the communicators that are there now
        self._backend = backend
        self._timeout_s = timeout_s
        self._lost: set[int] = set()

    @classmethod
    def create(
        cls, mesh: Any, dims: Sequence[str] | None, *, backend: str | None, timeout_s: float
    ) -> MeshCommunicator:
        """See `Communicator.create`."""
        from monarch_slurm.collectives.keeper import Keeper

        if not hasattr(mesh, "spawn") or not hasattr(mesh, "sizes"):
            raise TypeError(f"mesh is a {type(mesh).__name__}; a ProcMesh is expected")
        backend = backend or ("gloo" if gpu_platform() == "none" else "ccl")
        groups = groups_along(mesh.sizes, list(mesh.sizes) if dims is None else list(dims))
        name = uuid.uuid4().hex
        made = cls(name, mesh.spawn("communicators", Keeper), groups, backend, timeout_s)
        made._join()
        return made

    @property
    def groups(self) -> list[list[int]]:
        """The row-major mesh ranks of each communicator, in the order of its ranks; the lost ones are left out."""
        alive = ([rank for rank in members if rank not in self._lost] for members in self._groups)
        return [members for members in alive if members]

    def local(self) -> Communicator:
        """Return this proc's communicator.

        Raises:
            CollectiveError: this process is not in the mesh, or the communicator was ended and not made anew.
        """
        if self._name not in _here:
            raise CollectiveError("this process has no end of the communicator; call local() in an actor of its mesh")
        return _here[self._name]

    def abort(self, reason: str, rank: int | None = None) -> None:
        """End all operations of the communicators, on every proc that lives; every waiter is told.

        torch.distributed's groups of backend ``monarch`` that the lost proc is in are ended, too. The lost proc is told
        without waiting for it: should it go on one day, it finds itself aborted. Returns after at most `ANSWER_S`
        seconds, when procs hang that are not known to.

        Args:
            reason: what is known of the failure.
            rank: the row-major mesh rank of the proc that is lost; it is left out of `remake` and of what follows.

        Raises:
            ValueError: the mesh has no such rank.
        """
        if rank is not None:
            self._leave_out([rank])
        asked = {}
        for members in self._joined:
            place = members.index(rank) if rank in members else None
            if rank is not None and place is None:
                continue  # another communicator's rank: this one goes on
            asked.update({each: self._keeper(each).abort.call_one(self._name, reason, place) for each in members})
        self._collect({each: call for each, call in asked.items() if each not in self._lost}, ANSWER_S, tolerate=True)

    def remake(self, lost: Iterable[int] = ()) -> None:
        """Make the communicators anew among the procs that live, in the same processes; `local` returns the new ones.

        The order of the ranks stays. Procs that are known to be dead are left out. If some may still wait in operations
        of the old communicators, call `abort` first.

        Args:
            lost: further mesh ranks to leave out: those that hang. The others are told, as by `abort`.

        Raises:
            CollectiveError: nobody is left, or a proc could not join, or it does not answer within the ``timeout_s`` of
                `Communicator.create`: the text names its rank.
            ValueError: the mesh has no rank of ``lost``.
        """
        for rank in self._leave_out(lost):
            self.abort("left out of what was made anew", rank)
        self._join(leave_out_dead=True)

    def close(self) -> None:
        """Free the communicators; what was started is waited for. Those that were aborted are only freed.

        Raises:
            CollectiveError: a proc could not within the ``timeout_s`` of `Communicator.create`.
        """
        ranks = [rank for members in self.groups for rank in members]
        self._collect({rank: self._keeper(rank).close.call_one(self._name) for rank in ranks}, self._timeout_s)

    def _leave_out(self, ranks: Iterable[int]) -> list[int]:
        """Leave these out from now on; returns those that were not yet."""
        known = {rank for members in self._groups for rank in members}
        given = list(ranks)
        for rank in given:
            if rank not in known:
                raise ValueError(f"rank {rank}: the mesh has the ranks 0 to {len(known) - 1}")
        fresh = [rank for rank in given if rank not in self._lost]
        self._lost.update(fresh)
        return fresh

    def _join(self, *, leave_out_dead: bool = False) -> None:
        asked = {rank: self._keeper(rank).host.call_one() for members in self.groups for rank in members}
        hosts = self._collect(asked, self._timeout_s, leave_out_dead=leave_out_dead)
        groups = self.groups
        if not groups:
            raise CollectiveError("every rank of the mesh is lost; spawn a new mesh")
        one_host = len({name for name, *_ in hosts.values()}) == 1
        inviting = {}
        for first in [members[0] for members in groups]:
            address = "127.0.0.1" if one_host else hosts[first][1]
            inviting[first] = self._keeper(first).invite.call_one(self._name, self._backend, address)
        invitations: dict[int, Invitation] = self._collect(inviting, self._timeout_s)
        self._joined, joins = groups, {}
        for members in groups:
            processes = [hosts[each][2] for each in members]
            for place, rank in enumerate(members):
                joins[rank] = self._keeper(rank).join.call_one(
                    self._name, invitations[members[0]], place, processes, self._timeout_s
                )
        self._collect(joins, self._timeout_s + ANSWER_S)

    def _keeper(self, rank: int) -> Any:
        place = {}
        for label, size in reversed(list(self._keepers.sizes.items())):
            rank, place[label] = divmod(rank, size)
        return self._keepers.slice(**place)

    def _collect(
        self, calls: dict[int, Any], within_s: float, *, tolerate: bool = False, leave_out_dead: bool = False
    ) -> dict[int, Any]:
        """The answers by rank; the first error is raised once all have answered or the time is up, if not tolerated."""
        deadline = time.monotonic() + within_s
        answers, failures = {}, {}
        for rank, call in calls.items():
            try:
                answers[rank] = call.get(max(0.0, deadline - time.monotonic()))
            except Exception as error:
                if leave_out_dead and isinstance(error, SupervisionError):
                    self._lost.add(rank)
                else:
                    failures[rank] = error
        if not failures or tolerate:
            return answers
        silent = sorted(rank for rank, error in failures.items() if isinstance(error, TimeoutError))
        for rank, failure in failures.items():
            if rank not in silent:  # what a proc says tells more than that another is silent
                raise CollectiveError(f"rank {rank} of the mesh could not take part: {failure}") from failure
        raise CollectiveError(
            f"no answer from mesh rank {', '.join(map(str, silent))} within {within_s:.3g} s; "
            f"if it hangs, leave it out: remake(lost={silent})"
        )

    def __repr__(self) -> str:
        return f"MeshCommunicator(groups={self.groups}, backend={self._backend!r}, lost={sorted(self._lost)})"


def register(name: str, communicator: Communicator | None) -> Communicator | None:
    """Make a communicator what `MeshCommunicator.local` returns here; None removes it. Returns the one before."""
    before = _here.pop(name, None)
    if communicator is not None:
        _here[name] = communicator
    return before
