"""Transfers over soft-RoCE, and what goes wrong on such a network, in two QEMU guests. Run by test_verbs.py.

Argument: a folder that both guests share. Node 0 is the controller; first its processes reach each other, then those
of node 1.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import monarch_slurm.actor
from monarch_slurm.actor import HostMesh, SupervisionError, shutdown_context, this_host
from monarch_slurm.config import configure
from monarch_slurm.controller import gather_hosts, publish
from monarch_slurm.host.start import serve
from monarch_slurm.rdma import RDMABuffer, RegistrationError, get_rdma_backend, recent_transfers
from rdma.actors import Holder, digest, pattern

MIB = 2**20
WAIT = 300
"""Seconds for anything that is to come; an emulated machine on a busy one takes its time."""


def bootstrap(memlock: int | None = None) -> None:
    configure(rdma_transports="ibverbs,local")
    if memlock is not None:
        lose_ipc_lock()
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock, memlock))


def lose_ipc_lock() -> None:
    """Give up CAP_IPC_LOCK, with which root may lock as much as it likes, for this thread and those it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    for word in range(3):
        data[word] &= ~(1 << 14)
    assert libc.capset(header, data) == 0


def shell(command: str) -> None:
    subprocess.run(command, shell=True, check=True)


def step(text: str) -> None:
    print(f"rdma: {time.monotonic():.0f} s: {text}", flush=True)


def spawn(host: HostMesh, count: int = 1, memlock: int | None = None) -> Any:
    procs = host.spawn_procs(per_host={"procs": count}, bootstrap=lambda: bootstrap(memlock))
    return procs.spawn("holder", Holder)


def check(user: Any, buffer: RDMABuffer, seed: int) -> None:
    assert user.read.call_one(buffer).get(WAIT) == (digest(pattern(buffer.size(), seed)), "ibverbs")


def every_size(owner: Any, user: Any, sizes: list[int]) -> None:
    for index, size in enumerate(sizes):
        step(f"{size} bytes each way")
        buffer = owner.make.call_one(size, index).get(WAIT)
        check(user, buffer, index)
        assert user.write.call_one(buffer, size, index + 50).get(WAIT) == "ibverbs"
        assert owner.digest_of.call_one(index).get(WAIT) == digest(pattern(size, index + 50))


def buffers_and_keys(owner: Any, user: Any) -> None:
    step("100 buffers in one action")
    sizes = [1 + 7919 * index % 60_000 for index in range(100)]
    buffers = owner.make_many.call_one(sizes).get(WAIT)
    came = user.add_up.call_one(buffers).get(WAIT)
    assert came == [digest(pattern(size, index)) for index, size in enumerate(sizes)]
    step("a wrong key, and a dropped buffer")
    buffer, fields = buffers[0], buffers[0]._target_fields()
    buffer._target = buffer._target.__class__(fields[0], 12345, *fields[2:])
    kind, text = user.read_error.call_one(buffer).get(WAIT)
    assert (kind, "not found" in text) == ("BufferGoneError", True)
    buffers[1].drop().get(WAIT)
    kind, text = user.read_error.call_one(buffers[1]).get(WAIT)
    assert (kind, "(ibverbs)" in text) == ("BufferGoneError", True)
    check(user, buffers[2], 2)
    step("a wrong key that reaches the device")
    user.spoil_key.call_one(buffers[2]).get(WAIT)
    kind, text = user.read_error.call_one(buffers[2]).get(WAIT)
    assert (kind, "the owner's device refused the transfer" in text) == ("BufferGoneError", True), (kind, text)
    check(user, buffers[2], 2)


def memory_of_a_gpu(owner: Any, user: Any) -> None:
    """Host memory stands in for it: no driver makes a dmabuf of it, so that it is registered by its address."""
    buffer = owner.make_device.call_one(300_001, 5).get(WAIT)
    check(user, buffer, 5)
    assert user.read_to_device.call_one(buffer).get(WAIT) == (digest(pattern(300_001, 5)), "ibverbs")


def link_down_and_up(owner: Any, user: Any) -> None:
    buffer = owner.make.call_one(100_000, 1).get(WAIT)
    check(user, buffer, 1)
    shell("ip link set rdma down")
    try:
        kind, text = user.read_error.call_one(buffer).get(WAIT)
    finally:
        shell("ip link set rdma up")
    assert kind == "DeviceError", (kind, text)
    assert "port of the RDMA device is down" in text, text
    wait_for_gid()
    check(user, buffer, 1)


def wait_for_gid() -> None:
    """The address of the port comes back a moment after the link."""
    gid = Path("/sys/class/infiniband/rxe0/ports/1/gids/1")
    end = time.monotonic() + WAIT
    while "ffff:0a4d" not in gid.read_text():
        assert time.monotonic() < end, "the port has no address"
        time.sleep(0.05)


def small_memlock(host: HostMesh, rich: Any) -> None:
    poor = spawn(host, memlock=64 * 1024)
    buffer = rich.make.call_one(1_000_000, 1).get(WAIT)
    kind, text = poor.read_error.call_one(buffer).get(WAIT)
    assert kind == RegistrationError.__name__, (kind, text)
    assert "ulimit -l" in text, text
    small = rich.make.call_one(1000, 2).get(WAIT)
    check(poor, small, 2)


def killed_peer(host: HostMesh, user: Any) -> None:
    doomed = spawn(host)
    buffer = doomed.make.call_one(100_000, 3).get(WAIT)
    check(user, buffer, 3)
    user.be_deaf.call_one(buffer).get(WAIT)
    os.kill(doomed.pid.call_one().get(WAIT), signal.SIGKILL)
    # Until it has ended, which takes a while here, the device still reads its memory.
    assert isinstance(doomed.pid.call_one().exception(WAIT), SupervisionError)
    kind, text = user.read_error.call_one(buffer).get(WAIT)
    assert kind == "PeerLostError", (kind, text)
    # Whoever has not heard of it yet is told by the queue pair.
    kind, text = user.read_by_queue_pair.call_one(buffer).get(WAIT)
    assert (kind, "does not answer on the RDMA network" in text) == ("PeerLostError", True), (kind, text)


def in_one_guest() -> None:
    host = this_host()
    holders = spawn(host, 2)
    owner, user = holders.slice(procs=0), holders.slice(procs=1)
    every_size(owner, user, [1, 4095, 1_000_003, 64 * MIB])
    buffers_and_keys(owner, user)
    step("memory of a GPU")
    memory_of_a_gpu(owner, user)
    step("link down and up")
    link_down_and_up(owner, user)
    step("killed peer")
    killed_peer(host, user)
    step("small memlock")
    small_memlock(host, owner)


def between_two(far: HostMesh) -> None:
    owner, users = spawn(far), spawn(this_host(), 3)
    user = users.slice(procs=0)
    every_size(owner, user, [1, 4097, 16 * MIB])
    step("many to one")
    buffer = owner.make.call_one(500_000, 9).get(WAIT)
    for _, came in users.read.call(buffer).get(WAIT).items():
        assert came == (digest(pattern(500_000, 9)), "ibverbs")
    step("2 % loss")
    shell("tc qdisc add dev rdma root netem loss 2%")
    try:
        check(user, buffer, 9)
        assert user.write.call_one(buffer, 500_000, 10).get(WAIT) == "ibverbs"
    finally:
        shell("tc qdisc del dev rdma root")
    check(user, buffer, 10)
    step("TCP")
    use_tcp()
    target = memoryview(bytearray(buffer.size()))
    spawn_tcp = far.spawn_procs(bootstrap=use_tcp).spawn("tcp", Holder)
    spawn_tcp.make.call_one(buffer.size(), 4).get(WAIT).read_into(target).get(WAIT)
    assert target == pattern(buffer.size(), 4)
    assert recent_transfers()[-1].backend == "tcp"


def use_tcp() -> None:
    configure(rdma_transports="tcp")


def main() -> None:
    folder = Path(sys.argv[1])
    if os.environ["RDMA_NODE"] != "0":
        serve(folder, name="far", address=os.environ["RDMA_IP"])
        return
    failures: list[Any] = []
    monarch_slurm.actor.unhandled_fault_hook = failures.append
    assert get_rdma_backend() == "ibverbs"
    publish(folder, address=os.environ["RDMA_IP"])
    in_one_guest()
    step("the other guest")
    between_two(gather_hosts(["far"], timeout=WAIT))
    shutdown_context().get(WAIT)
    step("all well")


if __name__ == "__main__":
    main()
