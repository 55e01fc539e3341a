"""A worker: a process that listens for programs, and is a host of one at a time.

It talks to holders of the key only. A program that attaches sends the worker an invitation to its own hub; the worker
starts a host agent, which joins there. When the program is gone, so are its agent and procs, and the worker waits for
the next program. Requests and answers are plain values; nothing that comes in is unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket as sockets
import subprocess
import threading
from typing import Any

import zmq

from monarch_slurm.config import settings
from monarch_slurm.host import kernel
from monarch_slurm.host.agent import ENDED
from monarch_slurm.host.gateway import GatewayEnd
from monarch_slurm.host.identity import pid_space
from monarch_slurm.host.start import AgentProcess, start_local_agent
from monarch_slurm.host.worker_address import WorkerAddress, resolve, split_tcp
from monarch_slurm.inherited import open_standard_descriptors, report_children
from monarch_slurm.wire import BindError, Gatekeeper, Invitation, JobKeys, Loop, pack, unpack
from monarch_slurm.wire.limits import LimitError, raise_descriptor_limit
from monarch_slurm.wire.plain import UnpackError
from monarch_slurm.wire.sockets import (
    BACKLOG,
    bind,
    bind_listener,
    guard_with_curve,
    keep_silent_ones,
    listen_quietly,
    make_router,
    only_this_user,
)
from monarch_slurm.wire.system_calls import check_system_calls
from monarch_slurm.wire.task_limits import zmq_context

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 1 << 20

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

_REAP_SECONDS = 1.0
"""Pause between two looks for ended orphans, of process 1."""

_END_MARGIN = 2.0
"""Seconds that an agent may take beyond its procs."""


class Worker:
    """Listens at an address from the moment it is made; `serve` does the rest.

    Args:
        keys: of `monarch_slurm.wire.shared_key.derive_keys`.

    Raises:
        BindError: the address cannot be listened at.
        LimitError: this process may start no more threads.
        MissingSystemCallError: the kernel lacks what agents need.
    """

    def __init__(self, keys: JobKeys, address: WorkerAddress) -> None:
        open_standard_descriptors()
        report_children()
        check_system_calls()
        raise_descriptor_limit()
        self._identity = address.identity
        self._name = str(address)
        self._loop = Loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq_context()
        self._router = make_router(self._context)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._gatekeeper = Gatekeeper(self._context, self._router, keys, "a worker's port")
        guard_with_curve(self._router, keys)
        try:
            _listen(self._router, address.bind)
        except BindError:
            self._close()
            raise
        self._agent: AgentProcess | None = None
        self._gateway = GatewayEnd(self._loop, self._reply, address)
        self._serves: dict[str, Any] = {}
        """The request of the program that has this worker."""
        self.served_this_process = False
        """Whether the last program that had this worker is the process that it runs in."""

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def serve(self) -> None:
        """Be a host of one program after the other, until one of them shuts its hosts down.

        On the main thread, SIGTERM and SIGHUP end the agent and its procs in order, as also for process 1 of a
        container, unless the program has handlers for them or ignores them.

        Raises:
            SystemExit: one of these signals came; with 128 and its number, as a shell has it.
        """
        ended_by: list[int] = []
        taken = self._take_signals(ended_by)
        if os.getpid() == 1:
            self._reap_orphans(frozenset(kernel.children()))
        self._gatekeeper.attach(self._loop)
        self._loop.add_reader(int(self._router.getsockopt(zmq.FD)), self._read)
        self._loop.call_soon(self._read)
        try:
            self._loop.run()
        finally:
            self._gateway.close()
            self._end_agent()
            self._close()
            if taken:
                signal.set_wakeup_fd(-1)
            for number in taken:
                signal.signal(number, signal.SIG_DFL)
        if ended_by:
            raise SystemExit(128 + ended_by[0])

    def _take_signals(self, ended_by: list[int]) -> list[signal.Signals]:
        if threading.current_thread() is not threading.main_thread():
            return []
        taken = [number for number in _ENDING_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]

        def stop(number: int, frame: object) -> None:
            ended_by.append(number)
            self._loop.stop()

        if taken:
            self._loop.call_on_signals(taken, self._loop.stop)
        for number in taken:
            signal.signal(number, stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, taken)
        return taken

    def _reap_orphans(self, known: frozenset[int]) -> None:
        """As process 1 of a PID namespace, this process is the parent of all orphans there."""
        kernel.reap(known | ({self._agent.pid} if self._agent is not None else set()))
        self._loop.call_later(_REAP_SECONDS, lambda: self._reap_orphans(known))

    def stop(self) -> None:
        """End `serve`. For any thread."""
        self._loop.stop()

    def _close(self) -> None:
        self._gatekeeper.close()
        self._context.destroy(linger=200)

    def _read(self) -> None:
        while True:
            try:
                peer, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                request = unpack(frames[0])
                if "op" in request:
                    self._gateway.take(peer, request)
                else:
                    self._reply(peer, self._answer(peer, request))
            except (*UnpackError, KeyError, IndexError):
                logger.warning("worker %s: somebody with its key asked what is no request; dropped", self._name)

    def _reply(self, peer: bytes, answer: dict[str, Any]) -> None:
        if not self._context.closed:
            with contextlib.suppress(zmq.ZMQError):  # it has hung up; it asks again if it still wants to know
                self._router.send_multipart([peer, pack(answer)], zmq.NOBLOCK)
            self._loop.call_soon(self._read)  # sending may have taken the sign that something came

    def _answer(self, peer: bytes, request: dict[str, Any]) -> dict[str, Any]:
        wanted, program = request["identity"], request["program"]
        if wanted and wanted != self._identity:
            return _refusal(f"it is {self._identity or 'a worker without an identity'}, not {wanted}")
        if request.get("gateway"):
            return self._gateway.open(peer)
        invitation, host = Invitation(**request["invitation"]), request["host"]
        if self._agent is None:
            try:
                agent = start_local_agent(
                    invitation, host, request["name"], with_settings=request["settings"], own_environment=True
                )
            except LimitError as error:
                return _refusal(str(error))
            self._agent, self._serves = agent, request
            logger.info("worker %s: attached to by %s", self._name, request["who"])
            self.served_this_process = (
                invitation.controller_pid == os.getpid() and invitation.controller_host == pid_space()
            )
            self._loop.watch_process(agent.pid, lambda: self._agent_ended(agent.wait()))
        elif self._serves["program"] != program:
            return _refusal(f"it serves {self._serves['who']} until that ends", later=True)
        elif self._serves["host"] != host:
            return {**_refusal("this program has attached to it before", later=True), "host": self._serves["host"]}
        return {"accepted": True}

    def _agent_ended(self, status: int) -> None:
        who, self._agent, self._serves = self._serves["who"], None, {}
        logger.info("worker %s: %s has left (status %d of its agent)", self._name, who, status)
        if status == ENDED:
            self._loop.stop()

    def _end_agent(self) -> None:
        if self._agent is not None:
            self._agent.terminate()
            try:
                self._agent.wait(settings().process_exit_timeout + _END_MARGIN)
            except subprocess.TimeoutExpired:
                self._agent.kill()
                self._agent.wait()


def _refusal(why: str, later: bool = False) -> dict[str, Any]:
    return {"accepted": False, "why": why, "later": later}


def _listen(router: zmq.Socket[bytes], url: str) -> None:
    if not url.startswith("tcp:"):
        _check_free(url)
        only_this_user(router)
        bind(router, url)
        return
    host, port = split_tcp(url)
    try:
        ip = resolve(host)
    except OSError as error:
        raise BindError(f"cannot listen on {url}: {error.strerror}") from None
    try:
        listener = _inherited(int(port[2:]), url) if port.startswith("fd") else listen_quietly(ip, int(port))
    except OSError as error:
        raise BindError(f"cannot listen on {url}: {error.strerror}") from None
    bind_listener(router, listener)


def _check_free(url: str) -> None:
    """Make sure that nobody listens at the Unix socket ``url``, which ZeroMQ would take away from them.

    Raises:
        BindError: somebody does.
    """
    path = url.partition("://")[2]
    with sockets.socket(sockets.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.connect("\0" + path[1:] if path.startswith("@") else path)
        raise BindError(f"cannot listen on {url}: {os.strerror(errno.EADDRINUSE)}")


def _inherited(fd: int, url: str) -> sockets.socket:
    """Return the bound TCP socket ``fd``, which listens from here on.

    Raises:
        BindError: it is none.
    """
    try:
        inherited = sockets.socket(fileno=fd)
    except OSError as error:
        raise BindError(f"cannot listen on {url}: descriptor {fd}: {error.strerror}") from None
    try:
        is_tcp = inherited.family in (sockets.AF_INET, sockets.AF_INET6) and inherited.type == sockets.SOCK_STREAM
        if not is_tcp or not inherited.getsockname()[1]:
            raise BindError(f"cannot listen on {url}: descriptor {fd} is no TCP socket that is bound to a port")  # noqa: TRY301
        keep_silent_ones(inherited)
        if not inherited.getsockopt(sockets.SOL_SOCKET, sockets.SO_ACCEPTCONN):
            inherited.listen(BACKLOG)
    except OSError as error:
        inherited.detach()
        raise BindError(f"cannot listen on {url}: descriptor {fd}: {error.strerror}") from None
    except BindError:
        inherited.detach()
        raise
    return inherited
