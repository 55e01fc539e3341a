"""Memory of a GPU registered with an RDMA device: the two move bytes between them, past the host's memory.

By its dmabuf where both drivers take part; else by its address, which works where a module for peer memory is loaded
(nvidia-peermem; part of amdgpu's for older kernels). If neither works, bytes bounce through page-locked host memory.
Which way a process has is found once, and a way that is not the best is told once.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.gpu import export_dmabuf
from monarch_slurm.gpu.memory import Dmabuf
from monarch_slurm.rdma.errors import NoDirectWayError
from monarch_slurm.rdma.memory import Stager

logger = logging.getLogger(__name__)

_PASSING = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ENOSPC})
"""What says nothing about the way: it may work for the next buffer."""

Export = Callable[[int, int, int], Dmabuf]


class GpuDirect:
    """Registers memory of GPUs. For any thread.

    Args:
        native: the native module.
        port: name of the RDMA device, for messages.
        export: makes a dmabuf: address, bytes, GPU.
    """

    def __init__(self, native: Any, port: str, export: Export = export_dmabuf) -> None:
        self._native = native
        self._port = port
        self._export = export
        self._lock = threading.Lock()
        self._refused: dict[str, str] = {}
        """Ways that have failed, and why."""

    def register(self, device: Any, stager: Stager, nbytes: int, local_write: bool, remote: bool) -> Any:
        """Return a registration with the open ``device``; it ends when the object dies.

        Raises:
            NoDirectWayError: neither way works here, or now.
        """
        for_now: dict[str, str] = {}
        for name, way in (("dmabuf", self._by_dmabuf), ("peer memory", self._by_address)):
            if name in self._refused:
                continue
            try:
                return way(device, stager, nbytes, local_write, remote)
            except (OSError, MonarchSlurmError) as error:
                why = str(error.args[-1])
                if isinstance(error, OSError) and error.args[0] in _PASSING:
                    for_now[name] = why
                else:
                    self._refuse(name, why)
        ways = "; ".join(f"{name}: {why}" for name, why in {**self._refused, **for_now}.items())
        refusal = NoDirectWayError(f"{self._port} cannot reach the GPU's memory ({ways})")
        refusal.lasting = not for_now
        raise refusal

    def _by_dmabuf(self, device: Any, stager: Stager, nbytes: int, local_write: bool, remote: bool) -> Any:
        address = stager.bytes.data_ptr()
        made = self._export(address, nbytes, max(0, stager.bytes.get_device()))
        try:
            return self._native.Region.of_dmabuf(
                device, made.fd, made.offset_bytes, address, nbytes, local_write, remote
            )
        finally:
            os.close(made.fd)

    def _by_address(self, device: Any, stager: Stager, nbytes: int, local_write: bool, remote: bool) -> Any:
        return self._native.Region(device, stager.bytes.data_ptr(), nbytes, local_write, remote)

    def _refuse(self, name: str, why: str) -> None:
        with self._lock:
            if name in self._refused:
                return
            self._refused[name] = why
        instead = "peer memory is tried" if name == "dmabuf" else "it bounces through host memory"
        logger.warning("%s does not take GPU memory by %s, so %s: %s", self._port, name, instead, why)
