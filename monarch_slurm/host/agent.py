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
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from monarch_slurm.config import configure, settings
from monarch_slurm.errors import ConfigError
from monarch_slurm.host.branch import Branch
from monarch_slurm.host.exits import FailureKind, ProcDown
from monarch_slurm.host.identity import address_towards, ending_signals, pid_space
from monarch_slurm.host.lease import Lease
from monarch_slurm.host.log_streams import LogStreams
from monarch_slurm.host.mailbox import Mailboxes
from monarch_slurm.host.output import Output
from monarch_slurm.host.places import Places
from monarch_slurm.host.procs import ProcTable
from monarch_slurm.host.spawning import Place, procs_asked_for
from monarch_slurm.host.stack_gathering import StackDesk
from monarch_slurm.host.uplink import dial_controller
from monarch_slurm.wire import (
    AGENT,
    CONTROLLER,
    Address,
    Invitation,
    Link,
    Loop,
    Message,
    StreamLink,
    UnknownPeerError,
    WireError,
    make_runtime_dir,
    remove_runtime_dir,
)
from monarch_slurm.wire.arriving import Holding
from monarch_slurm.wire.keys import write_invitation
from monarch_slurm.wire.limits import raise_descriptor_limit
from monarch_slurm.wire.runtime_dir import SOCKET_NAME, sweep_away
from monarch_slurm.wire.task_limits import zmq_context

logger = logging.getLogger(__name__)

ENDED, LEASE_EXPIRED, FENCED, RELEASED = 0, 3, 4, 5
"""Exit codes of an agent: told to end; nothing heard from the controller; the controller gave this host up; the
controller needs it no longer."""

_FAREWELL_MS = 500
"""Time for the last messages to reach the controller, if it is still there."""


class Agent:
    """One host agent.

    Args:
        invitation: where the controller is and how to prove membership.
        name: the host's name as people know it (Slurm's node name, or the hostname).
        host: id of the host; one that no agent had before.
        output: where lines of procs go.
        folder: job folder, whose ``controller.json`` vanishes when the controller ends; None if there is none.
        watched: pids of this machine whose end is that of the controller.
        address: IP address that procs of this host bind and advertise; None takes the one that reaches the controller.
        own_environment: this host's variables go before those that the controller forwards to procs.
    """

    def __init__(
        self,
        invitation: Invitation,
        name: str,
        *,
        host: str,
        output: Output,
        folder: Path | None = None,
        watched: Iterable[int] = (),
        address: str | None = None,
        own_environment: bool = False,
    ) -> None:
        raise_descriptor_limit()
        self.name = name
        self.host = host
        self.ip = address or address_towards(invitation.address)
        self._address = Address(self.host, AGENT)
        self._own_environment = frozenset(os.environ) if own_environment else frozenset()
        self._invitation = invitation
        self._loop = Loop()
        self._output = output
        self._exit_code, self._ending = ENDED, False
        self._runtime_dir = make_runtime_dir()
        self._socket_path = self._runtime_dir / SOCKET_NAME
        write_invitation(self._runtime_dir, invitation)  # for other programs of this user on this machine
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq_context()
        self._mailboxes = Mailboxes(host, name)
        self._owners: dict[str, Address] = {}
        self._restartable: set[str] = set()
        self._places = Places()
        beside = invitation.controller_host == pid_space()
        self._lease = Lease(
            self._loop,
            folder,
            self._beat,
            self._controller_gone,
            invitation.address,
            beside,
            self._controllers_machine_silence,
        )
        self._down = StreamLink(self._loop, self._from_proc, self._proc_fault, batch=True)
        self._down.listen(self._socket_path)
        self._holding = Holding[str](lambda name, message: self._to_proc(name, message, held=True))
        log_dir = Path(settings().log_dir) if settings().log_dir else None
        # An agent without a job folder is a child of the client, and prints where that does.
        self._logs = logs = LogStreams(
            self._loop, self._address, name, self._route, lambda: self._procs.read_logs(), folder is None
        )
        self._procs = ProcTable(self._loop, output, log_dir, self._may_still_speak, self._proc_ended, logs.take)
        self._up = dial_controller(
            self._loop, self._context, invitation, self.host,
            lambda _, message: self._from_controller(message), self._controller_fault, self._controller_closed,
        )  # fmt: skip
        self._branch = Branch(self._loop, self._context, host, self.ip, invitation, self._route, self._up.send)
        stacks = StackDesk(self._loop, self._address, self._procs.pids, self._route)
        self._handlers: dict[str, Callable[[Message], None]] = {
            "spawn": self._spawn,
            "stop": self._stop_procs,
            "kill": self._kill_procs,
            "renew": lambda message: self._procs.renew(),
            "adopt": self._adopt,
            "cast": self._cast,
            "describe": lambda message: self._route(self._procs.describe(message)),
            "host_down": self._owner_host_down,
            "host_moved": self._host_moved,
            "proc_down": self._owner_proc_down,
            "logging": logs.set_option,
            "log_flush": logs.flush_now,
            "log_ack": logs.acknowledged,
            "stacks": stacks.ask,
            "pong": stacks.heard,
            "procs_restart": self._owner_procs_restart,
            "failing": lambda message: self._procs.note_failure(message.src.proc, **message.fields),
            "shutdown": lambda message: self._wind_down(**message.fields),
            "welcome": self._take_welcome,
            "fenced": self._fenced,
        }
        for pid in watched:
            self._lease.watch(pid)

    def run(self) -> int:
        """Serve until told to end; return the exit code."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._loop.call_on_signals(ending_signals(), self._told_by_signal)
        hello = {
            "name": self.name,
            "pid": os.getpid(),
            "hostname": socket.gethostname(),
            "address": self.ip,
            "endpoint": self._invitation.address,
        }
        self._up.send(Message("hello", CONTROLLER, self._address, hello))
        self._procs.warm()
        self._lease.beat()
        try:
            self._loop.run()
        finally:
            self._close()
        return self._exit_code

    # ---- the controller

    def _beat(self) -> None:
        self._up.send(self._branch.heartbeat())
        self._procs.reap()

    def _controller_gone(self, how: str, code: int = LEASE_EXPIRED) -> None:
        if self._exit_code in (ENDED, RELEASED):  # else this has been told before, and the end is near
            logger.error("host %s: %s: ending all procs", self.name, how)
            self._end(code)

    def _controllers_machine_silence(self) -> float | None:
        # Of a connection through a gateway this kernel knows the gateway's end only.
        relayed = not self._invitation.controller_host
        return self._up.machine_silence() if isinstance(self._up, Link) and not relayed else None

    def _from_controller(self, message: Message) -> None:
        self._lease.heard()
        self._branch.from_controller(message)

    def _controller_fault(self, peer: str, error: WireError) -> None:
        self._controller_gone(f"{error} on the link from the controller", FENCED)

    def _controller_closed(self, peer: str) -> None:
        self._controller_gone("the controller has ended, or has given this host up")

    def _take_welcome(self, message: Message) -> None:
        configure(**message.fields["settings"])
        self._places.update(message.fields["places"])
        self._lease.beat()  # its interval may be another now

    def _fenced(self, message: Message) -> None:
        self._controller_gone(f"the controller gave this host up ({message.fields['cause']})", FENCED)

    def _told_by_signal(self) -> None:
        # The owners of the procs know nothing of this, so it is a failure to them.
        self._wind_down(settings().process_exit_timeout, "Stopped(the agent of its host was told to end by a signal)")

    def _wind_down(self, timeout: float, why: str = "", release: bool = False) -> None:
        """End the procs in order, and then this agent; procs that take longer than ``timeout`` seconds are killed."""
        if not self._ending:
            self._ending, self._exit_code = True, RELEASED if release else ENDED
            for name in self._procs.names():
                self._stop_proc(name, self._address, timeout, why)
            if not self._procs.names():
                self._end(self._exit_code)

    def _end(self, code: int) -> None:
        """End at once, procs and all."""
        self._exit_code = code
        self._loop.stop()

    def _close(self) -> None:
        self._procs.close()
        self._logs.flush()
        self._branch.close()
        self._branch.send(Message("bye", CONTROLLER, self._address))
        self._down.close()
        self._up.close(linger_ms=0 if self._exit_code == LEASE_EXPIRED else _FAREWELL_MS)
        self._context.term()
        remove_runtime_dir(self._runtime_dir)
        if self._invitation.near:
            sweep_away(Path(self._invitation.near).parent)
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
            self._branch.send(message)
        elif message.dst.proc != AGENT:
            self._to_proc(message.dst.proc, message)
        elif message.kind in self._handlers:
            self._handlers[message.kind](message)
        else:
            logger.error("host %s: unknown message %r from %s", self.name, message.kind, message.src)

    def _to_proc(self, name: str, message: Message, held: bool = False) -> None:
        if self._mailboxes.keep(name, message) or (not held and self._holding.hold(name, message)):
            return
        try:
            self._down.send(message, name)
        except UnknownPeerError:
            # It is ending, and how is known in a moment; or it is about to move here, and its keeper tells in a moment.
            if name in self._procs or (message.fields.get("kept") and not self._mailboxes.is_buried(name)):
                self._mailboxes.open(name).messages.append(message)
            else:
                self._undeliverable(name, message)

    def _undeliverable(self, name: str, message: Message, *exit_text: str) -> None:
        # Nobody waits for what was sent to a port; and a proc that moves here has none of its old ones.
        port = message.kind == "port" and not self._mailboxes.is_buried(name)
        if not port and message.kind not in ("proc_down", "host_down", "procs_restart", "host_moved"):
            down = self._mailboxes.end_of(name, *exit_text)
            self._route(Message("proc_down", message.src, self._address, down.to_fields()))

    def _cast(self, message: Message) -> None:
        fields = message.fields
        for rank in fields["base_ranks"]:
            name = f"{fields['proc_mesh']}.{rank}"
            if fields.get("again"):
                self._mailboxes.open(name).actors.append(message)
            else:
                self._to_proc(name, message)

    # ---- procs

    def _place(self) -> Place:
        return Place(self.host, self.name, str(self._socket_path), self.ip, self._own_environment)

    def _spawn(self, message: Message) -> None:
        fields = message.fields
        mesh = fields["mesh"]
        try:
            if self._ending:
                raise ConfigError("its agent is ending")  # noqa: TRY301 - answered as what cannot be had here
            asked = procs_asked_for(message, self._place())
        except ConfigError as error:
            for rank in fields["ranks"]:
                self._undeliverable(f"{mesh}.{rank}", message, f"NotStarted(host {self.name}: {error})")
            return
        self._owners[mesh] = message.src
        if fields["restartable"]:
            self._restartable.add(mesh)
        for spec, first in asked:
            if self._mailboxes.is_buried(spec.proc):
                self._undeliverable(spec.proc, message)  # somebody has stopped it meanwhile
            else:
                box = self._mailboxes.open(spec.proc)
                box.first, box.actors[:0] = first, self._logs.greetings(spec.proc)
        self._procs.spawn([spec for spec, _ in asked if spec.proc in self._mailboxes])

    def _adopt(self, message: Message) -> None:
        """Hold what is sent to procs of a lost host, which their keeper starts here."""
        self._owners[message.fields["mesh"]] = message.src
        self._restartable.add(message.fields["mesh"])
        for name in _names(message.fields):
            self._mailboxes.open(name)

    def _may_still_speak(self, name: str) -> bool:
        return self._down.connected(name)

    def _proc_reported(self, name: str) -> None:
        box = self._mailboxes.close(name)
        if box is not None and box.first is not None:
            self._procs.reported(name)
            box.first.fields["places"] = self._places.table()
            box.first.fields["program"] = self._invitation.server_public
            for message in (box.first, *box.actors, *box.messages):
                if not self._holding.hold(name, message):
                    self._down.send(message, name)

    def _proc_ended(self, down: ProcDown) -> None:
        self._logs.flush()  # its last lines come before the news of its end
        self._down.forget(down.proc)
        held = self._holding.forget(down.proc)
        if not down.expected:
            logger.info("host %s: proc %s (pid %d) ended: %s", self.name, down.proc, down.pid, down.exit)
        if down.mesh in self._restartable and not down.expected and down.mesh in self._owners:
            # What was sent to it until now was sent before anybody could know; what comes from here on is held.
            self._mailboxes.close(down.proc)
            self._mailboxes.open(down.proc)
            self._route(Message("proc_failed", self._owners[down.mesh], self._address, down.to_fields()))
        else:
            self._tell_end(down)
            for message in held:
                self._undeliverable(down.proc, message)
        self._kill_owned_by(down.proc)
        if self._ending and not self._procs.names():
            self._end(self._exit_code)

    def _tell_end(self, down: ProcDown) -> None:
        """A proc here has ended and does not start again: tell the neighbours, and everybody by the controller."""
        self._tell_procs(Message("proc_down", Address(self.host, ""), self._address, down.to_fields()))
        self._branch.send(Message("proc_down", CONTROLLER, self._address, down.to_fields()))
        self._bury(down)

    def _bury(self, down: ProcDown) -> None:
        for message in self._mailboxes.bury(down):
            self._undeliverable(down.proc, message)
        if not self._procs.names(down.mesh) and not self._mailboxes.awaiting_restart(down.mesh):
            self._owners.pop(down.mesh, None)
            self._restartable.discard(down.mesh)

    def _tell_procs(self, message: Message) -> None:
        for name in self._procs.names():
            if name not in self._mailboxes and not self._holding.hold(name, message):
                try:
                    self._down.send(message, name)
                except UnknownPeerError:
                    continue  # it is ending too

    def _owner_proc_down(self, message: Message) -> None:
        """News of the end of a proc on another host, or of one that is not to be started again."""
        self._tell_procs(message)
        down = ProcDown(**message.fields)
        self._kill_owned_by(down.proc)
        if self._places.now(down.host) == self.host and down.proc not in self._procs:
            self._bury(down)

    def _owner_procs_restart(self, message: Message) -> None:
        self._tell_procs(message)
        for rank in message.fields["ranks"]:
            self._kill_owned_by(f"{message.fields['down']['mesh']}.{rank}")

    def _host_moved(self, message: Message) -> None:
        self._places.move(message.fields["old"], message.fields["new"])
        self._tell_procs(message)

    def _owner_host_down(self, message: Message) -> None:
        self._places.move(message.fields["host"], message.fields["stand_in"] or message.fields["host"])
        self._tell_procs(message)
        for mesh, owner in list(self._owners.items()):
            if owner.host == message.fields["host"]:
                self._kill_mesh(mesh)

    def _kill_owned_by(self, proc: str) -> None:
        for mesh, owner in list(self._owners.items()):
            if owner.proc == proc:
                self._kill_mesh(mesh)

    def _kill_mesh(self, mesh: str) -> None:
        for name in self._procs.names(mesh):
            self._procs.expect_end(name, 0.0)
        for name in self._mailboxes.awaiting_restart(mesh):
            self._end_instead_of_restart(name)

    def _end_instead_of_restart(self, name: str) -> None:
        down = self._mailboxes.end_of(name, "Stopped(before it was started again)")
        self._tell_end(replace(down, expected=True))

    def _stop_procs(self, message: Message) -> None:
        """End procs in order: each is told, and killed if it takes too long; ``proc_down`` tells when it is gone."""
        mesh = message.fields["mesh"]
        there, waiting = set(self._procs.names(mesh)), set(self._mailboxes.awaiting_restart(mesh))
        for name in _names(message.fields):
            if name in there:
                self._stop_proc(name, message.src, message.fields["timeout"])
            elif name in waiting:
                self._end_instead_of_restart(name)
            else:
                self._undeliverable(name, message)

    def _stop_proc(self, name: str, asker: Address, timeout: float, why: str = "") -> None:
        if name in self._mailboxes:
            self._procs.expect_end(name, 0.0, why)
        else:
            self._to_proc(name, Message("exit", Address(self.host, name), asker, {"timeout": timeout}))
            self._procs.expect_end(name, timeout, why)

    def _kill_procs(self, message: Message) -> None:
        for name in _names(message.fields):
            if "event" in message.fields:
                self._procs.note_failure(name, FailureKind.STOP_TIMEOUT, message.fields["event"], "")
            self._procs.signal(name, message.fields["signal"])


def _names(fields: dict[str, Any]) -> list[str]:
    return [f"{fields['mesh']}.{rank}" for rank in fields["ranks"]]
