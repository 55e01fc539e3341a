"""Where a process of another program finds the keys of a running one: files that their user alone can read.

The controller and each of its agents keep the invitation in their private folder of sockets; the job's folder has it,
too. A reference names the controller's public key only, so whoever gets hold of a reference gets no key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from monarch_slurm.host.identity import NoControllerError, pid_space
from monarch_slurm.wire import Invitation, KeyFileError, read_invitation
from monarch_slurm.wire.keys import CONTROLLER_FILE
from monarch_slurm.wire.runtime_dir import runtime_dirs

FOLDER_VARIABLE = "MONARCH_SLURM_JOB_FOLDER"
"""Environment variable of every process of a job: its folder."""


def find_invitation(program: str) -> Invitation:
    """Return the invitation of the controller whose public key is ``program``.

    Raises:
        NoControllerError: it has ended, or nothing on this machine tells how to reach it.
        KeyFileError: others could read the job's key file.
    """
    for folder in _folders():
        try:
            invitation = read_invitation(folder / CONTROLLER_FILE)
        except FileNotFoundError:
            continue
        except (KeyFileError, OSError):
            if str(folder) == os.environ.get(FOLDER_VARIABLE):
                raise
            continue  # of a process that has nothing to do with this one
        if invitation.server_public == program:
            if invitation.controller_host == pid_space() and not Path(f"/proc/{invitation.controller_pid}").exists():
                raise NoControllerError(f"it has ended (its controller was pid {invitation.controller_pid})")
            return invitation
    raise NoControllerError(
        "it has ended, or it is out of reach: a program can be reached by processes of the same user on its own "
        "machine, on its hosts, and where MONARCH_SLURM_JOB_FOLDER names the folder of its job"
    )


def _folders() -> Iterator[Path]:
    yield from runtime_dirs()
    if FOLDER_VARIABLE in os.environ:
        yield Path(os.environ[FOLDER_VARIABLE])
