from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from monarch_slurm.job import JobSpecError, NodeSpec, SlurmJob
from monarch_slurm.job.batch import BatchPlan
from monarch_slurm.job.request import SlurmRequest
from monarch_slurm.job.slurm_options import (
    KEYWORDS,
    REFUSED_BY_SBATCH,
    REFUSED_BY_SRUN,
    check_srun_options,
    merged_options,
)

FakeSlurm = Callable[..., Path]


@pytest.mark.parametrize("name", REFUSED_BY_SBATCH)
def test_options_that_the_package_depends_on_are_refused_in_every_form(name: str) -> None:
    for given in ([f"--{name}=1"], [f"--{name}", "1"], [f"--{name}"]):
        with pytest.raises(JobSpecError, match=f"option --{name} of sbatch cannot be given"):
            merged_options(["--switches=1", *given])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("-a1-3", "--array of sbatch"),
        ("-HW", "--wait of sbatch"),
        ("-Qa1-3", "--quiet of sbatch"),
        ("-N4", "--nodes of sbatch"),
        ("--arr=1-3", "write the option of sbatch in full: --array"),
        ("--sig=USR1@90", "in full: --signal"),
        ("--part=debug", "in full: --partition"),
        ("--out=x", "in full: --output"),
        ("-", "is no option"),
        ("--", "is no option"),
        ("--=3", "is no option"),
    ],
)
def test_neither_short_nor_cut_names_get_by(given: str, words: str) -> None:
    for spec in (lambda: SlurmJob({"hosts": 1}, slurm_args=[given]), lambda: NodeSpec(1, slurm_args=(given,))):
        with pytest.raises(JobSpecError, match=words):
            spec()


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        (["--time=5"], "time_limit", "5"),
        (["-t", "5"], "time_limit", "5"),
        (["-t5"], "time_limit", "5"),
        (["-pdebug"], "partition", "debug"),
        (["-C", "a b"], "constraint", "a b"),
        (["-C", "first", "--constraint=second"], "constraint", "second"),
        (["--gpus-per-node=8"], "gpus_per_node", 8),
        (["-x n[1-2]"], "exclude", "n[1-2]"),
        (["--exclusive"], "exclusive", True),
    ],
)
def test_options_with_a_keyword_become_it(given: Sequence[str], field: str, value: object) -> None:
    request = SlurmRequest(2, "job", "python", slurm_args=tuple(given), exclusive=False)
    assert (getattr(request, field), request.slurm_args) == (value, ())


@pytest.mark.parametrize(
    "given",
    [("--switches=1",), ("--gpus=8",), ("--gpus-per-node=mi300x:8",), ("--exclusive=user",), ("-H",), ("-Hpdebug",),
     ("-L", "lic@db:4"), ("--mail-user=me@x",), ("--frob",), ("-vv",), ("--mem-per-cpu=1G",), ("--nice=-5",)],
)  # fmt: skip
def test_other_options_reach_sbatch_as_they_are(given: tuple[str, ...]) -> None:
    assert merged_options(given) == (given, {})


def test_an_option_that_replaces_a_keyword_says_so_and_a_short_limit_gets_a_short_notice(
    fake_slurm: FakeSlurm, caplog: pytest.LogCaptureFixture
) -> None:
    fake_slurm()
    with caplog.at_level(logging.WARNING):
        script = SlurmJob({"hosts": 2}, time_limit="8:00:00", slurm_args=["--time=2"]).script()
    assert caplog.messages == ["slurm_args: time_limit '2' replaces '8:00:00'"]
    assert "#SBATCH --time=2\n" in script
    assert "#SBATCH --signal=B:USR2@30\n" in script


def test_the_nodes_of_one_mesh_may_have_options_of_their_own(fake_slurm: FakeSlurm) -> None:
    fake_slurm()
    spec = NodeSpec(1, slurm_args=("-p", "cpu", "--reservation=night", "--mem=1G"))
    assert (spec.partition, spec.mem, spec.slurm_args) == ("cpu", "1G", ("--reservation=night",))


@pytest.mark.parametrize("name", REFUSED_BY_SRUN)
def test_a_hosts_srun_keeps_its_own_options(name: str) -> None:
    with pytest.raises(JobSpecError, match=f"option --{name} of srun cannot be given"):
        SlurmJob({"hosts": 1}, srun_args=[f"--{name}=1"])
    with pytest.raises(JobSpecError, match=name):
        BatchPlan(None, "python", srun_args=(f"--{name}=1",))  # of a template, or of a session


def test_other_options_of_srun_pass() -> None:
    check_srun_options(["--network=job_vni", "--mpi=pmix", "--cpu-bind=cores", "--mem=1G", "--container-image=x", "-v"])


@pytest.mark.parametrize("line", ["#SBATCH --array=1-3", "  #SBATCH --signal=USR1@9"])
def test_a_setup_line_is_no_option(line: str) -> None:
    with pytest.raises(JobSpecError, match="belong into slurm_args"):
        SlurmJob({"hosts": 1}, setup=[line])


def test_variables_of_sbatch_do_not_win_over_the_request(
    fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_slurm(sbatch="env >seen; echo Submitted batch job 12")
    given = {"SBATCH_SIGNAL": "USR1@90", "SBATCH_ARRAY_INX": "1-3", "SBATCH_TIMELIMIT": "1", "SBATCH_QOS": "high"}
    for name, value in {**given, "SBATCH_JOB_NAME": "x", "SBATCH_DEBUG": "1"}.items():
        monkeypatch.setenv(name, value)
    SlurmJob({"hosts": 1}, time_limit="5").apply("true")
    seen = Path("seen").read_text()
    assert [name for name in given if f"{name}=" in seen] == ["SBATCH_QOS"]
    assert "SBATCH_DEBUG=1\n" in seen
    assert "SBATCH_JOB_NAME" not in seen
    assert {message.partition("=")[0] for message in caplog.messages} == {"SBATCH_SIGNAL", "SBATCH_ARRAY_INX"}


def test_every_keyword_is_one_of_the_request() -> None:
    assert {name for name in KEYWORDS.values() if not hasattr(SlurmRequest(1, "job", "python"), name)} == set()
