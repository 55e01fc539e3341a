"""Copies within one process."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from monarch_slurm.rdma.engine import Op
from monarch_slurm.rdma.registry import Registry
from monarch_slurm.rdma.samehost import copy_pieces


class LocalEngine:
    """Copies from and to buffers of this process."""

    name = "local"
    takes_devices = True

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def transfer(self, ops: Sequence[Op], deadline: float) -> None:
        """See `Engine.transfer`."""
        for op in ops:
            entry = self._registry.find(op.target.slot, op.target.key)
            stager = entry.memory.stager
            with self._registry.using(entry):
                if stager is not None and op.stager is not None:
                    ends = (stager, op.stager) if op.write else (op.stager, stager)
                    ends[0].copy(ends[1], op.nbytes)
                    continue
                if op.stager is not None:
                    (op.stager.to_host if op.write else op.stager.from_host)(0, entry.memory.address, op.nbytes)
                    continue
                if stager is not None:
                    (stager.from_host if op.write else stager.to_host)(0, op.address, op.nbytes)
                    continue
                there = entry.memory.address
                piece = (there, op.address, op.nbytes) if op.write else (op.address, there, op.nbytes)
                copy_pieces(lambda piece: ctypes.memmove(*piece), [piece], deadline)

    def lost(self, reason: str) -> None:
        """This process is never lost to itself."""

    def close(self) -> None:
        """There is nothing to give back."""
