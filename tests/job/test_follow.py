from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import asdict
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
from monarch_slurm.job.follow import describe_exit, follow_job
from monarch_slurm.job.head_lock import HEAD_FILE, HeadProcess
from monarch_slurm.job.log_reader import LogReader


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
        return follow_job(
            7,
            self.folder,
            self.out,
            self.told.append,
            self.ask,
            lambda name: f"{name} is allocated",
            lambda: self.now,
            self.sleep,
        )


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
    ended = f"job 7: its program ended with exit code 3; its files are in {world.folder.path}"
    assert world.told == ["job 7 is PENDING (Priority)", "job 7 is RUNNING", ended]


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


def beat(world: World, number: int, name: str = "a", node: str = "n1", restarts: int = 0) -> None:
    head = HeadProcess(name, node, 12, restarts, 0.0, number)
    (world.folder.path / HEAD_FILE).write_text(json.dumps(asdict(head)))


def test_a_head_that_falls_silent_is_told_long_before_slurm_notices(world: World) -> None:
    world.set(JobStatus(7, "RUNNING"))
    beat(world, 1)
    silent: list[list[str]] = []
    world.events = {
        25: lambda: beat(world, 2),
        125: lambda: (
            silent.append(list(world.told)),
            world.folder.batch_log.write_text(
                "monarch_slurm: n2: the head node is lost: starting the job again\n"
                "2030-01-01 00:00:00,000 INFO monarch_slurm.job.batch: nothing to tell\n"
                "monarch_slurm: n3: the head node is lost: starting the job again\n"
                "2030-01-01 00:00:00,000 WARNING monarch_slurm.job.steps: host n4 waits: 2 GPUs\nof a program: "
            ),
        ),
        150: lambda: world.set(JobStatus(7, "PENDING", "BeginTime")),
        250: lambda: (beat(world, 1, "b", "n2", 1), world.set(JobStatus(7, "RUNNING"))),
        300: lambda: (beat(world, 2, "b", "n2", 1), world.folder.write_exit_code(0)),
    }
    assert world.follow() == 0
    (told,) = silent
    assert told[0] == "job 7 is RUNNING"
    assert re.match("job 7: nothing was heard from head node n1 for 1[5-8] s", told[1])
    assert told[2] == "job 7 is RUNNING; n1 is allocated"
    assert world.told[3:] == [
        "job 7: the head node is lost: starting the job again",
        "job 7: host n4 waits: 2 GPUs",
        "job 7 is PENDING (BeginTime)",
        "job 7: the job has started again (restart 1); its head is node n2",
        "job 7 is RUNNING",
    ]


def test_a_head_that_was_only_cut_off_is_heard_from_again(world: World) -> None:
    world.set(JobStatus(7, "RUNNING"))
    beat(world, 1)
    world.events = {150: lambda: beat(world, 2), 170: lambda: world.folder.write_exit_code(0)}
    assert world.follow() == 0
    assert world.told[3:] == ["job 7: head node n1 is heard from again", "job 7 is RUNNING"]


def test_a_log_of_a_template_is_not_told_twice(world: World) -> None:
    output = world.folder.path.parent / "train-7.log"
    output.write_text("2030-01-01 00:00:00,000 WARNING monarch_slurm.job.steps: host n4 waits: 2 GPUs\n")
    world.folder.controller_log.symlink_to(output)
    world.folder.batch_log.symlink_to(output)
    world.folder.write_exit_code(0)
    assert world.follow() == 0
    assert (world.out.getvalue(), world.told) == (output.read_text(), [])


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (7, "exit code 7"),
        (75, "exit code 75: it was asked to end, and has saved its state"),
        (137, "exit code 137 (killed by SIGKILL)"),
        (128 + 40, "exit code 168"),
        (255, "exit code 255"),
    ],
)
def test_what_an_exit_code_means(code: int, text: str) -> None:
    assert describe_exit(code) == text


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
