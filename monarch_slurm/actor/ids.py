"""Names that no two actors and no two procs of a job share."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

_UID = r"(?P<label>[A-Za-z0-9_\-]*)(?:<(?P<token>[A-Za-z0-9_\-]+)>)?"


@dataclass(frozen=True)
class Uid:
    """A label, a random token, or both: ``trainer<5f3a9c1>``. A label without a token is that of the only one.

    Attributes:
        label: what people call it; empty for an anonymous one.
        token: what makes it unique; empty for a singleton.
    """

    label: str = ""
    token: str = ""

    def __post_init__(self) -> None:
        if re.fullmatch(_UID, str(self)) is None or not (self.label or self.token):
            raise ValueError(f"{str(self)!r} is no uid: a label of letters, digits, _ and - expected")

    @staticmethod
    def anonymous() -> Uid:
        """Return a new uid without a label."""
        return Uid("", os.urandom(8).hex())

    @staticmethod
    def instance(label: str | None = None) -> Uid:
        """Return a new uid, with a label if one is given."""
        return Uid(label or "", os.urandom(8).hex())

    @staticmethod
    def singleton(label: str) -> Uid:
        """Return the uid of the only one of that label."""
        return Uid(label)

    @staticmethod
    def from_string(uid: str) -> Uid:
        """Return what ``str`` made the text ``uid`` of.

        Raises:
            ValueError: the text is no uid.
        """
        match = re.fullmatch(_UID, uid)
        if match is None:
            raise ValueError(f"{uid!r} is no uid, such as trainer<5f3a9c1>")
        return Uid(match["label"], match["token"] or "")

    @property
    def is_instance(self) -> bool:
        """Whether it has a token."""
        return bool(self.token)

    @property
    def is_singleton(self) -> bool:
        """Whether it is the only one of its label."""
        return not self.token

    def __str__(self) -> str:
        return f"{self.label}<{self.token}>" if self.token else self.label


@dataclass(frozen=True)
class ProcId:
    """The name of a proc: a `Uid` whose label is that of its mesh with its rank."""

    uid: Uid

    @staticmethod
    def from_string(proc_id: str) -> ProcId:
        """Return what ``str`` made the text ``proc_id`` of.

        Raises:
            ValueError: the text is no uid.
        """
        return ProcId(Uid.from_string(proc_id))

    @property
    def label(self) -> str:
        """What people call it."""
        return self.uid.label

    def __str__(self) -> str:
        return str(self.uid)


@dataclass(frozen=True)
class ActorAddr:
    """The name of an actor and where it is: ``trainer<5f3a9c1>.gpus-3<5f3a9c>@n17#0c4d``.

    Attributes:
        uid: of the actor; its label is the name given at spawn.
        proc_id: the proc that it runs in.
        addr: the host, with its incarnation.
    """

    uid: Uid
    proc_id: ProcId
    addr: str

    @staticmethod
    def from_string(text: str) -> ActorAddr:
        """Return what ``str`` made ``text`` of.

        Raises:
            ValueError: the text is no address of an actor.
        """
        names, at, addr = text.partition("@")
        actor, dot, proc = names.partition(".")
        if not (at and dot and addr):
            raise ValueError(f"{text!r} is no address of an actor, such as trainer<5f3a9c1>.gpus-3<5f3a9c>@n17#0c4d")
        return ActorAddr(Uid.from_string(actor), ProcId.from_string(proc), addr)

    @property
    def label(self) -> str:
        """Name given at spawn."""
        return self.uid.label

    @property
    def actor_name(self) -> str:
        """Name of the actor, unique in its proc."""
        return str(self.uid)

    @property
    def proc_label(self) -> str:
        """What people call its proc."""
        return self.proc_id.label

    @property
    def proc_name(self) -> str:
        """Name of its proc, unique in the job."""
        return str(self.proc_id)

    @property
    def pid(self) -> int:
        """Number of the actor among those of its name in the proc: always 0."""
        return 0

    @property
    def is_root(self) -> bool:
        """Whether it is the client."""
        return self.uid == CLIENT

    def __str__(self) -> str:
        return f"{self.uid}.{self.proc_id}@{self.addr}"


CLIENT = Uid.singleton("client")
"""The program's own actor, the root of the supervision tree."""


def actor_uid(mesh: str) -> Uid:
    """Return the uid of an actor of the actor mesh with that id."""
    label, _, token = mesh.rpartition("-")
    return Uid(label, token)


def proc_id(proc: str) -> ProcId:
    """Return the id of the proc that has the name ``proc`` on its host."""
    mesh, dot, rank = proc.rpartition(".")
    if not dot:
        return ProcId(Uid.singleton(proc))
    label, _, token = mesh.rpartition("-")
    return ProcId(Uid(f"{label}-{rank}", token))
