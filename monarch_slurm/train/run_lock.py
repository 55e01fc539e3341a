"""One start of a run at a time: two in one folder would remove each other's saved states and mix up the journal."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.owned_files import append_owned

logger = logging.getLogger(__name__)

LOCK = "run.lock"
"""In the run's folder: locked (flock(2)) while the run goes on, until its process ends, however it does."""


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Be the only process that goes on with the run in ``folder``. For runs outside of jobs: those have a lock of their
    own, which outlives no lost node.

    Raises:
        MonarchSlurmError: another one does, or the lock cannot be opened.
    """
    try:
        fd = append_owned(folder / LOCK, read=True)
    except OSError as error:
        raise MonarchSlurmError(f"cannot open {folder / LOCK}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
            raise MonarchSlurmError(
                f"the run in {folder} is going on already, in process {pid or 'unknown'}: wait until it ends, or end it"
            ) from None
        except OSError as error:  # a file system without locks is no reason not to train
            logger.warning("cannot lock %s: %s; start no second run in it", folder, error.strerror)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)
