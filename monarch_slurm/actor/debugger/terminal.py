"""The program's own terminal: ranks that stop are told of there, and can be debugged there if somebody sits at it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time

from monarch_slurm.actor.debugger.desk import DebugDesk, StoppedRank
from monarch_slurm.actor.debugger.shell import NEWS_SECONDS, DebugShell, EndOfInput, HangUp, summarize
from monarch_slurm.wire.task_limits import start_thread


def watch_stops(desk: DebugDesk) -> None:
    """Tell of stops on stderr, and debug in this terminal, while no other terminal does. On a thread of its own."""
    told: set[StoppedRank] = set()
    while True:
        _wait_for_stops(desk, told)
        new = {rank: f"stopped at {rank.where} ({rank.host}, pid {rank.pid})" for rank in desk.stopped()}
        told = set(new)
        _print(summarize(new if len(new) == 1 else {rank: f"stopped at {rank.where}" for rank in new}))
        if _have_terminal():
            _debug_here(desk)
        else:
            _print(f"`{_attach_command()}` on {socket.gethostname()} debugs what has stopped\n")


def _wait_for_stops(desk: DebugDesk, told: set[StoppedRank]) -> None:
    """Return once ranks are stopped that are not ``told``, and others that stop at the same time."""
    with desk.changed:
        desk.changed.wait_for(lambda: not desk.is_open and not told.issuperset(desk.stopped()))
        stops = -1
        while desk.stops != stops:
            stops = desk.stops
            end = time.monotonic() + NEWS_SECONDS
            while desk.stops == stops and (left := end - time.monotonic()) > 0:
                desk.changed.wait(left)


def _attach_command() -> str:
    job = os.environ.get("SLURM_JOB_ID")
    command = f"monarch-slurm debug --pid {os.getpid()}"
    return f"srun --overlap --jobid={job} -N1 -n1 --pty {command}" if job else command


def _have_terminal() -> bool:
    """Return whether a person can answer here: not in the background, and not at a prompt of Python's own."""
    if hasattr(sys, "ps1") or sys.flags.interactive or sys.stdin is None:
        return False
    try:
        fd = sys.stdin.fileno()
        return os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp()
    except (OSError, ValueError):
        return False


def _debug_here(desk: DebugDesk) -> None:
    fd = sys.stdin.fileno()
    wake, waker = socket.socketpair()
    ready = threading.Event()

    def show(text: str, prompt: str) -> None:
        _print(text + prompt)
        if prompt:
            ready.set()
            with contextlib.suppress(OSError):
                waker.send(b".")

    shell = DebugShell(desk, show, until_all_go_on=True)

    def read() -> None:
        with wake:
            while True:
                readable, _, _ = select.select([wake, *([fd] if ready.is_set() else [])], [], [])
                if wake in readable and not wake.recv(64):
                    return
                if fd in readable:
                    if not _have_terminal():  # moved to the background: to read would stop the program
                        shell.events.put(HangUp())
                        return
                    ready.clear()
                    line = os.read(fd, 2**16)
                    shell.events.put(line.decode(errors="replace").rstrip("\n") if line else EndOfInput())

    reader = threading.Thread(target=read, name="monarch-debug-terminal", daemon=True)
    start_thread(reader)
    try:
        shell.run()
    finally:
        waker.close()
        reader.join()


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, its reader is gone, or there is none
        sys.stderr.write(text)
        sys.stderr.flush()
