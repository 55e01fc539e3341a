"""What a process may open: descriptors (``ulimit -n``) and ZeroMQ sockets, and errors that say which to raise."""

from __future__ import annotations

import contextlib
import errno
import os
import resource

import zmq

from monarch_slurm.errors import MonarchSlurmError

RESERVE = 32
"""Descriptors that are left alone, for what has to be opened to end in order."""


class LimitError(MonarchSlurmError):
    """This process may open no more; the text says which limit that is, and how it is raised."""


MOST_DESCRIPTORS = 1 << 20
"""A soft limit is not raised above this, the kernel's own default (fs.nr_open): some programs go through all numbers
below the limit."""


def raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors of this process, and of those that it starts, to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it; the limit is as it was
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descriptors_allowed() -> int:
    """Return how many descriptors this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def descriptors_in_use() -> int:
    """Return the number of descriptors that this process has open."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return descriptors_allowed()  # not one is left to look with


def descriptors_left() -> int:
    """Return how many more descriptors this process may open, less a reserve."""
    return descriptors_allowed() - descriptors_in_use() - RESERVE


def descriptor_limit(needs: str) -> str:
    """Return what to say when descriptors run out, and ``needs`` (a sentence without a full stop) is why."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    how = f"ulimit -n {hard}" if soft < hard else "ulimit -n, after an administrator has raised the hard limit"
    return (
        f"{descriptors_in_use()} of {soft} file descriptors are in use; {needs}. Raise the limit where the process "
        f"is started: {how} (hard limit {hard}; in a Slurm job it comes from slurmd and sbatch --propagate=NOFILE)"
    )


def make_context(sockets: int = 0) -> zmq.Context[zmq.Socket[bytes]]:
    """Return a ZeroMQ context.

    Args:
        sockets: how many sockets it must be able to have open at a time; 0 leaves ZeroMQ's default (1023).

    Raises:
        LimitError: ZeroMQ as it was built cannot have so many.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    if sockets:
        most = int(context.get(zmq.SOCKET_LIMIT))
        if sockets > most:
            context.term()
            raise LimitError(f"{sockets} ZeroMQ sockets are asked for, and this libzmq can have {most} in one context")
        context.set(zmq.MAX_SOCKETS, sockets)
    return context


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """Return a new socket.

    Raises:
        LimitError: there are too many, or too many descriptors.
    """
    try:
        return context.socket(kind)
    except zmq.ZMQError as error:
        if error.errno != errno.EMFILE:
            raise
    if descriptors_left() <= 0:
        raise LimitError(descriptor_limit("a ZeroMQ socket needs two"))
    most = int(context.get(zmq.MAX_SOCKETS))
    raise LimitError(f"{most} ZeroMQ sockets are open, which is the limit of their context (zmq.MAX_SOCKETS); raise it")
