"""Becoming the controller of a job, and waiting for its hosts."""

from __future__ import annotations

import atexit
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from monarch_slurm.actor import HostMesh, Shape, Slice
from monarch_slurm.actor.client import client
from monarch_slurm.controller.census import census
from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.host import HostInfo
from monarch_slurm.owned_files import FileRefusedError, describe, followed, make_folders
from monarch_slurm.wire import AdminServer, write_invitation
from monarch_slurm.wire.admin import Answer
from monarch_slurm.wire.keys import CONTROLLER_FILE

_LOOK_SECONDS = 0.5

ANSWERS: dict[str, Answer] = {"census": census}
"""What this controller answers when it is asked from outside (`monarch_slurm.wire.ask`); a program may add to it."""

_admins: dict[Path, AdminServer] = {}


class HostsMissingError(MonarchSlurmError):
    """Not all hosts joined in time; the text names those that are missing."""


class FolderError(MonarchSlurmError):
    """A job folder cannot be used."""


def make_job_folder(folder: Path) -> Path:
    """Make ``folder`` (mode 0700), or make sure that an existing one is private; return it.

    Raises:
        FolderError: it cannot be made or written, or belongs to somebody else.
    """
    try:
        real = followed(folder)
        make_folders(real)
        info = real.stat()
        if info.st_uid != os.getuid():
            raise FolderError(f"{folder} {describe(info)}: name a folder of your own")
        if stat.S_IMODE(info.st_mode) & 0o077:
            folder.chmod(0o700)
    except FileRefusedError as error:
        raise FolderError(str(error)) from None
    except OSError as error:
        raise FolderError(f"cannot use the folder {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise FolderError(f"cannot write to the folder {folder}")
    return folder


def publish(folder: Path, *, address: str) -> None:
    """Become the controller of the job in ``folder``: listen on an ephemeral port of the IP ``address``, and say so
    there.

    ``folder/controller.json`` (mode 0600) tells agents where to dial and holds the job's keys; ``folder/admin.json``
    tells where questions such as those of ``monarch-slurm status`` are answered.

    Raises:
        FolderError: the folder cannot be used.
        BindError: the address is not one of this machine.
    """
    invitation = client().hub.invitation(address)
    folder = make_job_folder(folder).absolute()
    write_invitation(folder, invitation)
    if folder not in _admins:
        _admins[folder] = AdminServer(folder, address, ANSWERS)


def withdraw(folder: Path) -> None:
    """Take the invitation back: agents that lose this controller from now on end at once instead of waiting for it."""
    (folder / CONTROLLER_FILE).unlink(missing_ok=True)
    admin = _admins.pop(folder.absolute(), None)
    if admin is not None:
        admin.close()


def gather_hosts(
    names: Sequence[str],
    *,
    timeout: float | None = None,
    still_hope: Callable[[], str | None] | None = None,
) -> HostMesh:
    """Wait until the agents of the named hosts have joined; return them as a mesh with dimension ``hosts``, in that
    order.

    Args:
        names: names that the agents were started with; a name that stands there twice needs two agents.
        timeout: seconds; None waits for ever.
        still_hope: asked twice a second; a text means that no more hosts will come, and why.

    Raises:
        HostsMissingError: some did not come.
    """
    here = client()
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        with here.hosts_changed:
            found, missing = _pick(names, here.joined)
        if not missing:
            break
        # Asked without the lock: it may take its time, and hosts must be able to join meanwhile.
        reason = still_hope() if still_hope is not None else None
        if reason is None and deadline is not None and time.monotonic() >= deadline:
            reason = f"gave up after {timeout:g} s"
        if reason is not None:
            raise HostsMissingError(
                f"{len(found)} of {len(names)} hosts joined; missing: {', '.join(missing)} ({reason}). "
                "Look at their logs: the package must be importable there, and the controller's address reachable"
            )
        left = _LOOK_SECONDS if deadline is None else min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))
        with here.hosts_changed:
            here.hosts_changed.wait_for(
                lambda: len(here.joined) >= len(names) and not _pick(names, here.joined)[1], left
            )
    hosts = tuple(info.host for info in found)
    return HostMesh(hosts, Shape(["hosts"], Slice.new_row_major([len(hosts)])), owned=True)


@atexit.register
def _close_admins() -> None:
    for folder in list(_admins):
        _admins.pop(folder).close()


def host_addresses(mesh: HostMesh) -> list[str]:
    """Return the IP address of each host of ``mesh``, as its agent found or was told it."""
    known = client().addresses
    return [known[host] for host in mesh._now_at()]


def _pick(names: Sequence[str], joined: Sequence[HostInfo]) -> tuple[list[HostInfo], list[str]]:
    left: dict[str, deque[HostInfo]] = {}
    for info in joined:
        left.setdefault(info.name, deque()).append(info)
    found, missing = [], []
    for name in names:
        if left.get(name):
            found.append(left[name].popleft())
        else:
            missing.append(name)
    return found, missing
