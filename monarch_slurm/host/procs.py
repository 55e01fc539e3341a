"""The procs of one host: starting them through the zygote, watching them, ending them."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from monarch_slurm.config import settings
from monarch_slurm.host import kernel
from monarch_slurm.host.exits import FailureKind, ProcDown, describe_exit
from monarch_slurm.host.guardian import end_children
from monarch_slurm.host.logs import LineReader, ProcLog
from monarch_slurm.host.orphans import Orphans
from monarch_slurm.host.output import Output
from monarch_slurm.host.proc import PACKET_BYTES, ProcSpec, pack_request
from monarch_slurm.host.shared_memory_files import SharedMemoryFiles, cleans_up
from monarch_slurm.host.zygote_link import ZygoteLink
from monarch_slurm.wire import Loop, Message, Timer, dumps
from monarch_slurm.wire.limits import LimitError, descriptor_limit, descriptors_left

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 0.5
"""Longest wait, after a proc's end and before it is told, for what the proc had sent. Mostly that is there at once."""

LOOK_SECONDS = 0.001

_MEMORY_SECONDS = 0.1
"""From a proc's end to the removal of its shared memory: one look for all that end together."""

DESCRIPTORS_PER_PROC = 6
"""What this process opens for a proc: pipes for its output (while it is born, both ends), a pidfd, its connection."""


@dataclass
class _Proc:
    spec: ProcSpec
    log: ProcLog
    readers: list[LineReader]
    pid: int = 0
    reaped: bool = False
    stopping: bool = False
    signal_at_birth: int = 0
    patience: Timer | None = None
    reported: bool = False
    asked_at: float = field(default_factory=time.time)
    why_ended: str = ""
    event: str = ""
    traceback: str = ""
    kind: FailureKind | None = None
    """Of the failure that it ends itself for."""
    ended_at: float = 0.0

    @property
    def lives(self) -> bool:
        """Whether it was forked and is not reaped."""
        return self.pid != 0 and not self.reaped


class ProcTable:
    """Every proc of this host.

    Args:
        loop: the agent's loop, on whose thread everything here happens.
        output: where lines of procs go.
        log_dir: folder for one log file per proc; None sends lines to the agent's own output.
        connected: whether a proc that is gone still has a connection, on which something that it sent may yet arrive.
        on_down: called once for each proc that ended or could not start.
        on_line: called with each line that a proc prints, and its stream (1 or 2); true: it need not be printed here.
    """

    def __init__(
        self,
        loop: Loop,
        output: Output,
        log_dir: Path | None,
        connected: Callable[[str], bool],
        on_down: Callable[[ProcDown], None],
        on_line: Callable[[ProcSpec, int, str], bool],
    ) -> None:
        self._on_line = on_line
        self._loop = loop
        self._output = output
        self._preload = settings().preload
        self._log_dir = log_dir
        self._connected = connected
        self._on_down = on_down
        self._procs: dict[str, _Proc] = {}
        self._zygote: ZygoteLink | None = None
        self._zygotes: set[ZygoteLink] = set()
        self._shared_memory = SharedMemoryFiles()
        self._sweeps_memory = False
        self._started_at = time.time()
        self._orphans = Orphans(
            loop,
            self.pids,
            self._known,
            lambda: any(zygote.asked for zygote in self._zygotes),
            lambda pid: self._shared_memory.note(pid, self._started_at),
        )
        kernel.become_subreaper()

    def __len__(self) -> int:
        return len(self._procs)

    def __contains__(self, name: str) -> bool:
        return name in self._procs

    def names(self, mesh: str | None = None) -> list[str]:
        """Return the names of the procs that are there, of one mesh or of all."""
        return [name for name, proc in self._procs.items() if mesh is None or proc.spec.mesh == mesh]

    def describe(self, question: Message) -> Message:
        """Return the answer to `monarch_slurm.controller.census`, who asks what the procs here are and do."""
        rows = [
            {
                "name": name,
                "mesh": proc.spec.mesh,
                "rank": proc.spec.rank,
                "pid": proc.pid,
                "state": "stopping" if proc.stopping else "running" if proc.reported else "starting",
                "since": proc.asked_at,
            }
            for name, proc in self._procs.items()
        ]
        fields = {"port": question.fields["port"], "rank": question.fields["rank"], "status": "value"}
        return Message("port", question.src, question.dst, fields, dumps(rows))

    def pid(self, name: str) -> int:
        """Return the pid of a proc; 0 if it is not there or has none yet."""
        proc = self._procs.get(name)
        return proc.pid if proc else 0

    def pids(self) -> dict[str, int]:
        """Return the names and pids of the procs that run."""
        return {name: proc.pid for name, proc in self._procs.items() if proc.lives}

    def read_logs(self) -> None:
        """Read the lines that procs have written by now."""
        for proc in self._procs.values():
            for reader in proc.readers:
                if not reader.ended:
                    self._read_log(reader)

    def warm(self) -> None:
        """Start the zygote now, so that the first spawn need not wait for it."""
        try:
            self._warm_zygote()
        except LimitError as error:
            logger.warning("%s; trying again when procs are asked for", error)

    def renew(self) -> None:
        """Replace the zygote, in case procs inherit what makes them fail. Procs that run are left alone."""
        old = self._zygote
        if old is not None:
            if not old.ready:
                return  # it has not forked anything yet: it is new
            self._zygote = None
            old.retire()
        self.warm()

    def spawn(self, specs: list[ProcSpec]) -> None:
        """Start procs. They, too, end in ``on_down`` if they cannot be started."""
        fitting: list[ProcSpec] = []
        unborn = sum(proc.pid == 0 for proc in self._procs.values())
        room = descriptors_left() // DESCRIPTORS_PER_PROC - unborn
        for spec in specs:
            self._add(spec)
            size = len(pack_request(spec, last=True))
            if size > PACKET_BYTES:
                why = f"its environment and search path take {size} bytes; {PACKET_BYTES} are allowed"
            elif len(fitting) >= room:
                why = f"its host's agent: {descriptor_limit(f'a proc takes {DESCRIPTORS_PER_PROC}')}"
            else:
                fitting.append(spec)
                continue
            self._loop.call_soon(lambda name=spec.proc, why=why: self._end(name, f"NotStarted({why})"))  # type: ignore[misc]
        if fitting:
            self._ask(fitting)

    def _ask(self, specs: list[ProcSpec]) -> None:
        try:
            zygote = self._warm_zygote()
        except LimitError as error:
            for spec in specs:
                self._loop.call_soon(lambda name=spec.proc, why=str(error): self._not_born(name, why))  # type: ignore[misc]
        else:
            zygote.ask(specs)

    def reported(self, name: str) -> None:
        """Note that a proc has reported, so that its start is over."""
        proc = self._procs.get(name)
        if proc is not None:
            proc.reported = True
            if proc.patience is not None:
                proc.patience.cancel()

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a proc (SIGKILL: and to all that it started), at its birth if it has no pid yet.

        One that still waits for the zygote is not born for a SIGKILL: a zygote may take long to be ready.
        """
        proc = self._procs.get(name)
        if proc is None:
            return
        if proc.pid == 0:
            proc.signal_at_birth = number
            if number == signal.SIGKILL and self._zygote is not None and self._zygote.withdraw(name):
                self._loop.call_soon(lambda: self._end(name, proc.why_ended or _KILLED))
        elif proc.lives:
            _send_signal(proc, number)

    def expect_end(self, name: str, seconds: float, why: str = "") -> None:
        """The proc was told to end: kill it if it has not within ``seconds``.

        Args:
            why: says that its owner did not want it to end, and why it does; the owner is told so.
        """
        proc = self._procs.get(name)
        if proc is not None:
            proc.stopping = proc.stopping or not why
            proc.why_ended = why
            if seconds > 0:
                self._loop.call_at_deadline(seconds, lambda: self._kill_if_same(name, proc))
            else:
                self.signal(name, signal.SIGKILL)

    def note_failure(self, name: str, kind: str, event: str, traceback: str) -> None:
        """A proc that is about to end says why, with the traceback of the Python exception that was the reason."""
        proc = self._procs.get(name)
        if proc is not None:
            proc.kind, proc.event, proc.traceback = FailureKind(kind), event, traceback

    def reap(self) -> None:
        """Look after orphans; to be called now and then."""
        self._orphans.sweep()

    def close(self) -> None:
        """Kill everything and the zygotes; return when all of it is gone."""
        for proc in self._procs.values():
            if proc.lives:
                _send_signal(proc, signal.SIGKILL)
        for zygote in self._zygotes:
            zygote.kill()
        # The zygotes are dead, so no new child can appear but orphans of those that are being killed here.
        for pid in end_children(kernel.children):
            self._shared_memory.note(pid, self._started_at)
        self._shared_memory.sweep()

    def _sweep_memory(self) -> None:
        self._sweeps_memory = False
        self._shared_memory.sweep()

    def _kill_if_same(self, name: str, proc: _Proc) -> None:
        if self._procs.get(name) is proc:
            self.signal(name, signal.SIGKILL)

    # ---- zygotes

    def _warm_zygote(self) -> ZygoteLink:
        if self._zygote is None:
            self._zygote = ZygoteLink(
                self._loop, self._preload, self._pipes, self._born, self._not_born, self._zygote_ended
            )
            self._zygotes.add(self._zygote)
        return self._zygote

    def _zygote_ended(self, zygote: ZygoteLink, why: str) -> None:
        self._zygotes.discard(zygote)
        if self._zygote is zygote:
            self._zygote = None
        if not zygote.ready and zygote.preload:
            logger.warning("%s while it preloaded %r; going on without", why, zygote.preload)
            self._preload = ""
            if zygote.waiting:
                self._ask(zygote.waiting)
            return
        for name in [*zygote.asked, *(spec.proc for spec in zygote.waiting)]:
            if name in self._procs:
                self._end(name, f"NotStarted({why})")

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
        log = ProcLog(
            self._output,
            prefix,
            path,
            settings().stderr_tail_lines,
            lambda stream, line: self._on_line(spec, stream, line),
        )
        self._procs[spec.proc] = _Proc(spec, log, [])

    def _born(self, name: str, pid: int) -> None:
        proc = self._procs[name]
        proc.pid = pid
        self._loop.watch_process(pid, lambda: self._ended(name))
        if proc.signal_at_birth:
            _send_signal(proc, proc.signal_at_birth)
        seconds = proc.spec.settings.get("proc_start_timeout") or settings().proc_start_timeout
        if not proc.reported:
            proc.patience = self._loop.call_at_deadline(seconds, lambda: self._too_slow(name, seconds))

    def _not_born(self, name: str, why: str) -> None:
        if name in self._procs:
            self._end(name, f"NotStarted({why})")

    def _too_slow(self, name: str, seconds: float) -> None:
        self._procs[
            name
        ].why_ended = f"NotReported(no word from it within {seconds:g} s of its start; setting proc_start_timeout)"
        self.signal(name, signal.SIGKILL)

    def _ended(self, name: str) -> None:
        proc = self._procs[name]
        # What it started ends with it; while it is not reaped its pid is nobody else's.
        known = self._known()
        kernel.kill_group_but(proc.pid, [pid for pid in kernel.children() if pid not in known and cleans_up(pid)])
        try:
            result = os.waitid(os.P_PID, proc.pid, os.WEXITED | os.WNOHANG)
        except ChildProcessError:  # still the midwife's child: it ends in a moment
            result = None
        if result is None:
            self._loop.call_later(LOOK_SECONDS, lambda: self._ended(name))
            return
        proc.ended_at = time.time()
        proc.reaped = True
        self._shared_memory.note(proc.pid, proc.asked_at)
        if not self._sweeps_memory:
            self._sweeps_memory = True
            self._loop.call_later(_MEMORY_SECONDS, self._sweep_memory)
        if proc.patience is not None:
            proc.patience.cancel()
        self._orphans.sweep()
        exit_text = proc.why_ended or describe_exit(result.si_code, result.si_status)
        self._drain(name, exit_text, self._loop.awake + DRAIN_SECONDS)

    def _drain(self, name: str, exit_text: str, deadline: float) -> None:
        """Tell of the end once the connection is gone, too; nothing that the proc sent can come after that."""
        if self._connected(name) and self._loop.awake < deadline:
            self._loop.call_later(LOOK_SECONDS, lambda: self._drain(name, exit_text, deadline))
        else:
            self._end(name, exit_text)

    def _end(self, name: str, exit_text: str) -> None:
        proc = self._procs.pop(name)
        for reader in proc.readers:
            if not reader.ended:
                self._loop.remove_reader(reader.fd)
                reader.finish()
        proc.log.close()
        self._orphans.sweep()
        spec = proc.spec
        kind = proc.kind or (FailureKind.PROC_EXITED if proc.reported else FailureKind.PROC_NOT_STARTED)
        self._on_down(
            ProcDown(
                spec.host, spec.host_name, name, spec.mesh, spec.rank, proc.pid, exit_text,
                proc.ended_at or time.time(), proc.log.tail, proc.stopping, proc.event, proc.traceback, kind,
            )
        )  # fmt: skip

    def _read_log(self, reader: LineReader) -> None:
        if not reader.read():
            self._loop.remove_reader(reader.fd)
            reader.finish()

    # ---- orphans

    def _known(self) -> set[int]:
        return {proc.pid for proc in self._procs.values() if proc.lives} | {zygote.pid for zygote in self._zygotes}


_KILLED = describe_exit(os.CLD_KILLED, int(signal.SIGKILL))


def _send_signal(proc: _Proc, number: int) -> None:
    kernel.send(proc.pid, number)  # only this process reaps it, so the pid is nobody else's
