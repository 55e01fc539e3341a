"""The client: the user's program, which is the root of the supervision tree and the controller of its hosts."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from monarch_slurm.actor.cell import make_cell
from monarch_slurm.actor.context import Instance, set_client_boot
from monarch_slurm.actor.errors import MeshFailure
from monarch_slurm.actor.future import Future
from monarch_slurm.actor.layout import ProcLayout
from monarch_slurm.actor.runtime import Runtime
from monarch_slurm.actor.shape import Extent, Point, Shape
from monarch_slurm.config import settings
from monarch_slurm.host import HostDown, HostInfo, Hub, start_local_agent
from monarch_slurm.host.agent import new_host_id
from monarch_slurm.wire import CONTROLLER, JobKeys, Loop, Message

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


class Client:
    """The root actor of this process, its I/O loop and its hub. There is at most one; `client` makes it."""

    def __init__(self) -> None:
        self._loop = Loop()
        self._pid = os.getpid()
        self.hosts_changed = threading.Condition()
        self.joined: list[HostInfo] = []
        self.lost: list[HostDown] = []
        self._local_lock = threading.Lock()
        self._local: subprocess.Popen[bytes] | None = None
        self._local_id = new_host_id(socket.gethostname())
        self.hub = Hub(self._loop, JobKeys.make(), self._take, self._host_joined, self._host_down)
        self.runtime = Runtime(CONTROLLER, socket.gethostname(), self._send, make_cell)
        self.runtime.local_host = self._local_id
        self.runtime.home = ProcLayout("client", (CONTROLLER.host,), 1), Shape.unity(), 0
        here = Point(0, Extent((), ()))
        self.root = Instance(self.runtime, self, "root", "client", here, None, "<root>", None, 0)
        self._faults_stopped = False
        self._loop.start("monarch-io")
        self.hub.expect(self._local_id)
        self.ended: Future[None] | None = None

    # ---- Body of the root instance

    def supervise(self, failure: MeshFailure) -> None:
        """A failure that nobody below has handled: the program's hook decides, on a thread of its own."""
        if not self._faults_stopped:
            threading.Thread(target=self._fault, args=(failure,), name="monarch-fault", daemon=True).start()

    def end(self, reason: str, failed: bool) -> None:
        """The root ends with its process."""
        raise RuntimeError("the root actor is this program; end the program instead")

    def _fault(self, failure: MeshFailure) -> None:
        import monarch_slurm.actor as public

        try:
            public.unhandled_fault_hook(failure)
        except BaseException as error:  # the hook says by raising anything that the program cannot go on
            if self._faults_stopped:
                return
            self._faults_stopped = True
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            print(
                f"Unhandled monarch error on the root actor, hostname={socket.gethostname()}, PID={os.getpid()} at time "
                f"{when}:\n{failure.report()}",
                file=sys.stderr,
                flush=True,
            )
            if not isinstance(error, SystemExit):
                print(f"the fault hook raised {error!r}", file=sys.stderr, flush=True)
            global _exit_code
            _exit_code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    # ---- messages

    def _send(self, message: Message) -> None:
        if message.dst.host == self._local_id:
            self.ensure_local_agent()
        self.hub.send(message)

    def _take(self, message: Message) -> None:
        if not self.runtime.handle(message):
            logger.error("unknown message %r from %s", message.kind, message.src)

    def _host_joined(self, info: HostInfo) -> None:
        with self.hosts_changed:
            self.joined.append(info)
            self.hosts_changed.notify_all()

    def _host_down(self, down: HostDown) -> None:
        self._take(Message("host_down", CONTROLLER, CONTROLLER, down.to_fields()))
        with self.hosts_changed:
            self.joined = [info for info in self.joined if info.host != down.host]
            self.lost.append(down)
            self.hosts_changed.notify_all()

    # ---- the agent of this machine

    def ensure_local_agent(self) -> None:
        """Start the agent of this machine unless it runs; procs are asked of it without waiting for it."""
        with self._local_lock:
            if self._local is not None or self.ended is not None:
                return
            invitation = self.hub.invitation(LOOPBACK)
            self._local = start_local_agent(invitation, self._local_id, socket.gethostname())
        process = self._local
        pidfd = os.pidfd_open(process.pid)

        def agent_ended() -> None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
            code = process.wait()
            self.hub.give_up(self._local_id, socket.gethostname(), f"its agent ended with status {code}")

        self._loop.call_soon(lambda: self._loop.add_reader(pidfd, agent_ended))

    def shutdown(self, timeout: float) -> None:
        """End every agent and wait up to ``timeout`` seconds for the local one."""
        if self.ended is not None or os.getpid() != self._pid:
            return
        self.ended = Future._pending()
        self._faults_stopped = True
        self.hub.shutdown()
        with self._local_lock:
            local = self._local
        if local is not None:
            try:
                local.wait(timeout)
            except subprocess.TimeoutExpired:
                local.kill()
                local.wait()
        deadline = time.monotonic() + timeout
        with self.hosts_changed:
            while self.joined and (left := deadline - time.monotonic()) > 0:
                self.hosts_changed.wait(left)
        self._loop.stop()
        self._loop.join(1.0)
        self.hub.close()
        self.ended._resolve(lambda: None)


_client: Client | None = None
_client_lock = threading.Lock()
_exit_code = 0


def client() -> Client:
    """Return the client of this process, made with the first call.

    Raises:
        RuntimeError: it has been shut down, or this process was forked from the one that had it.
    """
    global _client
    with _client_lock:
        if _client is None:
            _client = Client()
        if _client._pid != os.getpid():
            raise RuntimeError("this process was forked from a client and cannot use it; start a new program instead")
        return _client


def shutdown_context(host_timeout: float | None = None) -> Future[None]:
    """End all hosts and procs of this program. Later calls return a finished future; the client cannot be started again.

    Args:
        host_timeout: seconds that the local agent may take; None takes the setting ``process_exit_timeout``.

    Raises:
        ValueError: ``host_timeout`` is negative or not finite.
    """
    if host_timeout is not None and not 0 <= host_timeout < float("inf"):
        raise ValueError(f"invalid host_timeout {host_timeout}: seconds, 0 or more, expected")
    if _client is not None and _client._pid == os.getpid():
        _client.shutdown(settings().process_exit_timeout if host_timeout is None else host_timeout)
    return Future._of(None)


def unhandled_fault_hook(failure: MeshFailure) -> None:
    """Decide what an unhandled failure does to the program: this default ends it with status 1; returning goes on."""
    sys.exit(1)


def _at_exit() -> None:
    shutdown_context()
    if _exit_code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code)


_boot: Callable[[], Instance] = lambda: client().root  # noqa: E731
set_client_boot(_boot)
atexit.register(_at_exit)
