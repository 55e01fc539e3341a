"""The program's end of attaching to workers: they are dialled, and asked to be its hosts."""

from __future__ import annotations

import os
import socket as sockets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import zmq
import zmq.utils.monitor

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.host.worker_address import WorkerAddress, resolve, split_tcp
from monarch_slurm.wire import Invitation, JobKeys, pack, unpack
from monarch_slurm.wire.plain import UnpackError
from monarch_slurm.wire.sockets import connect_tcp, make_dealer
from monarch_slurm.wire.task_limits import zmq_context

_ATTEMPT_SECONDS = 5.0
"""Seconds that a worker has to answer at the first attempt; each further attempt gives it twice as long."""

_PAUSE_SECONDS = 0.2
_THREADS = 64
_UNREADABLE_ANSWERS = 3
"""After so many handshakes that fail, the key is the reason, and not a worker that has just ended."""

_HANDSHAKES_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)


class AttachError(MonarchSlurmError, RuntimeError):
    """A worker cannot be attached to; the text says which one and why."""


class TryAgainError(Exception):
    """It did not work now and may in a moment."""


class _HandshakeError(TryAgainError):
    """What is there did not take this program's key."""


@dataclass
class Candidate:
    """A worker that is to become a host of this program.

    Attributes:
        address: where it is.
        host: id that it is to have; ``name`` is what people call it.
        why: why the last attempt failed.
    """

    address: WorkerAddress
    host: str
    name: str
    why: str = "it was not dialled yet"
    handshakes_failed: int = 0
    patience: float = _ATTEMPT_SECONDS


def attach_all(
    candidates: Sequence[Candidate],
    keys: JobKeys,
    invite: Callable[[WorkerAddress], Invitation],
    with_settings: dict[str, Any],
    program: str,
    on_failed: Callable[[Candidate, str], None],
    timeout: float,
    is_ours: Callable[[str], bool],
    reach: Callable[[str], str] = str,
) -> list[Candidate]:
    """Ask workers to be hosts of this program; return those that have accepted: their agents join in a moment.

    Args:
        keys: of `monarch_slurm.wire.shared_key.derive_keys`.
        invite: returns what tells a worker where to join, with an address that it can reach.
        with_settings: settings that the agents take over.
        program: id of this program, the same in all its requests.
        on_failed: called with each worker that cannot be had, and why.
        timeout: seconds that workers may take to come, and to end what they did for another program.
        is_ours: whether a host of that id is there, and is this program's.
        reach: returns what is to be dialled for a worker's URL.
    """
    end = time.monotonic() + timeout
    context: zmq.Context[zmq.Socket[bytes]] = zmq_context()
    context.set(zmq.MAX_SOCKETS, 4 * _THREADS)
    accepted: list[Candidate] = []

    def attempt(candidate: Candidate) -> bool:
        """Return whether it is worth another one."""
        try:
            request = {
                "identity": candidate.address.identity,
                "program": program,
                "who": f"the program with pid {os.getpid()} on {sockets.gethostname()}",
                "host": candidate.host,
                "name": candidate.name,
                "settings": with_settings,
                "invitation": asdict(invite(candidate.address)),
            }
            seconds = min(candidate.patience, max(_ATTEMPT_SECONDS, end - time.monotonic()))
            candidate.patience *= 2
            socket, _ = ask_worker(context, keys, reach(candidate.address.dial), request, is_ours, seconds)
            socket.close(linger=0)
        except (TryAgainError, OSError) as error:
            candidate.why = error.strerror or repr(error) if isinstance(error, OSError) else str(error)
            candidate.handshakes_failed += isinstance(error, _HandshakeError)
            if candidate.handshakes_failed < _UNREADABLE_ANSWERS and time.monotonic() < end:
                return True
            on_failed(candidate, candidate.why)
        except MonarchSlurmError as error:
            on_failed(candidate, str(error))
        else:
            accepted.append(candidate)
        return False

    left = list(candidates)
    with ThreadPoolExecutor(_THREADS, "monarch-attach") as pool:
        while left:
            left = [candidate for candidate, again in zip(left, pool.map(attempt, left), strict=True) if again]
            if left:
                time.sleep(_PAUSE_SECONDS)
    context.destroy(linger=0)
    return accepted


def ask_worker(
    context: zmq.Context[zmq.Socket[bytes]],
    keys: JobKeys,
    url: str,
    request: dict[str, Any],
    is_ours: Callable[[str], bool],
    seconds: float = _ATTEMPT_SECONDS,
) -> tuple[zmq.Socket[bytes], dict[str, Any]]:
    """Return the connection with the worker at ``url``, and how it has accepted ``request``, within ``seconds``.

    Raises:
        TryAgainError: it did not now.
        AttachError: it never will.
    """
    end = time.monotonic() + seconds
    socket = make_dealer(context, f"{request['program']}-{os.urandom(4).hex()}")
    monitor = socket.get_monitor_socket()
    accepted = False
    try:
        connect_tcp(socket, Invitation(url, keys.server_public, keys.agent_public, keys.agent_secret))
        socket.send(pack(request))
        _wait_for_answer(socket, monitor, url, end)
        try:
            answer = unpack(socket.recv())
            accepted = bool(answer["accepted"])
            if not accepted:
                kind = AttachError if not answer["later"] or is_ours(answer.get("host", "")) else TryAgainError
                raise kind(answer["why"])
            return socket, answer
        except (*UnpackError, KeyError) as error:
            raise AttachError(f"what answers there is no worker of this version: {error!r}") from None
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)
        if not accepted:
            socket.close(linger=0)


def _wait_for_answer(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], url: str, end: float) -> None:
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    connected = False
    while (left := end - time.monotonic()) > 0:
        ready = dict(poller.poll(round(left * 1000)))
        if socket in ready:
            return
        if monitor in ready:
            event = zmq.utils.monitor.recv_monitor_message(monitor)["event"]
            if event in _HANDSHAKES_FAILED:
                raise _HandshakeError("it does not take this key: another one was made for it, or it is no worker")
            if event == zmq.EVENT_CONNECTED:
                connected = True
            elif event == zmq.EVENT_DISCONNECTED:
                raise TryAgainError("it hung up")
            elif event == zmq.EVENT_CLOSED:
                raise TryAgainError(_why_unreachable(url))
    raise TryAgainError("it does not answer" if connected else _why_unreachable(url))


def _why_unreachable(url: str) -> str:
    """Dial without ZeroMQ, which does not tell why it cannot connect."""
    try:
        if url.startswith("tcp:"):
            host, port = split_tcp(url)
            sockets.create_connection((resolve(host), int(port)), timeout=_ATTEMPT_SECONDS).close()
        else:
            path = url.partition("://")[2]
            with sockets.socket(sockets.AF_UNIX) as probe:
                probe.connect("\0" + path[1:] if path.startswith("@") else path)
    except (OSError, ValueError) as error:
        return f"nothing listens there ({getattr(error, 'strerror', None) or error})"
    return "it does not answer"
