"""The agent's side of its zygote: starting it, asking it for procs, noticing that it is no more."""

from __future__ import annotations

import errno
import logging
import os
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from typing import Any

from monarch_slurm.config import settings
from monarch_slurm.host.proc import ENTRY_MODULE, PACKET_BYTES, ProcSpec, pack_request
from monarch_slurm.interpreter import module_command, python_environment
from monarch_slurm.wire import Loop, unpack
from monarch_slurm.wire.limits import LimitError, descriptor_limit
from monarch_slurm.wire.task_limits import start_process

logger = logging.getLogger(__name__)

_BUSY_SECONDS = 0.005

_START_SECONDS = 60.0
"""Time that a zygote gets at least if it preloads nothing of the user's: a busy machine takes long to start Python."""


class ZygoteLink:
    """One zygote process, from its start to its end.

    Args:
        preload: what it imports, see `monarch_slurm.host.zygote.preload`.
        pipes: makes the pipes for a proc's stdout and stderr, and returns their write ends; asked once per proc.
        on_born: called with the name and the pid of each proc that was forked.
        on_not_born: called with the name of each proc that could not be forked, and why.
        on_ended: called once with this link and the reason when the zygote has ended, and forks nothing any more.

    Raises:
        LimitError: this process may start no other, or open nothing more.
    """

    def __init__(
        self,
        loop: Loop,
        preload: str,
        pipes: Callable[[ProcSpec], list[int]],
        on_born: Callable[[str, int], None],
        on_not_born: Callable[[str, str], None],
        on_ended: Callable[[ZygoteLink, str], None],
    ) -> None:
        self._loop = loop
        self._pipes = pipes
        self._on_born = on_born
        self._on_not_born = on_not_born
        self._on_ended = on_ended
        self.preload = preload
        self.ready = False
        self._retired = False
        self.waiting: list[ProcSpec] = []
        """Procs that are asked for once the zygote is ready."""
        self._outbox: deque[tuple[ProcSpec, bool]] = deque()
        self._ends: list[int] = []
        self.asked: set[str] = set()
        """Names of procs that it was asked for and that have no pid yet."""
        self._socket, theirs = _socket_pair()
        modules = ",".join(filter(None, [ENTRY_MODULE, preload]))
        command = module_command("monarch_slurm.host.zygote", str(theirs.fileno()), str(os.getpid()), modules)
        # One thread per numeric library: a fork of a process with running pool threads is broken.
        environment = python_environment({**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})
        try:
            self._process = start_process(
                "the zygote", command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self._socket.setblocking(False)
        loop.add_reader(self._socket.fileno(), self._read)
        self._why = ""
        self._seconds = settings().preload_timeout if preload else max(settings().preload_timeout, _START_SECONDS)
        self._patience = loop.call_at_deadline(self._seconds, self._give_up)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, specs: list[ProcSpec]) -> None:
        """Have procs forked, as soon as the zygote is ready; each is told by ``on_born``. One call is one round."""
        if not self.ready:
            self.waiting += specs
            return
        self.asked.update(spec.proc for spec in specs)
        self._outbox += [(spec, spec is specs[-1]) for spec in specs]
        self._send()

    def withdraw(self, name: str) -> bool:
        """Take back that a proc was asked for; return whether it still waited for the zygote to be ready."""
        waited = len(self.waiting)
        self.waiting = [spec for spec in self.waiting if spec.proc != name]
        return len(self.waiting) < waited

    def _send(self) -> None:
        while self._outbox:
            spec, last = self._outbox[0]
            if not self._ends:
                self._ends = self._pipes(spec)
            try:
                socket.send_fds(self._socket, [pack_request(spec, last)], self._ends)
            except BlockingIOError:  # it is busy forking
                self._loop.call_later(_BUSY_SECONDS, self._send)
                return
            except OSError as error:  # it is gone; _read is told so, and gives these procs up
                logger.warning("cannot ask the zygote for procs: %s", error)
                self._outbox.clear()
            else:
                self._outbox.popleft()
            self._close_ends()

    def _close_ends(self) -> None:
        for end in self._ends:
            os.close(end)
        self._ends = []

    def retire(self) -> None:
        """Let it answer what it was asked, and then leave."""
        self._retired = True
        self._patience.cancel()
        self._socket.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """End it now, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        while True:
            try:
                packet = self._socket.recv(PACKET_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                packet = b""
            if not packet:
                self._ended()
                return
            answer = unpack(packet)
            if "ready" in answer:
                self._is_ready(answer)
            else:
                self.asked.discard(answer["proc"])
                if "error" in answer:
                    self._on_not_born(answer["proc"], answer["error"])
                else:
                    self._on_born(answer["proc"], answer["pid"])

    def _is_ready(self, answer: dict[str, Any]) -> None:
        self.ready = True
        self._patience.cancel()
        for failure in answer["failures"]:
            logger.warning("the zygote could not preload %s; procs will import it themselves", failure)
        if answer["threads"] != 1:
            logger.warning(
                "preloading %r started threads (%s in all); forked procs lack them. "
                "Leave out the module that starts them",
                self.preload,
                answer["threads"],
            )
        waiting, self.waiting = self.waiting, []
        if waiting:
            self.ask(waiting)

    def _give_up(self) -> None:
        if not self.ready:
            self._why = f"the zygote has not been ready within {self._seconds:g} s (setting preload_timeout)"
            logger.warning("%s: ending it", self._why)
            self._process.kill()

    def _ended(self) -> None:
        # End of file comes after the last midwife has closed its copy of the socket: nothing is born after this.
        self._patience.cancel()
        self._outbox.clear()
        self._close_ends()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        if self._retired:
            self._process.kill()  # Python may take seconds to end with all that was imported
            self._loop.watch_process(self.pid, self._gone)
        else:
            self._gone()

    def _gone(self) -> None:
        status = self._process.wait()
        self._on_ended(self, self._why or f"the zygote ended with status {status}")


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise LimitError(descriptor_limit("a zygote needs two")) from None
