"""A shell on a host of a job, in the terminal of the program that asks for it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import tty
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from monarch_slurm.actor import Actor, Channel, Port, endpoint
from monarch_slurm.interpreter import GIVEN_PATH_VARIABLE, SAFE_PATH, python_environment
from monarch_slurm.wire.task_limits import start_thread

if TYPE_CHECKING:
    from monarch_slurm.actor import HostMesh

_READ_BYTES = 64 * 1024
_LOOK_SECONDS = 0.2
_GRACE_SECONDS = 1.0
"""What a shell that is told to end may take before it is told more firmly."""


_BECOME_SHELL = (
    f"{SAFE_PATH}import fcntl, os, signal, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); "
    f"path = os.environ.pop({GIVEN_PATH_VARIABLE!r}, None); path is None or os.environ.update(PYTHONPATH=path); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
"""A session of its own with the pty as its terminal, without forking by hand in a process that has threads. Procs
ignore Ctrl-C, and what they start would, too. It imports nothing of this package, so that the shell is there
at once."""


class ShellActor(Actor):
    """One shell on a pty. Its output goes to a port as bytes, the exit code comes last."""

    @endpoint
    def start(
        self, output: Port[bytes | int], env: dict[str, str], workdir: str | None, rows: int, columns: int
    ) -> None:
        """Start the shell (``$SHELL``, or bash)."""
        self._terminal, theirs = pty.openpty()
        self._set_size(rows, columns)
        shell = env.get("SHELL") or os.environ.get("SHELL") or shutil.which("bash") or "/bin/sh"
        command = [sys.executable, "-c", _BECOME_SHELL, shell, "-i"]
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=workdir,
            env=python_environment({**os.environ, "TERM": "xterm-256color", **env}),
        )  # fmt: skip
        os.close(theirs)
        start_thread(threading.Thread(target=self._forward, args=(output,), daemon=True))

    @endpoint
    def write(self, data: bytes) -> None:
        """Type ``data``."""
        with contextlib.suppress(OSError):  # it has ended meanwhile
            os.write(self._terminal, data)

    @endpoint
    def hang_up(self) -> None:
        """End the shell and what runs in its foreground, as a terminal does that is closed."""
        if self._process.poll() is not None:
            return
        groups = {self._process.pid}
        with contextlib.suppress(OSError):  # it has ended meanwhile
            groups.add(os.tcgetpgrp(self._terminal))
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGKILL):
            for group in groups - {0}:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_SECONDS)
                return

    @endpoint
    def resize(self, rows: int, columns: int) -> None:
        """Tell the shell the size of the terminal, in characters."""
        self._set_size(rows, columns)

    def _set_size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def _forward(self, output: Port[bytes | int]) -> None:
        """Pass on what is printed until the shell has ended; what it has left in the background may hold the pty."""
        ended, tell = os.pipe()
        codes: list[int] = []

        def wait() -> None:
            codes.append(self._process.wait())
            os.close(tell)

        start_thread(threading.Thread(target=wait, daemon=True))
        while True:
            ready = select.select([self._terminal, ended], [], [])[0]
            try:
                data = os.read(self._terminal, _READ_BYTES) if self._terminal in ready else b""
            except OSError:  # how a pty says that the other side is closed
                data = b""
            if not data:
                select.select([ended], [], [])
                break
            output.send(data)
        os.close(ended)
        output.send(codes[0] if codes[0] >= 0 else 128 - codes[0])


def shell(host_mesh_singleton: HostMesh, *, env: Mapping[str, str] | None = None, workdir: str | None = None) -> int:
    """Open a shell on a host in this terminal; return its exit code.

    The end of this program's stdin ends the shell, with an exit code other than 0 (129 of SIGHUP, or 137).

    Args:
        host_mesh_singleton: one host.
        env: further variables for the shell.
        workdir: folder that it begins in.

    Raises:
        ValueError: there is more than one host.
    """
    count = len(host_mesh_singleton)
    if count != 1:
        raise ValueError(f"a shell runs on one host; this mesh has {count}: slice it, such as slice(hosts=0)")
    procs = host_mesh_singleton.spawn_procs(name="shell")
    try:
        actor = procs.spawn("shell", ShellActor)
        port, receiver = Channel[Any].open()
        size = shutil.get_terminal_size()
        actor.start.call_one(port, dict(env or {}), workdir, size.lines, size.columns).get()
        with _raw_terminal(actor):
            return _talk(actor, receiver)
    finally:
        procs.stop().get()


def _talk(actor: Any, receiver: Any) -> int:
    """Pass on what is typed and what is printed, until the shell ends."""
    ended = threading.Event()
    start_thread(threading.Thread(target=_type, args=(actor, ended), name="shell-input", daemon=True))
    try:
        while True:
            said = receiver.recv().get()
            if isinstance(said, int):
                return said
            sys.stdout.buffer.write(said)
            sys.stdout.buffer.flush()
    finally:
        ended.set()


def _type(actor: Any, ended: threading.Event) -> None:
    stdin = _stdin()
    while stdin is not None and not ended.is_set():
        if select.select([stdin], [], [], _LOOK_SECONDS)[0]:
            try:
                data = os.read(stdin, _READ_BYTES)
            except OSError:  # the terminal is gone
                data = b""
            if not data:
                break
            actor.write.broadcast(data)
    if not ended.is_set():
        actor.hang_up.broadcast()


def _stdin() -> int | None:
    """Return the descriptor of stdin, or None if this process has none."""
    try:
        return sys.stdin.fileno()
    except (AttributeError, ValueError, OSError):
        return None


@contextlib.contextmanager
def _raw_terminal(actor: Any) -> Iterator[None]:
    """Hand every key on as it is typed, Ctrl-C too, and the size of the window when it changes."""
    if (stdin := _stdin()) is None or not os.isatty(stdin):
        yield
        return

    def resized(*_: object) -> None:
        size = shutil.get_terminal_size()
        actor.resize.broadcast(size.lines, size.columns)

    before = termios.tcgetattr(stdin)
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGWINCH, resized) if in_main_thread else None
    tty.setraw(stdin)
    try:
        yield
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
        if in_main_thread:
            signal.signal(signal.SIGWINCH, handler)
