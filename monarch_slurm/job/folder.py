"""The folder of one job: everything about it that a person or another process may want to read."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from monarch_slurm.host.invitations import FOLDER_VARIABLE as FOLDER_VARIABLE
from monarch_slurm.job.errors import JobFolderError, JobSpecError
from monarch_slurm.owned_files import FileRefusedError, make_folders, read_data, write_whole
from monarch_slurm.wire.admin import ADMIN_FILE

logger = logging.getLogger(__name__)

_FORBIDDEN = re.compile(r"[%\\\n\r]")


@dataclass(frozen=True)
class JobFolder:
    """Where the files of one job are; readable by its owner alone.

    ``submission.sh`` is what Slurm was given, ``batch.log`` what Slurm and srun said, ``controller.log`` what the
    controller's program printed, ``logs/NODE.log`` what each host printed, ``exit_code`` the program's exit code.
    """

    path: Path
    made: tuple[Path, ...] = field(default=(), compare=False, repr=False)
    """Folders that were made to hold it, the innermost first."""

    @staticmethod
    def create(base: Path, job_name: str) -> JobFolder:
        """Make a new folder in ``base`` with a name that tells when and what.

        Raises:
            JobFolderError: it cannot be made.
            JobSpecError: Slurm could not take its path.
        """
        base = base.expanduser().absolute()
        if _FORBIDDEN.search(str(base)):
            raise JobSpecError(f"{str(base)!r}: Slurm gives '%' and '\\' in a path a meaning; choose another folder")
        label = re.sub(r"[^A-Za-z0-9._-]+", "_", job_name)[:40]
        made = tuple(path for path in (base, *base.parents) if not path.exists())
        try:
            make_folders(base, 0o755)
            path = Path(tempfile.mkdtemp(prefix=f"{time.strftime('%Y%m%d-%H%M%S')}-{label}-", dir=base))
            folder = JobFolder(path, made)
            folder.logs.mkdir(mode=0o700)
        except FileRefusedError as error:
            raise JobFolderError(f"cannot make a folder for the job: {error}") from None
        except OSError as error:
            raise JobFolderError(f"cannot make a folder for the job in {base}: {error.strerror}") from None
        return folder

    def make_task(self, index: int) -> JobFolder:
        """Make and return the folder of one task of an array, in this one, which is that of the array."""
        task = JobFolder(self.path / str(index))
        task.path.mkdir(mode=0o700)
        task.logs.mkdir(mode=0o700)
        return task

    def remove(self) -> None:
        """Remove the folder and all that is in it, and folders that were made for it if nothing else is in them."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            for path in self.made:
                path.rmdir()

    def link_as(self, name: str) -> None:
        """Make the folder known as ``name``, too, beside it; the newest has a name that is used twice."""
        link = self.path.parent / name
        try:
            if link.is_symlink():  # a cluster that counts its jobs from 1 again
                link.unlink(missing_ok=True)
            with contextlib.suppress(FileExistsError):
                link.symlink_to(self.path.name)
        except PermissionError as error:  # it is another user's, in a folder with the sticky bit
            logger.warning("cannot make the link %s to %s: %s", link, self.path.name, error.strerror)

    @property
    def submission_script(self) -> Path:  # noqa: D102
        return self.path / "submission.sh"

    @property
    def submitit(self) -> Path:
        """Folder of submitit's own files: the pickled call, the results."""
        return self.path / "submitit"

    @property
    def batch_log(self) -> Path:  # noqa: D102
        return self.path / "batch.log"

    @property
    def controller_log(self) -> Path:  # noqa: D102
        return self.path / "controller.log"

    @property
    def controller_file(self) -> Path:
        """Where the controller says how to reach it, as long as it lives."""
        return self.path / "controller.json"

    @property
    def admin_file(self) -> Path:
        """Where the controller says how to ask it about the job, as long as it lives."""
        return self.path / ADMIN_FILE

    @property
    def exit_code_file(self) -> Path:  # noqa: D102
        return self.path / "exit_code"

    @property
    def job_pickle(self) -> Path:
        """The job object for the program that runs inside of the job."""
        return self.path / "job.pkl"

    @property
    def logs(self) -> Path:
        """Folder of the hosts' logs."""
        return self.path / "logs"

    def host_log(self, name: str) -> Path:
        """Return the path of the log of host ``name``."""
        return self.logs / f"{name}.log"

    @property
    def proc_logs(self) -> Path:
        """Link to the folder of the procs' own logs; there is none if their lines are in the hosts' logs."""
        return self.path / "proc_logs"

    def tell_proc_logs(self, log_dir: str) -> None:
        """Tell readers that procs write files of their own (setting ``log_dir``); an empty text: they do not."""
        if log_dir:
            with contextlib.suppress(FileExistsError):  # another node was first
                self.proc_logs.symlink_to(Path(log_dir).absolute())

    def exit_code(self) -> int | None:
        """Return the exit code of the controller's program; None if it has not ended, or has never run."""
        try:
            return int(read_data(self.exit_code_file))
        except FileNotFoundError:
            return None
        except FileRefusedError as error:
            tell_once(str(error))
        except ValueError:
            tell_once(f"{self.exit_code_file} holds no exit code: it is ignored")
        return None

    def forget_program(self) -> None:
        """Remove what the job's program left here when the job was started before."""
        self.exit_code_file.unlink(missing_ok=True)
        self.controller_file.unlink(missing_ok=True)
        self._notice_file.unlink(missing_ok=True)

    @property
    def _notice_file(self) -> Path:
        return self.path / "notice"

    def write_notice(self, reason: str) -> None:
        """Tell the program why it is asked to end, such as ``"the time limit"``."""
        write_whole(self._notice_file, reason.encode())

    def notice(self) -> str:
        """Return why the program is asked to end; an empty text if nothing is known."""
        try:
            return read_data(self._notice_file).decode(errors="replace")
        except FileNotFoundError:
            return ""
        except FileRefusedError as error:
            tell_once(str(error))
            return ""

    def write_exit_code(self, code: int) -> None:
        """Tell that the controller's program has ended; to be seen on every node, also after a crash."""
        write_whole(self.exit_code_file, f"{code}\n".encode())


_told: set[str] = set()


def tell_once(text: str) -> None:
    """Log that a file is ignored; those who look at a file again and again say it once."""
    if text not in _told:
        _told.add(text)
        logger.warning("%s", text)


def tail(path: Path, lines: int = 12) -> str:
    """Return the last ``lines`` lines of ``path``, indented; an empty text if there is no such file."""
    try:
        with open(path, errors="replace") as file:
            return "".join(f"    {line.rstrip()}\n" for line in deque(file, maxlen=lines)).rstrip("\n")
    except OSError:
        return ""
