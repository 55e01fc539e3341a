"""Which job commands in this folder are about: a job that a module defines, remembered by name in ``.monarch``."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import stat
import sys
from pathlib import Path

from monarch_slurm.job.base import DEFAULT_JOB_PATH, JobTrait
from monarch_slurm.job.errors import JobError, JobSpecError
from monarch_slurm.owned_files import describe, followed, make_folders, owned_text, write_whole

DEFAULT_CONTEXT = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def set_current_job(module_path: str, context: str | None = None) -> JobTrait:
    """Make the job ``module_path``, such as ``jobs.training``, the current one of this folder, and return it.

    ``.monarch/CONTEXT/spec`` remembers it; ``.monarch/job_state.pkl``, which `JobTrait.state` uses, becomes a link to
    ``.monarch/CONTEXT/state.pkl``.

    Args:
        context: name under which it is kept, besides others; None is the one in force.

    Raises:
        ValueError: ``module_path`` has no dot, or ``context`` cannot be the name of a folder.
        ImportError, AttributeError: there is no such module or attribute.
        TypeError: it is no job.
        JobError: a job that was not made so is remembered here.
    """
    name = context or current_context()
    folder = state_path(name).parent
    job = _load(module_path)
    make_folders(folder, 0o755)
    write_whole(folder / "spec", f"{module_path}\n".encode())
    link = Path(DEFAULT_JOB_PATH)
    if link.exists() and not link.is_symlink():
        raise JobError(f"{link} remembers a job of this folder; kill that job, or remove the file, first")
    aside = link.with_name(f".{link.name}.{os.getpid()}")
    aside.symlink_to(f"{name}/state.pkl")
    os.replace(aside, link)
    return job


def load_current_job() -> JobTrait:
    """Return the job that `set_current_job` made the current one of this folder.

    Raises:
        FileNotFoundError: there is none.
        ImportError, AttributeError, TypeError, ValueError: as of `set_current_job`.
    """
    path = Path(DEFAULT_JOB_PATH).parent / current_context() / "spec"
    try:
        spec = _spec(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"no current job in {Path.cwd()}: call set_current_job('module.job') here") from None
    return _load(spec)


def current_context() -> str:
    """Return the name of the context in force in this folder."""
    link = Path(DEFAULT_JOB_PATH)
    if not link.is_symlink():
        return DEFAULT_CONTEXT
    followed(link)  # one of somebody else would name the module to run
    return Path(os.readlink(link)).parent.name


def contexts() -> dict[str, str]:
    """Return the name of each context of this folder and the ``module.attribute`` of its job."""
    folder = Path(DEFAULT_JOB_PATH).parent
    return {path.parent.name: _spec(path) for path in sorted(folder.glob("*/spec"))}


def _spec(path: Path) -> str:
    return owned_text(path, "to import the module that it names").strip()


def use_context(name: str) -> None:
    """Put another context of this folder in force.

    Raises:
        JobSpecError: there is none of this name.
    """
    set_current_job(_spec_of(name), name)


def remove_context(name: str) -> None:
    """Forget a context; if it is in force, the default is.

    Raises:
        JobSpecError: there is none of this name.
        JobError: a job is remembered in it.
    """
    _spec_of(name)
    if state_path(name).exists():
        raise JobError(f"context {name!r} remembers a job: kill it first (monarch-slurm kill {name})")
    if name == current_context():
        Path(DEFAULT_JOB_PATH).unlink(missing_ok=True)
    folder = state_path(name).parent
    (folder / "spec").unlink()
    with contextlib.suppress(OSError):  # something of the user's is in it
        folder.rmdir()


def state_path(name: str) -> Path:
    """Return the file in which a context remembers its job.

    Raises:
        ValueError: ``name`` cannot be that of a context.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"context {name!r}: letters, digits, '.', '_' and '-' expected, a letter or digit first")
    return Path(DEFAULT_JOB_PATH).parent / name / "state.pkl"


def _spec_of(name: str) -> str:
    known = contexts()
    if name not in known:
        raise JobSpecError(f"there is no context {name!r} here; there are: {', '.join(known) or 'none'}")
    return known[name]


def _load(spec: str) -> JobTrait:
    module, dot, attribute = spec.rpartition(".")
    if not dot or not module or not attribute:
        raise ValueError(f"{spec!r}: module.attribute expected, such as jobs.training")
    _check_source(Path.cwd())
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    job = getattr(importlib.import_module(module), attribute)
    if not isinstance(job, JobTrait):
        raise TypeError(f"{spec} is no job but a {type(job).__name__}")
    return job


def _check_source(folder: Path) -> None:
    """Make sure that not everybody may put modules into ``folder``. Members of a group that share code may.

    Raises:
        JobSpecError: everybody may.
    """
    info = os.stat(folder)
    if info.st_mode & stat.S_IWOTH:
        raise JobSpecError(
            f"{folder} {describe(info)}: everybody may put modules there, and they would run as you. Go to a folder of "
            "your own"
        )
