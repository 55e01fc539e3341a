"""Examining nodes through Slurm, before or while a job runs there."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from monarch_slurm.health import Facts, Finding, Pieces, judge_answers, judge_host
from monarch_slurm.job.errors import JobError, SlurmUnreachableError
from monarch_slurm.job.status import run_command
from monarch_slurm.job.unreachable import no_answer


class ExaminationError(JobError):
    """Slurm did not let the nodes be examined; the text quotes it."""


def ask_nodes(
    nodes: Sequence[str],
    *,
    seconds: float,
    options: Sequence[str] = (),
    env: Mapping[str, str] = os.environ,
    waiting: Callable[[], None] = lambda: None,
) -> tuple[list[Finding], dict[str, Facts]]:
    """Run one task of srun on each node; return the findings, and the facts of the nodes that answered, by name.

    Inside of a job it is a step beside the job's others, else a job of its own, for which Slurm may let one wait.

    Args:
        nodes: names.
        seconds: time for the answers, from when the first task has started.
        options: further options of srun.
        waiting: called once if Slurm has not started the first task within two seconds.

    Raises:
        ExaminationError: srun is not there or refused.
        SlurmUnreachableError: no controller of Slurm answers.
    """
    inside = "SLURM_JOB_ID" in env
    command = [
        "srun", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1",
        f"--nodelist={','.join(nodes)}", "--no-kill", "--kill-on-bad-exit=0", "--mpi=none", "--input=none",
        "--job-name=doctor", "--mem=0",
        *(["--overlap", "--cpu-bind=none"] if inside else ["--time=2"]), *options,
        sys.executable, "-m", "monarch_slurm.health", str(seconds * 0.7),
    ]  # fmt: skip
    asked_at = time.time()
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        raise ExaminationError("srun is not on the PATH: nodes can be examined where Slurm's commands are") from None
    lines: queue.Queue[str | None] = queue.Queue()
    assert process.stdout is not None
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    answers: dict[str, Facts] = {}
    pieces = Pieces()
    deadline: float | None = None
    told = False
    while len(answers) < len(nodes):
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()) if deadline is not None else 2.0)
        except queue.Empty:
            if deadline is not None:
                break
            if not told:
                waiting()
                told = True
            continue
        if line is None:
            break
        if deadline is None:
            deadline = time.monotonic() + seconds
        facts = pieces.add(line)
        if facts is not None:
            answers[facts["host"]] = {**facts, "asked_at": asked_at, "heard_at": time.time()}
    if process.poll() is None:
        process.kill() if inside else process.terminate()
    errors = process.communicate()[1].strip()
    if deadline is None:
        if (silent := no_answer(errors, run_command)) is not None:
            raise SlurmUnreachableError(silent)
        said = "; ".join(line.strip() for line in errors.splitlines() if line.strip())
        raise ExaminationError(f"srun could not reach {', '.join(nodes)}: {said or 'it said nothing'}")
    findings = [finding for facts in answers.values() for finding in judge_host(facts)]
    return [*judge_answers(nodes, answers, seconds), *findings], answers


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)
