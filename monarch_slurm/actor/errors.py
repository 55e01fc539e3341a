"""What callers and owners get to see when something fails."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.host.exits import FailureKind
from monarch_slurm.wire.pickling import from_bytes, to_bytes

MAX_TRACEBACK_CHARS = 64 * 1024
"""A longer traceback (deep recursion) is cut in the middle."""


class ActorError(MonarchSlurmError):
    """An endpoint raised an exception; the actor lives on.

    Attributes:
        exception: the exception itself.
        exception_formatted: its traceback with causes, as text.
        message: which call failed.
    """

    def __init__(
        self,
        exception: BaseException,
        message: str = "A remote actor call has failed.",
        exception_formatted: str | None = None,
    ) -> None:
        self.exception = exception
        self.message = message
        self.exception_formatted = exception_formatted or format_exception(exception)
        super().__init__(exception, message)

    def __str__(self) -> str:
        return f"{self.message}\n {self.exception_formatted}"

    def __reduce__(self) -> tuple[object, ...]:
        return _actor_error, (_pickled(self.exception), self.message, self.exception_formatted)


class SupervisionError(MonarchSlurmError, RuntimeError):
    """The actor that was called has failed or was stopped, its process has died, or its host is lost."""

    def __init__(self, message: str, endpoint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.endpoint = endpoint

    def __str__(self) -> str:
        return f"Endpoint call {self.endpoint} failed, {self.message}" if self.endpoint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.endpoint)


class ActorRestartedError(SupervisionError):
    """The actor that was called ended before it answered, and is started again by its mesh's `RestartPolicy`.

    The call may have been handled or not. Calls made from now on reach the new actor, or wait for it.
    """


class ActorDeadlockError(MonarchSlurmError, TimeoutError):
    """An actor waits for its own answer, or for an actor that waits for it: no result can come while it waits.

    It is a `TimeoutError`, since the result is not lost: the call is handled when the endpoint has returned.
    """


class RemoteExceptionError(Exception):
    """Stands for a remote exception that cannot be pickled; the text is what it printed."""


@dataclass(frozen=True)
class MeshFailure:
    """A failure that a mesh's owner is told of, through ``__supervise__`` or `unhandled_fault_hook`.

    Attributes:
        mesh_name: name of the actor mesh or proc mesh (its ``_name``).
        crashed_ranks: ranks in that mesh; empty when all of it failed.
        event: what happened, for people.
        kind: what failed. ``CHILD_FAILED`` says that the actors of this mesh did not handle a failure below them, which
            ``event`` tells.
        exit: how the process ended (``"Killed(sig=9)"``), or None if it lives.
        host: name of the host where it happened, if known.
        pid: process id of the failed proc, 0 if unknown.
        stderr_tail: last lines of the proc's stderr.
        traceback: traceback of the Python exception that made an actor fail, or None.
        detected_at: seconds since the epoch when it was seen.
        restarted: the mesh's `RestartPolicy` has what failed started again. Nothing need be done about it, and what
            ``__supervise__`` returns does not matter.
        replaced_by: name of the host that has taken the place of the lost one: procs that are spawned on the same hosts
            from now on run there. Empty if no host is lost, or nothing takes its place.
    """

    mesh_name: str
    crashed_ranks: tuple[int, ...]
    event: str
    kind: FailureKind
    exit: str | None = None
    host: str | None = None
    pid: int = 0
    stderr_tail: tuple[str, ...] = ()
    traceback: str | None = None
    detected_at: float = 0.0
    restarted: bool = False
    replaced_by: str = ""

    @property
    def mesh(self) -> tuple[()]:
        """Empty; the mesh is known by `mesh_name`."""
        return ()

    def report(self) -> str:
        """Return the whole story for a person."""
        return f"Supervision event: {self.event}"

    def __str__(self) -> str:
        return (
            f"MeshFailure(mesh_name={self.mesh_name}, crashed_ranks={list(self.crashed_ranks)}, event={self.report()})"
        )

    __repr__ = __str__


def format_exception(error: BaseException) -> str:
    """Return the traceback of ``error`` with its causes, of bounded length, without this package's own first frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    text = text.replace(
        "Traceback (most recent call last):",
        "Traceback of where the remote call failed (most recent call last):",
    )
    if len(text) > MAX_TRACEBACK_CHARS:
        half = MAX_TRACEBACK_CHARS // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
    return text


_OWN_FOLDER = os.path.dirname(__file__) + os.sep


def _pickled(error: BaseException) -> bytes:
    try:
        return to_bytes(error)
    except Exception:  # whatever a user's exception raises when it is pickled: its text still goes
        return to_bytes(RemoteExceptionError(f"{type(error).__module__}.{type(error).__qualname__}: {error}"))


def _actor_error(pickled: bytes, message: str, formatted: str) -> ActorError:
    try:
        error = from_bytes(pickled)
    except Exception as reason:  # its class is not to be had here, or does not unpickle: its text did
        last_line = formatted.rstrip().rpartition("\n")[2]
        error = RemoteExceptionError(f"{last_line} (the exception itself cannot be unpickled here: {reason!r})")
    return ActorError(error, message, formatted)
