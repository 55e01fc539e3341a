"""How a process ended, and what an agent tells others about it."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from monarch_slurm.wire import Address


def describe_exit(code: int, status: int) -> str:
    """Return ``Exited(code=1)`` or ``Killed(sig=9)`` for the ``si_code`` and ``si_status`` of waitid(2)."""
    if code == os.CLD_EXITED:
        return f"Exited(code={status})"
    core = ", core dumped" if code == os.CLD_DUMPED else ""
    return f"Killed(sig={status}{core})"


def explain_exit(exit_text: str) -> str:
    """Return a few words on a fatal signal in ``exit_text``, or an empty text."""
    match = re.match(r"Killed\(sig=(\d+)", exit_text)
    return _SIGNAL_WORDS.get(int(match[1]), "") if match else ""


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9, ``SIGRTMIN+7`` for a real-time signal, ``signal N`` for a number without a name."""
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_SIGNAL_WORDS = {
    int(signal.SIGKILL): "killed from outside: by the kernel for want of memory, by Slurm, or by hand",
    int(signal.SIGSEGV): "segmentation fault in native code",
    int(signal.SIGBUS): "bus error, often a full /dev/shm",
    int(signal.SIGABRT): "native code called abort()",
}


SILENT = "nothing was heard from it"
"""Begins the cause of a host's end if nobody knows more than that."""

UNRESPONSIVE = "its agent said nothing"
"""Begins the cause of a host's end if its machine answers, and its agent does not."""

LOST_WITH_HOST = "Lost(host)"
"""``ProcDown.exit`` of a proc whose host is lost: nobody saw it."""


class FailureKind(str, Enum):
    """What failed. Programs decide by this; the texts of a failure are for people."""

    PROC_NOT_STARTED = "proc_not_started"
    """A process could not be started, or ended before it reported to its agent."""
    PROC_EXITED = "proc_exited"
    """A process ended by itself or by a signal."""
    HOST_LOST = "host_lost"
    """A host's agent has ended, or its machine does not answer."""
    ACTOR_ERROR = "actor_error"
    """An exception ended the actor: in ``__init__``, in an endpoint that nobody waits for, or in ``__supervise__``."""
    ACTOR_ABORTED = "actor_aborted"
    """The actor called its own ``abort()``."""
    CHILD_FAILED = "child_failed"
    """The actor did not handle the failure of a mesh that it owns."""
    MESSAGE_UNDELIVERED = "message_undelivered"
    """The actor did not handle that a message of it was not delivered."""
    CLEANUP_FAILED = "cleanup_failed"
    """``__cleanup__`` raised an exception."""
    STOP_TIMEOUT = "stop_timeout"
    """The actor did not end in the time that a stop or its ``__cleanup__`` may take."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class ProcDown:
    """A proc's end, as its agent tells it.

    Attributes:
        host: host id; ``host_name`` is the name that people know.
        mesh: id of the proc mesh; ``rank`` is the proc's rank in it.
        exit: `describe_exit`'s text, or why it never started.
        detected_at: seconds since the epoch when the agent saw it.
        stderr_tail: the last lines of its stderr.
        expected: it was told to stop.
        event: why it ended itself, for people: an actor in it has failed.
        traceback: of the Python exception that was the reason.
        kind: what failed; that of the actor where ``event`` says so.
    """

    host: str
    host_name: str
    proc: str
    mesh: str
    rank: int
    pid: int
    exit: str
    detected_at: float
    stderr_tail: list[str] = field(default_factory=list)
    expected: bool = False
    event: str = ""
    traceback: str = ""
    kind: FailureKind = FailureKind.PROC_EXITED

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", FailureKind(self.kind))  # a message has its value

    @property
    def address(self) -> Address:
        """The address that the proc had."""
        return Address(self.host, self.proc)

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of the message that carries this."""
        return asdict(self)

    def describe(self) -> str:
        """Return one or more lines for a person."""
        if self.kind is FailureKind.HOST_LOST:
            return f"{self.event} (proc {self.proc}, rank {self.rank})"
        if self.event:
            return f"{self.event} (host {self.host_name}, proc {self.proc}, rank {self.rank}, pid {self.pid})"
        hint = explain_exit(self.exit)
        text = (
            f"the process this actor was running on failed: {self.exit} (host {self.host_name}, proc {self.proc}, "
            f"rank {self.rank}, pid {self.pid})"
        )
        if hint:
            text += f"; {hint}"
        if self.stderr_tail:
            text += "\nlast lines of its stderr:\n" + "\n".join(f"  {line}" for line in self.stderr_tail)
        return text


@dataclass(frozen=True)
class HostDown:
    """A host's end, as the controller tells it.

    Attributes:
        stand_in: id of the host that takes its place; empty if none does.
        replaced_by: what people know that one as.
        silent: nothing more was heard from it, and nothing tells that its agent has ended: the node itself may be ill.
    """

    host: str
    host_name: str
    cause: str
    detected_at: float
    stand_in: str = ""
    replaced_by: str = ""
    silent: bool = False

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of the message that carries this."""
        return asdict(self)

    def describe(self) -> str:
        """Return a line for a person."""
        text = f"the host this actor was running on failed: {self.host_name}: {self.cause}"
        return f"{text}; {self.replaced_by} takes its place" if self.replaced_by else text
