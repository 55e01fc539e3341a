"""The host agent: the one process per node that spawns, watches, routes for and ends the procs there.

It has one thread. Messages for a proc that has not reported yet wait; messages for one that has ended are answered with
the news of its end, so nobody waits for an answer that cannot come. When the controller is silent for longer than the
lease, or says that this host was given up, the agent ends all its procs and itself.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from monarch_slurm.config import configure, settings
from monarch_slurm.errors import ConfigError
from monarch_slurm.host.exits import ProcDown
from monarch_slurm.host.identity import address_towards
from monarch_slurm.host.log_streams import LogStreams
from monarch_slurm.host.output import Output
from monarch_slurm.host.procs import ProcTable
from monarch_slurm.host.spawning import Place, procs_asked_for
from monarch_slurm.host.stack_gathering import StackDesk
from monarch_slurm.wire import (
    AGENT,
    CONTROLLER,
    Address,
    Invitation,
    Link,
    Loop,
    Message,
    Timer,
    UnknownPeerError,
    WireError,
    make_runtime_dir,
    remove_runtime_dir,
)
from monarch_slurm.wire.keys import CONTROLLER_FILE
from monarch_slurm.wire.runtime_dir import SOCKET_NAME
from monarch_slurm.wire.sockets import bind_ipc, connect_tcp, make_dealer, make_router

logger = logging.getLogger(__name__)

ENDED, LEASE_EXPIRED, FENCED = 0, 3, 4
"""Exit codes of an agent: told to end; nothing heard from the controller; the controller gave this host up."""

MAX_TOMBSTONES = 10_000

_NOT_THERE = "NotThere(this host has no such proc)"

_FAREWELL_MS = 500
"""Time for the last messages to reach the controller, if it is still there."""


@dataclass
class _Waiting:
    """Messages for a proc that has not reported yet, or that is ending."""

    messages: list[Message] = field(default_factory=list)
    first: Message | None = None


class Agent:
    """One host agent.

    Args:
        invitation: where the controller is and how to prove membership.
        name: the host's name as people know it (Slurm's node name, or the hostname).
        host: id of the host; one that no agent had before.
        output: where lines of procs go.
        folder: job folder, whose ``controller.json`` vanishes when the controller ends; None if there is none.
        controller_pid: pid of a controller on this machine whose end is watched; 0 for none.
        address: IP address that procs of this host bind and advertise; None takes the one that reaches the controller.
    """

    def __init__(
        self,
        invitation: Invitation,
        name: str,
        *,
        host: str,
        output: Output,
        folder: Path | None = None,
        controller_pid: int = 0,
        address: str | None = None,
    ) -> None:
        self.name = name
        self.host = host
        self.ip = address or address_towards(invitation.address)
        self._address = Address(self.host, AGENT)
        self._folder = folder
        self._invitation = invitation
        self._loop = Loop()
        self._output = output
        self._exit_code = ENDED
        self._ending = False
        self._runtime_dir = make_runtime_dir()
        self._socket_path = self._runtime_dir / SOCKET_NAME
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._waiting: dict[str, _Waiting] = {}
        self._owners: dict[str, Address] = {}
        self._tombstones: dict[str, ProcDown] = {}
        self._last_heard = self._loop.clock()
        self._next_beat: Timer | None = None
        router = make_router(self._context)
        bind_ipc(router, self._socket_path)
        self._down = Link(self._loop, router, self._from_proc, self._proc_fault)
        log_dir = Path(settings().log_dir) if settings().log_dir else None
        # An agent without a job folder is a child of the client, and prints where that does.
        self._logs = logs = LogStreams(
            self._loop, self._address, name, self._route, lambda: self._procs.read_logs(), folder is None
        )
        self._procs = ProcTable(self._loop, output, log_dir, self._may_still_speak, self._proc_ended, logs.take)
        dealer = make_dealer(self._context, self.host)
        connect_tcp(dealer, invitation)
        self._up = Link(self._loop, dealer, lambda _, message: self._from_controller(message), self._controller_fault)
        stacks = StackDesk(self._loop, self._address, self._procs.pids, self._route)
        self._handlers: dict[str, Callable[[Message], None]] = {
            "spawn": self._spawn,
            "stop": self._stop_procs,
            "kill": self._kill_procs,
            "renew": lambda message: self._procs.renew(),
            "cast": self._cast,
            "describe": lambda message: self._route(self._procs.describe(message)),
            "host_down": self._owner_host_down,
            "proc_down": self._owner_proc_down,
            "logging": logs.set_option,
            "log_flush": logs.flush_now,
            "log_ack": logs.acknowledged,
            "stacks": stacks.ask,
            "pong": stacks.heard,
            "shutdown": self._shutdown,
            "welcome": self._take_welcome,
            "heartbeat": lambda message: None,
            "fenced": self._fenced,
        }
        if controller_pid:
            self._watch_controller(controller_pid)

    def run(self) -> int:
        """Serve until told to end; return the exit code."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._loop.call_on_signals((signal.SIGTERM, signal.SIGHUP), self._told_by_signal)
        hello = {"name": self.name, "pid": os.getpid(), "hostname": socket.gethostname(), "address": self.ip}
        self._up.send(Message("hello", CONTROLLER, self._address, hello))
        self._procs.warm()
        self._beat()
        try:
            self._loop.run()
        finally:
            self._close()
        return self._exit_code

    # ---- the controller

    def _beat(self) -> None:
        if self._next_beat is not None:
            self._next_beat.cancel()
        interval = settings().heartbeat_interval
        if self._loop.late > interval:
            self._last_heard += self._loop.late  # this process did not run; it cannot have heard anything
        silence = self._loop.clock() - self._last_heard
        if silence > (settings().mesh_orphan_timeout or silence):  # None: for ever
            logger.error("host %s: nothing heard from the controller for %.0f s: ending all procs", self.name, silence)
            self._end(LEASE_EXPIRED)
            return
        if silence > 2 * interval and self._controller_left():
            logger.error("host %s: the controller has ended: ending all procs", self.name)
            self._end(LEASE_EXPIRED)
            return
        self._up.send(Message("heartbeat", CONTROLLER, self._address))
        self._procs.reap()
        self._next_beat = self._loop.call_later(interval, self._beat)

    def _controller_left(self) -> bool:
        return self._folder is not None and not (self._folder / CONTROLLER_FILE).exists()

    def _watch_controller(self, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._loop.call_soon(lambda: self._end(LEASE_EXPIRED))
            return

        def ended() -> None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
            logger.error("host %s: the controller has ended: ending all procs", self.name)
            self._end(LEASE_EXPIRED)

        self._loop.add_reader(pidfd, ended)

    def _from_controller(self, message: Message) -> None:
        self._last_heard = self._loop.clock()
        self._route(message)

    def _controller_fault(self, peer: str, error: WireError) -> None:
        logger.error("host %s: %s on the link from the controller: ending all procs", self.name, error)
        self._end(FENCED)

    def _take_welcome(self, message: Message) -> None:
        configure(**message.fields["settings"])
        self._beat()  # its interval may be another now

    def _fenced(self, message: Message) -> None:
        logger.error(
            "host %s: the controller gave this host up (%s): ending all procs", self.name, message.fields["cause"]
        )
        self._end(FENCED)

    def _shutdown(self, message: Message) -> None:
        self._wind_down(message.fields["timeout"])

    def _told_by_signal(self) -> None:
        # The owners of the procs know nothing of this, so it is a failure to them.
        self._wind_down(settings().process_exit_timeout, "Stopped(the agent of its host was told to end by a signal)")

    def _wind_down(self, timeout: float, why: str = "") -> None:
        """End the procs in order, and then this agent; procs that take longer than ``timeout`` seconds are killed."""
        if not self._ending:
            self._ending = True
            for name in self._procs.names():
                self._stop_proc(name, self._address, timeout, why)
            if not self._procs.names():
                self._end(ENDED)

    def _end(self, code: int) -> None:
        """End at once, procs and all."""
        self._exit_code = code
        self._loop.stop()

    def _close(self) -> None:
        self._procs.close()
        self._logs.flush()
        self._up.send(Message("bye", CONTROLLER, self._address))
        self._down.close()
        self._up.close(linger_ms=0 if self._exit_code == LEASE_EXPIRED else _FAREWELL_MS)
        self._context.term()
        remove_runtime_dir(self._runtime_dir)
        self._output.flush(timeout=1.0)

    # ---- routing

    def _from_proc(self, peer: str, message: Message) -> None:
        if message.kind == "hello":
            self._proc_reported(peer)
        elif message.src == Address(self.host, peer):
            self._route(message)
        else:
            logger.error("host %s: proc %s spoke as %s; dropped", self.name, peer, message.src)

    def _proc_fault(self, peer: str, error: WireError) -> None:
        logger.error("host %s: %s from proc %s: ending it", self.name, error, peer)
        self._procs.signal(peer, signal.SIGKILL)

    def _route(self, message: Message) -> None:
        if message.dst.host != self.host:
            self._up.send(message)
        elif message.dst.proc != AGENT:
            self._to_proc(message.dst.proc, message)
        elif message.kind in self._handlers:
            self._handlers[message.kind](message)
        else:
            logger.error("host %s: unknown message %r from %s", self.name, message.kind, message.src)

    def _to_proc(self, name: str, message: Message) -> None:
        waiting = self._waiting.get(name)
        if waiting is not None:
            waiting.messages.append(message)
            return
        try:
            self._down.send(message, name)
        except UnknownPeerError:
            if name in self._procs:
                self._waiting[name] = _Waiting([message])  # it is ending; how, is known in a moment
            else:
                self._undeliverable(name, message)

    def _undeliverable(self, name: str, message: Message, exit_text: str = _NOT_THERE) -> None:
        if message.kind in ("proc_down", "host_down"):
            return
        down = self._tombstones.get(name)
        if down is None:
            mesh, _, rank = name.rpartition(".")
            number = int(rank) if rank.isdecimal() else 0
            down = ProcDown(self.host, self.name, name, mesh, number, 0, exit_text, time.time())
        self._route(Message("proc_down", message.src, self._address, down.to_fields()))

    def _cast(self, message: Message) -> None:
        fields = message.fields
        for rank in fields["base_ranks"]:
            self._to_proc(f"{fields['proc_mesh']}.{rank}", message)

    # ---- procs

    def _spawn(self, message: Message) -> None:
        fields = message.fields
        mesh = fields["mesh"]
        if self._ending:
            for proc in fields["procs"]:
                self._undeliverable(f"{mesh}.{proc['rank']}", message, "NotStarted(the host's agent is ending)")
            return
        try:
            asked = procs_asked_for(message, Place(self.host, self.name, str(self._socket_path), self.ip))
        except ConfigError as error:
            for proc in fields["procs"]:
                self._undeliverable(f"{mesh}.{proc['rank']}", message, f"NotStarted(host {self.name}: {error})")
            return
        self._owners[mesh] = message.src
        for spec, first in asked:
            self._waiting[spec.proc] = _Waiting(self._logs.greetings(spec.proc), first)
        self._procs.spawn([spec for spec, _ in asked])

    def _may_still_speak(self, name: str) -> bool:
        if self._down.connected(name):
            return True
        self._down.read()  # the last that it sent
        return False

    def _proc_reported(self, name: str) -> None:
        waiting = self._waiting.pop(name, None)
        if waiting is None:
            return
        self._procs.reported(name)
        assert waiting.first is not None
        self._down.send(waiting.first, name)
        for message in waiting.messages:
            self._down.send(message, name)

    def _proc_ended(self, down: ProcDown) -> None:
        self._logs.flush()  # its last lines come before the news of its end
        waiting = self._waiting.pop(down.proc, None)
        self._down.forget(down.proc)
        self._tombstones[down.proc] = down
        while len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]
        if not down.expected:
            logger.info("host %s: proc %s (pid %d) ended: %s", self.name, down.proc, down.pid, down.exit)
        # To the neighbours here at once, and to everybody else by the controller.
        self._tell_procs(Message("proc_down", Address(self.host, ""), self._address, down.to_fields()))
        self._up.send(Message("proc_down", CONTROLLER, self._address, down.to_fields()))
        for message in waiting.messages if waiting else ():
            self._undeliverable(down.proc, message)
        self._kill_owned_by(down.address)
        if not self._procs.names(down.mesh):
            self._owners.pop(down.mesh, None)
        if self._ending and not self._procs.names():
            self._end(ENDED)

    def _tell_procs(self, message: Message) -> None:
        for name in self._procs.names():
            if name not in self._waiting:
                try:
                    self._down.send(message, name)
                except UnknownPeerError:
                    continue  # it is ending too

    def _owner_proc_down(self, message: Message) -> None:
        """News of a proc on another host."""
        self._tell_procs(message)
        self._kill_owned_by(Address(message.fields["host"], message.fields["proc"]))

    def _owner_host_down(self, message: Message) -> None:
        self._tell_procs(message)
        for mesh, owner in list(self._owners.items()):
            if owner.host == message.fields["host"]:
                self._kill_mesh(mesh)

    def _kill_owned_by(self, owner: Address) -> None:
        for mesh, address in list(self._owners.items()):
            if address == owner:
                self._kill_mesh(mesh)

    def _kill_mesh(self, mesh: str) -> None:
        for name in self._procs.names(mesh):
            self._procs.expect_end(name, 0.0)

    def _stop_procs(self, message: Message) -> None:
        """End procs in order: each is told, and killed if it takes too long; ``proc_down`` tells when it is gone."""
        there = set(self._procs.names(message.fields["mesh"]))
        for name in _names(message.fields):
            if name in there:
                self._stop_proc(name, message.src, message.fields["timeout"])
            else:
                self._undeliverable(name, message)

    def _stop_proc(self, name: str, asker: Address, timeout: float, why: str = "") -> None:
        if name in self._waiting:
            self._procs.expect_end(name, 0.0, why)
        else:
            self._to_proc(name, Message("exit", Address(self.host, name), asker, {"timeout": timeout}))
            self._procs.expect_end(name, timeout, why)

    def _kill_procs(self, message: Message) -> None:
        for name in _names(message.fields):
            self._procs.signal(name, message.fields["signal"])


def _names(fields: dict[str, Any]) -> list[str]:
    return [f"{fields['mesh']}.{rank}" for rank in fields["ranks"]]
