"""The device ``fakegpu``: torch's, on host memory, with streams that are threads (``native/testlib/fake_device.cpp``).

A process that has loaded it cannot be rid of it again: the tests that use it have a process of their own.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

NAME = "fakegpu"
_library: Any = None


def load(path: Path) -> None:
    """Make torch know the device."""
    global _library
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.load_library(path)
    _library = ctypes.CDLL(str(path))
    _library.fake_device_stream.restype = ctypes.c_void_p
    _library.fake_device_stream.argtypes = [ctypes.c_int, ctypes.c_int64]
    _library.fake_device_hold.argtypes = [ctypes.c_void_p]
    _library.fake_device_release.argtypes = [ctypes.c_void_p]
    torch._register_device_module(NAME, sys.modules[__name__])


class Stream(torch.Stream):
    """What ``torch.cuda.Stream`` is to CUDA."""

    @property
    def cuda_stream(self) -> int:
        return int(_library.fake_device_stream(self.device_index, self.stream_id))


def is_available() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def current_device() -> int:
    return int(_library.fake_device_current())


def set_device(device: torch.device | int) -> None:
    """Make a device the calling thread's current one."""
    _library.fake_device_set(device if isinstance(device, int) else device.index)


@contextmanager
def held(device: int, stream_id: int = 0) -> Iterator[None]:
    """Hold up what is enqueued on a stream within the block until its end; stream 0 is the device's own."""
    stream = _library.fake_device_stream(device, stream_id)
    _library.fake_device_hold(stream)
    try:
        yield
    finally:
        _library.fake_device_release(stream)
