"""Saving before Slurm ends the job, so that it can go on later: for the program that drives a job's hosts.

Slurm asks a job to end by SIGTERM: near the time limit (`monarch_slurm.job.batch` passes the early notice on), when it
is preempted, requeued or cancelled, when its node is drained with a limit. `save_on_notice` turns that into a call.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from monarch_slurm.errors import ConfigError
from monarch_slurm.job.folder import FOLDER_VARIABLE, JobFolder
from monarch_slurm.job.supervisor import BATCH_VARIABLE
from monarch_slurm.wire.task_limits import start_thread

logger = logging.getLogger(__name__)

SAVED = 75
"""Exit code of a program that was asked to end and has saved what it needs to go on (EX_TEMPFAIL of sysexits.h).

A job with ``requeue=True`` whose program ends like this, having been asked to, starts again.
"""


@contextlib.contextmanager
def save_on_notice(save: Callable[[], None]) -> Iterator[None]:
    """Have ``save`` called once if this process is asked to end (SIGTERM) inside of the ``with`` block.

    ``save`` is called on a thread of its own, while the main thread goes on; it may call actors. When it returns, the
    main thread gets `SystemExit` with the code `SAVED`, wherever it is; if it raises, with the code 1. It has the
    notice that the job asked for (``SlurmJob(notice=...)``, seconds) near the time limit, and Slurm's ``KillWait`` (30
    s unless set) otherwise. Further SIGTERMs are ignored from then on; outside of a job a second one
    while it saves ends the process.

    Raises:
        ConfigError: this is not the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("save_on_notice belongs in the main thread, which gets the signals")
    notice = _Notice(save)
    before = signal.signal(signal.SIGTERM, notice.take)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # whoever started this process may have blocked it
    try:
        yield
    finally:
        notice.close()
        signal.signal(signal.SIGTERM, before)


def notice_reason() -> str:
    """Return why this program has been asked to end: ``"the time limit"`` or ``"a preemption"`` of its job.

    An empty text if that is not known: outside of a job, and when Slurm has sent the SIGTERM itself.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    return JobFolder(Path(folder)).notice() if folder is not None else ""


class _Notice:
    def __init__(self, save: Callable[[], None]) -> None:
        self._save = save
        self._lock = threading.Lock()
        self._saving = False
        self._code: int | None = None
        self._told = self._closed = False

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM, in the main thread."""
        if self._told:
            return  # the program tidies up, which must not be cut short
        if self._code is not None:
            self._told = True
            raise SystemExit(self._code)
        if not self._saving:
            self._saving = True
            start_thread(threading.Thread(target=self._run, name="save-on-notice", daemon=True))
        elif BATCH_VARIABLE not in os.environ:
            raise SystemExit(128 + number)

    def close(self) -> None:
        """Send no more signals. In the main thread."""
        with self._lock:
            self._closed = True

    def _run(self) -> None:
        reason = notice_reason()
        logger.warning("this program was asked to end%s: saving", f" ({reason} is near)" if reason else "")
        try:
            self._save()
            code = SAVED
        except Exception:  # it is the caller's, and the last that this process does
            logger.exception("could not save")
            code = 1
        with self._lock:
            if not self._closed:
                self._code = code
                # To the main thread by name: it may sit in a system call, which a signal to another one leaves alone.
                signal.pthread_kill(_main_thread_id(), signal.SIGTERM)


def _main_thread_id() -> int:
    number = threading.main_thread().ident
    assert number is not None
    return number
