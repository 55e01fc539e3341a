"""What goes wrong with collectives."""

from __future__ import annotations

from monarch_slurm.errors import MonarchSlurmError


class CollectiveError(MonarchSlurmError):
    """An operation or the making of a communicator failed."""


class ProofError(CollectiveError):
    """A rank did not prove that it belongs to the group; no tensor was sent.

    It has ended meanwhile, or a process that is not of the job has connected to a data port in its place.
    """


class PeerLostError(CollectiveError):
    """The communicator was aborted, mostly because a peer is gone. Make it anew among the survivors.

    Attributes:
        rank: the peer's rank in the communicator; None when no single peer is to blame.
        reason: what is known of it.
    """

    def __init__(self, reason: str, rank: int | None = None) -> None:
        self.reason = reason
        self.rank = rank
        who = "the communicator was aborted" if rank is None else f"rank {rank} of the communicator is lost"
        super().__init__(f"{who}: {reason}; make the communicator anew among the survivors")

    def __reduce__(self) -> tuple[object, ...]:
        return PeerLostError, (self.reason, self.rank)


class CommunicatorClosedError(CollectiveError):
    """The communicator was closed by this process."""
