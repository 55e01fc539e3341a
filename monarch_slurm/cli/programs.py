"""The programs of this user that run on this machine, found through their consoles."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch_slurm.errors import MonarchSlurmError

if TYPE_CHECKING:
    from monarch_slurm.wire.console import Session


class NoProgramError(MonarchSlurmError):
    """There is no running program to talk to."""


@dataclass
class Program:
    """One running program; ``answers`` is False if it does not within a few seconds."""

    session: Session
    pid: int
    answers: bool
    hostname: str
    command: list[str]
    job: str

    @property
    def title(self) -> str:
        """What it is called in lists."""
        job = f", job {self.job}" if self.job else ""
        return f"{' '.join(self.command) or '?'} (pid {self.pid} on {self.hostname}{job})"

    def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Send a request and return the answer; None if the program ends first."""
        try:
            self.session.send(request)
            return self.session.receive()
        except OSError:
            return None


def choose_programs(pid: int | None, job: str | None) -> list[Program]:
    """Return this user's running programs, connected; those of one controller or one Slurm job if asked.

    Raises:
        NoProgramError: there is none.
    """
    from monarch_slurm.wire.console import ConsoleError, connect_console, find_consoles

    found = []
    for name in find_consoles():
        if pid is not None and f"/{pid}-" not in name:
            continue
        try:
            session, about, peer = connect_console(name)
        except ConsoleError:  # it has just ended
            continue
        told = about or {}
        program = Program(
            session, peer, about is not None, told.get("hostname") or socket.gethostname(),
            [str(word) for word in told.get("command", [])], str(told.get("job", "")),
        )  # fmt: skip
        if job is None or program.job == job:
            found.append(program)
    if not found:
        what = f"with pid {pid} " if pid is not None else f"of job {job} " if job is not None else ""
        raise NoProgramError(
            f"no program of yours {what}runs on {socket.gethostname()}: run this beside the controller, which in a "
            "Slurm job is on the head node (srun --overlap --jobid=ID -N1 -n1 --pty bash)"
        )
    return found
