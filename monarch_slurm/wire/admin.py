"""Questions to a live controller from outside, such as those of ``monarch-slurm status``.

The controller listens on one more socket. ``admin.json`` in the job's folder (mode 0600) tells where, and holds keys of
their own: whoever may ask may not join, and nothing that comes in is unpickled. Questions and answers are JSON.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import zmq

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.wire.gatekeeper import Gatekeeper
from monarch_slurm.wire.keys import Invitation, JobKeys, KeyFileError, read_invitation, write_invitation
from monarch_slurm.wire.loop import Loop
from monarch_slurm.wire.sockets import bind_tcp, connect_tcp, make_dealer, make_router
from monarch_slurm.wire.task_limits import zmq_context

logger = logging.getLogger(__name__)

ADMIN_FILE = "admin.json"

MAX_QUESTION_BYTES = 1 << 20

QUESTIONS = "questions"
"""The question that every controller answers: the names of the others that it answers."""

ANSWER_THREADS = 4
"""Questions that are answered at the same time."""

Answer = Callable[..., Any]
"""Returns what can be written as JSON. It is called on a thread of its own with the question's arguments by name."""


class NoAnswerError(MonarchSlurmError):
    """A controller does not answer: it has ended, hangs, or cannot be reached from here."""


class AdminServer:
    """Answers questions; `close` ends it.

    Args:
        folder: of the job, where ``admin.json`` goes.
        ip: IP address of this machine to listen on.
        answers: by the name of the question. It may grow while the server runs.

    Raises:
        BindError: the address is not one of this machine.
    """

    def __init__(self, folder: Path, ip: str, answers: Mapping[str, Answer]) -> None:
        self._answers = answers
        self._file = folder / ADMIN_FILE
        self._loop = Loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq_context()
        self._socket = make_router(self._context)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_QUESTION_BYTES)
        keys = JobKeys.make()
        self._gatekeeper = Gatekeeper(self._context, self._socket, keys, "the port for questions")
        address = bind_tcp(self._socket, ip, keys)
        self._pool = ThreadPoolExecutor(ANSWER_THREADS, "monarch-admin")
        self._loop.call_soon(self._attach)
        self._loop.start("monarch-admin-io")
        write_invitation(
            folder, Invitation(address, keys.server_public, keys.agent_public, keys.agent_secret), ADMIN_FILE
        )

    def close(self) -> None:
        """Take ``admin.json`` back and answer nothing any more. A second call does nothing."""
        self._file.unlink(missing_ok=True)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._loop.call_soon(self._close)
        self._loop.join(1.0)

    def _close(self) -> None:
        if not self._context.closed:
            self._gatekeeper.close()
            self._socket.close(0)
            self._context.destroy(linger=0)
            self._loop.stop()

    def _attach(self) -> None:
        self._gatekeeper.attach(self._loop)
        self._loop.add_reader(int(self._socket.getsockopt(zmq.FD)), self._read)
        self._read()

    def _read(self) -> None:
        """Read all that is there: ZeroMQ's descriptor tells only of changes."""
        while not self._context.closed:
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                number, question, arguments = json.loads(frames[0])
                self._pool.submit(self._answer, peer, int(number), str(question), dict(arguments))
            except (ValueError, TypeError, IndexError):
                logger.warning("somebody with this job's keys asked what is no question; dropped")
            except RuntimeError:  # the pool is closed
                return

    def _answer(self, peer: bytes, number: int, question: str, arguments: dict[str, Any]) -> None:
        answer = (lambda: sorted(self._answers)) if question == QUESTIONS else self._answers.get(question)
        try:
            if answer is None:
                raise LookupError(f"unknown question {question!r}; known here: {', '.join(sorted(self._answers))}")  # noqa: TRY301
            reply = json.dumps([number, True, answer(**arguments)], default=str)
        except Exception as error:  # whatever it is, the asker is told, and the job goes on
            reply = json.dumps([number, False, f"{type(error).__name__}: {error}"])
        self._loop.call_soon(lambda: self._send(peer, reply.encode()))

    def _send(self, peer: bytes, reply: bytes) -> None:
        if self._context.closed:
            return
        try:
            self._socket.send_multipart([peer, reply], zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError):
            return  # nobody waits any more
        self._read()


class AdminClient:
    """A connection to the controller of the job in ``folder``, to be used as a context manager.

    Raises:
        NoAnswerError: no controller is there.
        KeyFileError: its key file cannot be trusted.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._invitation = read_invitation(folder / ADMIN_FILE)
        except FileNotFoundError:
            raise NoAnswerError(f"no controller is running for {folder} ({ADMIN_FILE} is not there)") from None
        except OSError as error:
            raise KeyFileError(f"cannot read {folder / ADMIN_FILE}: {error.strerror}") from None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq_context()
        self._socket = make_dealer(self._context, f"admin-{time.time_ns()}-{threading.get_ident()}")
        connect_tcp(self._socket, self._invitation)
        self._number = 0

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def ask(self, question: str, timeout: float = 5.0, **arguments: Any) -> Any:
        """Return the controller's answer.

        Args:
            timeout: seconds.

        Raises:
            NoAnswerError: none came in time, or it was an error.
        """
        self._number += 1
        self._socket.send(json.dumps([self._number, question, arguments]).encode())
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            if not self._socket.poll(max(1, round(left * 1000))):
                break
            number, good, value = json.loads(self._socket.recv())
            if number != self._number:
                continue  # an answer that came too late
            if not good:
                raise NoAnswerError(f"the controller could not answer: {value}")
            return value
        raise NoAnswerError(
            f"the controller at {self._invitation.address.removeprefix('tcp://')} did not answer within {timeout:g} s: "
            "it has ended or hangs, or this machine cannot reach it"
        )


def ask(folder: Path, question: str, timeout: float = 5.0, **arguments: Any) -> Any:
    """Ask the controller of the job in ``folder`` one question; see `AdminClient.ask`."""
    with AdminClient(folder) as client:
        return client.ask(question, timeout, **arguments)
