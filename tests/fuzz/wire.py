"""Coverage-guided fuzzing of what is made of bytes that come from elsewhere, before anybody has been authenticated by
more than a key: headers of messages, packets of streams, requests of workers, shapes.

    pip install atheris .
    python tests/fuzz/wire.py -max_total_time=300 CORPUS_FOLDER

Options are libFuzzer's. Each input is refused with the error that is documented, or is what it seems to be; anything
else is a finding, and its bytes are left in a file ``crash-*``.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["monarch_slurm", "msgpack"]):
    from monarch_slurm.actor.ndslice import Slice
    from monarch_slurm.actor.shape import Extent, Point, Shape
    from monarch_slurm.config import configure
    from monarch_slurm.host.worker_address import WorkerAddress, WorkerAddressError
    from monarch_slurm.wire import CONTROLLER, Address, Message, WireError
    from monarch_slurm.wire.frames import decode, encode, number_of
    from monarch_slurm.wire.plain import UnpackError, pack, unpack
    from monarch_slurm.wire.stream import PeerGoneError, Stream


def message(data: bytes) -> None:
    """One or two frames; a message that is taken is passed on as it came."""
    first, _, second = data.partition(b"\xff\x00\xff")
    frames = [first, second] if second else [first]
    try:
        taken = decode(frames)
    except WireError:
        return
    assert all(type(text) is str for text in (taken.kind, *taken.dst, *taken.src))
    assert type(taken.fields) is dict
    again = [bytes(frame) for frame in encode(taken, number_of(frames))]
    assert again == frames, "passed on as it came"


def packets(data: bytes) -> None:
    """What a stranger with the right user id may write to a Unix socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        stream = Stream(ours)
        theirs.setblocking(False)
        theirs.send(data[: 2**16])
        theirs.shutdown(socket.SHUT_WR)
        try:
            for _ in range(4):
                for frames in stream.read():
                    assert all(len(frame) >= 0 for frame in frames)
        except (WireError, PeerGoneError):
            return
        finally:
            stream.close()


def plain(data: bytes) -> None:
    """Plain values; what is taken can be packed and comes out the same."""
    try:
        value = unpack(data)
    except UnpackError:
        return
    try:
        packed = pack(value)
    except UnpackError:  # such as a time with a zone, which nobody sends
        return
    unpack(packed)


def shapes(data: bytes) -> None:
    """Shapes, extents and points."""
    for kind in (Shape, Extent, Point):
        try:
            one = kind.from_bytes(data)
        except (ValueError, IndexError):
            continue
        restore, arguments = one.__reduce__()
        assert restore(*arguments) == one


def address(data: bytes) -> None:
    """Addresses of workers."""
    try:
        WorkerAddress.parse(data.decode(errors="replace"))
    except (WorkerAddressError, NotImplementedError):
        return


TARGETS: list[Callable[[bytes], None]] = [message, packets, plain, shapes, address]


def seeds() -> list[bytes]:
    """Inputs to begin with, one or more for each target."""
    fields = {"op": "call", "mesh": "m-1", "ranks": [1, 2], "none": None, "half": 0.5, "raw": b"\0\1"}
    sent = [
        bytes(frame) for frame in encode(Message("cast", CONTROLLER, Address("n1#2", "agent"), fields, [b"body"]), 7)
    ]
    packet = struct.pack("<I2Q", 2, len(sent[0]), 2) + sent[0] + b"xy"
    shape = Shape(["x", "y"], Slice(offset=2, sizes=[2, 3], strides=[3, 1]))
    return [
        b"\0" + sent[0],
        b"\1" + packet,
        b"\1" + packet + packet[:20],
        b"\2" + pack(fields),
        *(b"\3" + bytes(one.__reduce__()[1][0]) for one in (shape, shape.extent, Point(1, shape.extent))),
        b"\4service<3f>@tcp://[::1]:fd7@tcp://0.0.0.0:4444",
    ]


def one_input(data: bytes) -> None:
    """The first byte tells what is fuzzed."""
    if data:
        TARGETS[data[0] % len(TARGETS)](data[1:])


if __name__ == "__main__":
    configure(max_frame_length=2**16)  # a stream makes room for a frame that has been announced
    for number, seed in enumerate(seeds() if Path(sys.argv[-1]).is_dir() else []):
        (Path(sys.argv[-1]) / f"seed{number}").write_bytes(seed)
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
