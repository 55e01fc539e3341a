"""The zygote: a process that has imported what procs need, and forks them.

A proc that imports torch by itself takes seconds to start; a fork of a process that has it takes milliseconds. The
zygote has one thread, no ZeroMQ context and no device: a fork of those would be broken.

Order of events of a spawn: the agent sends one packet per proc, the last one marked; the zygote forks a midwife, which
forks the procs, tells the agent their pids and ends. That makes the agent (a subreaper) the parent of the procs, so it
can wait for them itself, and they outlive a zygote that breaks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.host import kernel, numa
from monarch_slurm.host.finalising import end_in_order, prepare_forks
from monarch_slurm.host.identity import take_no_sigterm
from monarch_slurm.host.orphans import PROC_VARIABLE
from monarch_slurm.host.proc import PACKET_BYTES, ProcSpec, become_command, run_proc, set_proc_title
from monarch_slurm.inherited import flush_streams, settle_inheritance
from monarch_slurm.interpreter import PRELOAD_PATH_VARIABLE, user_path
from monarch_slurm.wire import pack, unpack
from monarch_slurm.wire.task_limits import task_limit

_OURS = "monarch_slurm"


def preload(modules: list[str]) -> list[str]:
    """Import ``modules``, and call functions named as ``package.module:function``; return what failed, as texts."""
    failures = []
    for entry in modules:
        name, _, function = entry.partition(":")
        try:
            with _path_for(name):
                module = importlib.import_module(name)
                if function:
                    getattr(module, function)()
        except Exception as error:  # whatever a user's module raises: procs fall back to importing it themselves
            failures.append(f"{entry}: {_in_a_line(error)}")
    return failures


@contextlib.contextmanager
def _path_for(name: str) -> Iterator[None]:
    """Have the user's modules, and what they import, found where the program finds them; ours never there."""
    own = list(sys.path)
    if name.partition(".")[0] != _OURS:
        theirs = user_path()
        sys.path[:] = [*theirs, *(entry for entry in own if entry not in theirs)]
    try:
        yield
    finally:
        sys.path[:] = own


def _in_a_line(error: Exception) -> str:
    """Return what ``error`` is, and where a module raised it; a module that is not there has no such place."""
    what = " ".join(f"{type(error).__name__}: {error}".split())
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if "importlib" not in frame.filename]
    return f"{what} ({frames[-1].filename}:{frames[-1].lineno})" if frames else what


def main() -> None:
    """Serve the agent on the socket whose descriptor is the first argument, until it closes."""
    fd, agent = int(sys.argv[1]), int(sys.argv[2])
    modules = [entry for entry in sys.argv[3].split(",") if entry]
    settle_inheritance()
    kernel.die_with_parent(agent)
    kernel.set_title("monarch_slurm zygote", "ms-zygote")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller; the agent ends this process
    take_no_sigterm()
    with socket.socket(fileno=fd) as agent_socket:
        failures = preload(modules)
        os.environ.pop(PRELOAD_PATH_VARIABLE, None)
        threads = len(os.listdir("/proc/self/task"))
        agent_socket.send(pack({"ready": True, "failures": failures, "threads": threads}))
        prepare_forks()
        gc.collect()
        gc.freeze()
        _serve(agent_socket, agent)


def _serve(agent_socket: socket.socket, agent: int) -> None:
    batch: list[tuple[dict[str, Any], list[int]]] = []
    while True:
        packet, fds, _, _ = socket.recv_fds(agent_socket, PACKET_BYTES, 2)
        if not packet:
            return
        request = unpack(packet)
        batch.append((request["spec"], list(fds)))
        if request["last"]:
            try:
                midwife = os.fork()
            except OSError as error:
                for fields, _ in batch:
                    _refuse(agent_socket, fields["proc"], error)
                midwife = -1
            if midwife == 0:
                _deliver(agent_socket, batch, agent)
                os._exit(0)
            if midwife > 0:
                os.waitpid(midwife, 0)
            for _, pipes in batch:
                for pipe in pipes:
                    os.close(pipe)
            batch = []


def _deliver(agent_socket: socket.socket, batch: list[tuple[dict[str, Any], list[int]]], agent: int) -> None:
    midwife = os.getpid()
    midwife_ended, midwife_lives = os.pipe()
    for fields, pipes in batch:
        try:
            pid = os.fork()
        except OSError as error:
            _refuse(agent_socket, fields["proc"], error)
            continue
        if pid == 0:
            agent_socket.close()
            os.close(midwife_lives)
            for _, others in batch:
                for pipe in others:
                    if pipe not in pipes:
                        os.close(pipe)
            _be_born(ProcSpec(**fields), pipes, midwife, midwife_ended, agent)
        agent_socket.send(pack({"proc": fields["proc"], "pid": pid}))


def _refuse(agent_socket: socket.socket, proc: str, error: OSError) -> None:
    agent_socket.send(pack({"proc": proc, "error": task_limit(f"fork of proc {proc} failed", error)}))


def _be_born(spec: ProcSpec, pipes: list[int], midwife: int, midwife_ended: int, agent: int) -> NoReturn:
    """Become the proc."""
    code = 1
    try:
        os.setsid()  # a group of its own, so that whatever it starts can be ended with it
        os.dup2(pipes[0], 1)
        os.dup2(pipes[1], 2)
        for pipe in pipes:
            os.close(pipe)
        with open(os.devnull) as null:
            os.dup2(null.fileno(), 0)
        os.read(midwife_ended, 1)  # end of file: the midwife is past its last fork
        os.close(midwife_ended)
        while os.getppid() == midwife:  # it has closed its files and is about to be gone
            os.sched_yield()
        kernel.die_with_parent(agent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        random.seed()
        _apply(spec)
        if spec.command:
            become_command(spec)
        code = run_proc(spec)
    except MonarchSlurmError as error:
        print(f"error: {error}", file=sys.stderr)
    except BaseException:  # the last frame of the process: nothing above could tell of it
        traceback.print_exc()
    if code == 0:
        end_in_order(code)
    _leave(code)


def _apply(spec: ProcSpec) -> None:
    set_proc_title(spec)
    if not spec.inherit_env:
        os.environ.clear()
    for name, value in spec.env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.environ[PROC_VARIABLE] = spec.proc
    for path in reversed(spec.sys_path):
        if path not in sys.path:
            sys.path.insert(0, path)
    if spec.cwd and os.path.isdir(spec.cwd):
        os.chdir(spec.cwd)
    cpus = spec.cpus
    try:
        if spec.cpu_nodes:
            near = numa.cpus_of(spec.cpu_nodes)
            cpus = sorted({*cpus} & {*near}) if cpus else near
        if spec.memory_nodes:
            numa.keep_memory_on(spec.memory_nodes)
    except OSError as error:
        nodes = {"cpunodebind": spec.cpu_nodes, "membind": spec.memory_nodes}
        raise OSError(error.errno, f"host {spec.host_name} cannot bind {spec.proc} by {nodes}: {error}") from None
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            have = sorted(os.sched_getaffinity(0))
            raise OSError(
                error.errno, f"cannot bind {spec.proc} to CPUs {cpus}; host {spec.host_name} has {have}"
            ) from None


def _leave(code: int) -> NoReturn:
    # A proc that fails ends at once: others wait for the news, and its state is not fit for atexit and destructors.
    flush_streams()
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


if __name__ == "__main__":
    main()
