from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_slurm.job import (
    JobEndedError,
    JobError,
    JobFolderError,
    JobNotFoundError,
    JobStatus,
    SlurmUnreachableError,
)
from monarch_slurm.job.diagnosis import failed_hosts, host_problem, why_ended
from monarch_slurm.job.folder import JobFolder, tail
from monarch_slurm.job.follow import LogReader, follow_job


class World:
    """A job folder, a clock, and what happens at each step of it."""

    def __init__(self, base: Path) -> None:
        self.folder = JobFolder.create(base, "job")
        self.now = 0.0
        self.events: dict[int, Callable[[], object]] = {}
        self.answer: JobStatus | Exception = JobStatus(7, "PENDING", "Priority")
        self.out = io.StringIO()
        self.told: list[str] = []
        self._steps = 0

    def ask(self, job_id: int) -> JobStatus:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._steps += 1
        self.events.pop(self._steps, lambda: None)()
        assert self._steps < 10_000, "never ended"

    def say(self, text: str) -> None:
        with open(self.folder.controller_log, "ab") as log:
            log.write(text.encode())

    def set(self, answer: JobStatus | Exception) -> None:
        self.answer = answer

    def follow(self) -> int:
        return follow_job(7, self.folder, self.out, self.told.append, self.ask, lambda: self.now, self.sleep)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "runs")


def test_output_is_copied_as_it_comes_and_the_code_is_the_programs(world: World) -> None:
    seen_first: list[str] = []
    world.events = {
        5: lambda: world.set(JobStatus(7, "RUNNING")),
        10: lambda: world.say("step 1\nstep "),
        15: lambda: (
            seen_first.append(world.out.getvalue()),
            world.say("2\nlöss: ½\n"),
            world.folder.write_exit_code(3),
        ),
    }
    assert world.follow() == 3
    assert seen_first == ["step 1\nstep "]
    assert world.out.getvalue() == "step 1\nstep 2\nlöss: ½\n"
    assert world.told == ["job 7 is PENDING (Priority)", "job 7 is RUNNING"]


def test_a_job_that_ended_before_its_program_says_why(world: World) -> None:
    world.folder.batch_log.write_text("ERROR monarch_slurm.job.steps: host n3 has failed: exit code 1\n")
    world.folder.host_log("n3").write_text("ModuleNotFoundError: No module named 'monarch_slurm'\n")
    world.set(JobStatus(7, "FAILED", "NonZeroExitCode", exit_code=1))
    with pytest.raises(
        JobEndedError, match=r"job 7 is FAILED \(NonZeroExitCode\), exit code 1(.|\n)*logs/n3\.log(.|\n)*No module"
    ):
        world.follow()


def test_a_job_cancelled_in_the_queue_says_so(world: World) -> None:
    world.set(JobStatus(7, "CANCELLED", exit_code=0))
    with pytest.raises(JobError, match="job 7 is CANCELLED"):
        world.follow()


def test_a_folder_that_nodes_do_not_see_is_named(world: World) -> None:
    world.set(JobStatus(7, "FAILED", "RaisedSignal:53", exit_code=181))
    with pytest.raises(JobFolderError, match="file system that all nodes share"):
        world.follow()


def test_an_exit_code_that_comes_late_is_waited_for(world: World) -> None:
    world.say("done\n")
    world.set(JobStatus(7, "COMPLETED", exit_code=0))
    world.events = {3: lambda: world.folder.write_exit_code(0)}
    assert world.follow() == 0


def test_slurm_may_be_silent_for_as_long_as_it_likes(world: World) -> None:
    world.set(SlurmUnreachableError("squeue failed"))
    world.events = {3000: lambda: world.folder.write_exit_code(0)}
    assert world.follow() == 0
    assert world.told == ["squeue failed; trying again"]


def test_a_forgotten_job_is_given_up(world: World) -> None:
    world.set(JobNotFoundError("Slurm knows no job 7 (any more)"))
    with pytest.raises(JobNotFoundError):
        world.follow()


def test_a_character_that_is_cut_in_two_is_read_whole(tmp_path: Path) -> None:
    path, out = tmp_path / "log", io.StringIO()
    reader = LogReader(path)
    assert not reader.copy(out)
    text = "½".encode()
    path.write_bytes(text[:1])
    reader.copy(out)
    path.write_bytes(text)
    reader.copy(out)
    assert out.getvalue() == "½"


def test_the_batch_log_tells_which_hosts_failed(world: World) -> None:
    world.folder.batch_log.write_text(
        "2030-01-01 00:00:00,000 ERROR monarch_slurm.job.steps: host n1 has failed: exit code 1\n"
        "2030-01-01 00:00:00,000 WARNING monarch_slurm.job.steps: the step of host n3 ended: killed by SIGKILL\n"
        "2030-01-01 00:00:00,000 WARNING monarch_slurm.job.steps: host n3: starting its step again\n"
        "2030-01-01 00:00:00,000 ERROR monarch_slurm.job.steps: host n4 has failed: exit code 250 (srun: error: no)\n"
    )
    assert failed_hosts(world.folder) == {"n1": "exit code 1", "n4": "exit code 250 (srun: error: no)"}
    world.folder.host_log("n4").write_text("out of memory\n")
    text = str(host_problem(world.folder, ["n4"], "1 of 4 hosts did not join"))
    assert "host n4 has failed: exit code 250" in text
    assert "    out of memory" in text
    assert "starting its step again" in str(why_ended(world.folder, JobStatus(7, "NODE_FAIL", exit_code=0)))


def test_a_tail_is_short(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"{line}\n" for line in range(1000)))
    assert tail(path, 2) == "    998\n    999"
    assert tail(tmp_path / "none") == ""


def test_an_exit_code_is_whole_or_absent(world: World) -> None:
    assert world.folder.exit_code() is None
    world.folder.exit_code_file.write_text("")
    assert world.folder.exit_code() is None
    world.folder.write_exit_code(137)
    assert world.folder.exit_code() == 137
    assert sorted(path.name for path in world.folder.path.iterdir()) == ["exit_code", "logs"]
