"""The parts of transfers by themselves: memory, keys, strangers on the TCP port, devices, the registration cache."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import pickle
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from monarch_slurm.actor.client import client
from monarch_slurm.errors import ConfigError
from monarch_slurm.rdma import RDMAAction, RDMABuffer, get_rdma_backend, is_rdma_available, verbs, verbs_devices
from monarch_slurm.rdma import tcp_protocol as protocol
from monarch_slurm.rdma.engine import Begun, Op, Target
from monarch_slurm.rdma.errors import (
    BufferGoneError,
    NoBackendError,
    PeerLostError,
    RDMAError,
    RDMATimeoutError,
    gathered,
)
from monarch_slurm.rdma.manager import manager
from monarch_slurm.rdma.memory import memory_of, view_of
from monarch_slurm.rdma.options import transports
from monarch_slurm.rdma.registry import Entry, Registry
from monarch_slurm.rdma.samehost import network_id
from monarch_slurm.rdma.tcp_client import TcpEngine
from monarch_slurm.rdma.tcp_server import TcpServer
from monarch_slurm.rdma.verbs import registration_text
from monarch_slurm.rdma.verbs_devices import Gid, Port, bridges, choose, own_gpu, ports
from monarch_slurm.rdma.workers import Workers


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


# ---- memory


def test_a_view_is_no_copy() -> None:
    data = bytearray(b"abcdef")
    memory = memory_of(memoryview(data)[2:])
    view_of(memory.address, memory.nbytes)[:] = b"WXYZ"
    assert data == b"abWXYZ"
    with pytest.raises(BufferError):
        data.clear()  # the export holds it in place


def test_tensors_of_any_shape_and_type() -> None:
    tensor = torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4)
    memory = memory_of(tensor[1])
    assert (memory.address, memory.nbytes) == (tensor.data_ptr() + 24, 24)
    assert memory_of(memoryview(torch.zeros(2, 3).numpy())).nbytes == 24


@pytest.mark.parametrize(
    "data", [torch.zeros(4, 4).t(), memoryview(b"abcd")[::2], b"abc", [1], torch.zeros(3, device="meta")]
)
def test_what_is_not_contiguous_memory_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="only supports contiguous"):
        memory_of(data)


# ---- the public face


@pytest.fixture
def buffer() -> Iterator[RDMABuffer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        buffer = RDMABuffer(torch.arange(10, dtype=torch.int32))
    yield buffer
    with contextlib.suppress(BufferGoneError):
        buffer.drop().get(10)


def test_reads_and_writes_within_a_process(buffer: RDMABuffer) -> None:
    target = torch.zeros(12, dtype=torch.int32)
    buffer.read_into(target).get(10)
    assert target.tolist() == [*range(10), 0, 0]
    buffer.write_from(torch.full((3,), 7, dtype=torch.int32)).get(10)
    copy = pickle.loads(pickle.dumps(buffer))
    copy.read_into(target).get(10)
    assert target.tolist() == [7, 7, 7, *range(3, 10), 0, 0]


def test_sizes_and_timeouts_are_checked_at_the_call(buffer: RDMABuffer) -> None:
    with pytest.raises(ValueError, match=r"destination local memory size \(36\) must be >= remote buffer size \(40\)"):
        buffer.read_into(torch.zeros(9, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"source local memory size \(44\) must be <= remote buffer size \(40\)"):
        buffer.write_from(torch.zeros(11, dtype=torch.int32))
    with pytest.raises(ValueError, match="read-only"):
        buffer.read_into(memoryview(bytes(40)))
    with pytest.raises(TypeError):
        buffer.read_into(torch.zeros(10), timeout=1.5)  # type: ignore[arg-type]
    for timeout in (-1, 2**64):
        with pytest.raises(OverflowError):
            buffer.read_into(torch.zeros(10), timeout=timeout)
    with pytest.raises(ValueError, match="Cannot create RDMABuffer with size 0"):
        RDMABuffer(memoryview(b""))


def test_actions(buffer: RDMABuffer) -> None:
    RDMAAction().submit().get(0)
    targets = [torch.zeros(10, dtype=torch.int32) for _ in range(3)]
    action = RDMAAction()
    for target in targets:
        assert action.read_remote(target, buffer) is action
    for _ in range(2):
        action.submit().get(10)
        assert all(target.tolist() == list(range(10)) for target in targets)
        targets[0].zero_()
    with pytest.raises(NotImplementedError):
        action.fetch_add(buffer, buffer, 1)
    buffer.drop().get(10)
    with pytest.raises(BufferGoneError, match=r"RDMA submit failed on 1 backend\(s\):\n\(local\) buffer \d+ not found"):
        action.submit().get(10)


def test_read_only_memory_cannot_be_written() -> None:
    buffer = RDMABuffer(memoryview(b"abc"))
    with pytest.raises(ValueError, match="read-only"):
        buffer.write_from(memoryview(b"xyz"))
    buffer.drop().get(10)


def test_which_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_SLURM_RDMA_DISABLE_IBVERBS", "1")
    assert get_rdma_backend() == "tcp"
    with pytest.warns(DeprecationWarning, match="is_ibverbs_available"):
        assert not is_rdma_available()
    monkeypatch.setenv("MONARCH_SLURM_RDMA_ALLOW_TCP_FALLBACK", "0")
    assert get_rdma_backend() == "none"
    with pytest.raises(RuntimeError, match="no RDMA backend"):
        RDMABuffer(memoryview(b"abc"))
    monkeypatch.setenv("MONARCH_SLURM_RDMA_TRANSPORTS", "carrier-pigeon")
    with pytest.raises(ConfigError, match="carrier-pigeon"):
        transports()


def test_failures_are_gathered() -> None:
    same = gathered([PeerLostError("a").by("tcp"), PeerLostError("b").by("ibverbs")])
    assert (type(same), str(same)) == (PeerLostError, "RDMA submit failed on 2 backend(s):\n(tcp) a\n(ibverbs) b")
    assert type(gathered([PeerLostError("a"), BufferGoneError("b")])) is RDMAError


def test_whoever_waits_first_ends_what_was_begun_and_hears_of_a_fault() -> None:
    arrived, ended, told = threading.Barrier(2), [], []

    def wait() -> None:
        arrived.wait(30)
        raise ValueError("the device is gone")

    begun = Begun(wait, lambda: ended.append(1)).then(told.append)
    threads = [threading.Thread(target=begun.finish) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (ended, [str(failure) for failure in told]) == ([1], ["unexpected: ValueError('the device is gone')"])
    begun.finish_for_nobody()  # else it would wait for the barrier


# ---- the registry


def test_a_drop_waits_for_those_who_copy() -> None:
    registry = Registry()
    entry = registry.add(memory_of(memoryview(bytearray(10))))
    with registry.using(entry), pytest.raises(RDMATimeoutError):
        registry.drop(entry.slot, entry.key, soon(0.01))
    with pytest.raises(BufferGoneError):
        registry.find(entry.slot, entry.key)


@pytest.mark.parametrize("nbytes", [0, 20])
def test_a_storage_that_is_resized_in_place_is_noticed_where_the_owner_looks(nbytes: int) -> None:
    registry, freed, tensor = Registry(), [], torch.ones(10)
    registry.on_freed = freed.append
    entry = registry.add(memory_of(tensor[2:8]))
    assert registry.find(entry.slot, entry.key) is entry
    tensor.untyped_storage().resize_(nbytes)
    with pytest.raises(BufferGoneError, match="was freed or moved"):
        registry.find(entry.slot, entry.key)
    assert freed == [entry]
    assert registry._blocks[0][entry.slot] == 0, "peers find no key"
    registry.drop(entry.slot, entry.key, soon())


def test_a_tensor_that_gets_another_storage_leaves_the_buffer_its_own() -> None:
    registry, tensor = Registry(), torch.ones(10)
    entry = registry.add(memory_of(tensor))
    tensor.data = torch.zeros(10)
    assert registry.find(entry.slot, entry.key) is entry
    assert bytes(view_of(entry.memory.address, 40)) == torch.ones(10).numpy().tobytes()


def test_a_slot_used_again_has_another_key() -> None:
    registry = Registry()
    first = registry.add(memory_of(memoryview(bytearray(10))))
    registry.drop(first.slot, first.key, soon())
    second = registry.add(memory_of(memoryview(bytearray(10))))
    assert second.slot == first.slot
    with pytest.raises(BufferGoneError):
        registry.find(first.slot, first.key)
    assert registry.find(second.slot, second.key) is second


# ---- TCP


class Served:
    """A server with one buffer, and an engine that knows the secret."""

    def __init__(self, data: memoryview) -> None:
        self.registry = Registry()
        self.entry: Entry = self.registry.add(memory_of(data))
        self.server = TcpServer(self.registry, ["127.0.0.1"], 1)
        self.workers = Workers()

    def engine(self, secret: bytes | None = None) -> TcpEngine:
        return TcpEngine(self.server.addresses, secret or self.server.secret, 2, 2**16, self.workers.run)

    def op(self, local: memoryview, write: bool = False, **changes: int) -> Op:
        entry = self.entry
        target = Target(entry.slot, changes.get("key", entry.key), 0, 0, entry.memory.nbytes)
        return Op(write, memory_of(local).address, changes.get("nbytes", len(local)), target)


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(memoryview(bytearray(b"secret!!" * 100_000)))
    yield served
    served.server.close()


def test_tcp_reads_and_writes(served: Served) -> None:
    engine, local = served.engine(), memoryview(bytearray(800_000))
    engine.transfer([served.op(local)], soon())
    assert local == b"secret!!" * 100_000
    local[:] = b"changed." * 100_000
    engine.transfer([served.op(local, write=True)], soon())
    assert view_of(served.entry.memory.address, 800_000) == local
    engine.close()


def test_tcp_copies_that_begin_within_the_buffer(served: Served) -> None:
    engine, local = served.engine(), memoryview(bytearray(200_000))
    engine.transfer([served.op(local)._replace(offset=500_004)], soon())
    assert local == b"et!!secr" * 25_000
    with pytest.raises(RDMAError, match="past the end"):
        engine.transfer([served.op(local)._replace(offset=600_001)], soon())
    engine.close()


def test_tcp_refusals_leave_the_connection_whole(served: Served) -> None:
    engine, local = served.engine(), memoryview(bytearray(800_000))
    for write in (False, True):
        with pytest.raises(BufferGoneError):
            engine.transfer([served.op(local, write, key=1)], soon())
    too_long = memoryview(bytearray(900_000))
    with pytest.raises(RDMAError, match="past the end"):
        engine.transfer([served.op(too_long)], soon())
    engine.transfer([served.op(local)], soon())
    assert local == b"secret!!" * 100_000


@pytest.mark.parametrize("write", [False, True])
def test_a_buffer_dropped_in_the_middle_of_a_transfer(
    served: Served, monkeypatch: pytest.MonkeyPatch, write: bool
) -> None:
    engine, registry, calls = served.engine(), served.registry, itertools.count()
    local = memoryview(bytearray(800_000))
    engine.transfer([served.op(local)], soon())
    using = registry.using

    def using_until_dropped(entry: Entry) -> Any:
        if next(calls) == 1:  # the second piece: some bytes are under way
            registry.drop(entry.slot, entry.key, soon())
        return using(entry)

    monkeypatch.setattr(registry, "using", using_until_dropped)
    with pytest.raises(BufferGoneError, match="was dropped by its owner"):
        engine.transfer([served.op(local, write)], soon())
    other = registry.add(memory_of(memoryview(bytearray(b"another!" * 100_000))))
    target = Target(other.slot, other.key, 0, 0, other.memory.nbytes)
    engine.transfer([Op(False, memory_of(local).address, len(local), target)], soon())
    assert local == b"another!" * 100_000
    assert served.server.refused == 0


def test_a_stranger_gets_nothing(served: Served) -> None:
    local = memoryview(bytearray(8))
    with pytest.raises(PeerLostError, match=r"hung up|reset"):
        served.engine(b"x" * 32).transfer([served.op(local)], soon())
    assert served.server.refused == 1
    with socket.create_connection(served.server.addresses[0]) as stranger:
        assert len(stranger.recv(64)) == protocol.NONCE_BYTES
        entry = served.entry
        stranger.sendall(protocol.REQUEST.pack(protocol.READ, entry.slot, entry.key, 0, 8) * 2)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(64) == b""


def test_an_owner_without_the_secret_gets_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        engine = TcpEngine([listener.getsockname()], b"s" * 32, 1, 2**16, Workers().run)
        local = memoryview(bytearray(8))
        op = Op(True, memory_of(local).address, 8, Target(0, 1, 0, 0, 8))
        came: list[bytes] = []

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"n" * 32)
                connection.recv(64, socket.MSG_WAITALL)
                connection.sendall(b"p" * 32)
                came.append(connection.recv(64))

        workers = Workers()
        workers.run(pretend)
        with pytest.raises(RDMAError, match="does not know the owner's secret"):
            engine.transfer([op], soon())
        while not came:
            time.sleep(0.001)
        assert came == [b""]


def test_an_owner_that_hangs_runs_into_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        engine = TcpEngine([listener.getsockname()], b"s" * 32, 1, 2**16, Workers().run)
        local = memoryview(bytearray(8))
        with pytest.raises(RDMAError):
            engine.transfer([Op(False, memory_of(local).address, 8, Target(0, 1, 0, 0, 8))], soon(0.05))


# ---- devices


def make_device(
    root: Path, name: str, gids: dict[int, tuple[str, str]], state: str = "4: ACTIVE", node: int = 0
) -> None:
    port = root / name / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs" / "types").mkdir(parents=True)
    (root / name / "device").mkdir()
    (root / name / "device" / "numa_node").write_text(f"{node}\n")
    (port / "state").write_text(f"{state}\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    for index, (gid, kind) in gids.items():
        (port / "gids" / str(index)).write_text(f"{gid}\n")
        (port / "gid_attrs" / "types" / str(index)).write_text(f"{kind}\n")


LINK_LOCAL, MAPPED = "fe80:0000:0000:0000:0506:07ff:fe08:090a", "0000:0000:0000:0000:0000:ffff:0a00:0001"


def test_the_best_address_of_a_port(tmp_path: Path) -> None:
    gids = {
        0: (LINK_LOCAL, "IB/RoCE v1"),
        1: (LINK_LOCAL, "RoCE v2"),
        2: (MAPPED, "IB/RoCE v1"),
        3: (MAPPED, "RoCE v2"),
        4: ("0000:0000:0000:0000:0000:0000:0000:0000", "RoCE v2"),
    }
    make_device(tmp_path, "mlx5_0", gids)
    (port,) = ports(tmp_path)
    assert (port.device, port.number, port.gid.index, port.rate) == ("mlx5_0", 1, 3, 400.0)


def test_the_nearest_active_device(tmp_path: Path) -> None:
    for index, (state, node) in enumerate([("1: DOWN", 1), ("4: ACTIVE", 0), ("4: ACTIVE", 1)]):
        make_device(tmp_path, f"mlx5_{index}", {0: (MAPPED, "RoCE v2")}, state, node)
    found = ports(tmp_path)
    near, named = choose(found, "", {1}), choose(found, "nic:mlx5_1", {1})
    assert near is not None
    assert named is not None
    assert (near.device, named.device) == ("mlx5_2", "mlx5_1")
    of_node = choose(found, "cpu:0", {1}, ("pci0000:00",))
    assert of_node is not None
    assert of_node.device == "mlx5_1"
    for target in ("nic:mlx5_0", "gpu", "gpu:0", "gpu:-1", "cpu:x", "nic:", "tpu:0"):
        with pytest.raises(ConfigError, match="rdma_ibverbs_target"):
            choose(found, target, {1})
    assert choose([], "", {0}) is None


def test_the_device_behind_the_gpus_switch(tmp_path: Path) -> None:
    """As on nodes of eight GPUs and eight adapters: all are on the NUMA node, one is behind the same switch."""
    for index in range(4):
        make_device(tmp_path / "class", f"mlx5_{index}", {0: (MAPPED, "RoCE v2")}, node=0)
        switch = tmp_path / f"devices/pci0000:0{index // 2}/0000:0{index // 2}:01.0/0000:{index}0:00.0"
        (switch / "0000:aa:00.0").mkdir(parents=True)
        (tmp_path / "class" / f"mlx5_{index}" / "device").rename(switch / "nic")
        (tmp_path / "class" / f"mlx5_{index}" / "device").symlink_to(switch / "nic")
    gpu = bridges(tmp_path / "devices/pci0000:01/0000:01:01.0/0000:20:00.0/0000:aa:00.0")
    assert gpu == ("pci0000:01", "0000:01:01.0", "0000:20:00.0")
    found = ports(tmp_path / "class")
    chosen = choose(found, "", {0}, gpu)
    assert chosen is not None
    assert chosen.device == "mlx5_2"
    other = ("pci0000:00", "0000:00:01.0", "0000:10:00.0")
    asked = choose(found, "gpu:1", {0}, gpu, lambda: [gpu, other])
    assert asked is not None
    assert asked.device == "mlx5_1"
    with pytest.raises(ConfigError, match="has 2 GPUs"):
        choose(found, "gpu:2", {0}, gpu, lambda: [gpu, other])
    beside = choose([port for port in found if port.device != "mlx5_2"], "", {0}, gpu)
    assert beside is not None
    assert beside.device == "mlx5_3", "the same root"


class Gpu(NamedTuple):
    platform: str
    uuid: str
    pci_address: str


@pytest.mark.parametrize(
    ("seen", "current", "expected"),
    [
        ("", None, ()),
        ("1,0", None, ()),
        ("1", None, ("pci0000:00", "0000:21:00.0")),
        ("1", 7, ("pci0000:00", "0000:21:00.0")),
        ("1,0", 0, ("pci0000:00", "0000:21:00.0")),
        ("1,0", 1, ("pci0000:00", "0000:11:00.0")),
    ],
)
def test_the_gpu_that_a_process_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str, current: int | None, expected: tuple[str, ...]
) -> None:
    gpus = [Gpu("cuda", f"GPU-{index}", f"0000:{index}1:00.0") for index in (1, 2)]
    for gpu in gpus:
        slot = tmp_path / f"devices/pci0000:00/{gpu.pci_address[:7]}:00.0" / gpu.pci_address
        slot.mkdir(parents=True)
        (tmp_path / gpu.pci_address).symlink_to(slot)
    monkeypatch.setattr("monarch_slurm.rdma.verbs_devices.gpu_devices", lambda: gpus)
    monkeypatch.setattr("monarch_slurm.rdma.verbs_devices.gpu_platform", lambda: "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert own_gpu(current, tmp_path) == expected


def test_a_port_that_was_down_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[Any] = []
    opened: list[Any] = []
    for name, value in (("_host", None), ("_host_pid", 0), ("_look_again_at", 0.0)):
        monkeypatch.setattr(verbs, name, value)
    monkeypatch.setattr(verbs, "_LOOK_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(verbs_devices, "ports", lambda: list(ports))
    monkeypatch.setattr(verbs, "_open", lambda port: opened.append(port) or port)
    assert verbs.verbs_host() is None
    ports.append(Port("mlx5_0", 1, Gid(0, ipaddress.IPv6Address("::1"), "RoCE v2"), 0, 100.0))
    assert verbs.verbs_host() is ports[0]
    assert verbs.verbs_host() is ports[0]
    assert opened == ports


def test_no_text_has_a_buffers_key() -> None:
    target = Target(3, 987654321, 0, 0, 8)
    assert "987654321" not in repr(target) + repr(Op(True, 0, 8, target))


def test_a_small_memlock_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (65536, 65536))
    assert "ulimit -l" in registration_text(12, 10**6, "mlx5_0")
    assert "ulimit -l" not in registration_text(22, 10**6, "mlx5_0")


def test_other_hosts_reach_the_program_at_the_address_that_it_published(monkeypatch: pytest.MonkeyPatch) -> None:
    here = manager()
    with pytest.raises(NoBackendError, match="published no address"):
        here._open_tcp(here.home.process, {"network": "another"})
    monkeypatch.setattr(type(client().hub), "addresses", ["127.0.0.2"])
    answer = here._open_tcp(here.home.process, {"network": "another"})
    assert [address for address, _ in answer["addresses"]] == ["127.0.0.2"]
    monkeypatch.setenv("MONARCH_SLURM_ADDRESS", "127.0.0.3")
    answer = here._open_tcp(here.home.process, {"network": "another"})
    assert [address for address, _ in answer["addresses"]] == ["127.0.0.3"]
    same = here._open_tcp(here.home.process, {"network": network_id()})
    assert [address for address, _ in same["addresses"]] == ["127.0.0.1"]
