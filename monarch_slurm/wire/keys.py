"""The keys of a job, and the file that hands them to its host agents.

Whoever can read ``controller.json`` may join the job, and whoever may join can run code in it. So the file is readable
by its owner alone, is written before it gets its name, and is refused when anybody else could have read or written it.
"""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path

import zmq

from monarch_slurm.owned_files import FileRefusedError, read_owned, write_whole

CONTROLLER_FILE = "controller.json"

_ADDRESS = re.compile(r"tcp://[0-9A-Za-z.:%\[\]_-]+:[0-9]{1,5}")
_KEY = re.compile(r"[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")  # 32 bytes as Z85 (ZeroMQ RFC 32)


class KeyFileError(FileRefusedError):
    """The job's key file cannot be trusted or read."""


@dataclass(frozen=True)
class JobKeys:
    """CURVE keys of one job, Z85 text: the controller's pair and the pair that all its agents share."""

    server_public: str
    server_secret: str = field(repr=False)
    agent_public: str
    agent_secret: str = field(repr=False)

    @staticmethod
    def make() -> JobKeys:
        """Return new keys."""
        server = [key.decode() for key in zmq.curve_keypair()]
        agent = [key.decode() for key in zmq.curve_keypair()]
        return JobKeys(*server, *agent)


@dataclass(frozen=True)
class Invitation:
    """What an agent needs to join a job: where the controller listens, its public key, the agents' own pair.

    And the controller's pid, with a text that tells which processes may take it for the pid of the controller. They are
    on its machine, and join at its Unix socket ``near``.
    """

    address: str
    server_public: str
    agent_public: str
    agent_secret: str = field(repr=False)
    controller_host: str = ""
    controller_pid: int = 0
    near: str = ""

    def to_json(self) -> str:
        """Return the invitation as JSON. It holds a secret."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Invitation:
        """Return the invitation in ``text``.

        Raises:
            KeyFileError: the text is no invitation.
        """
        try:
            found = Invitation(**json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise KeyFileError(f"this is no invitation of a controller: {error}") from None
        for each in fields(Invitation):
            if type(getattr(found, each.name)) is not type(each.default if each.default is not MISSING else ""):
                raise KeyFileError(f"this is no invitation of a controller: {each.name} has another type")
        if not _ADDRESS.fullmatch(found.address):
            raise KeyFileError("this is no invitation of a controller: its address is none")
        for key in (found.server_public, found.agent_public, found.agent_secret):
            if not _KEY.fullmatch(key):
                raise KeyFileError("this is no invitation of a controller: a key in it is none")
        return found


def write_invitation(folder: Path, invitation: Invitation, name: str = CONTROLLER_FILE) -> Path:
    """Write the file ``name`` into ``folder``, readable by its owner only, complete as soon as it has its name."""
    path = folder / name
    write_whole(path, invitation.to_json().encode())
    return path


def read_invitation(path: Path) -> Invitation:
    """Return the invitation in ``path``.

    Raises:
        FileNotFoundError: it is not there (yet).
        KeyFileError: somebody else owns it, or can read or write it, or it holds no invitation.
    """
    try:
        text = read_owned(path, "its keys", private=True, root=False).decode(errors="replace")
        return Invitation.from_json(text)
    except FileRefusedError as error:
        where = "" if str(path) in str(error) else f"{path}: "
        raise KeyFileError(f"{where}{error}") from None
