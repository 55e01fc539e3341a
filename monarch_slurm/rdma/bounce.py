"""Local memory of a device brought to host memory and back, for engines that take host memory only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from monarch_slurm.rdma.engine import Op
from monarch_slurm.rdma.memory import Memory, Stager, host_bytes


@contextmanager
def on_host(ops: Sequence[Op]) -> Iterator[Sequence[Op]]:
    """Yield ``ops`` with local memory of the host only; what they read is on its device when the block ends well."""
    hosted: list[Op] = []
    back: list[tuple[Stager, Memory, int]] = []
    kept: list[Memory] = []
    for op in ops:
        if op.stager is None:
            hosted.append(op)
            continue
        memory = host_bytes(op.nbytes, op.stager)
        kept.append(memory)
        if op.write:
            op.stager.to_host(0, memory.address, op.nbytes)
        else:
            back.append((op.stager, memory, op.nbytes))
        hosted.append(op._replace(address=memory.address, anchor=memory.anchor, stager=None))
    yield hosted
    for stager, memory, nbytes in back:
        stager.from_host(0, memory.address, nbytes)
