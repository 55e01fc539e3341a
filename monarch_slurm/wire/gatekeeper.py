"""Who may talk at a ZeroMQ socket that listens for the job's own peers, and how many strangers may try.

libzmq takes connections itself, on a thread of its own, and gives nobody a say in that. What is done instead:

- The kernel keeps a connection that says nothing (TCP_DEFER_ACCEPT of tcp(7)): it costs neither a descriptor nor time
  of this process. ZeroMQ's peers speak first. One that is still silent when the kernel gives up is closed at once.
- libzmq reports each connection that it takes, and its descriptor. Those that are too many are shut down, and libzmq
  closes what has ended. Before that the kernel is asked how many bytes were sent to the peer: only one that has proved
  itself is sent as many.
- Without a descriptor libzmq would try to accept over and over. A spare one serves to take and close what waits then;
  honest peers dial again.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import logging
import os
import socket
import struct
import termios
from collections import Counter

import zmq
import zmq.utils.z85

from monarch_slurm.wire.admission import MAX_PER_ORIGIN, PROOF_SECONDS, Admission, StrangerLog
from monarch_slurm.wire.guarded_listener import SHORTAGES, ShortageLog
from monarch_slurm.wire.keys import JobKeys
from monarch_slurm.wire.loop import Loop
from monarch_slurm.wire.origin import Origin, origin_of
from monarch_slurm.wire.sockets import ZAP_ENDPOINT

logger = logging.getLogger(__name__)

MAX_UNPROVED = 4096
"""Connections without a proof, of all origins: the hosts of a large job all dial within a moment."""

STRANGER_BYTES = 260
"""What a peer is sent before it has proved itself, at most: libzmq's greeting (64 bytes), CURVE's WELCOME (170) and an
ERROR (12; RFC 23 and 26). The READY that follows a proof makes it 300 and more."""

_EVENTS = (
    zmq.EVENT_LISTENING
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_EVENT = struct.Struct("=hi")
_LISTENING, _ACCEPTED, _ACCEPT_FAILED = int(zmq.EVENT_LISTENING), int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_ACCEPT_FAILED)
_DISCONNECTED, _NOT_THE_PROTOCOL = int(zmq.EVENT_DISCONNECTED), int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_BATCH = 8
"""Events that are handled in one round of the loop: what members have sent waits for a few milliseconds at most."""

# struct tcp_info of linux/tcp.h: total_retrans; bytes_acked, bytes_received (Linux 4.1).
_TOTAL_RETRANS, _BYTES_ACKED = 100, 120
_INFO_BYTES = _BYTES_ACKED + 16

_AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER: nothing of the connection stays behind."""

_LATE_SECONDS = PROOF_SECONDS - 0.5
"""Whose connection ends so late was hung up on by libzmq."""

_EARLY_SECONDS = 0.2
"""How long connections that have ended soon are gathered before they are judged."""

_BURST = 16
"""So many in that time are a stranger's."""

_LOOK_SECONDS = 0.5
"""Pause between two looks at those that wait."""

_MOST_SHED = 1024


class Gatekeeper:
    """Answers ZeroMQ's question (ZAP, RFC 27) whether a peer may talk: only with the job's agent key; and limits those
    that have not come so far.

    libzmq asks before it hands on a single byte of a peer. Peers that do not get as far as that question (no CURVE, a
    wrong server key, no ZeroMQ at all) are refused by libzmq, and counted here. Everything belongs on the I/O loop that
    reads ``guarded``.

    Args:
        guarded: the socket whose peers are asked about. It must not listen yet.
        keys: the job's keys.
        name: what strangers connect to, for the log.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        guarded: zmq.Socket[bytes],
        keys: JobKeys,
        name: str = "the port for agents",
    ) -> None:
        self._questions = context.socket(zmq.REP)
        self._questions.setsockopt(zmq.LINGER, 0)
        self._questions.bind(ZAP_ENDPOINT)
        self._guarded = guarded
        self._events = _monitor(context, guarded)
        self._agent_key = zmq.utils.z85.decode(keys.agent_public)
        self._loop: Loop | None = None
        self._listeners: dict[int, int] = {}
        """The descriptors that listen, which libzmq owns, and their TCP ports; 0 at a Unix socket."""
        self._spare = _spare()
        self._admission: Admission[int] = Admission(MAX_PER_ORIGIN, MAX_UNPROVED, self._is_proved)
        self._ended: set[int] = set()
        """Connections whose other end had closed them before anybody could look where they came from."""
        self._early: Counter[Origin] = Counter()
        """Connections that have ended soon, by where they came from."""
        self._fails = False
        self._looks = False
        self._unfinished = 0
        self._shortages = ShortageLog(f"{name} can take no connection now, and peers try again")
        self.strangers = StrangerLog(name, "did not prove that they hold this job's key")

    @property
    def refused(self) -> int:
        """Connections so far that ended without a proof of membership."""
        return self.strangers.refused + self._unfinished

    @property
    def unproved(self) -> int:
        """Connections that are not known to have proved themselves."""
        return len(self._admission)

    def attach(self, loop: Loop) -> None:
        """Serve on ``loop``."""
        self._loop = loop
        for socket_, serve in ((self._questions, self._answer), (self._events, self._note_events)):
            loop.add_reader(int(socket_.getsockopt(zmq.FD)), serve)
            serve()

    def close(self) -> None:
        """Close the sockets; before ``guarded`` is closed, and when the loop does not run any more."""
        self._guarded.disable_monitor()
        self._events.close()
        self._questions.close()
        self._sort_out()
        self._listeners.clear()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        self.strangers.flush()

    # ---- who may talk

    def _answer(self) -> None:
        while not self._questions.closed and _readable(self._questions):
            version, request, domain, address, _identity, mechanism, *credentials = self._questions.recv_multipart()
            allowed = mechanism == b"CURVE" and credentials == [self._agent_key] and domain == b"monarch_slurm"
            code, text = (b"200", b"OK") if allowed else (b"400", b"no key of this job")
            self._questions.send_multipart([version, request, code, text, b"agent" if allowed else b"", b""])
            if not allowed:
                self.strangers.note(self._origin_at(address.decode(errors="replace")), "another key")

    def _origin_at(self, address: str) -> Origin:
        """Return the origin of those who wait at ``address``, with its user if it is the same for all."""
        waiting = {origin for origin in self._admission.origins() if origin.address == address}
        return waiting.pop() if len(waiting) == 1 else Origin(address)

    # ---- how many strangers may try

    def _note_events(self) -> None:
        failed = False
        for _ in range(_BATCH):
            if self._events.closed or not _readable(self._events):
                break
            event, value = _EVENT.unpack(self._events.recv_multipart()[0])
            if event == _ACCEPTED:
                self._accepted(value)
            elif event == _DISCONNECTED:
                self._disconnected(value)
            elif event == _NOT_THE_PROTOCOL:
                self._fails = True  # what comes next is the end of that connection
            elif event == _ACCEPT_FAILED:
                failed = True
            elif event == _LISTENING:
                self._note_listener(value)
        else:
            assert self._loop is not None
            self._loop.call_soon(self._note_events)
        if failed:
            self._cannot_accept()

    def _note_listener(self, fd: int) -> None:
        listener = _copy_of(fd)
        if listener is not None:
            with listener:
                self._listeners[fd] = 0 if listener.family == socket.AF_UNIX else listener.getsockname()[1]

    def _accepted(self, fd: int) -> None:
        assert self._loop is not None
        now = self._loop.awake
        connection = self._open(fd)
        if connection is None:
            self._ended.add(fd)
            return
        with connection:
            try:
                origin = origin_of(connection)
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            except OSError:
                self._ended.add(fd)
                return
        if len(info) == _INFO_BYTES and _was_silent(info):
            self._hang_up(fd, origin, "said nothing")
            return
        for gone, whose in self._admission.enter(fd, origin, now):
            self._hang_up(gone, whose, "too many at a time")
        if not self._looks:
            self._looks = True
            self._loop.call_later(_LOOK_SECONDS, self._look)

    def _disconnected(self, fd: int) -> None:
        if self._spare is None:
            self._spare = _spare()
        assert self._loop is not None
        fails, self._fails = self._fails, False
        seconds = self._admission.seconds_waited(fd, self._loop.awake)
        origin = self._admission.forget(fd)
        if fd in self._ended:
            self._ended.discard(fd)
            origin = Origin("")
        elif origin is None:
            return
        if fails:
            self.strangers.note(origin, "another key, or no greeting of this package")
            return
        if seconds >= _LATE_SECONDS:
            self.strangers.note(origin, "said too little")
            return
        if not self._early:
            self._loop.call_later(_EARLY_SECONDS, self._sort_out)
        self._early[origin] += 1

    def _sort_out(self) -> None:
        """Judge those that have ended early: libzmq does not say who has closed a connection, nor why.

        Most are no strangers: agents that have ended, or who looks whether this process still listens
        (`monarch_slurm.host.doorbell`). Many at a time are, such as those whose first bytes libzmq has refused.
        """
        early, self._early = self._early, Counter()
        if early.total() < _BURST:
            self._unfinished += early.total()
            return
        for origin, number in early.items():
            self.strangers.note(origin, "closed at once", number)

    def _look(self) -> None:
        """Look after those that wait, for as long as somebody does."""
        assert self._loop is not None
        self._admission.forget_proved()
        for late, origin in self._admission.overdue(self._loop.awake):
            self._hang_up(late, origin, "said too little")
        self._looks = len(self._admission) > 0
        if self._looks:
            self._loop.call_later(_LOOK_SECONDS, self._look)

    def _hang_up(self, fd: int, origin: Origin, detail: str) -> None:
        connection = self._open(fd)
        if connection is not None:
            with connection, contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                connection.shutdown(socket.SHUT_RDWR)
        self.strangers.note(origin, detail)

    def _is_proved(self, fd: int) -> bool:
        connection = self._open(fd)
        if connection is None:
            return True  # it has ended; there is nothing to close
        with connection, contextlib.suppress(OSError):
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            waiting = array.array("i", [0])
            fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, waiting)
            if len(info) == _INFO_BYTES:
                return bool(struct.unpack_from("Q", info, _BYTES_ACKED)[0] + waiting[0] > STRANGER_BYTES)
        return True

    def _open(self, fd: int) -> socket.socket | None:
        """Return libzmq's connection ``fd`` under a descriptor of its own; None if it is closed.

        libzmq may close it at any time, and this process may open something else under that number: the address tells.
        """
        copy = _copy_of(fd)
        if copy is None:
            return None
        try:
            is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and copy.getpeername() and copy.getsockname()[1] in self._listeners.values():
                return copy
        except OSError:
            pass
        copy.close()
        return None

    # ---- no descriptors

    def _cannot_accept(self) -> None:
        """Close what waits to be taken, as far as descriptors are missing."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        shed = [self._shed(fd) for fd in self._listeners]
        self._spare = _spare()
        if any(shed):
            self._shortages.note(errno.EMFILE)
        elif 0 in self._listeners.values():
            self.strangers.note(Origin(""), "another user of this machine")  # libzmq has compared the users

    def _shed(self, fd: int) -> bool:
        """Close the connections that wait at the listener ``fd``, until nothing is short; return whether it was."""
        listener = socket.socket(fileno=fd)
        found = False
        try:
            for _ in range(_MOST_SHED):
                with listener.accept()[0] as connection:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                    second = _spare()
                if second is not None:
                    os.close(second)
                    break
                found = True
        except OSError as error:
            if error.errno in SHORTAGES:  # somebody else took the spare one
                found = True
                for waiting, origin in self._admission.all_unproved():
                    self._hang_up(waiting, origin, "no descriptors are left")
        finally:
            listener.detach()
        return found


def _monitor(context: zmq.Context[zmq.Socket[bytes]], guarded: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    address = f"inproc://monitor-{os.urandom(8).hex()}"
    guarded.monitor(address, int(_EVENTS))
    events = context.socket(zmq.PAIR)
    events.setsockopt(zmq.LINGER, 0)
    events.setsockopt(zmq.RCVHWM, 0)  # else the thread that does the I/O would wait for the one that reads these
    events.connect(address)
    return events


def _copy_of(fd: int) -> socket.socket | None:
    """Return a socket under a descriptor of its own; None if it is closed, or something else by now."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def _spare() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _was_silent(info: bytes) -> bool:
    """Return whether the kernel has kept a connection for as long as it does, and nothing came."""
    (retransmitted,) = struct.unpack_from("I", info, _TOTAL_RETRANS)
    return bool(retransmitted) and struct.unpack_from("Q", info, _BYTES_ACKED + 8)[0] == 0


def _readable(socket_: zmq.Socket[bytes]) -> bool:
    return bool(int(socket_.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
