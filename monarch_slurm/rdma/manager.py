"""The transfer manager of a process: what peers may reach here, and the engines to those that are reached from here."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections.abc import Sequence, Set
from typing import NamedTuple

from monarch_slurm.actor.client import client
from monarch_slurm.actor.context import context
from monarch_slurm.actor.runtime import Runtime
from monarch_slurm.config import revision, settings
from monarch_slurm.host.identity import ADDRESS_VARIABLE, pid_space
from monarch_slurm.rdma import samehost
from monarch_slurm.rdma.bounce import on_host
from monarch_slurm.rdma.control import Control, Fields
from monarch_slurm.rdma.engine import Begun, Engine, Op, remaining
from monarch_slurm.rdma.errors import NoBackendError, NoDirectWayError, PeerLostError, RDMAError, RDMATimeoutError
from monarch_slurm.rdma.gpu_ipc import GpuExports, GpuIpc
from monarch_slurm.rdma.local import LocalEngine
from monarch_slurm.rdma.options import chunk_bytes, transports
from monarch_slurm.rdma.records import TransferRecord, records
from monarch_slurm.rdma.registry import Registry
from monarch_slurm.rdma.samehost import SameHost, SameHostMapped
from monarch_slurm.rdma.tcp_client import TcpEngine
from monarch_slurm.rdma.tcp_server import TcpServer
from monarch_slurm.rdma.verbs import VerbsEngine, VerbsHost, verbs_host
from monarch_slurm.rdma.workers import Workers
from monarch_slurm.wire import CONTROLLER, Address

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"


class Home(NamedTuple):
    """The process that owns a buffer, and the port of its manager."""

    host: str
    proc: str
    port: int

    @property
    def process(self) -> Address:
        """The owner's address."""
        return Address(self.host, self.proc)


class _Peer:
    """The engines to one process, made when they are first needed."""

    def __init__(self, manager: Manager, home: Home) -> None:
        self._manager = manager
        self._home = home
        self._lock = threading.Lock()
        self._card: Fields | None = None
        self._engines: dict[str, Engine | None] = {}
        self._not_for_devices: set[str] = set()
        self._chosen: dict[tuple[bool, bool], tuple[int, Engine]] = {}
        self._lost = ""
        manager.control.watch(home.process, self.gone)

    def gone(self, reason: str) -> None:
        """The process has ended."""
        self._lost = reason
        for engine in list(self._engines.values()):
            if engine is not None:
                engine.lost(reason)

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
                card = self._card = self._manager.ask(self._home, "card", {}, deadline)
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
            f"no compatible RDMA backend for buffer of {self._home.process}: allowed here {sorted(allowed)}, there "
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
            return self._manager.ask(self._home, kind, {**fields, "home": tuple(self._manager.home)}, by)

        return GpuIpc(same, card["pid"], ask, self._manager.workers.run)

    def give_up(self, name: str, why: str) -> None:
        """Do without an engine for memory of GPUs from now on."""
        logger.warning("memory of GPUs of %s is not reached by %s, but more slowly: %s", self._home.process, name, why)
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
        return VerbsEngine(verbs, lambda kind, fields, by: self._manager.ask(self._home, kind, fields, by))

    def _make_tcp(self, card: Fields, deadline: float) -> Engine:
        answer = self._manager.ask(self._home, "tcp", {"network": samehost.network_id()}, deadline)
        addresses = [(address, port) for address, port in answer["addresses"]]
        spawn = self._manager.workers.run
        return TcpEngine(addresses, answer["secret"], settings().rdma_tcp_streams, chunk_bytes(), spawn)


class Manager:
    """What `manager` returns: there is one in each process that uses buffers. For any thread."""

    def __init__(self, runtime: Runtime) -> None:
        self.pid = os.getpid()
        self.registry = Registry()
        self.workers = Workers()
        self.verbs: VerbsHost | None = None
        answers = {
            "card": self._card,
            "tcp": self._open_tcp,
            "drop": self._drop,
            "verbs_connect": self._verbs_connect,
            "verbs_register": self._verbs_register,
            "gpu_export": self._gpu_export,
            "gpu_forget": self._gpu_forget,
        }
        self.control = Control(runtime, answers, self.workers.run)
        self.home = Home(*runtime.address, self.control.port)
        self.local = LocalEngine(self.registry)
        self.gpu_exports = GpuExports(self.registry)
        self._lock = threading.Lock()
        self._peers: dict[Home, _Peer] = {}
        self._servers: dict[tuple[str, ...], TcpServer] = {}
        self._watched: set[Address] = set()
        samehost.allow_peers()

    def ask(self, home: Home, kind: str, fields: Fields, deadline: float) -> Fields:
        """Ask the manager of ``home``; see `Control.ask`."""
        return self.control.ask(home.process, home.port, kind, fields, deadline)

    def engine(self, home: Home, mapped: bool, direct: bool, deadline: float) -> Engine:
        """Return the best engine to ``home``."""
        return self.local if home == self.home else self._peer(home).engine(mapped, direct, deadline)

    def _peer(self, home: Home) -> _Peer:
        with self._lock:
            peer = self._peers.get(home)
            if peer is None:
                peer = self._peers[home] = _Peer(self, home)
        return peer

    def begin(self, home: Home, mapped: bool, direct: bool, ops: Sequence[Op]) -> Begun | None:
        """Begin ``ops``, which all go to ``home``, on the calling thread; None if that is a matter for `transfer`.

        Never on the main thread: what a signal handler raises there would leave the buffers held for ever.
        """
        if home == self.home or threading.current_thread() is threading.main_thread():
            return None
        engine = self._peer(home).settled(mapped, direct)
        if not isinstance(engine, (SameHost, SameHostMapped, GpuIpc)):
            return None
        if not engine.takes_devices and any(op.stager is not None for op in ops):
            return None
        started, name = time.monotonic(), engine.name
        try:
            begun = engine.begin(ops)
        except (RDMAError, OSError):
            return None  # `transfer` meets the same, and tells it
        return begun and begun.then(lambda failure: self._note(home, name, ops, started, failure))

    def transfer(self, home: Home, mapped: bool, direct: bool, ops: Sequence[Op], deadline: float) -> RDMAError | None:
        """Do ``ops``, which all go to ``home``; return what went wrong."""
        started = time.monotonic()
        backend, failure = "", None
        try:
            without: set[str] = set()
            engine = self.engine(home, mapped, direct, deadline)
            while True:
                backend = engine.name
                try:
                    self._transfer(engine, ops, deadline)
                    break
                except NoDirectWayError as error:
                    if error.lasting:
                        self._peer(home).give_up(engine.name, str(error))
                    without.add(engine.name)
                    engine = self._peer(home).engine(mapped, direct, deadline, without)
        except RDMAError as error:
            failure = error.by(backend)
        except Exception as error:  # a fault of this package; whoever waits must hear of it
            failure = RDMAError(f"unexpected: {error!r}").by(backend)
            failure.__cause__ = error
        self._note(home, backend or "none", ops, started, failure)
        return failure

    def _note(self, home: Home, backend: str, ops: Sequence[Op], started: float, failure: RDMAError | None) -> None:
        seconds = time.monotonic() - started
        text = None if failure is None else str(failure)
        nbytes = sum(op.nbytes for op in ops)
        records.add(TransferRecord(str(home.process), backend, len(ops), nbytes, seconds, text))

    def _transfer(self, engine: Engine, ops: Sequence[Op], deadline: float) -> None:
        if engine.takes_devices:
            engine.transfer(ops, deadline)
        else:
            with on_host(ops) as hosted:
                engine.transfer(hosted, deadline)

    def drop(self, slot: int, key: int, deadline: float) -> None:
        """Take back a buffer of this process; see `Registry.drop`."""
        entry = self.registry.drop(slot, key, deadline)
        if self.verbs is not None:
            self.verbs.drop(entry)
        for home, allocations in self.gpu_exports.drop(entry).items():
            with contextlib.suppress(PeerLostError, RDMATimeoutError):  # what a dead process has mapped is unmapped
                self.ask(home, "gpu_forget", {"allocations": allocations, "home": tuple(self.home)}, deadline)

    # ---- answers to peers

    def _card(self, _: Address, __: Fields) -> Fields:
        return {
            "pids": pid_space(),
            "pid": os.getpid(),
            "nonce_address": ctypes.addressof(self.registry.nonce),
            "nonce": bytes(self.registry.nonce),
            "lock_fd": self.registry.lock_fd,
            "transports": sorted(transports()),
            "verbs": verbs_host() is not None,
        }

    def _open_tcp(self, _: Address, fields: Fields) -> Fields:
        listen = (_LOOPBACK,) if fields["network"] == samehost.network_id() else tuple(self._reachable())
        with self._lock:
            server = self._servers.get(listen)
            if server is None:
                server = self._servers[listen] = TcpServer(self.registry, listen, settings().rdma_tcp_threads)
        return {"addresses": server.addresses, "secret": server.secret}

    def _reachable(self) -> list[str]:
        """The addresses of this machine that the other hosts of the job know of: its agent's, or the controller's."""
        told = os.environ.get(ADDRESS_VARIABLE)
        if told:
            return [told]
        published = client().hub.addresses if self.home.process == CONTROLLER else []
        published = [address for address in published if address != _LOOPBACK]  # this machine's own agents join there
        if not published:
            raise NoBackendError(
                f"process {self.home.process} can be reached from its own network only: it has published no address, "
                f"and {ADDRESS_VARIABLE} is not set"
            )
        return published

    def _drop(self, _: Address, fields: Fields) -> Fields:
        self.drop(fields["slot"], fields["key"], time.monotonic() + fields["seconds"])
        return {}

    def _gpu_export(self, _: Address, fields: Fields) -> Fields:
        return self.gpu_exports.send(Home(*fields["home"]), fields)

    def _gpu_forget(self, _: Address, fields: Fields) -> Fields:
        self._peer(Home(*fields["home"])).forget(fields["allocations"])
        return {}

    def _verbs_connect(self, asking: Address, fields: Fields) -> Fields:
        verbs = self._verbs()
        with self._lock:
            is_new = asking not in self._watched
            self._watched.add(asking)
        if is_new:
            self.control.watch(asking, lambda _: verbs.forget_peer(asking))
        return verbs.connect_peer(asking, fields)

    def _verbs_register(self, asking: Address, fields: Fields) -> Fields:
        entries = [self.registry.find(slot, key) for slot, key in fields["buffers"]]
        return {"rkeys": [self._verbs().export(entry, self.registry) for entry in entries]}

    def _verbs(self) -> VerbsHost:
        with self._lock:
            if self.verbs is None:
                self.verbs = verbs_host()
        if self.verbs is None:
            raise NoBackendError("there is no RDMA device in this process")
        return self.verbs


_manager: Manager | None = None
_manager_lock = threading.Lock()


def manager() -> Manager:
    """Return the transfer manager of this process, made with the first call, which must come from an actor or the
    client.

    Raises:
        RuntimeError: the process was forked from one that had a manager, or the thread belongs to no actor.
    """
    global _manager
    with _manager_lock:
        if _manager is None:
            _manager = Manager(context().actor_instance.runtime)
        if _manager.pid != os.getpid():
            raise RuntimeError("this process was forked from one that transfers buffers; spawn a proc instead")
        return _manager
