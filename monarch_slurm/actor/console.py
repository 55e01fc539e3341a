"""What a program offers at its console."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from monarch_slurm._version import __version__
from monarch_slurm.actor.debugger.desk import DebugDesk
from monarch_slurm.actor.debugger.service import serve_debugger
from monarch_slurm.actor.runtime import Runtime
from monarch_slurm.actor.stacks import gather_stacks
from monarch_slurm.host import HostInfo
from monarch_slurm.wire import Loop
from monarch_slurm.wire.console import Console, Session


def open_console(loop: Loop, runtime: Runtime, desk: DebugDesk, hosts: Callable[[], list[HostInfo]]) -> Console:
    """Open the console of this program.

    Args:
        hosts: returns the hosts whose agents have joined.
    """
    about = {
        "version": __version__,
        "pid": os.getpid(),
        "hostname": socket.gethostname(),
        "command": sys.argv,
        "started": time.time(),
        "job": os.environ.get("SLURM_JOB_ID", ""),
    }

    def stacks(session: Session, request: dict[str, Any]) -> None:
        session.send(gather_stacks(runtime, hosts()))

    def debug(session: Session, request: dict[str, Any]) -> None:
        serve_debugger(desk, session)

    return Console(loop, about, {"stacks": stacks, "debug": debug})
