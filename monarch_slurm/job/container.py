"""Containers that program and host agents run in. Slurm's own commands are needed outside of them alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch_slurm.job.errors import JobSpecError

RUNTIMES = ("apptainer", "singularity", "pyxis")

_IMAGE_FILE = {".sif": "apptainer", ".sqsh": "pyxis"}


@dataclass(frozen=True)
class Container:
    """A container image, and what starts it on a node.

    The batch script itself runs outside, with Slurm's commands; it starts the program and the agents inside.

    Attributes:
        image: path of a ``.sif`` (Apptainer) or ``.sqsh`` (Pyxis) file, or the address of an image that the runtime
            can fetch.
        runtime: ``"apptainer"``, ``"singularity"`` or ``"pyxis"`` (Slurm's plugin for enroot); None tells it by the
            image file's ending.
        python: command that starts Python inside; the package must be importable there.
        mounts: folders to have inside, each as ``/path`` or ``/outside:/inside``; the job's folder is there anyway.
        args: further options: of ``apptainer exec`` (such as ``--rocm``), or of srun for Pyxis (such as
            ``--container-writable``).

    Raises:
        JobSpecError: the runtime is unknown, or not told.
    """

    image: str
    runtime: str | None = None
    python: str = "python3"
    mounts: tuple[str, ...] = ()
    args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "mounts", tuple(self.mounts))
        object.__setattr__(self, "args", tuple(self.args))
        runtime = self.runtime or _IMAGE_FILE.get(Path(self.image).suffix)
        if runtime is None:
            raise JobSpecError(f"container {self.image!r}: say its runtime, one of {', '.join(RUNTIMES)}")
        if runtime not in RUNTIMES:
            raise JobSpecError(f"container runtime {runtime!r}; there are {', '.join(RUNTIMES)}")
        object.__setattr__(self, "runtime", runtime)
        if bad := [mount for mount in self.mounts if not re.fullmatch(r"/[^:,]*(:/[^:,]*(:[a-z,+-]+)?)?", mount)]:
            raise JobSpecError(f"container mount {bad[0]!r}: /path or /outside:/inside expected")

    @property
    def in_srun(self) -> bool:
        """Whether srun itself starts the container, and so each process inside needs a step."""
        return self.runtime == "pyxis"

    def wrap(self, command: Sequence[str], folder: Path) -> list[str]:
        """Return the command line that runs ``command`` inside; if srun starts the container, what srun is to run."""
        if self.in_srun:
            # With LaunchParameters=test_exec srun looks for the command outside of the image, and replaces its name by
            # the path that it finds there. A shell is in both, and finds the command inside.
            return ["/bin/sh", "-c", 'exec "$0" "$@"', *command]
        assert self.runtime is not None
        binds = [f"--bind={mount}" for mount in (str(folder), *self.mounts)]
        return [self.runtime, "exec", *binds, *self.args, self.image, *command]

    def srun_args(self, folder: Path) -> list[str]:
        """Return the options with which srun starts the container; none if srun has nothing to do with it."""
        if not self.in_srun:
            return []
        mounts = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in (str(folder), *self.mounts))
        return [f"--container-image={self.image}", f"--container-mounts={mounts}", *self.args]
