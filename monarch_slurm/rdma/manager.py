"""The transfer manager of a process: what peers may reach here, and the engines to those that are reached from here."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from monarch_slurm.actor.client import client
from monarch_slurm.actor.context import process_runtime
from monarch_slurm.actor.runtime import Runtime
from monarch_slurm.config import settings
from monarch_slurm.host.identity import ADDRESS_VARIABLE, pid_space
from monarch_slurm.rdma import samehost
from monarch_slurm.rdma.bounce import bounced
from monarch_slurm.rdma.control import Control, Fields
from monarch_slurm.rdma.engine import Begun, Engine, Op
from monarch_slurm.rdma.errors import NoBackendError, NoDirectWayError, PeerLostError, RDMAError, RDMATimeoutError
from monarch_slurm.rdma.gpu_ipc import GpuExports, GpuIpc
from monarch_slurm.rdma.local import LocalEngine
from monarch_slurm.rdma.options import transports
from monarch_slurm.rdma.peer import Home, Peer
from monarch_slurm.rdma.records import TransferRecord, records
from monarch_slurm.rdma.registry import Entry, Registry
from monarch_slurm.rdma.samehost import SameHost, SameHostMapped
from monarch_slurm.rdma.tcp_server import TcpServer
from monarch_slurm.rdma.verbs import VerbsHost, verbs_host
from monarch_slurm.rdma.workers import Turns, Workers
from monarch_slurm.wire import CONTROLLER, Address

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"


class Manager:
    """What `manager` returns: there is one in each process that uses buffers. For any thread."""

    def __init__(self, runtime: Runtime) -> None:
        self.pid = os.getpid()
        self.registry = Registry()
        self.registry.on_freed = self._freed
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
        self._peers: dict[Home, Peer] = {}
        self._servers: dict[tuple[str, ...], TcpServer] = {}
        self._watched: set[Address] = set()
        self._turns: dict[tuple[Home, str], Turns] = {}
        samehost.allow_peers()

    def ask(self, home: Home, kind: str, fields: Fields, deadline: float) -> Fields:
        """Ask the manager of ``home``; see `Control.ask`."""
        return self.control.ask(home.process, home.port, kind, fields, deadline)

    def run(
        self, home: Home, what: str, function: Callable[[], None], too_late: Callable[[], None], deadline: float
    ) -> None:
        """Run ``function``, which waits for ``home``, on a thread; see `Turns.run`."""
        with self._lock:
            turns = self._turns.get((home, what))
            if turns is None:
                turns = self._turns[home, what] = Turns(self.workers)
        turns.run(function, too_late, deadline)

    def engine(self, home: Home, mapped: bool, direct: bool, deadline: float) -> Engine:
        """Return the best engine to ``home``."""
        return self.local if home == self.home else self._peer(home).engine(mapped, direct, deadline)

    def _peer(self, home: Home) -> Peer:
        with self._lock:
            peer = self._peers.get(home)
            if peer is None:
                peer = self._peers[home] = Peer(self, home)
        return peer

    def begin(self, home: Home, mapped: bool, direct: bool, ops: Sequence[Op]) -> Begun | None:
        """Begin ``ops``, which all go to ``home``, on the calling thread; None if that is a matter for `transfer`.

        Never on the main thread: what a signal handler raises there would leave the buffers held for ever.
        """
        if home == self.home or threading.current_thread() is threading.main_thread():
            return None
        peer = self._peer(home)
        peer.enter()
        begun = None
        try:
            begun = self._begin(peer, mapped, direct, ops)
        finally:
            if begun is None:
                peer.leave()
        return begun and begun.then(lambda _: peer.leave())

    def _begin(self, peer: Peer, mapped: bool, direct: bool, ops: Sequence[Op]) -> Begun | None:
        engine = peer.settled(mapped, direct)
        if not isinstance(engine, (SameHost, SameHostMapped, GpuIpc)):
            return None
        if not engine.takes_devices and any(op.stager is not None for op in ops):
            return None
        started, name = time.monotonic(), engine.name
        try:
            begun = engine.begin(ops)
        except (RDMAError, OSError):
            return None  # `transfer` meets the same, and tells it
        return begun and begun.then(lambda failure: self._note(peer.home, name, ops, started, failure))

    def transfer(self, home: Home, mapped: bool, direct: bool, ops: Sequence[Op], deadline: float) -> RDMAError | None:
        """Do ``ops``, which all go to ``home``; return what went wrong."""
        with contextlib.nullcontext() if home == self.home else self._peer(home).in_use():
            return self._transfer(home, mapped, direct, ops, deadline)

    def _transfer(self, home: Home, mapped: bool, direct: bool, ops: Sequence[Op], deadline: float) -> RDMAError | None:
        started = time.monotonic()
        backend, failure = "", None
        try:
            without: set[str] = set()
            engine = self.engine(home, mapped, direct, deadline)
            while True:
                backend = engine.name
                try:
                    self._by(engine, ops, deadline)
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

    def _by(self, engine: Engine, ops: Sequence[Op], deadline: float) -> None:
        if engine.takes_devices:
            engine.transfer(ops, deadline)
        else:
            bounced(ops, lambda hosted: engine.transfer(hosted, deadline))

    def drop(self, slot: int, key: int, deadline: float) -> None:
        """Take back a buffer of this process; see `Registry.drop`."""
        entry = self.registry.drop(slot, key, deadline)
        if self.verbs is not None:
            self.verbs.drop(entry)
        for home, allocations in self.gpu_exports.drop(entry).items():
            with contextlib.suppress(PeerLostError, RDMATimeoutError):  # what a dead process has mapped is unmapped
                self.ask(home, "gpu_forget", {"allocations": allocations, "home": tuple(self.home)}, deadline)

    def _freed(self, entry: Entry) -> None:
        if self.verbs is not None:
            self.verbs.drop(entry)

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


def look_after(home: Home, slot: int) -> None:
    """See `Registry.look_after`; of other processes' buffers nothing is known here."""
    here = _manager
    if here is not None and here.home == home and here.pid == os.getpid():
        here.registry.look_after(slot)


_manager: Manager | None = None
_manager_lock = threading.Lock()


def manager() -> Manager:
    """Return the transfer manager of this process, made with the first call.

    Raises:
        RuntimeError: the process was forked from one that had a manager, or is no process of a job.
    """
    global _manager
    with _manager_lock:
        if _manager is None:
            _manager = Manager(process_runtime())
        if _manager.pid != os.getpid():
            raise RuntimeError("this process was forked from one that transfers buffers; spawn a proc instead")
        return _manager
