"""The client: the user's program, which is the root of the supervision tree and the controller of its hosts."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from monarch_slurm.actor import controllers, driving
from monarch_slurm.actor.birth import make_cell
from monarch_slurm.actor.console import open_console
from monarch_slurm.actor.context import Instance, may_boot_client, set_client_boot, set_program
from monarch_slurm.actor.debugger.desk import DebugDesk
from monarch_slurm.actor.debugger.hook import Debugging
from monarch_slurm.actor.debugger.terminal import watch_stops
from monarch_slurm.actor.direct import DirectLinks
from monarch_slurm.actor.direct_link import kill_message
from monarch_slurm.actor.errors import MeshFailure
from monarch_slurm.actor.forks import not_in_forks
from monarch_slurm.actor.future import Future
from monarch_slurm.actor.layout import ProcLayout
from monarch_slurm.actor.local_host import LocalHost
from monarch_slurm.actor.log_prefix import prefix_log_records
from monarch_slurm.actor.log_printer import LogPrinter
from monarch_slurm.actor.runtime import Runtime
from monarch_slurm.actor.shape import Extent, Point, Shape
from monarch_slurm.actor.stand_ins import Pool, StandIns
from monarch_slurm.actor.undeliverable import UndeliverableMessageEnvelope
from monarch_slurm.config import get_global_config, settings, warn_of_unknown_variables
from monarch_slurm.host import FailureKind, HostDown, HostInfo, Hub, ProcDown
from monarch_slurm.host.stacks import register_stacks
from monarch_slurm.inherited import (
    flush_streams,
    ignores,
    main_thread_blocks,
    open_standard_descriptors,
    report_children,
)
from monarch_slurm.interrupts import ignore_interrupts
from monarch_slurm.prompt import is_at_prompt
from monarch_slurm.wire import CONTROLLER, Address, JobKeys, Loop, Message, WireError
from monarch_slurm.wire.limits import LimitError, descriptor_limit, raise_descriptor_limit
from monarch_slurm.wire.runtime_dir import check_runtime_dir
from monarch_slurm.wire.system_calls import check_system_calls
from monarch_slurm.wire.task_limits import check_threads, start_thread

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 1.0
"""Seconds for cleanups at the end of the program, which is the end of every mesh that it has not stopped."""

_LOG_SECONDS = 1.0
"""Seconds at the end of the program for the lines of procs that have not been printed."""

_AGENT_SECONDS = 2.0
"""Seconds that an agent may take beyond its procs, before it is killed."""


_REMEMBERED_FAILURES = 100

_PORT_RANGES = 2**20

_THREADS = 8
"""Threads and processes that a client starts with its first procs, one or two spare."""


@dataclass
class HostRecord:
    """An agent that has joined, and how it ended; ``joined_at`` is in seconds since the epoch."""

    info: HostInfo
    joined_at: float
    down: HostDown | None = None


class Client:
    """The root actor of this process, its I/O loop and its hub. There is at most one; `client` makes it.

    Attributes:
        joined: hosts that are there; ``addresses`` has the IP addresses of those that are gone, too.
        hosts_changed: condition that is notified whenever a host comes or goes.
        records: every agent that has ever joined, by host id.
        proc_failures: the last procs that ended without being told to.
        stand_ins: which hosts take the places of lost ones. On the loop's thread only, but for what it remembers.
    """

    def __init__(self) -> None:
        warn_of_unknown_variables()
        open_standard_descriptors()
        report_children()
        check_system_calls()
        check_threads(_THREADS, "the client")
        check_runtime_dir()  # the agent of this machine needs one; here the error reaches the caller
        self._loop = Loop()
        self.pid = os.getpid()
        self.hosts_changed = threading.Condition()
        self.joined: list[HostInfo] = []
        self.addresses: dict[str, str] = {}
        self.records: dict[str, HostRecord] = {}
        self.proc_failures: deque[ProcDown] = deque(maxlen=_REMEMBERED_FAILURES)
        self.started_at = time.time()
        raise_descriptor_limit()
        keys = JobKeys.make()
        self.hub = Hub(self._loop, keys, self._take, self._host_joined, self._host_down, self._take_at_once)
        self.direct = DirectLinks(
            CONTROLLER,
            0,
            self.hub.near,
            self.hub.send,
            self.hub.near.knows,
            lambda message: True,
            lambda message: self.runtime.handle_at_once(message),
            self._take_in,
            self._proc_broken,
        )
        # All programs have the same address: their ports must not have the same numbers, should one get another's.
        numbers = secrets.randbelow(_PORT_RANGES)
        self.runtime = Runtime(CONTROLLER, socket.gethostname(), not_in_forks(self._send), make_cell, numbers)
        self.stand_ins = StandIns()
        self.hub.on_passed = self.direct.make_way
        self.hub.find_stand_in = self._find_stand_in
        self.runtime.on_retire = lambda host: self._loop.call_soon(lambda: self._retire(host))
        self._local = LocalHost(self._loop, self.hub, self._set_local_host)
        self.runtime.home = ProcLayout("client", (CONTROLLER.host,), 1), Shape.unity(), 0
        here = Point(0, Extent((), ()))
        self.root = Instance(self.runtime, self, "root", "client", here, None, "<root>", None, 0)
        self.runtime.cells.on_demand[controllers.MESH] = lambda: controllers.spawn_controllers(self.root)
        self._faults: queue.SimpleQueue[MeshFailure] = queue.SimpleQueue()
        self._faults_stopped = False
        self._ending = threading.Lock()
        self.ended = False
        self._log_printer = LogPrinter(self._send, lambda: bool(get_global_config()["prefix_with_rank"]))
        self.runtime.print_logs = self._log_printer.flush
        register_stacks()
        prefix_log_records()
        self.desk = DebugDesk(self._send, self._watch_stops)
        self._debugging = Debugging(self.runtime)
        self._debugging.install()
        self._console = open_console(self._loop, self.runtime, self.desk, lambda: list(self.hub.hosts.values()))
        start_thread(threading.Thread(target=self._judge_faults, name="monarch-faults", daemon=True))
        set_program(keys.server_public, self.hub.admit_guests)
        self._loop.start("monarch-io")
        driving.set_link(self.hub.near)

    # ---- Body of the root instance

    hears_undeliverable = False

    def undeliverable(self, message: UndeliverableMessageEnvelope) -> None:
        """The program does not ask for these."""

    def supervise(self, failure: MeshFailure) -> None:
        """A failure that nobody below has handled: the program's hook decides, on a thread of its own."""
        if failure.restarted:
            logger.warning("restarted: %s", failure.report())
        else:
            self._faults.put(failure)

    def end(self, reason: str, failed: bool) -> None:
        """The root ends with its process."""
        raise RuntimeError("the root actor is this program; end the program instead")

    def _judge_faults(self) -> None:
        while not self._faults_stopped:
            failure = self._faults.get()
            try:
                # The hook is replaced by assignment to the public name, so that is where it is looked up.
                sys.modules["monarch_slurm.actor"].unhandled_fault_hook(failure)
            except BaseException as error:  # by raising anything the hook says that the program cannot go on
                with self._ending:
                    if not self._faults_stopped:
                        self._faults_stopped = True
                        _end_program(failure, error)

    # ---- hosts in the place of others

    def look_after(self, pool: Pool) -> None:
        """Have spares of ``pool`` take the places of its hosts that are lost from now on, or were meanwhile."""

        def begin() -> None:
            self.stand_ins.add(pool)
            lost = [host for host in pool.placed if host in self.records and self.records[host].down]
            pool.open |= dict.fromkeys(lost, False)
            self._fill_places()

        self._loop.call_soon(begin)

    def look_away(self, pool: Pool) -> None:
        """The job of ``pool`` ends. For any thread."""
        self._loop.call_soon(lambda: self.stand_ins.remove(pool))

    def fill_places(self) -> None:
        """Look whether a host that is there may take an open place. For any thread."""
        self._loop.call_soon(self._fill_places)

    def abandon(self, place: str, why: str) -> None:
        """The host that was asked for does not come. For any thread."""
        name = f"the host in place of {place.partition('#')[0]}"

        def give_up() -> None:
            if self.stand_ins.asks(place) is not None:
                self.hub.give_up(place, name, why)

        self._loop.call_soon(give_up)

    def _find_stand_in(self, down: HostDown) -> tuple[str, str] | None:
        found = None if self._faults_stopped else self.stand_ins.lost(down, self.joined)
        pool = self.stand_ins.asks(found[0]) if found is not None else None
        if found is not None and pool is not None and pool.request is not None:
            self.hub.expect(found[0])
            pool.request(down, found[0])
        return found

    def _fill_places(self) -> None:
        for place, info in self.stand_ins.fill(self.joined, time.time()):
            logger.warning("host %s takes the place of the lost host %s", info.name, place.partition("#")[0])
            self.hub.move(place, info.host)

    def _retire(self, host: str) -> None:
        for place in self.stand_ins.retire([host]):
            self.hub.give_up(place, place.partition("#")[0], "its mesh was shut down")

    # ---- messages

    def _watch_stops(self) -> None:
        start_thread(threading.Thread(target=watch_stops, args=(self.desk,), name="monarch-debug", daemon=True))

    def _set_local_host(self, host: str) -> None:
        self.runtime.local_host = host

    def _send(self, message: Message) -> None:
        self._local.ensure(message.dst.host)
        driving.send_whole(self.direct.send, message)

    def _take(self, message: Message) -> None:
        if not self.direct.take(message):
            self._take_in(message)

    def _take_in(self, message: Message) -> None:
        if message.kind == "ports":
            self.runtime.replies.take_many(message.fields["replies"])
            return
        if message.kind == "proc_down" and not message.fields["expected"]:
            with self.hosts_changed:
                self.proc_failures.append(ProcDown(**message.fields))
        if message.kind == "debug_input":
            self._debugging.feed(message)
        elif not (self.desk.take(message) or self.runtime.handle(message) or self._log_printer.take(message)):
            logger.error("unknown message %r from %s", message.kind, message.src)

    def _take_at_once(self, message: Message) -> bool:
        return not self.direct.blocks(message) and self.runtime.handle_at_once(message)

    def _proc_broken(self, proc: Address, error: WireError) -> None:
        logger.error("%s on the direct link from %s: ending it", error, proc)
        self.hub.send(kill_message(proc, CONTROLLER))

    def _host_joined(self, info: HostInfo) -> None:
        self._local.joined(info)
        with self.hosts_changed:
            self.joined.append(info)
            self.addresses[info.host] = info.address
            self.records[info.host] = HostRecord(info, time.time())
            self.hosts_changed.notify_all()
        self._fill_places()

    def _host_down(self, down: HostDown) -> None:
        self._take(Message("host_down", CONTROLLER, CONTROLLER, down.to_fields()))
        with self.hosts_changed:
            self.joined = [info for info in self.joined if info.host != down.host]
            if down.host in self.records:
                self.records[down.host].down = down
            self.hosts_changed.notify_all()
        if self.stand_ins.fails(down):
            event = f"host {down.host_name} is lost, and no other is left to take its place: {down.cause}"
            lost: dict[str, Any] = {"host": down.host_name, "detected_at": down.detected_at}
            self._faults.put(MeshFailure("hosts", (), event, FailureKind.HOST_LOST, **lost))

    def give_up(self, host: str, name: str, cause: str) -> None:
        """Declare a host lost, whether it ever joined or not. For any thread."""
        self._loop.call_soon(lambda: self.hub.give_up(host, name, cause))

    def shutdown(self, timeout: float) -> None:
        """End every agent with its procs, which get ``timeout`` seconds; the agents themselves get a little more."""
        with self._ending:
            if self.ended or os.getpid() != self.pid:
                return
            self._faults_stopped = True
            deadline = time.monotonic() + timeout + _AGENT_SECONDS
            self.hub.shutdown(timeout)
            self._local.close(timeout + _AGENT_SECONDS)
            with self.hosts_changed:
                self.hosts_changed.wait_for(lambda: not self.joined, max(0.0, deadline - time.monotonic()))
            self._loop.stop()
            self._loop.join(1.0)
            self.runtime.replies.end(lambda process, ref: "this program is ending")
            self._log_printer.flush(_LOG_SECONDS)
            self._console.close()
            self.hub.close()
            self.ended = True


_client: Client | None = None
_client_lock = threading.Lock()
_exit_code = 0


def has_client() -> bool:
    """Return whether this process has a client, running or ended."""
    return _client is not None


def client() -> Client:
    """Return the client of this process, made with the first call.

    Raises:
        RuntimeError: it has been shut down, this is a proc, or this process was forked from the one that had it.
        LimitError: this process may start no more threads, or open nothing more.
        MissingSystemCallError: the kernel refuses what this package needs.
    """
    global _client
    with _client_lock:
        if _client is None:
            if not may_boot_client():
                raise RuntimeError("only the program itself has hosts of its own; this is one of its procs")
            try:
                _client = Client()
            except OSError as error:
                if error.errno != errno.EMFILE:
                    raise
                raise LimitError(descriptor_limit("a program with actors needs about 35")) from error
        if _client.pid != os.getpid():
            raise RuntimeError("this process was forked from a client and cannot use it; start a new program instead")
        if _client.ended:
            raise RuntimeError("the client has been shut down, and cannot be started again in this process")
        return _client


def shutdown_context(host_timeout: float | None = None) -> Future[None]:
    """End all hosts and procs of this program. Later calls return a finished future; the client cannot be started
    again.

    Args:
        host_timeout: seconds that procs may take for their actors' cleanups; None takes the setting
            ``process_exit_timeout``.

    Raises:
        ValueError: ``host_timeout`` is negative or not finite.
    """
    if host_timeout is not None and not 0 <= host_timeout < float("inf"):
        raise ValueError(f"invalid host_timeout {host_timeout}: seconds, 0 or more, expected")
    if _client is not None and _client.pid == os.getpid():
        _client.shutdown(settings().process_exit_timeout if host_timeout is None else host_timeout)
    return Future._of(None)


def unhandled_fault_hook(failure: MeshFailure) -> None:
    """Decide what an unhandled failure does to the program, which continues if this returns.

    The default ends it with status 1. At a prompt and in a notebook it prints the failure instead.
    """
    if not is_at_prompt():
        sys.exit(1)
    print(f"nobody handled this failure:\n{failure.report()}", file=sys.stderr, flush=True)


def _end_program(failure: MeshFailure, error: BaseException) -> None:
    """Report, and interrupt the main thread; its KeyboardInterrupt ends in the exit code that the hook asked for."""
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    where = f"hostname={socket.gethostname()}, PID={os.getpid()} at time {when}"
    print(f"Unhandled monarch error on the root actor, {where}:\n{failure.report()}", file=sys.stderr, flush=True)
    if not isinstance(error, SystemExit):
        print(f"the fault hook raised {error!r}", file=sys.stderr, flush=True)
    global _exit_code
    _exit_code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    if ignores(signal.SIGINT) or main_thread_blocks(signal.SIGINT):
        _leave_without_main_thread(_exit_code)
        return
    show = sys.excepthook
    # The report says it all; where the main thread happened to be is of no interest.
    sys.excepthook = lambda kind, *rest: None if kind is KeyboardInterrupt else show(kind, *rest)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _leave_without_main_thread(code: int) -> None:
    """End the program without its main thread, which SIGINT does not reach: a shell ignores it for background jobs."""

    def leave() -> None:
        atexit._run_exitfuncs()
        flush_streams()
        os._exit(code)

    start_thread(threading.Thread(target=leave, name="monarch-exit", daemon=True))


def _at_exit() -> None:
    if _client is not None and threading.current_thread() is threading.main_thread():
        ignore_interrupts()  # the end takes a moment, and half an end would leave processes
    shutdown_context(_EXIT_SECONDS)
    if _exit_code:
        logging.shutdown()
        flush_streams()
        os._exit(_exit_code)  # else Python would end by SIGINT, as which the main thread was told


_boot: Callable[[], Instance] = lambda: client().root  # noqa: E731
set_client_boot(_boot)
atexit.register(_at_exit)
