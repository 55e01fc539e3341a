"""Communicators over the dimensions of a mesh of procs, made and ended by the program that owns the mesh.

`keeper`, whose actor holds the communicators of one proc, stands on top of this module.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from monarch_slurm.actor import SupervisionError
from monarch_slurm.collectives.communicator import Communicator
from monarch_slurm.collectives.errors import CollectiveError
from monarch_slurm.collectives.partition import groups_along
from monarch_slurm.collectives.rendezvous import Invitation
from monarch_slurm.native_build import gpu_platform

_here: dict[str, Communicator] = {}  # of this process, by name; filled by its keeper


class MeshCommunicator:
    """Communicators over a mesh: one for each place in the dimensions that they do not span. It can be pickled.

    Make it with `Communicator.create`; actors call `local` for their proc's end. When a proc dies, its peers abort by
    themselves and every waiter is told which rank it was; the owner of the mesh calls `remake`. Of a proc that hangs
    the owner tells them by `abort`.
    """

    def __init__(self, name: str, keepers: Any, groups: list[list[int]], backend: str, timeout_s: float) -> None:
        self._name = name
        self._keepers = keepers
        self._groups = groups
        self._backend = backend
        self._timeout_s = timeout_s
        self._lost: set[int] = set()

    @classmethod
    def create(
        cls, mesh: Any, dims: Sequence[str] | None, *, backend: str | None, timeout_s: float
    ) -> MeshCommunicator:
        """See `Communicator.create`."""
        from monarch_slurm.collectives.keeper import Keeper

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

        torch.distributed's groups of backend ``monarch`` that the lost proc is in are ended, too.

        Args:
            reason: what is known of the failure.
            rank: the row-major mesh rank of the proc that is lost; it is left out of `remake` and of what follows.
        """
        if rank is not None:
            self._lost.add(rank)
        calls = []
        for members in self._groups:
            place = members.index(rank) if rank in members else None
            if rank is not None and place is None:
                continue  # another communicator's rank: this one goes on
            calls += [self._keeper(each).abort.call_one(self._name, reason, place) for each in members]
        self._collect(calls, tolerate=True)

    def remake(self, lost: Iterable[int] = ()) -> None:
        """Make the communicators anew among the procs that live, in the same processes; `local` returns the new ones.

        The order of the ranks stays. Procs that are known to be dead are left out. If some may still wait in operations
        of the old communicators, call `abort` first.

        Args:
            lost: further mesh ranks to leave out: those that hang.

        Raises:
            CollectiveError: nobody is left, or a proc could not join.
        """
        self._lost.update(lost)
        for rank, call in [(rank, self._keeper(rank).host.call_one()) for members in self.groups for rank in members]:
            if isinstance(call.exception(), SupervisionError):
                self._lost.add(rank)
        self._join()

    def close(self) -> None:
        """Free the communicators; what was started is waited for."""
        self._collect([self._keeper(rank).close.call_one(self._name) for members in self.groups for rank in members])

    def _join(self) -> None:
        groups = self.groups
        if not groups:
            raise CollectiveError("every rank of the mesh is lost; spawn a new mesh")
        ranks = [rank for members in groups for rank in members]
        hosts = dict(zip(ranks, self._collect([self._keeper(rank).host.call_one() for rank in ranks]), strict=True))
        one_host = len({name for name, *_ in hosts.values()}) == 1
        addresses = {rank: "127.0.0.1" if one_host else address for rank, (_, address, _) in hosts.items()}
        invitations: list[Invitation] = self._collect(
            [self._keeper(each[0]).invite.call_one(self._name, self._backend, addresses[each[0]]) for each in groups]
        )
        joins = [
            self._keeper(rank).join.call_one(
                self._name, invitation, place, [hosts[each][2] for each in members], self._timeout_s
            )
            for members, invitation in zip(groups, invitations, strict=True)
            for place, rank in enumerate(members)
        ]
        self._collect(joins)

    def _keeper(self, rank: int) -> Any:
        place = {}
        for label, size in reversed(list(self._keepers.sizes.items())):
            rank, place[label] = divmod(rank, size)
        return self._keepers.slice(**place)

    @staticmethod
    def _collect(calls: list[Any], *, tolerate: bool = False) -> list[Any]:
        """The answers of all calls; the first error is raised once all have answered, or none if they are tolerated."""
        answers: list[Any] = []
        failure: Exception | None = None
        for call in calls:
            try:
                answers.append(call.get())
            except Exception as error:
                failure = failure or error
        if failure is not None and not tolerate:
            raise CollectiveError(f"a proc of the mesh could not take part: {failure}") from failure
        return answers

    def __repr__(self) -> str:
        return f"MeshCommunicator(groups={self.groups}, backend={self._backend!r}, lost={sorted(self._lost)})"


def register(name: str, communicator: Communicator | None) -> Communicator | None:
    """Make a communicator what `MeshCommunicator.local` returns here; None removes it. Returns the one before."""
    before = _here.pop(name, None)
    if communicator is not None:
        _here[name] = communicator
    return before
