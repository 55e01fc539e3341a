"""Examining nodes through Slurm, before or while a job runs there."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from monarch_slurm.health import Facts, Finding, Pieces, judge_answers, judge_host
from monarch_slurm.interpreter import module_command, python_environment
from monarch_slurm.job.errors import JobError, SlurmUnreachableError
from monarch_slurm.job.node_states import describe_nodes, node_states
from monarch_slurm.job.nodelist import compress
from monarch_slurm.job.slurm_options import check_srun_options
from monarch_slurm.job.status import answers_within, run_command
from monarch_slurm.job.unreachable import no_answer
from monarch_slurm.wire.task_limits import start_thread

TELL_SECONDS = 2.0
"""Time after which the user hears that Slurm lets srun wait."""

START_SECONDS = 30.0
"""Time from the allocation of the nodes to the first task's examination: the start of Python from a shared folder."""

ASK_SECONDS = 5.0
"""Time for Slurm's answer about the nodes that are not free."""

_WAITS = ("queued and waiting for resources", "step creation temporarily disabled")
_HAS_NODES = ("has been allocated resources", "step created")


class ExaminationError(JobError):
    """Slurm did not let the nodes be examined; the text quotes it."""


def ask_nodes(
    nodes: Sequence[str],
    *,
    seconds: float,
    options: Sequence[str] = (),
    env: Mapping[str, str] = os.environ,
    waiting: Callable[[str], None] = lambda text: None,
) -> tuple[list[Finding], dict[str, Facts]]:
    """Run one task of srun on each node; return the findings, and the facts of the nodes that answered, by name.

    Inside of a job it is a step beside the job's others, else a job of its own, which waits for the nodes.

    Args:
        nodes: names.
        seconds: time for Slurm to allocate the nodes, and then for the answers, from the first answer on.
        options: further options of srun.
        waiting: called once if Slurm lets srun wait, with a line that says for what.

    Raises:
        ExaminationError: srun is missing or refused, or Slurm did not allocate the nodes in time.
        JobSpecError: an option of srun cannot be given.
        SlurmUnreachableError: no controller of Slurm answers.
    """
    check_srun_options(options)
    inside = "SLURM_JOB_ID" in env
    command = [
        "srun", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1",
        f"--nodelist={','.join(nodes)}", "--no-kill", "--kill-on-bad-exit=0", "--mpi=none", "--input=none",
        "--job-name=doctor", "--mem=0",
        *(["--overlap", "--cpu-bind=none"] if inside else ["--time=2"]), *options,
        *module_command("monarch_slurm.health", str(seconds * 0.7)),
    ]  # fmt: skip
    asked_at = time.time()
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=python_environment()
        )
    except FileNotFoundError:
        raise ExaminationError("srun is not on the PATH: nodes can be examined where Slurm's commands are") from None
    srun = _Srun(process)
    answers: dict[str, Facts] = {}
    pieces = Pieces()
    began = time.monotonic()
    waits = told = False
    deadline = began + seconds + START_SECONDS + seconds
    heard = False
    while len(answers) < len(nodes) and (now := time.monotonic()) < deadline:
        line = srun.next_line(0.2)
        if line is None and srun.ended:
            break
        if srun.waits != waits:
            waits = srun.waits
            deadline = began + seconds if waits else now + START_SECONDS + seconds
        if waits and not told and now - began >= min(TELL_SECONDS, seconds / 2):
            told = True
            waiting(f"waiting for Slurm to allocate {compress(nodes)}{_occupied(nodes, inside)}")
        if line is None:
            continue
        if not heard:
            heard = True
            deadline = now + seconds
        facts = pieces.add(line)
        if facts is not None:
            answers[facts["host"]] = {**facts, "asked_at": asked_at, "heard_at": time.time()}
    srun.end(signal_first=not inside)
    if waits:
        raise ExaminationError(
            f"Slurm did not allocate {compress(nodes)} within {seconds:g} s{_occupied(nodes, inside)}. Examine other "
            "nodes, or wait longer (--timeout)"
        )
    if not heard and srun.failed:
        if (silent := no_answer(srun.said, run_command)) is not None:
            raise SlurmUnreachableError(silent)
        said = "; ".join(line.strip() for line in srun.said.splitlines() if line.strip())
        raise ExaminationError(f"srun could not reach {', '.join(nodes)}: {said or 'it said nothing'}")
    findings = [finding for facts in answers.values() for finding in judge_host(facts)]
    return [*judge_answers(nodes, answers, seconds), *findings], answers


def _occupied(nodes: Sequence[str], inside: bool) -> str:
    """Return what keeps Slurm from allocating the nodes, to follow a sentence; empty if nobody can tell."""
    if inside:
        return ": other steps of the job have their CPUs or GPUs (start those with srun --overlap)"
    states = node_states(answers_within(ASK_SECONDS), nodes)
    text = describe_nodes(state for name, state in states.items() if name in nodes and state.why_not_free)
    return f": {text}" if text else ""


class _Srun:
    """A running srun, whose output and errors are read by threads."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors: list[str] = []
        self.waits = False
        """Whether srun waits for nodes, by its own words."""
        self.ended = self.failed = False
        assert process.stdout is not None
        assert process.stderr is not None
        self._threads = [
            threading.Thread(target=self._read, args=(process.stdout,), daemon=True),
            threading.Thread(target=self._listen, args=(process.stderr,), daemon=True),
        ]
        for thread in self._threads:
            start_thread(thread)

    @property
    def said(self) -> str:
        return "".join(self._errors)

    def next_line(self, seconds: float) -> str | None:
        """Return a line of the tasks; None if there is none for so many seconds, or srun has ended."""
        if self.ended:
            return None
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            return None
        self.ended = line is None
        return line

    def end(self, signal_first: bool) -> None:
        """End srun, and with it the job that it waits for or has.

        Args:
            signal_first: give srun time to cancel its job.
        """
        self.failed = self.ended
        if self._process.poll() is None:
            if signal_first:
                self._process.terminate()
            else:
                self._process.kill()
        try:
            self._process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(1.0)

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put(None)

    def _listen(self, stream: IO[str]) -> None:
        for line in stream:
            self._errors.append(line)
            words = line.lower()
            if any(phrase in words for phrase in _WAITS):
                self.waits = True
            elif any(phrase in words for phrase in _HAS_NODES):
                self.waits = False
