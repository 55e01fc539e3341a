"""What can go wrong with a transfer: each class is one thing to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from monarch_slurm.errors import MonarchSlurmError


class RDMAError(MonarchSlurmError, RuntimeError):
    """A transfer, or what it needs, failed. The process and its other transfers are unharmed.

    Attributes:
        backend: which engine was at work (``"tcp"``), or an empty text.
    """

    backend: str = ""

    def by(self, backend: str) -> RDMAError:
        """Note which engine was at work; return this error."""
        self.backend = self.backend or backend
        return self


class BufferGoneError(RDMAError):
    """The buffer was dropped, its memory was freed, or the key is none of its owner's: make a new `RDMABuffer`."""


class PeerLostError(RDMAError):
    """The owner's process or host has ended or cannot be reached. A transfer to a new process works at once."""


class RDMATimeoutError(RDMAError):
    """The transfer did not end within its ``timeout``. What part of the destination was written is not known."""


class RegistrationError(RDMAError):
    """Memory could not be registered with the RDMA device, mostly because of the limit ``ulimit -l``."""


class DeviceError(RDMAError):
    """The RDMA device or its link is down. The next transfer tries it again with a new connection."""


class NoDirectWayError(RDMAError):
    """This process cannot map the owner's GPU memory. Users do not see it: another way is taken.

    Attributes:
        lasting: it will not be able to later, either.
    """

    lasting: bool = True


class NoBackendError(RDMAError):
    """The two processes have no way of transfer in common that the settings allow."""


def gathered(failures: Sequence[RDMAError]) -> RDMAError:
    """Return one error that tells of all ``failures``: of their class, if they have one in common."""
    texts = dict.fromkeys(f"({error.backend or 'none'}) {error}" for error in failures)
    kinds = {type(error) for error in failures}
    kind = kinds.pop() if len(kinds) == 1 else RDMAError
    backends = {error.backend for error in failures}
    text = f"RDMA submit failed on {len(backends)} backend(s):\n" + "\n".join(texts)
    return kind(text).by(failures[0].backend if len(backends) == 1 else "")
