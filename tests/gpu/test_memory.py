"""GPU memory on the fake driver, which gives host memory: mapping, exports over a socket, another process, errors."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_libraries import compile_fake

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.gpu import (
    GpuMemory,
    export_dmabuf,
    libraries,
    receive_fds,
    receive_memory,
    send_fds,
    send_memory,
    send_tensor,
    sharing,
)


@pytest.fixture(scope="session")
def libraries_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fake")


@pytest.fixture(params=["cuda", "rocm"])
def fake(request: pytest.FixtureRequest, libraries_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    platform = request.param
    monkeypatch.setenv("MONARCH_SLURM_GPU_PLATFORM", platform)
    monkeypatch.setenv("MONARCH_SLURM_GPU_LIBRARY", str(compile_fake("fake_gpu", platform, libraries_folder)))
    libraries.gpu_runtime.cache_clear()
    yield platform
    libraries.gpu_runtime.cache_clear()


def _write_in_the_other_process(sock: socket.socket) -> None:
    memory = receive_memory(sock)
    memory.write(b"from the peer", offset_bytes=100)
    sock.sendall(b"!")


def test_a_tensor_whose_memory_holds_other_values_is_not_sent() -> None:
    torch = pytest.importorskip("torch")
    ours, _theirs = socket.socketpair()
    with pytest.raises(ValueError, match="resolve_conj"):
        send_tensor(ours, torch.ones(2, dtype=torch.complex64).conj())
    with pytest.raises(ValueError, match="a contiguous GPU tensor with elements is needed"):
        send_tensor(ours, torch.ones(2))


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


def _write_across_the_seam(sock: socket.socket) -> None:
    message, fds = receive_fds(sock)
    mapping = sharing.map_exported(0, None, fds, message["sizes"])
    libraries.gpu_runtime().write(0, mapping.address + message["sizes"][0] - 3, b"seam")
    sock.sendall(b"!")


@pytest.mark.usefixtures("fake")
def test_memory_of_several_allocations() -> None:
    """As torch's expandable segments are: mapped one behind the other."""
    parts = [GpuMemory.allocate(size) for size in (2 << 20, 4 << 20, 1)]
    sizes = [part.size_bytes for part in parts]
    fds = [part.export_fd() for part in parts]
    whole = sharing.map_exported(0, None, fds, sizes)
    found = sharing.allocations_of(whole.address + 5, (6 << 20) - 5)
    assert [each.size_bytes for each in found] == sizes[:2]
    ours, theirs = socket.socketpair()
    peer = multiprocessing.get_context("fork").Process(target=_write_across_the_seam, args=(theirs,))
    peer.start()
    with sharing.exported(found) as (ipc, exports):
        assert ipc is None
        send_fds(ours, {"sizes": sizes[:2]}, exports)
    assert ours.recv(1) == b"!"
    peer.join()
    assert parts[0].read(3, sizes[0] - 3) + parts[1].read(1) == b"seam"
    before = len(os.listdir("/proc/self/fd"))
    del whole
    assert before - len(os.listdir("/proc/self/fd")) == 3, "the mapping's own handles"
    for fd in fds:
        os.close(fd)


@pytest.mark.usefixtures("fake")
def test_plain_memory_has_an_ipc_handle() -> None:
    runtime = libraries.gpu_runtime()
    address = runtime.alloc(0, 1000)
    with sharing.exported(sharing.allocations_of(address + 100, 10)) as (ipc, fds):
        assert fds == []
        assert sharing.map_exported(0, ipc, [], [1000]).address == address
    runtime.free(0, address)


@pytest.mark.usefixtures("fake")
def test_any_thread_and_no_side_effect_on_its_device() -> None:
    """CUDA's driver has no device on a new thread; a caller's current device is as it was."""
    library = ctypes.CDLL(os.environ["MONARCH_SLURM_GPU_LIBRARY"])

    def current() -> int:
        value = ctypes.c_void_p()
        name = "cuCtxGetCurrent" if "cuda" in library._name else "hipGetDevice"
        getattr(library, name)(ctypes.byref(value))
        return value.value or 0

    def use() -> tuple[int, int]:
        before = current()
        memory = GpuMemory.allocate(1, device=1)
        memory.write(b"abc")
        assert memory.read(3) == b"abc"
        os.close(export_dmabuf(memory.address, 3, device=1).fd)
        with sharing.exported(sharing.allocations_of(memory.address, 3, device=1)) as (_, fds):
            sharing.map_exported(1, None, fds, [memory.size_bytes])
        address = libraries.gpu_runtime().alloc(1, 100)
        with sharing.exported(sharing.allocations_of(address, 3, device=1)) as (ipc, _):
            sharing.map_exported(1, ipc, [], [100])
        libraries.gpu_runtime().free(1, address)
        return before, current()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(use).result() == (0, 0)


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
    many = [os.dup(writer) for _ in range(150)]
    send_fds(ours, {"b": 2}, many)
    message, copies = receive_fds(theirs)
    assert (message, len(copies)) == ({"b": 2}, 150)
    for fd in many + copies:
        os.close(fd)
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
