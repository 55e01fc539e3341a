"""The engines to one process: made when they are first needed, given back when it has ended and nobody uses them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from monarch_slurm.config import revision, settings
from monarch_slurm.host.identity import pid_space
from monarch_slurm.rdma import samehost
from monarch_slurm.rdma.control import Fields
from monarch_slurm.rdma.engine import Engine, remaining
from monarch_slurm.rdma.errors import NoBackendError, PeerLostError, RDMAError
from monarch_slurm.rdma.gpu_ipc import GpuIpc
from monarch_slurm.rdma.options import chunk_bytes, transports
from monarch_slurm.rdma.samehost import SameHost, SameHostMapped
from monarch_slurm.rdma.tcp_client import TcpEngine
from monarch_slurm.rdma.verbs import VerbsEngine, verbs_host
from monarch_slurm.wire import Address

if TYPE_CHECKING:
    from monarch_slurm.rdma.manager import Manager

logger = logging.getLogger(__name__)


class Home(NamedTuple):
    """The process that owns a buffer, and the port of its manager."""

    host: str
    proc: str
    port: int

    @property
    def process(self) -> Address:
        """The owner's address."""
        return Address(self.host, self.proc)


class Peer:
    """The engines to one process, made when they are first needed."""

    def __init__(self, manager: Manager, home: Home) -> None:
        self._manager = manager
        self.home = home
        self._lock = threading.Lock()
        self._card: Fields | None = None
        self._engines: dict[str, Engine | None] = {}
        self._not_for_devices: set[str] = set()
        self._chosen: dict[tuple[bool, bool], tuple[int, Engine]] = {}
        self._lost = ""
        self._users = 0
        self._users_lock = threading.Lock()
        manager.control.watch(home.process, self.gone)

    def gone(self, reason: str) -> None:
        """The process has ended: wake who waits for it, and give back what the engines hold once nobody uses them."""
        self._lost = reason
        for engine in list(self._engines.values()):
            if engine is not None:
                engine.lost(reason)
        self._manager.workers.run(self._give_back)

    def enter(self) -> None:
        """Keep the engines until `leave`."""
        with self._users_lock:
            self._users += 1

    def leave(self) -> None:
        """See `enter`."""
        with self._users_lock:
            self._users -= 1
        if self._lost:
            self._give_back()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the engines while the block runs."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def _give_back(self) -> None:
        with self._users_lock:
            if self._users:
                return
            engines = [engine for engine in self._engines.values() if engine is not None]
            self._engines.clear()
            self._chosen.clear()
        for engine in engines:
            engine.close()

    def engine(self, mapped: bool, direct: bool, deadline: float, without: Set[str] = frozenset()) -> Engine:
        """Return the best engine: for memory that can be ``mapped``, or that the CPU can reach at all (``direct``)."""
        if self._lost:
            raise PeerLostError(f"the owner of the buffer is gone: {self._lost}")
        settled = None if without else self.settled(mapped, direct)
        if settled is not None:
            return settled
        now = revision()
        engine = self._choose(mapped, direct, deadline, without)
        if not without:
            self._chosen[mapped, direct] = now, engine
        return engine

    def settled(self, mapped: bool, direct: bool) -> Engine | None:
        """Return the engine that `engine` would return without asking anybody; None when it would have to ask."""
        if self._lost:
            return None
        chosen_at, engine = self._chosen.get((mapped, direct), (-1, None))
        return engine if chosen_at == revision() else None

    def _choose(self, mapped: bool, direct: bool, deadline: float, without: Set[str]) -> Engine:
        allowed = transports() - without
        if not self._lock.acquire(timeout=remaining(deadline)):
            remaining(deadline)
        try:
            card = self._card
            if card is None:
                card = self._card = self._manager.ask(self.home, "card", {}, deadline)
            common = allowed & set(card["transports"])
            if direct:
                if "shm" in common and mapped and (found := self._get("shm", card, deadline)) is not None:
                    return found
                for name in ("process_vm", "ibverbs"):
                    if name in common and (found := self._get(name, card, deadline)) is not None:
                        return found
            else:
                for name in ("gpu_ipc", "ibverbs"):
                    usable = name in common and name not in self._not_for_devices
                    if usable and (found := self._get(name, card, deadline)) is not None:
                        return found
            if "tcp" in common and (found := self._get("tcp", card, deadline)) is not None:
                return found
        finally:
            self._lock.release()
        raise NoBackendError(
            f"no compatible RDMA backend for buffer of {self.home.process}: allowed here {sorted(allowed)}, there "
            f"{sorted(card['transports'])}"
        )

    def _get(self, name: str, card: Fields, deadline: float) -> Engine | None:
        if name not in self._engines:
            self._engines[name] = getattr(self, f"_make_{name}")(card, deadline)
        return self._engines[name]

    def _make_process_vm(self, card: Fields, deadline: float) -> Engine | None:
        if card["pids"] != pid_space():
            return None
        try:
            return SameHost(card["pid"], card["nonce_address"], card["nonce"], card["lock_fd"])
        except (OSError, RDMAError):
            return None  # another PID namespace, or a kernel that forbids it

    def _make_shm(self, card: Fields, deadline: float) -> Engine | None:
        same = self._get("process_vm", card, deadline)
        return SameHostMapped(same) if isinstance(same, SameHost) else None

    def _make_gpu_ipc(self, card: Fields, deadline: float) -> Engine | None:
        same = self._get("process_vm", card, deadline)
        if not isinstance(same, SameHost):
            return None

        def ask(kind: str, fields: Fields, by: float) -> Fields:
            return self._manager.ask(self.home, kind, {**fields, "home": tuple(self._manager.home)}, by)

        return GpuIpc(same, card["pid"], ask, self._manager.workers.run)

    def give_up(self, name: str, why: str) -> None:
        """Do without an engine for memory of GPUs from now on."""
        logger.warning("memory of GPUs of %s is not reached by %s, but more slowly: %s", self.home.process, name, why)
        self._not_for_devices.add(name)
        self._chosen.clear()

    def forget(self, allocations: Sequence[int]) -> None:
        """The owner has dropped all buffers in these allocations of GPU memory."""
        engine = self._engines.get("gpu_ipc")
        if isinstance(engine, GpuIpc):
            engine.forget(allocations)

    def _make_ibverbs(self, card: Fields, deadline: float) -> Engine | None:
        verbs = verbs_host()
        if verbs is None or not card["verbs"]:
            return None
        return VerbsEngine(verbs, lambda kind, fields, by: self._manager.ask(self.home, kind, fields, by))

    def _make_tcp(self, card: Fields, deadline: float) -> Engine:
        answer = self._manager.ask(self.home, "tcp", {"network": samehost.network_id()}, deadline)
        addresses = [(address, port) for address, port in answer["addresses"]]
        spawn = self._manager.workers.run
        return TcpEngine(addresses, answer["secret"], settings().rdma_tcp_streams, chunk_bytes(), spawn)
