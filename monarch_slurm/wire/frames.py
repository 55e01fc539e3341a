"""The shape of a message on a link.

A message is a list of frames. The first has an 8-byte sequence number of the link, the 4-byte length of the header, the
header, and the first part of the body if that is small; further frames have the rest of the body. The header is a
msgpack array ``[kind, dst, src, fields]``: ``dst`` and ``src`` are process addresses (`Address`), ``fields`` a map of
plain values. Only a body is ever unpickled, and only by the process that it is addressed to.

One small message is one frame: each frame more costs a few microseconds at each of the four sockets on its way.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.wire.bulk import in_place
from monarch_slurm.wire.large_buffers import Buffer
from monarch_slurm.wire.plain import UnpackError, pack, unpack

_SEQUENCE = struct.Struct("<Q")
_PREFIX = struct.Struct("<QI")
_INLINE = 1 << 31
"""Flag in the length of the header: the first part of the body follows it in the first frame."""

MAX_HEADER_BYTES = 16 * 2**20

MAX_PART_BYTES = 8 * 2**20
"""A frame between machines may be so much larger than a header, and no more: a stranger who announces a larger one is
refused before there is memory for it."""

_INLINE_BODY_BYTES = 16 * 1024
"""A first part of a body up to this size travels in the first frame."""


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
    encoded: list[Buffer] | None = None
    """What came, kept so that a message which is passed on unchanged is not encoded again."""


def encode(message: Message, number: int) -> list[Buffer]:
    """Return the frames of ``message`` with the sequence number ``number``."""
    if message.encoded is not None:
        first, *rest = message.encoded
        return [_SEQUENCE.pack(number) + memoryview(in_place(first))[_SEQUENCE.size :], *rest]
    header = pack([message.kind, message.dst, message.src, message.fields])
    rest = list(message.body)
    if rest and len(rest[0]) <= _INLINE_BODY_BYTES:
        inline = rest.pop(0)
        return [b"".join((_PREFIX.pack(number, len(header) | _INLINE), header, in_place(inline))), *rest]
    return [_PREFIX.pack(number, len(header)) + header, *rest]


def number_of(frames: Sequence[Buffer]) -> int:
    """Return the sequence number of the message ``frames``.

    Raises:
        WireError: they are no message.
    """
    if not frames or len(frames[0]) < _PREFIX.size:
        raise WireError(f"not a message: {len(frames)} frames, the first of {len(frames[0]) if frames else 0} bytes")
    number: int = _SEQUENCE.unpack_from(in_place(frames[0]))[0]
    return number


def decode(frames: Sequence[Buffer]) -> Message:
    """Return the message that `encode` made ``frames`` of.

    Raises:
        WireError: they are something else.
    """
    number_of(frames)
    first = in_place(frames[0])
    length: int = _PREFIX.unpack_from(first)[1]
    inline, length = length & _INLINE, length & ~_INLINE
    end = _PREFIX.size + length
    if length > MAX_HEADER_BYTES or end > len(first) or (end != len(first) and not inline):
        raise WireError(f"not a message: a header of {length} bytes in a frame of {len(first)}")
    try:
        kind, dst, src, fields = unpack(first[_PREFIX.size : end])
        (dst_host, dst_proc), (src_host, src_proc) = dst, src
    except UnpackError as error:
        raise WireError(f"not a message header: {error!r}") from None
    texts = type(kind) is type(dst_host) is type(dst_proc) is type(src_host) is type(src_proc) is str
    if not texts or type(fields) is not dict:
        raise WireError(f"not a message header: {(kind, dst, src)!r}")
    body: list[Buffer] = [memoryview(first)[end:], *frames[1:]] if inline else [*frames[1:]]
    return Message(kind, Address(dst_host, dst_proc), Address(src_host, src_proc), fields, body, [*frames])
