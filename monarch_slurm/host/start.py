"""Starting a host agent: from a job folder, or as a child of a controller on the same machine."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from monarch_slurm.config import configure, settings
from monarch_slurm.host.agent import ENDED, RELEASED, Agent
from monarch_slurm.host.devices import settle_visibility
from monarch_slurm.host.dial import check_not_own
from monarch_slurm.host.guardian import guard
from monarch_slurm.host.identity import NoControllerError, new_host_id, pid_space
from monarch_slurm.host.output import Output, OutputHandler
from monarch_slurm.host.proc import importable
from monarch_slurm.wire import Invitation, pack, read_invitation, unpack
from monarch_slurm.wire.awake_clock import AwakeClock
from monarch_slurm.wire.keys import CONTROLLER_FILE

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


def serve_from_pipe(fd: int) -> int:
    """Run the agent that `start_local_agent` asked for on the pipe ``fd``."""
    with os.fdopen(fd, "rb") as pipe:
        start = unpack(pipe.read())
    configure(**start["settings"])
    invitation = Invitation(**start["invitation"])

    def run_agent() -> int:
        output = _set_up_output()
        settle_visibility(start["name"])
        return Agent(
            invitation,
            start["name"],
            host=start["host"],
            output=output,
            watched=start["watched"],
            own_environment=start["own_environment"],
        ).run()

    return guard(run_agent)


def start_local_agent(
    invitation: Invitation,
    host: str,
    name: str,
    *,
    session: bool = True,
    with_settings: Mapping[str, Any] | None = None,
    own_environment: bool = False,
) -> subprocess.Popen[bytes]:
    """Start the agent of host ``host`` as a child process that ends when this process or the controller does.

    Keys go through a pipe: neither the command line nor the environment shows them.

    Args:
        session: give it a session of its own, so that Ctrl-C in the terminal reaches the controller alone.
        with_settings: settings of the controller that go before those of this process.
        own_environment: the variables of this process go before those that the controller forwards.
    """
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "monarch_slurm.host", "--fd", str(read_end)]
    process = subprocess.Popen(
        command,
        pass_fds=[read_end],
        stdin=subprocess.DEVNULL,
        start_new_session=session,
        env={**os.environ, **importable()},
    )
    os.close(read_end)
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
    return process


def _set_up_output() -> Output:
    output = Output()
    handler = OutputHandler(output)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], force=True)
    return output
