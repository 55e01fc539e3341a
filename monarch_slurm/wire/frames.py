"""The shape of a message on a link.

A message is a list of frames: an 8-byte sequence number of the link, a header, and the body's frames. The header is a
msgpack array ``[kind, dst, src, fields]``: ``dst`` and ``src`` are process addresses (`Address`), ``fields`` a map of
plain values. Only a body is ever unpickled, and only by the process that it is addressed to.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.wire.pickling import Buffer
from monarch_slurm.wire.plain import UnpackError, pack, unpack

_SEQUENCE = struct.Struct("<Q")
MAX_HEADER_BYTES = 16 * 2**20


class WireError(MonarchSlurmError):
    """Bytes arrived that are no message of ours, or a message was lost on a link."""


class Address(NamedTuple):
    """Where a process is: the id of its host and its name there.

    The controller is ``("controller", "client")``, an agent ``(host, "agent")``. A host id carries the incarnation of
    the agent (``n1#2``), so that a host that was given up cannot speak again under its old name.
    """

    host: str
    proc: str

    def __str__(self) -> str:
        return f"{self.host}/{self.proc}"


CONTROLLER = Address("controller", "client")
AGENT = "agent"


@dataclass
class Message:
    """One message: what it is, from whom, to whom, its fields and the frames of its body."""

    kind: str
    dst: Address
    src: Address
    fields: dict[str, Any] = field(default_factory=dict)
    body: Sequence[Buffer] = ()
    header: Buffer | None = None
    """The encoded header, kept when a message is passed on unchanged."""


def encode(message: Message) -> list[Buffer]:
    """Return the header and body frames of ``message``."""
    header = message.header
    if header is None:
        header = pack([message.kind, message.dst, message.src, message.fields])
    return [header, *message.body]


def decode(frames: Sequence[Buffer]) -> Message:
    """Return the message whose header and body are ``frames``.

    Raises:
        WireError: they are not what `encode` makes.
    """
    if not frames or len(frames[0]) > MAX_HEADER_BYTES:
        raise WireError(f"not a message: {len(frames)} frames")
    try:
        kind, dst, src, fields = unpack(frames[0])
        (dst_host, dst_proc), (src_host, src_proc) = dst, src
    except UnpackError as error:
        raise WireError(f"not a message header: {error!r}") from None
    texts = (kind, dst_host, dst_proc, src_host, src_proc)
    if not all(isinstance(text, str) for text in texts) or not isinstance(fields, dict):
        raise WireError(f"not a message header: {texts!r}")
    return Message(kind, Address(dst_host, dst_proc), Address(src_host, src_proc), fields, frames[1:], frames[0])


def pack_sequence(number: int) -> bytes:
    """Return a link's sequence number as a frame."""
    return _SEQUENCE.pack(number)


def unpack_sequence(frame: Buffer) -> int:
    """Return the sequence number in ``frame``.

    Raises:
        WireError: the frame has the wrong length.
    """
    if len(frame) != _SEQUENCE.size:
        raise WireError(f"not a sequence number: {len(frame)} bytes")
    return int(_SEQUENCE.unpack(frame)[0])
