"""Starting a host agent: from a job folder, or as a child of a controller on the same machine."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from monarch_slurm.config import configure, settings
from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.host.agent import ENDED, RELEASED, Agent
from monarch_slurm.host.devices import settle_visibility
from monarch_slurm.host.dial import check_not_own
from monarch_slurm.host.guardian import guard
from monarch_slurm.host.identity import NoControllerError, ending_signals, new_host_id, pid_space
from monarch_slurm.host.output import Output, OutputHandler
from monarch_slurm.inherited import open_standard_descriptors, stream_for_child
from monarch_slurm.interpreter import PRELOAD_PATH_VARIABLE, module_command, program_path, python_environment
from monarch_slurm.wire import Invitation, pack, read_invitation, unpack
from monarch_slurm.wire.awake_clock import AwakeClock
from monarch_slurm.wire.keys import CONTROLLER_FILE
from monarch_slurm.wire.limits import LimitError, descriptor_limit
from monarch_slurm.wire.task_limits import start_process

_POLL_SECONDS = 0.1


def serve(folder: Path, *, name: str, address: str | None = None, apart: bool = False) -> int:
    """Run the host agent ``name`` of the job in ``folder`` in this process, until it is told to end.

    Waits for ``folder/controller.json`` as long as the lease (setting ``mesh_orphan_timeout``, seconds).

    Args:
        address: IP address that procs of this host bind and advertise; None takes the one that reaches the controller.
        apart: whether the controller is known to run on another machine.

    Returns:
        The exit code of the agent (see `monarch_slurm.host.agent`).

    Raises:
        NoControllerError: the file did not come, or the address in it is one of this machine.
        SocketPathError: there is no folder for sockets.
        KeyFileError: the file cannot be trusted.
    """
    for number in ending_signals():
        signal.signal(number, _end_early)  # by default they would not end process 1 of a container
    lease = settings().mesh_orphan_timeout
    clock = AwakeClock()
    path = folder / CONTROLLER_FILE
    while True:
        try:
            invitation = read_invitation(path)
            break
        except FileNotFoundError:
            if lease is not None and clock.tick(_POLL_SECONDS) > lease:
                raise NoControllerError(
                    f"host {name}: no controller published {path} within {lease:g} s; "
                    "is the folder on a file system that all nodes share, and did the controller start?"
                ) from None
        time.sleep(_POLL_SECONDS)
    if apart:
        check_not_own(invitation, name)

    def run_agent() -> int:
        output = _set_up_output()
        settle_visibility(name)
        return Agent(
            invitation,
            name,
            host=new_host_id(name),
            output=output,
            folder=folder,
            # the end of a controller on this machine is seen at once; of any other, the lease tells
            watched=[invitation.controller_pid] if invitation.controller_host == pid_space() else [],
            address=address,
        ).run()

    code = guard(run_agent)
    return ENDED if code == RELEASED else code  # an agent of a job serves one program only


class AgentProcess:
    """An agent that `start_local_agent` has started: its guardian, which ends with it.

    Args:
        said: pipe on which the agent says why it could not begin.
    """

    def __init__(self, process: subprocess.Popen[bytes], said: int) -> None:
        self._process = process
        self._said = said
        self.pid = process.pid
        self.terminate, self.kill = process.terminate, process.kill

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, up to ``timeout`` seconds; return its exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        return self._process.wait(timeout)

    def why_ended(self) -> str:
        """Wait for its end; return the reason if it said one, else its exit status. To be called once."""
        status = self._process.wait()
        os.set_blocking(self._said, False)
        with os.fdopen(self._said, "rb") as pipe:
            reason = (pipe.read() or b"").decode(errors="replace").strip()
        return f"its agent could not start: {reason}" if reason else f"its agent ended with status {status}"


def serve_from_pipe(fd: int, report_fd: int | None = None) -> int:
    """Run the agent that `start_local_agent` asked for on the pipe ``fd``.

    Args:
        report_fd: pipe that is told why the agent cannot start, if it cannot.
    """
    with os.fdopen(fd, "rb") as pipe:
        data = pipe.read()
    if not data:
        raise NoControllerError("the controller has ended before it said what this agent is to do")
    start = unpack(data)
    configure(**start["settings"])
    invitation = Invitation(**start["invitation"])

    def run_agent() -> int:
        output = _set_up_output()
        settle_visibility(start["name"])
        agent = Agent(
            invitation,
            start["name"],
            host=start["host"],
            output=output,
            watched=start["watched"],
            own_environment=start["own_environment"],
        )
        if report_fd is not None:
            os.close(report_fd)
        return agent.run()

    def report_failure() -> int:
        try:
            return run_agent()
        except MonarchSlurmError as error:
            _report(report_fd, error)
            raise

    try:
        return guard(report_failure)
    except MonarchSlurmError as error:
        _report(report_fd, error)
        raise


def start_local_agent(
    invitation: Invitation,
    host: str,
    name: str,
    *,
    session: bool = True,
    with_settings: Mapping[str, Any] | None = None,
    own_environment: bool = False,
) -> AgentProcess:
    """Start the agent of host ``host`` as a child process that ends when this process or the controller does.

    Keys go through a pipe: neither the command line nor the environment shows them.

    Args:
        session: give it a session of its own, so that Ctrl-C in the terminal reaches the controller alone.
        with_settings: settings of the controller that go before those of this process.
        own_environment: the variables of this process go before those that the controller forwards.

    Raises:
        LimitError: this process may start no other, or open nothing more.
    """
    open_standard_descriptors()  # or one of them could be an end of the pipe
    read_end, write_end = _pipe()
    try:
        said, say = _pipe()
    except LimitError:
        os.close(read_end)
        os.close(write_end)
        raise
    command = module_command("monarch_slurm.host", "--fd", str(read_end), "--report-fd", str(say))
    try:
        process = start_process(
            "the host agent of this machine",
            command,
            pass_fds=[read_end, say],
            stdin=subprocess.DEVNULL,
            stdout=stream_for_child("stdout"),
            stderr=stream_for_child("stderr"),
            start_new_session=session,
            env=python_environment({**os.environ, PRELOAD_PATH_VARIABLE: program_path()}, find_package=True),
        )
    except BaseException:
        os.close(write_end)
        os.close(said)
        raise
    finally:
        os.close(read_end)
        os.close(say)
    beside = invitation.controller_host == pid_space()
    start = {
        "invitation": asdict(invitation),
        "name": name,
        "host": host,
        "watched": sorted({os.getpid(), invitation.controller_pid} if beside else {os.getpid()}),
        "own_environment": own_environment,
        "settings": {**asdict(settings()), **(with_settings or {})},
    }
    with os.fdopen(write_end, "wb") as pipe:
        pipe.write(pack(start))
    return AgentProcess(process, said)


def _end_early(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _report(fd: int | None, error: MonarchSlurmError) -> None:
    if fd is not None:
        with contextlib.suppress(OSError):  # it was closed, or the controller has ended
            os.write(fd, str(error).encode())


def _pipe() -> tuple[int, int]:
    try:
        return os.pipe()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise LimitError(descriptor_limit("a host agent is started through a pipe, which needs two")) from None


def _set_up_output() -> Output:
    output = Output()
    handler = OutputHandler(output)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], force=True)
    return output
