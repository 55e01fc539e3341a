"""Starting a host agent: from a job folder, or as a child of a controller on the same machine."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import msgpack

from monarch_slurm.config import configure, get_global_config, settings
from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.host.agent import Agent, new_host_id
from monarch_slurm.wire import Invitation, read_invitation
from monarch_slurm.wire.keys import CONTROLLER_FILE

_POLL_SECONDS = 0.1


class NoControllerError(MonarchSlurmError):
    """No controller has published itself in the job folder."""


def serve(folder: Path, *, name: str, address: str | None = None) -> int:
    """Run the host agent ``name`` of the job in ``folder`` in this process, until it is told to end.

    Waits for ``folder/controller.json`` as long as the lease (setting ``mesh_orphan_timeout``, seconds).

    Args:
        address: IP address that procs of this host bind and advertise; None takes the one that reaches the controller.

    Returns:
        The exit code of the agent (see `monarch_slurm.host.agent`).

    Raises:
        NoControllerError: the file did not come.
        KeyFileError: the file cannot be trusted.
    """
    deadline = time.monotonic() + settings().mesh_orphan_timeout
    path = folder / CONTROLLER_FILE
    while True:
        try:
            invitation = read_invitation(path)
            break
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise NoControllerError(
                    f"host {name}: no controller published {path} within {settings().mesh_orphan_timeout:g} s; is the folder "
                    "on a file system that all nodes share, and did the controller start?"
                ) from None
        time.sleep(_POLL_SECONDS)
    _set_up_logging()
    return Agent(invitation, name, host=new_host_id(name), folder=folder, address=address).run()


def serve_from_pipe(fd: int) -> int:
    """Run the agent that `start_local_agent` asked for on the pipe ``fd``."""
    with os.fdopen(fd, "rb") as pipe:
        start = msgpack.unpackb(pipe.read())
    configure(**start["settings"])
    _set_up_logging()
    invitation = Invitation(**start["invitation"])
    return Agent(invitation, start["name"], host=start["host"], controller_pid=start["controller_pid"]).run()


def start_local_agent(invitation: Invitation, host: str, name: str, session: bool = True) -> subprocess.Popen[bytes]:
    """Start the agent of host ``host`` as a child process that ends when this process does.

    Keys go through a pipe: neither the command line nor the environment shows them.

    Args:
        session: give it a session of its own, so that Ctrl-C in the terminal reaches the controller alone.
    """
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "monarch_slurm.host", "--fd", str(read_end)]
    process = subprocess.Popen(command, pass_fds=[read_end], stdin=subprocess.DEVNULL, start_new_session=session)
    os.close(read_end)
    start = {
        "invitation": asdict(invitation),
        "name": name,
        "host": host,
        "controller_pid": os.getpid(),
        "settings": get_global_config(),
    }
    with os.fdopen(write_end, "wb") as pipe:
        pipe.write(msgpack.packb(start))
    return process


def _set_up_logging() -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
