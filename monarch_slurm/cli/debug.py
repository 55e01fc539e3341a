"""``monarch-slurm debug``: Python's debugger on ranks of a running program that have stopped at ``breakpoint()``."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
import termios
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from monarch_slurm.cli.programs import NoProgramError, Program, choose_programs

if TYPE_CHECKING:
    from monarch_slurm.wire.console import Session


@click.command()
@click.option("--pid", type=click.IntRange(1), help="The program (controller) with this process id.")
@click.option("--job", help="The program of this Slurm job.")
def debug(pid: int | None, job: str | None) -> None:
    """Talk to ranks of your program that have stopped at breakpoint().

    Run it beside the controller: on the machine of your program, on the head node of a Slurm job. `help` at its prompt
    tells the commands; they can be piped in, too. Ranks stay stopped when it ends. A second one takes over.
    """
    session = _choose(pid, job).session
    session.send({"service": "debug"})
    try:
        if sys.stdin.isatty():
            with _Terminal(session) as terminal:
                terminal.run()
        else:
            _run_commands(session)
    except OSError:
        click.echo("the program has ended", err=True)
    finally:
        session.close()


def _choose(pid: int | None, job: str | None) -> Program:
    programs = choose_programs(pid, job)
    if len(programs) > 1:
        lines = "".join(f"\n  --pid {program.pid}: {program.title}" for program in programs)
        raise NoProgramError(f"{len(programs)} programs of yours run here; say which:{lines}")
    if not programs[0].answers:
        raise NoProgramError(f"{programs[0].title} does not answer; `monarch-slurm stacks` shows where it is")
    return programs[0]


def _run_commands(session: Session) -> None:
    """Send the lines of stdin, each when the one before is answered; show what comes meanwhile."""
    stdin, said, at_prompt = sys.stdin.fileno(), b"", False
    while True:
        line, newline, rest = said.partition(b"\n")
        if at_prompt and newline:
            session.send({"line": line.decode(errors="replace")})
            said, at_prompt = rest, False
        ready = select.select([session.fileno(), *([stdin] if at_prompt else [])], [], [])[0]
        if session.fileno() in ready:
            packet = _receive(session)
            if packet is None:
                return
            click.echo(packet["text"], nl=False)
            if packet.get("over"):
                return
            at_prompt = bool(packet["prompt"])
        elif data := os.read(stdin, 2**16):
            said += data
        else:
            session.send({"line": said.decode(errors="replace")} if said else {"end": True})
            said, at_prompt = b"", False


def _receive(session: Session) -> dict[str, Any] | None:
    packet = session.receive()
    if packet is None:
        click.echo("the program has ended", err=True)
    elif "error" in packet:
        raise NoProgramError(f"{packet['error']}: it runs another version of monarch_slurm")
    return packet


class _NewsError(Exception):
    """Something has come from the program while a line was being typed."""


class _Terminal:
    """A person at a terminal, with line editing and history.

    Until the first key of a line, signals and the program are waited for without a race. From then on Python's line
    editing waits, which a signal of the kernel interrupts when something comes from the program (SIGIO).
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._typing = False
        self._interrupted = False
        self._typed = ""
        self._shown = ""
        self._readline: Any = None
        with contextlib.suppress(ImportError):  # some Pythons lack it
            import readline

            self._readline = readline
        self._wake, self._waker = socket.socketpair()
        for end in (self._wake, self._waker):
            end.setblocking(False)

    def __enter__(self) -> _Terminal:
        self._before = signal.signal(signal.SIGINT, self._interrupt), signal.signal(signal.SIGIO, self._news)
        signal.set_wakeup_fd(self._waker.fileno())
        fd = self._session.fileno()
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
        return self

    def __exit__(self, *_: object) -> None:
        fd = self._session.fileno()
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_ASYNC)
        signal.set_wakeup_fd(-1)
        for number, handler in zip((signal.SIGINT, signal.SIGIO), self._before, strict=True):
            signal.signal(number, handler)
        self._wake.close()
        self._waker.close()

    def run(self) -> None:
        """Go on until the person leaves or the program ends."""
        prompt = ""
        while True:
            ready = self._wait(prompt)
            if self._interrupted:
                self._interrupted, self._typed, prompt = False, "", ""
                self._print("\n")
                self._session.send({"interrupt": True})
            elif self._session.fileno() in ready:
                packet = _receive(self._session)
                if packet is None:
                    return
                self._print(packet["text"])
                if packet.get("over"):
                    return
                prompt = packet["prompt"]
            elif ready:
                answer = self._read(prompt)
                if answer is not None:
                    self._session.send(answer)
                    prompt = ""

    def _interrupt(self, *_: object) -> None:
        self._interrupted = True
        if self._typing:
            raise KeyboardInterrupt

    def _news(self, *_: object) -> None:
        if self._typing:
            raise _NewsError

    def _print(self, text: str) -> None:
        if text and self._shown:
            click.echo("\r" + " " * len(self._shown) + "\r", nl=False)
        if text:
            self._shown = ""
        click.echo(text, nl=False)

    def _wait(self, prompt: str) -> list[int]:
        """Return the descriptors that are readable: the program's and, at a prompt, the keyboard's."""
        keyboard = sys.stdin.fileno()
        if not self._shown:
            click.echo(prompt, nl=False)
            self._shown = prompt
        if self._typed and prompt:
            return select.select([self._session.fileno()], [], [], 0)[0] or [keyboard]
        with _single_keys(keyboard) if prompt and self._readline is not None else contextlib.nullcontext():
            fds = [self._wake.fileno(), self._session.fileno(), *([keyboard] if prompt else [])]
            ready = [] if self._interrupted else select.select(fds, [], [])[0]
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        return [fd for fd in ready if fd != self._wake.fileno()]

    def _read(self, prompt: str) -> dict[str, Any] | None:
        """Return what is typed; None when something has come meanwhile. What was typed until then is not lost."""
        if self._readline is not None:
            self._readline.set_startup_hook(lambda: self._readline.insert_text(self._typed))
            click.echo("\r", nl=False)  # the prompt stands there
        try:
            self._typing = True
            if self._interrupted or select.select([self._session.fileno()], [], [], 0)[0]:
                return None  # it came before anything could be raised
            line = input(prompt if self._readline is not None else "")
        except _NewsError:
            self._typed = self._readline.get_line_buffer() if self._readline is not None else ""
            self._shown = prompt + self._typed
            return None
        except KeyboardInterrupt:
            return None
        except EOFError:
            click.echo()
            return {"end": True}
        finally:
            self._typing = False
        self._typed = self._shown = ""
        return {"line": line}


@contextlib.contextmanager
def _single_keys(keyboard: int) -> Iterator[None]:
    """Have the terminal hand on each key, and show none: line editing does, once there is one."""
    before = termios.tcgetattr(keyboard)
    mode = termios.tcgetattr(keyboard)
    mode[3] &= ~(termios.ICANON | termios.ECHO)
    termios.tcsetattr(keyboard, termios.TCSADRAIN, mode)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
