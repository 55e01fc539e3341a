"""Calling actors of another program: this process joins that program's controller as a guest.

A reference (a mesh, a port) that comes from elsewhere names the program that it belongs to by its controller's public
key. The first use in a process of another program finds the keys (`monarch_slurm.host.invitations`) and joins: the
controller passes messages between a guest and its hosts as between two hosts, and sends it the news of ended procs and
hosts that it has had to do with. A guest has a runtime of its own for each program, whose addresses mean what they mean
in that program. This process's own runtime stays what it is; what is sent to its ports through a guest is handed on.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import socket
import threading
from typing import Any, NoReturn

from monarch_slurm.actor import driving
from monarch_slurm.actor.context import is_own, process_runtime
from monarch_slurm.actor.ends import whose
from monarch_slurm.actor.errors import SupervisionError
from monarch_slurm.actor.forks import not_in_forks
from monarch_slurm.actor.replies import VALUE
from monarch_slurm.actor.runtime import Runtime
from monarch_slurm.host.identity import NoControllerError, pid_space
from monarch_slurm.host.invitations import find_invitation
from monarch_slurm.host.lease import Lease
from monarch_slurm.host.uplink import dial_controller
from monarch_slurm.wire import AGENT, CONTROLLER, Address, Link, Loop, Message, StreamLink, WireError, dumps
from monarch_slurm.wire.large_buffers import Buffer
from monarch_slurm.wire.task_limits import zmq_context

logger = logging.getLogger(__name__)

_PORT_RANGES = 2**20
"""Ports of guests have higher numbers than those of programs and procs."""

_LINGER_MS = 500
"""For what was sent last, at the end of this process."""


class Guest:
    """This process in another program.

    Args:
        program: public key of that program's controller.
        home: this process's own runtime.

    Attributes:
        runtime: sends to processes of that program; it has no actors.
        ended: why nothing can be sent any more; empty while it can.

    Raises:
        NoControllerError: the program has ended, or is out of reach.
        KeyFileError: others could read the job's key file.
    """

    def __init__(self, program: str, home: Runtime) -> None:
        invitation = find_invitation(program)
        token = secrets.token_hex(4)
        name = f"{socket.gethostname()}:{os.getpid()}"
        host = f"{name}#{token}"
        self.ended = ""
        self._home = home
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._loop = Loop()
        self._context = zmq_context()
        self._address = Address(host, AGENT)
        # What people know procs by ends in their rank.
        address = Address(host, f"guest-{token}.0")
        numbers = _PORT_RANGES + secrets.randbelow(_PORT_RANGES)
        self.runtime = Runtime(address, socket.gethostname(), not_in_forks(self._send), _no_actors, numbers)
        self.runtime.guest_of = program
        self._link = dial_controller(
            self._loop, self._context, invitation, host,
            lambda _, message: self._take(message),
            lambda _, error: self._broken(error),
            lambda _: self._gone("its controller has ended"),
            batch=False,
        )  # fmt: skip
        relayed = not invitation.controller_host
        self._lease = Lease(
            self._loop,
            None,
            lambda: self._link.send(Message("heartbeat", CONTROLLER, self._address)),
            self._gone,
            invitation.address,
            isinstance(self._link, StreamLink),
            lambda: self._link.machine_silence() if isinstance(self._link, Link) and not relayed else None,
        )
        if invitation.controller_host == pid_space():
            self._lease.watch(invitation.controller_pid)
        hello = {
            "name": name,
            "pid": os.getpid(),
            "hostname": socket.gethostname(),
            "address": "",
            "endpoint": invitation.address,
            "guest": True,
        }
        self._link.send(Message("hello", CONTROLLER, self._address, hello))
        self._loop.call_soon(self._lease.beat)
        self._loop.start("monarch-guest")

    def _send(self, message: Message) -> None:
        if not self.ended:
            driving.send_whole(self._link.send, message)

    def _take(self, message: Message) -> None:
        self._lease.heard()
        kind, fields = message.kind, message.fields
        if kind == "port":
            answer = fields["port"], fields["rank"], fields["status"], message.body
            if not self.runtime.replies.take(*answer):
                self._home.replies.take(*answer)
            if "receipt" in fields:
                self.runtime.post(fields["receipt"], 0, VALUE, [])
        elif kind == "welcome":
            self.runtime.places.update(fields["places"])
        elif kind == "fenced":
            self._gone(f"its controller has given this process up: {fields['cause']}")
        elif kind == "shutdown":
            self._gone("it ends")
        elif kind != "heartbeat" and (kind == "cast" or not self.runtime.handle(message)):
            logger.error("a guest takes no message %r, which came from %s", kind, message.src)

    def _broken(self, error: WireError) -> None:
        self._gone(f"{error} on the link from its controller")

    def _gone(self, why: str) -> None:
        """Fail all calls, and those to come. On the loop's thread."""
        if self.ended:
            return
        self.ended = f"the program that it belongs to cannot be reached any more: {why}"
        text = self.ended
        self.runtime.replies.end(lambda process, ref: whose(text, process, ref))
        self._loop.call_soon(self.close)

    def close(self, linger_ms: int = 0) -> None:
        """Leave the program. On any thread of the process that has joined, once or more."""
        with self._lock:
            if self._pid != os.getpid() or self._context.closed:
                return
            self._loop.stop()
            if not self._loop.is_here():
                self._loop.join(1.0)
            self._link.close(linger_ms)
            self._context.destroy(linger=linger_ms)


_guests: dict[str, Guest] = {}
_lock = threading.Lock()


def runtime_of(program: str) -> Runtime:
    """Return the runtime that reaches the processes of ``program``; empty stands for that of this process.

    On any thread of the process, also one that belongs to no actor.

    Raises:
        SupervisionError: that program has ended, or is out of reach.
        KeyFileError: others could read the job's key file.
    """
    home = process_runtime()
    if is_own(program):
        return home
    with _lock:
        guest = _guests.get(program)
        if guest is None or guest.ended:
            try:
                guest = _guests[program] = Guest(program, home)
            except NoControllerError as error:
                text = f"the reference belongs to another program, which cannot be reached: {error}"
                raise SupervisionError(text) from None
        return guest.runtime


class _Receiving(threading.local):
    runtime: Runtime | None = None


_receiving = _Receiving()


def dumps_for(runtime: Runtime, value: Any) -> list[Buffer]:
    """Pickle ``value`` for a process that ``runtime`` reaches."""
    if not runtime.guest_of:
        return dumps(value)
    _receiving.runtime = runtime
    try:
        return dumps(value)
    finally:
        _receiving.runtime = None


def receiving_runtime() -> Runtime | None:
    """Return the guest's runtime if what is being pickled on this thread is for another program."""
    return _receiving.runtime


def check_own(program: str, what: str) -> None:
    """Make sure that a mesh belongs to the program of this process.

    Raises:
        RuntimeError: it does not.
    """
    if not is_own(program):
        raise RuntimeError(
            f"cannot {what} of another program: only that program can; from here, actors of it can be called"
        )


def _no_actors(runtime: Runtime, message: Message) -> NoReturn:
    raise RuntimeError("a guest of another program has no actors there")


def _at_exit() -> None:
    for guest in list(_guests.values()):
        guest.close(_LINGER_MS)


atexit.register(_at_exit)
