"""Transfers by an RDMA device (ibverbs): the owner's CPU takes no part.

One device, port and address per process (see `verbs_devices`). An asking process makes a few reliable queue pairs to an
owner, whose manager answers with as many; afterwards only the device works. Memory is registered when it is first used:
an owner's buffer until it is dropped, local memory as `registration` says. When a transfer fails, its queue pairs are
destroyed, so that nothing touches local memory any more; the next one makes new ones.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from monarch_slurm.config import settings
from monarch_slurm.errors import ConfigError
from monarch_slurm.native_build import NativeBuildError, load_native
from monarch_slurm.rdma import verbs_devices
from monarch_slurm.rdma.bounce import bounced
from monarch_slurm.rdma.engine import Op, Target, remaining
from monarch_slurm.rdma.errors import (
    BufferGoneError,
    DeviceError,
    NoDirectWayError,
    PeerLostError,
    RDMAError,
    RDMATimeoutError,
    RegistrationError,
)
from monarch_slurm.rdma.gpu_direct import GpuDirect
from monarch_slurm.rdma.lanes import Lanes
from monarch_slurm.rdma.memory import Stager
from monarch_slurm.rdma.options import chunk_bytes, transports
from monarch_slurm.rdma.registration import RegistrationCache
from monarch_slurm.rdma.registry import Entry, Registry
from monarch_slurm.wire import Address

logger = logging.getLogger(__name__)

_DEPTH = 16
"""Chunks under way on one queue pair."""
_CHUNK_BYTES = 2**20
_MAX_LANES = 4
"""Batches at a time to one owner, each with queue pairs of its own."""

Fields = dict[str, Any]
Ask = Callable[[str, Fields, float], Fields]
Buffer = tuple[int, int]
"""Slot and key."""


class VerbsHost:
    """The device of this process, what is registered with it, and the queue pairs of peers. For any thread."""

    def __init__(self, native: Any, port: verbs_devices.Port) -> None:
        self.port = port
        self.native = native
        self.gpu_direct = GpuDirect(native, port.device)
        self._lock = threading.Lock()
        self._device: Any = None
        self._exported: dict[int, tuple[int, Any]] = {}
        self._passive: dict[tuple[Address, int], Any] = {}
        self.cache = RegistrationCache(self.register, settings().rdma_registration_cache_mb * 2**20)

    @property
    def device(self) -> Any:
        """The open device.

        Raises:
            DeviceError: it cannot be opened.
        """
        with self._lock:
            if self._device is None:
                try:
                    self._device = self.native.Device(self.port.device, self.port.number, self.port.gid.index)
                except OSError as error:
                    raise DeviceError(f"cannot open RDMA device {self.port.device}: {error.args[-1]}") from None
            return self._device

    def register(
        self, address: int, nbytes: int, local_write: bool, remote: bool = False, stager: Stager | None = None
    ) -> Any:
        """Return a registration of memory; it ends when the object dies.

        Raises:
            RegistrationError: the device does not take it.
            NoDirectWayError: it is memory of a GPU (``stager``), which the device cannot reach.
        """
        device = self.device
        if stager is not None:
            return self.gpu_direct.register(device, stager, nbytes, local_write, remote)
        try:
            return self.native.Region(device, address, nbytes, local_write, remote)
        except OSError as error:
            raise RegistrationError(registration_text(error.args[0], nbytes, self.port.device)) from None

    def make_link(self, count: int) -> Any:
        """Return queue pairs that are not connected yet.

        Raises:
            DeviceError: the device has no more.
        """
        device = self.device
        try:
            return self.native.Link(device, count, _DEPTH)
        except OSError as error:
            raise DeviceError(f"cannot make queue pairs on {self.port.device}: {error.args[-1]}") from None

    def facts(self, link: Any) -> Fields:
        """Return what the other end needs to know of ``link``."""
        device = self.device
        return {"numbers": link.numbers, "gid": device.gid, "lid": device.lid, "mtu": device.mtu}

    def connect(self, link: Any, peer: Fields) -> None:
        """Connect ``link`` to the queue pairs that ``peer`` tells of.

        Raises:
            DeviceError: the device refuses; mostly because there is no route to that address.
        """
        try:
            link.connect(peer["numbers"], peer["gid"], peer["lid"], peer["mtu"])
        except (OSError, ValueError) as error:
            raise DeviceError(f"cannot connect queue pairs of {self.port.device}: {error.args[-1]}") from None

    # ---- the owner's part

    def connect_peer(self, asking: Address, fields: Fields) -> Fields:
        """Answer a process that wants to reach this one's memory; its earlier queue pairs are given back."""
        link = self.make_link(len(fields["numbers"]))
        self.connect(link, fields)
        with self._lock:
            old = self._passive.pop((asking, fields["link"]), None)
            self._passive[asking, fields["link"]] = link
        del old  # outside of the lock: the device may take its time
        return self.facts(link)

    def forget_peer(self, asking: Address) -> None:
        """The process is gone: give back its queue pairs."""
        with self._lock:
            gone = [self._passive.pop(key) for key in list(self._passive) if key[0] == asking]
        del gone

    def export(self, entry: Entry, registry: Registry) -> int:
        """Return the key by which devices of peers reach a buffer, registering it at the first call."""
        with registry.using(entry), self._lock:
            known = self._exported.get(entry.slot)
        if known is not None and known[0] == entry.key:
            return int(known[1].rkey)
        memory = entry.memory
        with registry.using(entry):  # a drop waits until it can see the registration
            region = self.register(memory.address, memory.nbytes, not memory.readonly, True, memory.stager)
            with self._lock:
                known = self._exported.setdefault(entry.slot, (entry.key, region))
        return int(known[1].rkey)

    def drop(self, entry: Entry) -> None:
        """End the registration of a buffer; when this returns no device touches it."""
        with self._lock:
            known = self._exported.pop(entry.slot, None)
        del known


class _Lane:
    """Queue pairs to an owner, for one batch at a time; None before they are connected."""

    def __init__(self) -> None:
        self.link: Any = None


class VerbsEngine:
    """Transfers from and to one process.

    Args:
        host: the device of this process.
        ask: asks the owner's manager.
    """

    name = "ibverbs"
    takes_devices = True

    def __init__(self, host: VerbsHost, ask: Ask) -> None:
        self._host = host
        self._ask = ask
        self._lanes = Lanes(_Lane, 1, _MAX_LANES)
        self._rkeys: dict[int, tuple[int, int]] = {}
        """By slot: key of the buffer that was last known there, and the device's key for it."""
        self._lost = ""

    def transfer(self, ops: Sequence[Op], deadline: float) -> None:
        """See `Engine.transfer`."""
        rkeys = self._learn_keys({(op.target.slot, op.target.key) for op in ops}, deadline)
        (lane,) = self._lanes.take(1, deadline)
        try:
            try:
                regions = self._regions(ops)
            except NoDirectWayError:  # local memory of a GPU; the owner's is reached all the same
                bounced(ops, lambda hosted: self._run(lane, hosted, self._regions(hosted), rkeys, deadline))
            else:
                self._run(lane, ops, regions, rkeys, deadline)
        finally:
            self._lanes.give([lane])

    def _regions(self, ops: Sequence[Op]) -> list[Any]:
        cache = self._host.cache
        return [cache.get(op.address, op.nbytes, not op.write, op.anchor, op.stager) for op in ops]

    def _run(
        self, lane: _Lane, ops: Sequence[Op], regions: Sequence[Any], rkeys: dict[Buffer, int], deadline: float
    ) -> None:
        copies = [
            (
                op.write,
                op.address,
                region.lkey,
                op.target.address + op.offset,
                rkeys[op.target.slot, op.target.key],
                op.nbytes,
            )
            for op, region in zip(ops, regions, strict=True)
        ]
        if lane.link is None:
            lane.link = self._connect(lane, deadline)
        kind, text = lane.link.transfer(copies, min(_CHUNK_BYTES, chunk_bytes()), remaining(deadline))
        if kind:
            lane.link = None
            raise self._explain(kind, text, [op.target for op in ops], deadline)

    def lost(self, reason: str) -> None:
        """See `Engine.lost`."""
        self._lost = reason
        for lane in list(self._lanes.all):
            link = lane.link
            if link is not None:
                link.cancel()

    def close(self) -> None:
        """See `Engine.close`."""
        for lane in self._lanes.all:
            lane.link = None

    def _connect(self, lane: _Lane, deadline: float) -> Any:
        link = self._host.make_link(settings().rdma_qps_per_peer)
        answer = self._ask("verbs_connect", {**self._host.facts(link), "link": id(lane)}, deadline)
        self._host.connect(link, answer)
        return link

    def _learn_keys(self, buffers: Collection[Buffer], deadline: float) -> dict[Buffer, int]:
        """Return the device's keys for ``buffers``."""
        known = {buffer: self._rkeys.get(buffer[0], (0, 0)) for buffer in buffers}
        rkeys = {buffer: rkey for buffer, (key, rkey) in known.items() if buffer[1] == key}
        unknown = [buffer for buffer in buffers if buffer not in rkeys]
        if unknown:
            answer = self._ask("verbs_register", {"buffers": unknown}, deadline)
            rkeys.update(zip(unknown, answer["rkeys"], strict=True))
            self._rkeys.update({slot: (key, rkeys[slot, key]) for slot, key in unknown})
        return rkeys

    def _explain(self, kind: str, text: str, targets: Sequence[Target], deadline: float) -> RDMAError:
        port = f"{self._host.port.device} port {self._host.port.number}"
        if self._lost:
            return PeerLostError(f"the owner of the buffer is gone: {self._lost}")
        if kind == "peer":
            return PeerLostError(f"the owner of the buffer does not answer on the RDMA network: {text} ({port})")
        if kind == "access":
            # The device says only that a key opened nothing; the owner knows which buffer is gone.
            buffers = {(target.slot, target.key) for target in targets}
            for buffer in buffers:
                self._rkeys.pop(buffer[0], None)
            try:
                self._learn_keys(buffers, deadline)
            except RDMAError as error:
                return error
            return BufferGoneError(f"the owner's device refused the transfer: {text} ({port})")
        if kind in ("timeout", "cancelled"):
            return RDMATimeoutError(f"{text} ({port})")
        if kind == "local":
            return RegistrationError(f"the local memory is not what was registered: {text} ({port})")
        return DeviceError(f"{text} ({port})")


def registration_text(code: int, nbytes: int, device: str) -> str:
    """Return what to say when registering fails with errno ``code``."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = f"cannot register {nbytes} bytes with RDMA device {device}: {os.strerror(code)}"
    if code in (errno.ENOMEM, errno.EPERM, errno.EAGAIN) and soft != resource.RLIM_INFINITY:
        text += (
            f". The limit of locked memory is {soft} bytes (`ulimit -l`); under Slurm set "
            "PropagateResourceLimitsExcept=MEMLOCK and LimitMEMLOCK=infinity for slurmd"
        )
    return text


_LOOK_AGAIN_SECONDS = 10.0
"""A port that is down at the first look may come up."""

_host: VerbsHost | None = None
_host_pid = 0
_look_again_at = 0.0
_host_lock = threading.Lock()


def verbs_host() -> VerbsHost | None:
    """Return the RDMA device of this process; None if it has none, may not use it, or cannot load what it takes.

    Raises:
        ConfigError: the setting ``rdma_ibverbs_target`` is wrong, or names what is not there.
    """
    global _host, _host_pid, _look_again_at
    if "ibverbs" not in transports():
        return None
    with _host_lock:
        if _host_pid != os.getpid():
            _host, _host_pid, _look_again_at = None, os.getpid(), 0.0
        if _host is None and time.monotonic() >= _look_again_at:
            port = _port(settings().rdma_ibverbs_target)
            # What is wrong with a device, or with the native module, has been told and is not asked again.
            _look_again_at = time.monotonic() + _LOOK_AGAIN_SECONDS if port is None else math.inf
            _host = _open(port) if port is not None else None
        return _host


def _port(target: str) -> verbs_devices.Port | None:
    ports = verbs_devices.ports()
    if not ports:
        return None
    nodes, gpu = verbs_devices.own_numa_nodes(), verbs_devices.own_gpu(verbs_devices.current_gpu())
    return verbs_devices.choose(ports, target, nodes, gpu, verbs_devices.all_gpus)


def _open(port: verbs_devices.Port) -> VerbsHost | None:
    try:
        native = load_native("_rdma")
    except (NativeBuildError, ConfigError, ImportError) as error:
        logger.warning("RDMA device %s is not used, since the native module is not there: %s", port.device, error)
        return None
    if not native.has_verbs:
        logger.warning(
            "RDMA device %s is not used: the native module was built without libibverbs' headers", port.device
        )
        return None
    host = VerbsHost(native, port)
    try:
        host.device  # noqa: B018 - opened here, so that a device that cannot be opened counts as none
    except (DeviceError, native.LibraryMissing) as error:
        logger.warning("RDMA device %s is not used: %s", port.device, error)
        return None
    return host
