"""What Slurm says about a job.

squeue is asked first, for it answers everywhere; then scontrol, which alone knows the exit code without accounting;
then sacct, for jobs that slurmctld has forgotten. Plain formats are used: the shape of ``--json`` differs from release
to release.
"""

from __future__ import annotations

import contextlib
import enum
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from monarch_slurm.inherited import report_children
from monarch_slurm.job.errors import (
    JobEndedError,
    JobNotFoundError,
    JobStartTimeoutError,
    NoSlurmError,
    SlurmUnreachableError,
)
from monarch_slurm.job.unreachable import slurm_failure

NOT_FOUND_GRACE = 30.0
"""Seconds that a job may be unknown before it counts as gone: a busy slurmctld is late, sacct later."""

COMMAND_TIMEOUT = 60.0
FIRST_POLL, LONGEST_POLL = 0.2, 10.0


class Phase(enum.Enum):
    """Where a job is on its way, whatever Slurm calls it."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"


_W, _R, _G, _E = Phase.WAITING, Phase.RUNNING, Phase.ENDING, Phase.ENDED
PHASES = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"), _W),
    **dict.fromkeys(("SPECIAL_EXIT", "SUSPENDED", "STOPPED", "POWER_UP_NODE", "EXPEDITING"), _W),
    **dict.fromkeys(("RUNNING", "RESIZING", "SIGNALING"), _R),
    **dict.fromkeys(("COMPLETING", "STAGE_OUT", "UPDATE_DB"), _G),
    **dict.fromkeys(("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"), _E),
    **dict.fromkeys(("BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"), _E),
}
"""Every job state of Slurm (squeue(1), JOB STATE CODES); one that is not in the table counts as waiting."""

STUCK = {
    "PartitionNodeLimit": "the partition has too few nodes, or allows fewer in one job",
    "PartitionTimeLimit": "the time limit is longer than the partition allows",
    "PartitionConfig": "the partition does not allow such a job",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "BadConstraints": "no node satisfies the constraints",
    "AccountNotAllowed": "the account may not use the partition",
    "InvalidAccount": "the account is not valid",
    "InvalidQOS": "the QOS is not valid",
    "QOSNotAllowed": "the QOS may not be used here",
    "JobHeldUser": "the job is held; scontrol release {job} frees it",
    "JobHeldAdmin": "an administrator holds the job",
    "DependencyNeverSatisfied": "a job that this one depends on has failed",
}
"""Reasons for which a job waits for ever unless somebody changes something."""

JobId = int | str
"""Slurm's number of a job; ``"12_3"`` is a task of an array."""

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def run_command(command: Sequence[str], timeout: float = COMMAND_TIMEOUT) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands.

    Raises:
        NoSlurmError: it is not installed here.
        SlurmUnreachableError: it did not end within ``timeout`` seconds.
    """
    if shutil.which(command[0]) is None:
        raise NoSlurmError(f"no Slurm here: {command[0]} is not on PATH; run this on a login node of the cluster")
    report_children()
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise SlurmUnreachableError(f"{command[0]} did not answer within {timeout:g} s") from None


def answers_within(seconds: float) -> Run:
    """Return a `run_command` whose commands share one deadline, in ``seconds`` from now.

    After it, each command raises `SlurmUnreachableError` without being run.
    """
    deadline = time.monotonic() + seconds

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        left = deadline - time.monotonic()
        if left > 0:
            with contextlib.suppress(SlurmUnreachableError):
                return run_command(command, left)
        raise SlurmUnreachableError(
            f"Slurm's controller did not answer within {seconds:g} s; try again later, or ask those who run the cluster"
        )

    return run


@dataclass(frozen=True)
class JobStatus:
    """One look at a job.

    Attributes:
        state: Slurm's own word.
        reason: why it waits or has ended, in Slurm's words; empty if there is none.
        nodes: its nodes, compressed; empty while it waits.
        start: when it started or is expected to, in local time; empty if Slurm cannot tell.
        exit_code: of the batch script, 128 + signal if a signal ended it; None if it has not ended or nobody knows.
        source: the command that answered.
    """

    job_id: JobId
    state: str
    reason: str = ""
    nodes: str = ""
    start: str = ""
    exit_code: int | None = None
    source: str = "squeue"

    @property
    def phase(self) -> Phase:  # noqa: D102
        return PHASES.get(self.state, Phase.WAITING)

    def __str__(self) -> str:
        text = f"job {self.job_id} is {self.state}"
        if self.phase is Phase.WAITING:
            text += f" ({self.reason})" if self.reason else ""
            text += f", expected to start {self.start.replace('T', ' ')}" if self.start else ""
            if self.reason in STUCK:
                text += f": {STUCK[self.reason].format(job=self.job_id)}; it will not start like this"
        elif self.phase is Phase.ENDED:
            text += f" ({self.reason})" if self.reason else ""
            text += f", exit code {self.exit_code}" if self.exit_code is not None else ""
        return text


def query(job_id: JobId, run: Run = run_command) -> JobStatus:
    """Return what Slurm knows of the job now.

    Raises:
        JobNotFoundError: it knows nothing of it.
        SlurmUnreachableError: slurmctld does not answer.
        NoSlurmError: Slurm's commands are not here.
    """
    status = _from_squeue(job_id, run)
    if status is not None and status.phase is not Phase.ENDED:
        return status
    return _from_scontrol(job_id, run) or status or _from_sacct(job_id, run)


def listed_id(job_id: JobId, run: Run = run_command) -> str:
    """Return the id by which Slurm lists a job with this number: ``ARRAY_INDEX`` for an element of an array.

    Without an answer that is ``job_id``, which names the same job.
    """
    try:
        lines = run(["squeue", "-h", "-j", str(job_id), "-o", "%i"]).stdout.split()
    except (NoSlurmError, SlurmUnreachableError):
        lines = []
    return lines[0] if len(lines) == 1 and "+" not in lines[0] else str(job_id)


def _answer(command: Sequence[str], run: Run) -> str:
    """Return the output of ``command``; empty if the job is unknown to it."""
    done = run(command)
    if done.returncode == 0:
        return done.stdout.strip()
    if re.search(r"invalid job id", done.stderr, re.IGNORECASE):
        return ""
    raise slurm_failure(done, f"{command[0]} failed", run)


def _known(text: str) -> str:
    return "" if text.strip("()") in ("", "None", "N/A", "null", "Unknown") else text


def _from_squeue(job_id: JobId, run: Run) -> JobStatus | None:
    answer = _answer(["squeue", "-h", "--states=all", "-j", str(job_id), "--sort=i", "-o", "%T|%S|%N|%r"], run)
    if not answer:
        return None
    components = [line.split("|", 3) for line in answer.splitlines()]
    state, start, _, reason = components[0]
    return JobStatus(job_id, state, _known(reason), _joined(nodes for _, _, nodes, _ in components), _known(start))


def _joined(node_lists: Iterable[str]) -> str:
    """Return the nodes of all components of a heterogeneous job, in the components' order, or those of the only one."""
    return ",".join(filter(None, map(_known, node_lists)))


def _from_scontrol(job_id: JobId, run: Run) -> JobStatus | None:
    answer = _answer(["scontrol", "show", "job", "-o", str(job_id)], run)
    components = [
        dict(re.findall(r"\b(JobState|Reason|NodeList|StartTime|ExitCode)=(\S*)", line)) for line in answer.splitlines()
    ]
    if not components or "JobState" not in components[0]:
        return None
    fields = components[0]
    status = JobStatus(
        job_id,
        fields["JobState"],
        _known(fields.get("Reason", "")),
        _joined(component.get("NodeList", "") for component in components),
        _known(fields.get("StartTime", "")),
        source="scontrol",
    )
    return replace(status, exit_code=_exit_code(fields.get("ExitCode", ""))) if status.phase is Phase.ENDED else status


def _from_sacct(job_id: JobId, run: Run) -> JobStatus:
    unknown = JobNotFoundError(f"Slurm knows no job {job_id} (any more)")
    if shutil.which("sacct") is None and run is run_command:
        raise unknown
    done = run(["sacct", "-n", "-P", "-X", "-j", str(job_id), "-o", "State,ExitCode,NodeList,Start"])
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:  # accounting is off, or it has not heard of the job either
        raise unknown
    components = [line.split("|") for line in lines]
    state, code, _, start = components[0]
    state = state.split(" ")[0]  # "CANCELLED by 0"
    nodes = _joined(listed for _, _, listed, _ in components)
    status = JobStatus(job_id, state, "", nodes, _known(start), source="sacct")
    return replace(status, exit_code=_exit_code(code)) if status.phase is Phase.ENDED else status


def _exit_code(text: str) -> int | None:
    match = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    if match is None:
        return None
    code, signal = int(match.group(1)), int(match.group(2))
    return code or (128 + signal if signal else 0)


class StartWatch:
    """Decides, look by look, whether to go on waiting for a job to start. Holds no clock and asks nobody.

    Args:
        timeout: seconds that the job may wait in the queue; None waits without limit.
        began: time of the first look, seconds.
    """

    def __init__(self, job_id: JobId, timeout: float | None, began: float) -> None:
        self._job_id = job_id
        self._timeout = timeout
        self._began = began
        self._last_seen = began
        self._notice = ""

    def see(self, now: float, answer: JobStatus | JobNotFoundError | SlurmUnreachableError) -> str | None:
        """Take in the answer of time ``now``; return what is new to tell the user, None for nothing.

        Raises:
            JobNotFoundError: the job has been unknown for longer than `NOT_FOUND_GRACE`.
            JobEndedError: it has ended.
            JobStartTimeoutError: it has waited for longer than it may.
        """
        if isinstance(answer, JobNotFoundError):
            if now - self._last_seen > NOT_FOUND_GRACE:
                raise answer
            text = ""
        elif isinstance(answer, SlurmUnreachableError):
            self._last_seen = now  # unknown is what Slurm says, not what it does not say
            text = f"job {self._job_id}: {answer}; trying again"
        else:
            self._last_seen = now
            if answer.phase in (Phase.ENDING, Phase.ENDED):
                raise JobEndedError(str(answer))
            text = str(answer)
            if answer.phase is Phase.RUNNING:
                return text
        waited = now - self._began
        if self._timeout is not None and waited >= self._timeout:
            raise JobStartTimeoutError(
                f"{text or f'job {self._job_id} is not known to Slurm yet'} after {waited:.0f} s; it stays in the "
                f"queue: wait for it again, or cancel it with: scancel {self._job_id}"
            )
        if not text or text == self._notice:
            return None
        self._notice = text
        return text


def wait_for_start(
    job_id: JobId,
    timeout: float | None,
    notice: Callable[[str], None],
    ask: Callable[[JobId], JobStatus] = query,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> JobStatus:
    """Wait until the job runs; return its status then.

    Args:
        timeout: seconds to wait; None waits without limit.
        notice: is called with a line whenever something has changed: state, reason, expected start.

    Raises:
        JobEndedError, JobStartTimeoutError, JobNotFoundError, NoSlurmError
    """
    watch = StartWatch(job_id, timeout, clock())
    pause = FIRST_POLL
    while True:
        answer: JobStatus | JobNotFoundError | SlurmUnreachableError
        try:
            answer = ask(job_id)
        except (JobNotFoundError, SlurmUnreachableError) as error:
            answer = error
        text = watch.see(clock(), answer)
        if text is not None:
            notice(text)
        if isinstance(answer, JobStatus) and answer.phase is Phase.RUNNING:
            return answer
        sleep(pause)
        pause = min(pause * 1.5, LONGEST_POLL)
