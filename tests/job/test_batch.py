from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pretended import DEADLINE, Pretended, wait_until

FakeSlurm = Callable[..., Path]

BATCH = """
import sys
from monarch_slurm.job.batch import BatchPlan, run_batch
run_batch(sys.argv[1], BatchPlan(tuple(sys.argv[3:]) or None, sys.executable, requeue=sys.argv[2] == "again"))
"""

SRUN = """
for argument; do case $argument in
--nodelist=*) export SLURMD_NODENAME=${argument#*=}; shift ;;
--*) shift ;;
*) break ;;
esac; done
echo $$ >> "$STARTED.$SLURMD_NODENAME"
[ $SLURMD_NODENAME = n1 ] && SLURM_STEP_ID=0 exec "$@"
while ! [ -e "$MONARCH_SLURM_JOB_FOLDER/exit_code" ]; do sleep 0.05; done
"""


class Batch(Pretended):
    """Runs the batch script's part of a pretended job; srun runs the task of the first node here."""

    def start(self, *program: str, requeue: bool = False) -> subprocess.Popen[bytes]:
        with open(self.log, "wb") as log:
            again = "again" if requeue else "once"
            command = [sys.executable, "-c", BATCH, str(self.folder.path), again, *program]
            return subprocess.Popen(command, env=self.env, stdout=log, stderr=log)

    def program_said(self, text: str) -> bool:
        path = self.folder.controller_log
        return path.exists() and text in path.read_text()

    def said(self, text: str) -> bool:
        return text in self.log.read_text()

    def started(self, node: str) -> list[int]:
        """Pids of the sruns of ``node`` so far."""
        path = Path(f"{self.env['STARTED']}.{node}")
        return [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.fixture
def batch(short: Path, fake_slurm: FakeSlurm) -> Batch:
    fake_slurm(srun=SRUN, squeue="echo 'n[1-2]'")
    job = Batch(short)
    job.env |= {"STARTED": str(short / "started"), "PATH": os.environ["PATH"]}
    return job


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_the_programs_exit_code_is_the_jobs_and_is_written_down(script: str, code: int, batch: Batch) -> None:
    job = batch.start("bash", "-c", f"echo $MONARCH_BATCH_JOB $MONARCH_SLURM_JOB_FOLDER; sleep 100 & {script}")
    assert job.wait(DEADLINE) == code, batch.log.read_text()
    assert batch.folder.exit_code() == code
    assert batch.folder.controller_log.read_text() == f"1 {batch.folder.path}\n"
    batch.assert_gone()


@pytest.mark.parametrize(("script", "again"), [("kill -9 $$", True), ("kill -SEGV $$", True), ("exit 1", False)])
def test_a_job_that_may_start_again_does_so_when_its_program_is_killed(
    script: str, again: bool, batch: Batch, fake_slurm: FakeSlurm, short: Path
) -> None:
    asked = short / "asked"
    # Slurm ends the tasks of the hosts, and then the batch script.
    end = 'kill $(cat "$STARTED.n1" 2>/dev/null) $PPID'
    fake_slurm(srun=SRUN, squeue="echo 'n[1-2]'", scontrol=f'[ "$1" = requeue ] && echo "$@" >> {asked} && {end}')
    job = batch.start("bash", "-c", f"until [ -s $STARTED.n1 ]; do sleep 0.01; done; {script}", requeue=True)
    job.wait(DEADLINE)
    assert asked.exists() == again, batch.log.read_text()
    assert (batch.folder.exit_code() is None) == again  # whoever follows the job waits for its next start
    if again:
        name = "SIGKILL" if "-9" in script else "SIGSEGV"
        assert batch.said(f"the program was killed by {name}; Slurm starts the job again")
    batch.assert_gone()


def test_a_job_that_slurm_does_not_start_again_has_the_programs_exit_code(batch: Batch, fake_slurm: FakeSlurm) -> None:
    fake_slurm(srun=SRUN, squeue="echo 'n[1-2]'", scontrol='[ "$1" != requeue ] || { echo disabled >&2; exit 1; }')
    job = batch.start("bash", "-c", "kill -9 $$", requeue=True)
    assert job.wait(DEADLINE) == 137
    assert batch.folder.exit_code() == 137
    assert batch.said("Slurm does not start the job again: disabled")


def test_a_program_that_cannot_be_started_is_named(batch: Batch) -> None:
    assert batch.start("no-such-program").wait(DEADLINE) == 127
    assert batch.folder.exit_code() == 127
    assert "cannot start no-such-program on n1: No such file" in batch.folder.controller_log.read_text()
    batch.assert_gone()


def test_the_notice_of_the_time_limit_asks_the_program_to_end(batch: Batch) -> None:
    job = batch.start("bash", "-c", "trap 'echo saving; exit 5' TERM; echo up; while :; do sleep 0.05; done")
    wait_until(lambda: batch.program_said("up"), "the program")
    job.send_signal(signal.SIGUSR2)
    assert job.wait(DEADLINE) == 5
    assert batch.program_said("saving")
    batch.assert_gone()


def test_what_is_killed_takes_all_that_it_started_along(batch: Batch) -> None:
    job = batch.start("bash", "-c", "echo up; exec sleep 100")
    wait_until(lambda: batch.program_said("up") and bool(batch.started("n2")), "program and steps")
    job.kill()
    job.wait()
    wait_until(lambda: not batch.processes(), "end of what the job started")


def test_a_step_that_is_killed_is_started_again_and_no_other(batch: Batch) -> None:
    job = batch.start("bash", "-c", "while ! [ -e stop ]; do sleep 0.05; done")
    wait_until(lambda: bool(batch.started("n1") and batch.started("n2")), "both steps")
    os.kill(batch.started("n2")[0], signal.SIGKILL)
    wait_until(lambda: len(batch.started("n2")) == 2, "another step")
    assert batch.said("the step of host n2 ended: killed by SIGKILL")
    Path("stop").touch()
    assert job.wait(DEADLINE) == 0
    assert len(batch.started("n1")) == 1
    batch.assert_gone()


def test_a_node_that_slurm_has_taken_is_left_alone(batch: Batch, fake_slurm: FakeSlurm) -> None:
    fake_slurm(srun=SRUN, squeue="echo n1")
    job = batch.start("bash", "-c", "while ! [ -e stop ]; do sleep 0.05; done")
    wait_until(lambda: bool(batch.started("n2")), "the step")
    os.kill(batch.started("n2")[0], signal.SIGKILL)
    wait_until(lambda: batch.said("host n2: Slurm has taken the node from the job"), "the answer of squeue")
    Path("stop").touch()
    assert job.wait(DEADLINE) == 0
    assert len(batch.started("n2")) == 1


def test_without_a_program_the_job_lasts_as_long_as_its_hosts(batch: Batch, fake_slurm: FakeSlurm) -> None:
    fake_slurm(srun="exit 0")
    assert batch.start().wait(DEADLINE) == 0
    fake_slurm(srun="exit 1")
    assert batch.start().wait(DEADLINE) == 1
    assert batch.said("host n1 has failed: exit code 1")


def test_what_the_whole_job_has_asked_for_is_no_wish_of_a_step(batch: Batch, fake_slurm: FakeSlurm) -> None:
    fake_slurm(
        srun='env > "$STARTED.env"; echo "$@" > "$STARTED.arguments"',
        scontrol="echo '  Nodes=n[1-2] CPU_IDs=0-3 Mem=0 GRES=gpu:a:3(IDX:0-2),gpu:b:1(IDX:3)'",
    )
    batch.env |= {"SLURM_GPUS": "8", "SLURM_CPUS_PER_TASK": "3", "SLURM_TRES_PER_TASK": "cpu=3", "SLURM_HINT": "x"}
    assert batch.start().wait(DEADLINE) == 0
    env = dict(line.split("=", 1) for line in Path(f"{batch.env['STARTED']}.env").read_text().splitlines())
    hidden = {"SLURM_GPUS", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_HINT"}
    assert not hidden & set(env)
    assert json.loads(env["MONARCH_SLURM_BATCH_VARIABLES"]) == {name: batch.env[name] for name in hidden}
    assert env["SLURM_JOB_ID"] == "12"
    assert "--gpus-per-node=4 " in Path(f"{batch.env['STARTED']}.arguments").read_text()
