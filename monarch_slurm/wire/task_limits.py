"""Threads and processes that cannot be started: errors that name the limit, its value, and where it is set.

To the kernel both are tasks. fork(2) and pthread_create(3) fail with EAGAIN when a limit of tasks is reached: that of
a control group (``pids.max``), of the user (``ulimit -u``) or of the machine; and with ENOMEM when memory runs out. A
thread also needs address space for its stack; if that is missing, the error is EAGAIN, too.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zmq

from monarch_slurm.wire.limits import LimitError, descriptor_limit

logger = logging.getLogger(__name__)

_CGROUPS = Path("/sys/fs/cgroup")
_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 1 << 21, 1 << 24
_MARGIN = 2
"""A limit counts as reached from this many tasks below it: some may have ended since the failure."""

_ZMQ_THREADS = 2
"""Of a context: one closes sockets, one does the I/O."""

_NO_TASK = (errno.EAGAIN, errno.ENOMEM)


def start_thread(thread: threading.Thread) -> threading.Thread:
    """Start ``thread`` and return it.

    Raises:
        LimitError: the limit of tasks or memory is reached.
    """
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        if thread.ident is not None:
            raise  # it was started before
        raise LimitError(task_limit(f"the thread {thread.name} cannot be started", error)) from None
    return thread


def start_timer(timer: threading.Timer, purpose: str) -> None:
    """Start ``timer`` as a daemon. If that is impossible, log a warning: ``purpose`` then has no time limit."""
    timer.daemon = True
    try:
        start_thread(timer)
    except LimitError as error:
        logger.warning("%s has no time limit: %s", purpose, error)


def check_threads(number: int, purpose: str) -> None:
    """Make sure that ``number`` threads can be started now, where a library would end the process if it could not.

    Raises:
        LimitError: they cannot.
    """
    over = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(number):
            started.append(start_thread(threading.Thread(target=over.wait, name=f"for {purpose}", daemon=True)))
    finally:
        over.set()
        for thread in started:
            thread.join()


def zmq_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return a ZeroMQ context, which starts threads with its first socket: libzmq ends the process if it cannot.

    Raises:
        LimitError: they cannot be started.
    """
    check_threads(_ZMQ_THREADS, "ZeroMQ")
    return zmq.Context()


def start_process(what: str, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Return ``subprocess.Popen(command, **options)``.

    Args:
        what: what is started, for messages.

    Raises:
        LimitError: the limit of tasks, of memory or of open files is reached.
        OSError: the command cannot be run for another reason.
    """
    try:
        return subprocess.Popen(command, **options)
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise LimitError(descriptor_limit(f"{what} cannot be started")) from None
        if error.errno in _NO_TASK:
            raise LimitError(task_limit(f"{what} cannot be started", error)) from None
        raise


def task_limit(what: str, error: Exception) -> str:
    """Return what to say when a process or thread cannot be started, and why that may be.

    Args:
        what: begins the text: what cannot be started.
        error: what fork(2) or Python has raised.
    """
    reason = error.strerror if isinstance(error, OSError) else str(error)
    limits = list(_reached_limits(isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM))
    if not limits:
        limits = [
            "no limit of processes and threads is reached now; see pids.max of the control groups in "
            "/proc/self/cgroup, ulimit -u, ulimit -v and /proc/sys/kernel/threads-max"
        ]
    return f"{what} ({reason}): {'; '.join(limits)}"


def _reached_limits(no_memory: bool) -> Iterator[str]:
    if not no_memory:
        yield from _cgroup_limits()
        yield from _user_limit()
        yield from _machine_limit()
    yield from _address_space()
    yield from _memory_limits()


def _cgroup_limits() -> Iterator[str]:
    for folder in _cgroup_folders("pids"):
        most, current = _number(folder / "pids.max"), _number(folder / "pids.current")
        if most is not None and current is not None and current >= most - _MARGIN:
            yield (
                f"{current} of {most} processes and threads of the control group are in use ({folder}/pids.max). "
                "Raise it where the group is made: TasksMax= of systemd, --pids-limit of docker and podman, or the "
                "site's cgroup settings for Slurm jobs; or start fewer procs or actors"
            )


def _user_limit() -> Iterator[str]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY or _is_exempt():
        return
    current = _tasks_of_user(os.getuid())
    if current >= soft - _MARGIN:
        how = f"ulimit -u {'unlimited' if hard == resource.RLIM_INFINITY else hard}" if soft != hard else "ulimit -u"
        yield (
            f"{current} processes and threads of user {os.getuid()} run on this machine, and {soft} are allowed "
            f"(RLIMIT_NPROC, ulimit -u). Raise it where the process is started: {how}, or nproc in "
            "/etc/security/limits.conf; in a Slurm job it comes from slurmd and sbatch --propagate=NPROC"
        )


def _machine_limit() -> Iterator[str]:
    running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    for name in ("threads-max", "pid_max"):
        most = _number(Path("/proc/sys/kernel") / name)
        if most is not None and running >= most - _MARGIN:
            yield (
                f"{running} of {most} processes and threads of this machine are in use (/proc/sys/kernel/{name}); "
                "an administrator can raise it"
            )


def _address_space() -> Iterator[str]:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        yield (
            f"this process uses {used} of {soft} bytes of address space (RLIMIT_AS, ulimit -v), and a thread takes "
            f"{_stack_bytes()} for its stack. Raise it where the process is started: ulimit -v unlimited"
        )


def _memory_limits() -> Iterator[str]:
    for folder in _cgroup_folders("memory"):
        for most_file, current_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            ("memory.kmem.limit_in_bytes", "memory.kmem.usage_in_bytes"),
        ):
            most, current = _number(folder / most_file), _number(folder / current_file)
            if most is not None and current is not None and current > 0.95 * most:
                yield (
                    f"{current} of {most} bytes of memory of the control group are in use ({folder}/{most_file}); in a "
                    "Slurm job ask for more by --mem"
                )


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group for ``controller`` and of those above it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            root = _CGROUPS / controllers if (_CGROUPS / controllers).is_dir() else _CGROUPS / controller
        elif number == "0":
            root = _CGROUPS / "unified" if (_CGROUPS / "unified").is_dir() else _CGROUPS
        else:
            continue
        folder = root / path.lstrip("/")
        while folder != root and root in folder.parents:
            yield folder
            folder = folder.parent
        yield root  # in a container this is its own group


def _is_exempt() -> bool:
    """Return whether RLIMIT_NPROC does not hold for this process (setrlimit(2))."""
    if os.getuid() == 0:
        return True
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & (_CAP_SYS_ADMIN | _CAP_SYS_RESOURCE))
    return False


def _tasks_of_user(user: int) -> int:
    total = 0
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            if entry.stat().st_uid == user:
                total += len(os.listdir(f"/proc/{entry.name}/task"))
        except OSError:
            continue  # it has ended meanwhile
    return total


def _stack_bytes() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return "its part" if soft == resource.RLIM_INFINITY else f"{soft} bytes"


def _number(path: Path) -> int | None:
    """Return the number in a file; None if it has none, such as ``max``, or cannot be read."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
