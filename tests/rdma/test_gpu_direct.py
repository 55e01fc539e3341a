"""Ways to register GPU memory with an RDMA device, on stand-ins for driver and device: which is taken, and when."""

from __future__ import annotations

import errno
import os
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from monarch_slurm.errors import MonarchSlurmError  # noqa: E402
from monarch_slurm.gpu import Dmabuf  # noqa: E402
from monarch_slurm.rdma.engine import Op, Target  # noqa: E402
from monarch_slurm.rdma.errors import NoDirectWayError  # noqa: E402
from monarch_slurm.rdma.gpu_direct import GpuDirect  # noqa: E402
from monarch_slurm.rdma.memory import Stager  # noqa: E402
from monarch_slurm.rdma.verbs import VerbsEngine, VerbsHost  # noqa: E402
from monarch_slurm.rdma.verbs_devices import Gid, Port  # noqa: E402


class Native:
    """A device that takes dmabufs, and foreign addresses, or not."""

    def __init__(self, dmabuf: bool = True, peer_memory: bool = True) -> None:
        self.made: list[tuple[Any, ...]] = []
        native = self

        class Region:
            lkey, rkey = 7, 9

            def __init__(self, device: Any, address: int, nbytes: int, *access: bool) -> None:
                if address in gpu_addresses and not peer_memory:
                    raise OSError(errno.EFAULT, "ibv_reg_mr failed: Bad address")
                native.made.append(("address", address, nbytes, *access))

            @classmethod
            def of_dmabuf(cls, device: Any, fd: int, offset: int, address: int, nbytes: int, *access: bool) -> Any:
                os.fstat(fd)  # it is open
                if not dmabuf:
                    raise OSError(errno.EOPNOTSUPP, "ibv_reg_dmabuf_mr failed: Operation not supported")
                native.made.append(("dmabuf", offset, address, nbytes, *access))
                return cls.__new__(cls)

        self.Region = Region


gpu_addresses: set[int] = set()


@pytest.fixture
def memory() -> Any:
    tensor = torch.arange(5000, dtype=torch.int32)
    gpu_addresses.add(tensor.data_ptr())
    yield tensor
    gpu_addresses.clear()


def export(address: int, size_bytes: int, device: int) -> Dmabuf:
    assert device == 0
    return Dmabuf(os.memfd_create("dmabuf"), address % 4096, size_bytes)


def refuse(address: int, size_bytes: int, device: int) -> Dmabuf:
    raise MonarchSlurmError("this driver cannot export a dmabuf")


def test_a_dmabuf_first(memory: Any) -> None:
    native, before = Native(), len(os.listdir("/proc/self/fd"))
    GpuDirect(native, "mlx5_0", export).register("device", Stager(memory), 20_000, True, False)
    address = memory.data_ptr()
    assert native.made == [("dmabuf", address % 4096, address, 20_000, True, False)]
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("dmabuf", "exports"), [(False, export), (True, refuse)])
def test_then_peer_memory_and_it_is_told_once(
    memory: Any, dmabuf: bool, exports: Any, caplog: pytest.LogCaptureFixture
) -> None:
    native = Native(dmabuf=dmabuf)
    direct = GpuDirect(native, "mlx5_0", exports)
    for _ in range(3):
        direct.register("device", Stager(memory), 20_000, True, True)
    assert native.made == [("address", memory.data_ptr(), 20_000, True, True)] * 3
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "mlx5_0 does not take GPU memory by dmabuf"
    ]


def test_neither(memory: Any) -> None:
    direct = GpuDirect(Native(dmabuf=False, peer_memory=False), "mlx5_0", export)
    for _ in range(2):
        with pytest.raises(NoDirectWayError, match=r"\(dmabuf: .*not supported; peer memory: .*Bad address\)"):
            direct.register("device", Stager(memory), 20_000, True, True)


def test_a_shortage_does_not_end_a_way(memory: Any) -> None:
    native, short = Native(), True

    def export_or_not(address: int, size_bytes: int, device: int) -> Dmabuf:
        if short:
            raise OSError(errno.EMFILE, "too many open files")
        return export(address, size_bytes, device)

    direct = GpuDirect(native, "mlx5_0", export_or_not)
    direct.register("device", Stager(memory), 20_000, True, False)
    short = False
    direct.register("device", Stager(memory), 20_000, True, False)
    assert [way for way, *_ in native.made] == ["address", "dmabuf"]


def test_a_refusal_for_now_is_no_lasting_one(memory: Any) -> None:
    def none_left(address: int, size_bytes: int, device: int) -> Dmabuf:
        raise OSError(errno.ENOMEM, "no memory")

    direct = GpuDirect(Native(peer_memory=False), "mlx5_0", none_left)
    with pytest.raises(NoDirectWayError) as refusal:
        direct.register("device", Stager(memory), 20_000, True, False)
    assert not refusal.value.lasting


class Link:
    """Queue pairs that note what is to be copied, and do it."""

    numbers = (1,)

    def __init__(self) -> None:
        self.copies: list[tuple[Any, ...]] = []

    def connect(self, *peer: Any) -> None:
        pass

    def transfer(self, copies: Any, chunk: int, seconds: float) -> tuple[str, str]:
        self.copies += copies
        return "", ""


@pytest.mark.parametrize("peer_memory", [True, False])
def test_local_memory_that_the_device_cannot_reach_bounces(
    memory: Any, peer_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = Gid(0, None, "RoCE v2")  # type: ignore[arg-type]
    host = VerbsHost(Native(dmabuf=False, peer_memory=peer_memory), Port("mlx5_0", 1, address, 0, 100.0))
    host.gpu_direct = GpuDirect(host.native, "mlx5_0", export)
    host._device = type("Device", (), {"gid": b"", "lid": 0, "mtu": 5})()
    link = Link()
    monkeypatch.setattr(host, "make_link", lambda count: link)

    def ask(kind: str, fields: dict[str, Any], deadline: float) -> dict[str, Any]:
        if kind == "verbs_register":
            return {"rkeys": [3] * len(fields["buffers"])}
        return {"numbers": [1], "gid": b"", "lid": 0, "mtu": 5}

    target = Target(0, 1, 0, 123, 20_000)
    op = Op(True, memory.data_ptr(), 20_000, target, None, Stager(memory))
    VerbsEngine(host, ask).transfer([op], time.monotonic() + 60)
    ((write, local, lkey, remote, rkey, nbytes),) = link.copies
    assert (write, lkey, remote, rkey, nbytes) == (True, 7, 123, 3, 20_000)
    assert (local == memory.data_ptr()) is peer_memory
