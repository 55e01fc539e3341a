"""GPU memory on the fake driver, which gives host memory: mapping, exports over a socket, another process, errors."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.gpu import GpuMemory, export_dmabuf, libraries, receive_fds, receive_memory, send_fds, send_memory


@pytest.fixture(params=["cuda", "rocm"])
def fake(
    request: pytest.FixtureRequest, compile_fake: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    platform = request.param
    monkeypatch.setenv("MONARCH_SLURM_GPU_PLATFORM", platform)
    monkeypatch.setenv("MONARCH_SLURM_GPU_LIBRARY", str(compile_fake("fake_gpu", platform)))
    libraries.gpu_runtime.cache_clear()
    yield platform
    libraries.gpu_runtime.cache_clear()


def _write_in_the_other_process(sock: socket.socket) -> None:
    memory = receive_memory(sock)
    memory.write(b"from the peer", offset_bytes=100)
    sock.sendall(b"!")


@pytest.mark.usefixtures("fake")
def test_both_processes_see_one_memory() -> None:
    memory = GpuMemory.allocate(1)
    assert memory.size_bytes == 2 << 20
    ours, theirs = socket.socketpair()
    peer = multiprocessing.get_context("fork").Process(target=_write_in_the_other_process, args=(theirs,))
    peer.start()
    send_memory(ours, memory)
    assert ours.recv(1) == b"!"
    peer.join()
    assert memory.read(13, offset_bytes=100) == b"from the peer"


@pytest.mark.usefixtures("fake")
def test_closing_frees_the_descriptor_and_the_addresses() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        memory = GpuMemory.allocate(5 << 20)
        assert memory.size_bytes == 6 << 20
        memory.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(MonarchSlurmError, match="closed"):
        memory.read(1)


@pytest.mark.usefixtures("fake")
def test_a_dmabuf_is_whole_pages() -> None:
    memory = GpuMemory.allocate(1)
    made = export_dmabuf(memory.address + 4090, 10)
    os.close(made.fd)
    assert (made.offset_bytes, made.length_bytes) == (4090, 8192)
    with pytest.raises(MonarchSlurmError, match="0 bytes"):
        export_dmabuf(memory.address, 0)


@pytest.mark.usefixtures("fake")
def test_errors_name_the_call() -> None:
    with pytest.raises(MonarchSlurmError, match="error 101"):
        GpuMemory.allocate(1, device=7)
    with pytest.raises(ValueError, match="of a memory of"):
        GpuMemory.allocate(1).write(b"x", offset_bytes=2 << 20)


@pytest.mark.usefixtures("fake")
def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPU_NO_DEVICE", "1")
    with pytest.raises(MonarchSlurmError, match=r"Init failed: error 100 \(no device\)"):
        GpuMemory.allocate(1)


def test_fds_travel_and_garbage_does_not() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    send_fds(ours, {"a": 1}, [writer])
    message, fds = receive_fds(theirs)
    assert message == {"a": 1}
    os.write(fds[0], b"x")
    assert os.read(reader, 1) == b"x"
    for fd in (reader, writer, fds[0]):
        os.close(fd)
    ours.sendall(b"GET / HTTP/1.0\r\n")
    with pytest.raises(MonarchSlurmError, match="not sent by send_fds"):
        receive_fds(theirs)
    ours.close()
    theirs.recv(100)
    with pytest.raises(MonarchSlurmError, match="closed the connection"):
        receive_fds(theirs)
