"""What can go wrong between a user and the nodes, each error named for what to do about it."""

from __future__ import annotations

from monarch_slurm.errors import ConfigError, MonarchSlurmError


class JobError(MonarchSlurmError, RuntimeError):
    """A job could not be submitted, started, found or read. As in Monarch, a `RuntimeError`."""


class JobSpecError(JobError, ConfigError):
    """Change the arguments: what was asked for cannot be a job."""


class NoSlurmError(JobError):
    """Go to a machine with Slurm's commands: they are not on PATH here, or they find no cluster."""


class SubmitError(JobError):
    """Change the request: Slurm refused it. The text quotes Slurm and lists what there is."""


class JobFolderError(JobError):
    """Choose another folder: the job's folder cannot be written, or compute nodes do not see it."""


class SlurmUnreachableError(JobError):
    """Try again later: Slurm's controller does not answer. The job itself may be well."""


class JobNotFoundError(JobError):
    """Check the job id: Slurm does not know this job (any more)."""


class JobStartTimeoutError(JobError):
    """Wait longer or ask for less: the job is still in the queue. It is left there."""


class JobEndedError(JobError):
    """Read the log: the job ended before its hosts could be used. The text quotes its last lines."""


class HostStartError(JobError):
    """Read the log: a host's agent did not come up. The text names the host and quotes its last lines."""


class UnfitHostError(JobError):
    """Mend the node or leave it out: a check of its health has failed. The text says which."""


class PreflightError(JobError):
    """Mend the node or leave it out: a pre-flight command failed there. The text quotes what it said."""


class AddressError(JobError, ConfigError):
    """Change the address option: this machine has no such interface or address, or no route."""


class HostsTakenError(JobError):
    """Start a job of your own: the hosts of this one serve another controller, or did."""


class NodeListError(JobError, ValueError):
    """A list in Slurm's compressed form cannot be read.

    Attributes:
        text: the whole list.
        offset: index in ``text`` of the first character that makes no sense.
    """

    def __init__(self, text: str, offset: int, reason: str) -> None:
        super().__init__(f"cannot read Slurm's list {text!r}: {reason} at character {offset}")
        self.text = text
        self.offset = offset
