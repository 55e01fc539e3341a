"""Running a command on hosts of a job."""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monarch_slurm.actor import Channel, Future, HostMesh, context
from monarch_slurm.actor.context import set_context
from monarch_slurm.job.bash_actor import BashActor
from monarch_slurm.job.errors import JobSpecError
from monarch_slurm.wire.task_limits import start_thread


def exec_command(
    host_mesh: HostMesh,
    cmd: Sequence[str] | str,
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    output_dir: str | None = None,
    rank: int | None = None,
    point: Mapping[str, int] | None = None,
    per_host: Mapping[str, int] | None = None,
) -> Future[int]:
    """Run a command on hosts, once per rank, and return a future of the largest exit code. It starts at once.

    A path that ends in ``.py``, or ``-m module``, is run by Python in a process of the mesh; everything else is a
    shell command. It finds its place in ``MONARCH_RANK_<DIM>`` and ``MONARCH_SIZE_<DIM>``.

    Args:
        cmd: arguments, or one line for the shell.
        workdir: folder to run in, which must exist there.
        output_dir: folder on the hosts for ``stdout.log`` and ``stderr.log`` of each rank; ``$SUBDIR`` in it stands for
            the rank's place, such as ``hosts_0_gpus_1``. None prints the output here, as it comes.
        rank: only this rank of hosts and ``per_host``, counted through.
        point: only ranks with these coordinates, such as ``{"hosts": 2}``.
        per_host: dimensions of the processes on each host; None for one.

    Raises:
        JobSpecError: ``cmd`` is empty, ``rank`` and ``point`` are given both, or there is no such place.
    """
    arguments = [cmd] if isinstance(cmd, str) else list(cmd)
    if not arguments or not arguments[0].strip():
        raise JobSpecError("there is no command to run")
    sizes = {**host_mesh.sizes, **(per_host or {})}
    place = _place(sizes, rank, point)
    call = _Call(arguments, isinstance(cmd, str), dict(env or {}), workdir, output_dir)
    # From here on in a thread of its own: it goes on whoever looks at the future, and its prints keep their order.
    done: Future[int] = Future._pending()
    here = context()  # the procs belong to whoever asked
    start_thread(
        threading.Thread(
            target=_settle,
            args=(done, lambda: _run(host_mesh, call, sizes, place, dict(per_host or {}), here)),
            name="exec-command",
            daemon=True,
        )
    )
    return done


class _Call:
    def __init__(
        self, arguments: list[str], is_line: bool, env: dict[str, str], workdir: str | None, output_dir: str | None
    ) -> None:
        self.arguments = arguments
        self.env = env
        self.workdir = workdir
        self.output_dir = output_dir
        first = arguments[0]
        self.is_python = not is_line and (first.endswith(".py") or (first == "-m" and len(arguments) > 1))
        lines = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
        lines += [f"cd {shlex.quote(workdir)} || exit 1"] if workdir is not None else []
        self.script = "\n".join([*lines, first if is_line else shlex.join(arguments)])


def _settle(done: Any, run: Callable[[], int]) -> None:
    try:
        code = run()
    except Exception as error:  # whatever stopped it belongs to whoever looks at the future
        done._fail(error)
    else:
        done._resolve(lambda: code)


def _place(sizes: dict[str, int], rank: int | None, point: Mapping[str, int] | None) -> dict[str, int]:
    """Return the coordinates that are asked for; the dimensions that it lacks are wanted whole."""
    if rank is not None and point is not None:
        raise JobSpecError("rank and point exclude each other")
    if rank is not None:
        place = {}
        rest = rank
        for label, size in reversed(sizes.items()):
            rest, place[label] = divmod(rest, size)
        if rest or rank < 0:
            raise JobSpecError(f"there is no rank {rank}; the mesh has {sizes}")
        return place
    for label, coordinate in (point or {}).items():
        if label not in sizes:
            raise JobSpecError(f"the mesh has no dimension {label!r}; there are {', '.join(sizes) or 'none'}")
        if not 0 <= coordinate < sizes[label]:
            raise JobSpecError(f"{label}={coordinate} is outside of the mesh, which has {sizes[label]}")
    return dict(point or {})


def _run(
    host_mesh: HostMesh, call: _Call, sizes: dict[str, int], place: dict[str, int], per_host: dict[str, int], here: Any
) -> int:
    set_context(here)
    kept = {label: slice(place[label], place[label] + 1) for label in place}
    hosts = host_mesh.slice(**{label: kept[label] for label in kept if label in host_mesh.sizes})
    procs = hosts.spawn_procs(per_host or None, name="exec")
    try:
        wanted = procs.slice(**{label: kept[label] for label in kept if label in per_host})
        actors = wanted.spawn("exec", BashActor, place, sizes)
        if call.is_python:
            results = actors.run_python.call(call.arguments, call.env, call.workdir, os.getcwd(), call.output_dir).get()
            return _show(list(results.values()), call.output_dir is None)
        if call.output_dir is not None:
            results = actors.run.call(call.script, None, call.output_dir).get()
            return _show(list(results.values()), wanted=False)
        port, receiver = Channel[str].open()
        answers = actors.run_streaming.call(call.script, port)
        return _stream(receiver, answers, len(wanted))
    finally:
        procs.stop().get()


def _show(results: list[dict[str, Any]], wanted: bool) -> int:
    for result in results if wanted else []:
        sys.stdout.write(result["stdout"])
        sys.stderr.write(result["stderr"])
    sys.stdout.flush()
    return max(int(result["returncode"]) for result in results)


_LOOK_SECONDS = 0.5


def _stream(receiver: Any, answers: Any, count: int) -> int:
    """Print lines as they come, until every rank has told its exit code."""
    worst = 0
    line = receiver.recv()
    while count:
        try:
            text = line.get(_LOOK_SECONDS)
        except TimeoutError:
            error = answers.exception(0)  # a rank that has died sends no code
            if error is not None and not isinstance(error, TimeoutError):
                raise error from None
            continue
        line = receiver.recv()
        _, kind, said = text.split(":", 2)
        if kind == "rc":
            worst = max(worst, int(said) if int(said) >= 0 else 128 - int(said))
            count -= 1
        else:
            print(said, file=sys.stdout if kind == "out" else sys.stderr, flush=True)
    return worst
