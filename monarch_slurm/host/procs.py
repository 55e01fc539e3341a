"""The procs of one host: starting them through the zygote, watching them, ending them."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgpack

from monarch_slurm.config import settings
from monarch_slurm.host import kernel
from monarch_slurm.host.exits import ProcDown, describe_exit
from monarch_slurm.host.logs import LineReader, ProcLog
from monarch_slurm.host.proc import PACKET_BYTES, ProcSpec
from monarch_slurm.wire import Loop

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 0.002
"""Between a proc's end and telling of it, so that what it sent before it ended is read first."""


@dataclass
class _Proc:
    spec: ProcSpec
    log: ProcLog
    readers: list[LineReader]
    pid: int = 0
    pidfd: int = -1
    stopping: bool = False
    ended_at: float = 0.0


@dataclass
class _Zygote:
    process: subprocess.Popen[bytes]
    socket: socket.socket
    ready: bool = False
    waiting: list[ProcSpec] = field(default_factory=list)


class ProcTable:
    """Every proc of this host.

    Args:
        loop: the agent's loop, on whose thread everything here happens.
        preload: what the zygote imports, see `monarch_slurm.host.zygote.preload`.
        log_dir: folder for one log file per proc; None sends lines to the agent's own output.
        on_down: called once for each proc that ended or could not start.
    """

    def __init__(self, loop: Loop, preload: str, log_dir: Path | None, on_down: Callable[[ProcDown], None]) -> None:
        self._loop = loop
        self._preload = preload
        self._log_dir = log_dir
        self._on_down = on_down
        self._procs: dict[str, _Proc] = {}
        self._zygote: _Zygote | None = None
        self._reap_timer_armed = False
        kernel.become_subreaper()

    def __len__(self) -> int:
        return len(self._procs)

    def names(self, mesh: str | None = None) -> list[str]:
        """Return the names of the procs that are there, of one mesh or of all."""
        return [name for name, proc in self._procs.items() if mesh is None or proc.spec.mesh == mesh]

    def pid(self, name: str) -> int:
        """Return the pid of a proc; 0 if it is not there or has none yet."""
        proc = self._procs.get(name)
        return proc.pid if proc else 0

    def warm(self) -> None:
        """Start the zygote now, so that the first spawn need not wait for it."""
        if self._zygote is None:
            self._zygote = self._start_zygote()

    def renew(self) -> None:
        """Replace the zygote, in case procs inherit what makes them fail. Procs that run are left alone."""
        old, self._zygote = self._zygote, None
        if old is not None:
            if old.waiting or not old.ready:
                self._zygote = old  # it has not forked anything yet: it is new
                return
            self._retire(old)
        self.warm()

    def spawn(self, specs: list[ProcSpec]) -> None:
        """Start procs. They, too, end in ``on_down`` if they cannot be started."""
        for spec in specs:
            self._add(spec)
        self.warm()
        assert self._zygote is not None
        if self._zygote.ready:
            self._request(self._zygote, specs)
        else:
            self._zygote.waiting += specs

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a proc and all that it started; a proc that has no pid yet ends when it gets one."""
        proc = self._procs.get(name)
        if proc is None:
            return
        if proc.pid == 0:
            proc.stopping = True
        elif proc.pidfd >= 0:
            _signal_group(proc, number)

    def expect_end(self, name: str, seconds: float) -> None:
        """The proc was told to end: kill it if it has not within ``seconds``."""
        proc = self._procs.get(name)
        if proc is not None:
            proc.stopping = True
            self._loop.call_later(seconds, lambda: self._kill_if_same(name, proc))

    def close(self) -> None:
        """Kill everything and the zygote; return when all of it is gone."""
        for proc in self._procs.values():
            if proc.pidfd >= 0:
                _signal_group(proc, signal.SIGKILL)
        if self._zygote is not None:
            self._zygote.process.kill()
            self._zygote.process.wait()
        # The zygote is dead, so no new child can appear but orphans of those that are being killed here.
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                for child in kernel.children():
                    _kill(child)
                time.sleep(0.001)

    def _kill_if_same(self, name: str, proc: _Proc) -> None:
        if self._procs.get(name) is proc:
            self.signal(name, signal.SIGKILL)

    # ---- the zygote

    def _start_zygote(self) -> _Zygote:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "monarch_slurm.host.zygote", str(theirs.fileno()), str(os.getpid())]
        # One thread per numeric library: a fork of a process with running pool threads is broken.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [*command, self._preload], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
        )
        theirs.close()
        ours.setblocking(False)
        zygote = _Zygote(process, ours)
        self._loop.add_reader(ours.fileno(), lambda: self._zygote_speaks(zygote))
        return zygote

    def _zygote_speaks(self, zygote: _Zygote) -> None:
        while True:
            try:
                packet = zygote.socket.recv(PACKET_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                packet = b""
            if not packet:
                self._zygote_ended(zygote)
                return
            answer = msgpack.unpackb(packet)
            if "ready" in answer:
                self._zygote_ready(zygote, answer)
            else:
                self._born(answer["proc"], answer["pid"])

    def _zygote_ready(self, zygote: _Zygote, answer: dict[str, object]) -> None:
        zygote.ready = True
        failures = answer["failures"]
        assert isinstance(failures, list)
        for failure in failures:
            logger.warning("the zygote could not preload %s\nprocs will import it themselves", failure)
        if answer["threads"] != 1:
            logger.warning(
                "preloading %r started threads (%s in all); forked procs lack them. Leave out the module that starts them",
                self._preload,
                answer["threads"],
            )
        waiting, zygote.waiting = zygote.waiting, []
        self._request(zygote, waiting)

    def _zygote_ended(self, zygote: _Zygote) -> None:
        self._loop.remove_reader(zygote.socket.fileno())
        zygote.socket.close()
        code = zygote.process.wait()
        if self._zygote is not zygote:
            return
        self._zygote = None
        lost = [name for name, proc in self._procs.items() if proc.pid == 0]
        if not zygote.ready and self._preload:
            logger.warning("the zygote ended (status %s) while it preloaded %r; going on without", code, self._preload)
            self._preload = ""
            if zygote.waiting:
                self._zygote = self._start_zygote()
                self._zygote.waiting = zygote.waiting
            return
        for name in lost:
            self._end(name, f"NotStarted(the zygote ended with status {code})")

    def _retire(self, zygote: _Zygote) -> None:
        """Close the zygote's socket after what it was asked for: it answers that, then reads the end and leaves."""
        zygote.socket.shutdown(socket.SHUT_WR)

    def _request(self, zygote: _Zygote, specs: list[ProcSpec]) -> None:
        zygote.socket.setblocking(True)
        try:
            for index, spec in enumerate(specs):
                packet = msgpack.packb({"spec": asdict(spec), "last": index == len(specs) - 1})
                ends = self._pipes(spec)
                socket.send_fds(zygote.socket, [packet], ends)
                for end in ends:
                    os.close(end)
        except OSError as error:  # its end is told by _zygote_speaks, which gives these procs up
            logger.warning("cannot ask the zygote for procs: %s", error)
        finally:
            zygote.socket.setblocking(False)

    def _pipes(self, spec: ProcSpec) -> list[int]:
        proc = self._procs[spec.proc]
        ends = []
        for on_line in (proc.log.stdout, proc.log.stderr):
            read_end, write_end = os.pipe()
            reader = LineReader(read_end, on_line)
            proc.readers.append(reader)
            self._loop.add_reader(read_end, lambda reader=reader: self._read_log(reader))  # type: ignore[misc]
            ends.append(write_end)
        return ends

    # ---- the life of a proc

    def _add(self, spec: ProcSpec) -> None:
        path = self._log_dir / f"{spec.host_name}.{spec.proc}.log" if self._log_dir else None
        prefix = f"[{spec.host_name} {spec.mesh} {spec.rank}]"
        self._procs[spec.proc] = _Proc(spec, ProcLog(prefix, path, settings().stderr_tail_lines), [])

    def _born(self, name: str, pid: int) -> None:
        proc = self._procs[name]
        proc.pid = pid
        proc.pidfd = os.pidfd_open(pid)
        self._loop.add_reader(proc.pidfd, lambda: self._ended(name))
        if proc.stopping:
            _signal_group(proc, signal.SIGKILL)

    def _ended(self, name: str) -> None:
        proc = self._procs[name]
        _kill_group(proc.pid)  # what it started ends with it; while it is not reaped its pid is nobody else's
        try:
            result = os.waitid(os.P_PIDFD, proc.pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:  # still the midwife's child: it ends in a moment
            self._loop.remove_reader(proc.pidfd)
            self._loop.call_later(DRAIN_SECONDS, lambda: self._loop.add_reader(proc.pidfd, lambda: self._ended(name)))
            return
        if result is None:
            return
        proc.ended_at = time.time()
        self._loop.remove_reader(proc.pidfd)
        os.close(proc.pidfd)
        proc.pidfd = -1
        exit_text = describe_exit(result.si_code, result.si_status)
        self._loop.call_later(DRAIN_SECONDS, lambda: self._end(name, exit_text))

    def _end(self, name: str, exit_text: str) -> None:
        proc = self._procs.pop(name)
        for reader in proc.readers:
            if not reader.ended:
                self._loop.remove_reader(reader.fd)
                reader.read()
                reader.finish()
        proc.log.close()
        self._kill_orphans()
        spec = proc.spec
        self._on_down(
            ProcDown(
                spec.host, spec.host_name, name, spec.mesh, spec.rank, proc.pid, exit_text,
                proc.ended_at or time.time(), proc.log.tail, proc.stopping,
            )
        )  # fmt: skip

    def _read_log(self, reader: LineReader) -> None:
        if not reader.read():
            self._loop.remove_reader(reader.fd)
            reader.finish()

    def _kill_orphans(self) -> None:
        """End children that no table knows: what a dead proc had started in a session of its own."""
        known = {proc.pid for proc in self._procs.values()}
        if self._zygote is not None:
            known.add(self._zygote.process.pid)
            if any(proc.pid == 0 for proc in self._procs.values()):
                return  # a proc may have been born whose pid has not been told yet
        strangers = [pid for pid in kernel.children() if pid not in known]
        for pid in strangers:
            _kill(pid)
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue
        if strangers and not self._reap_timer_armed:
            self._reap_timer_armed = True
            self._loop.call_later(0.05, self._reap_again)

    def _reap_again(self) -> None:
        self._reap_timer_armed = False
        self._kill_orphans()


def _signal_group(proc: _Proc, number: int) -> None:
    try:
        signal.pidfd_send_signal(proc.pidfd, number)
    except ProcessLookupError:
        return
    if number == signal.SIGKILL:
        _kill_group(proc.pid)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
