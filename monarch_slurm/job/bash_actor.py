"""An actor that runs commands on its host: shell scripts, and Python programs in its own process."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from monarch_slurm.actor import Actor, Port, context, endpoint
from monarch_slurm.owned_files import append_owned, make_folders
from monarch_slurm.wire.task_limits import start_thread

SUBDIR = "$SUBDIR"
"""In the name of an output folder: replaced by the place of the rank, such as ``hosts_0_gpus_1``."""

STDOUT_FILE, STDERR_FILE = "stdout.log", "stderr.log"

Result = dict[str, Any]


class BashActor(Actor):
    """Runs commands; each endpoint returns when its command has ended.

    Commands find their place in ``MONARCH_RANK_<DIM>`` and ``MONARCH_SIZE_<DIM>``, one pair per dimension.

    Args:
        origin: what is added to each coordinate, for a mesh that is a part of a larger one.
        sizes: sizes of the dimensions of that larger one.
    """

    def __init__(self, origin: dict[str, int] | None = None, sizes: dict[str, int] | None = None) -> None:
        rank = context().actor_instance.rank
        self._place = {label: (origin or {}).get(label, 0) + rank[label] for label in rank}
        self._sizes = {label: rank.size(label) for label in rank} | (sizes or {})
        self._rank = _flat(self._place, self._sizes)

    @endpoint
    def run(self, script: str, target_ranks: Sequence[int] | None = None, output_dir: str | None = None) -> Result:
        """Run ``script`` with bash.

        Args:
            target_ranks: ranks that run it; None for all. The others return at once.
            output_dir: folder on this host for ``stdout.log`` and ``stderr.log``; None returns the output.

        Returns:
            ``{"returncode", "stdout", "stderr"}``, and ``"skipped": True`` if this rank was none of the targets.
        """
        if target_ranks is not None and self._rank not in target_ranks:
            return {"returncode": 0, "stdout": "", "stderr": "", "skipped": True}
        with self._output(output_dir) as (stdout, stderr):
            done = subprocess.run(
                ["bash", "-c", script],
                stdin=subprocess.DEVNULL, stdout=stdout or subprocess.PIPE, stderr=stderr or subprocess.PIPE,
                env={**os.environ, **self._variables()}, check=False, text=True, errors="replace",
            )  # fmt: skip
        return {"returncode": done.returncode, "stdout": done.stdout or "", "stderr": done.stderr or ""}

    @endpoint
    def run_streaming(self, script: str, output_port: Port[str], target_ranks: Sequence[int] | None = None) -> None:
        """Run ``script`` with bash and send each line as it comes, as ``rank:out:line`` or ``rank:err:line``.

        The last message is ``rank:rc:returncode``; a rank that is none of the targets sends ``skip:rank`` alone.
        """
        if target_ranks is not None and self._rank not in target_ranks:
            output_port.send(f"skip:{self._rank}")
            return
        process = subprocess.Popen(
            ["bash", "-c", script],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **self._variables()}, text=True, errors="replace",
        )  # fmt: skip
        readers = [
            threading.Thread(target=self._forward, args=(pipe, kind, output_port))
            for pipe, kind in ((process.stdout, "out"), (process.stderr, "err"))
        ]
        for reader in readers:
            start_thread(reader)
        for reader in readers:
            reader.join()
        output_port.send(f"{self._rank}:rc:{process.wait()}")

    @endpoint
    def run_python(
        self,
        cmd: Sequence[str],
        env: dict[str, str] | None = None,
        workdir: str | None = None,
        client_cwd: str | None = None,
        output_dir: str | None = None,
    ) -> Result:
        """Run a Python program in this process: ``["train.py", ...]`` or ``["-m", "module", ...]``.

        Args:
            client_cwd: folder that a relative path is looked for in, and that can be imported from.

        Returns:
            ``{"returncode", "stdout", "stderr"}``; an exception counts as 1.
        """
        os.environ.update({**self._variables(), **(env or {})})
        if client_cwd is not None and client_cwd not in sys.path:
            sys.path.insert(0, client_cwd)
        script = str(Path(client_cwd or ".", cmd[0]).absolute())  # before the folder changes
        if workdir is not None:
            os.chdir(workdir)
        with self._output(output_dir) as files:
            stdout, stderr = files[0] or io.StringIO(), files[1] or io.StringIO()
            with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
                code = _run_module(cmd[1], cmd[1:]) if cmd[0] == "-m" else _run_script(script, cmd)
            texts = [file.getvalue() if isinstance(file, io.StringIO) else "" for file in (stdout, stderr)]
        return {"returncode": code, "stdout": texts[0], "stderr": texts[1]}

    def _forward(self, pipe: IO[str] | None, kind: str, port: Port[str]) -> None:
        assert pipe is not None
        with pipe:
            for line in pipe:
                port.send(f"{self._rank}:{kind}:{line.rstrip()}")

    def _variables(self) -> dict[str, str]:
        ranks = {f"MONARCH_RANK_{label.upper()}": str(place) for label, place in self._place.items()}
        return ranks | {f"MONARCH_SIZE_{label.upper()}": str(size) for label, size in self._sizes.items()}

    @contextlib.contextmanager
    def _output(self, folder: str | None) -> Any:
        if folder is None:
            yield None, None
            return
        subdir = "_".join(f"{label}_{place}" for label, place in self._place.items()) or "rank_0"
        if SUBDIR not in folder and self._place:
            folder = f"{folder}/{SUBDIR}"  # else ranks would write into each other's files
        path = Path(folder.replace(SUBDIR, subdir))
        make_folders(path, 0o755)
        with open(_emptied(path / STDOUT_FILE), "w") as stdout, open(_emptied(path / STDERR_FILE), "w") as stderr:
            yield stdout, stderr


def _emptied(path: Path) -> int:
    fd = append_owned(path, 0o644)
    os.ftruncate(fd, 0)
    return fd


def _flat(place: dict[str, int], sizes: dict[str, int]) -> int:
    rank = 0
    for label, coordinate in place.items():
        rank = rank * sizes[label] + coordinate
    return rank


def _run_script(path: str, arguments: Sequence[str]) -> int:
    sys.argv = [arguments[0], *arguments[1:]]
    sys.path.insert(0, str(Path(path).parent))
    return _exit_code(lambda: runpy.run_path(path, run_name="__main__"))


def _run_module(name: str, arguments: Sequence[str]) -> int:
    sys.argv = list(arguments)
    return _exit_code(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def _exit_code(run: Any) -> int:
    try:
        run()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # whatever a program raises at its top ends it, and it alone
        traceback.print_exc()
        return 1
    return 0
