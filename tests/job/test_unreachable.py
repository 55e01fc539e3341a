"""No controller of Slurm answers: every command says so in one line, and what to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import run_command

from monarch_slurm.health import ask_here, features
from monarch_slurm.job import SlurmUnreachableError
from monarch_slurm.job.status import run_command as run_slurm
from monarch_slurm.job.unreachable import controller_trouble

FakeSlurm = Callable[..., Path]

NO_CLUSTER = """
name=$(basename "$0")
cat >&2 <<END
$name: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
$name: error: fetch_config: DNS SRV lookup failed
$name: error: _establish_config_source: failed to fetch config
$name: fatal: Could not establish a configuration source
END
exit 1
"""
DOWN = 'echo "$(basename $0): error: Unable to contact slurm controller (connect failure)" >&2; exit 1'
PING_DOWN = f"""
if [ "$1" != ping ]; then {DOWN}; fi
echo 'Slurmctld(primary) at login9 is DOWN'
echo 'Slurmctld(backup) at login8 is DOWN'
echo '*** RESTORE SLURMCTLD DAEMON TO SERVICE ***'
exit 1
"""
BROKEN = "echo \"$(basename $0): error: something else\" >&2; echo 'a second line' >&2; exit 1"
COMMANDS = ("sbatch", "srun", "squeue", "scancel", "sinfo", "scontrol")


@pytest.fixture(autouse=True)
def _outside_of_any_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM", "SBATCH")):
            monkeypatch.delenv(name)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["status", "12"],
        ["logs", "12"],
        ["cancel", "12"],
        ["attach", "12"],
        ["submit", "--nodes", "1", "true"],
        ["shell", "--job", "12"],
        ["doctor", "--nodes", "n1"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("kind", ["no cluster", "down", "broken"])
def test_one_line_says_what_is_wrong_and_what_to_do(
    fake_slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    kind: str,
) -> None:
    text = {"no cluster": NO_CLUSTER, "down": DOWN, "broken": BROKEN}[kind]
    fake_slurm(**dict.fromkeys(COMMANDS, text) | ({"scontrol": PING_DOWN} if kind == "down" else {}))
    code, said = run_command(monkeypatch, capsys, *arguments)
    words = {
        "no cluster": "Slurm's commands are here, but find no cluster (SLURM_CONF is not set, and DNS names no",
        "down": "error: Slurm's controller on login9 and login8 does not answer; try again later",
        "broken": "something else",
    }[kind]
    assert (code, said.count("\n"), words in said) == (1, 1, True), said
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("ping", "why"),
    [
        ("echo 'Slurmctld(primary) at a is DOWN'; echo 'Slurmctld(backup) at b is UP'; exit 0", ""),
        (PING_DOWN, "controller on login9 and login8 does not answer"),
        (NO_CLUSTER, "find no cluster"),
        ("exec sleep 60", "scontrol did not answer within 0.2 s"),
        ("echo odd; exit 3", "scontrol ping failed: exit code 3"),
    ],
)
def test_the_controller_is_asked_with_a_limit_of_time(fake_slurm: FakeSlurm, ping: str, why: str) -> None:
    fake_slurm(scontrol=ping)
    trouble = controller_trouble(run_slurm, 0.2 if "sleep" in ping else 30.0)
    assert (trouble == "") == (why == "")
    assert why in trouble
    facts = ask_here(None)
    slurm = next(part for part in features(facts, trouble) if part.name == "Slurm jobs")
    assert (slurm.works, slurm.why) == (not why, trouble or "submission and steps")


def test_doctor_asks(
    fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm(scontrol=PING_DOWN)
    _, said = run_command(monkeypatch, capsys, "doctor", "--no-gpus")
    assert "no    Slurm jobs: Slurm's controller on login9 and login8 does not answer" in said


def test_a_program_gets_an_error_that_says_try_again(fake_slurm: FakeSlurm) -> None:
    from monarch_slurm.job import SlurmJob

    fake_slurm(**dict.fromkeys(COMMANDS, DOWN) | {"scontrol": PING_DOWN})
    with pytest.raises(SlurmUnreachableError, match="try again later"):
        SlurmJob({"hosts": 1}).apply([sys.executable, "-c", ""])
