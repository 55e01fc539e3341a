from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch_slurm.interpreter import module_line
from monarch_slurm.job import (
    Container,
    JobError,
    JobFolderError,
    JobSpecError,
    NodeSpec,
    NoSlurmError,
    SlurmJob,
    SubmitError,
    submission,
)
from monarch_slurm.job.slurm_options import option_lines
from monarch_slurm.job.submission import inherited_variables

RECORDED = Path(__file__).parent / "recorded"
FakeSlurm = Callable[..., Path]
SINFO = "echo 'debug*|4'; echo 'mi300|8'"

JOBS = {
    "plain": SlurmJob({"hosts": 4}, python_exe="python", log_dir="/shared/runs"),
    "full": SlurmJob(
        {"trainers": 3, "spare": 1},
        python_exe="apptainer exec rocm.sif python",
        slurm_args=["--constraint=mi300", "-C", "fast fabric", "--comment=two words", "--reservation", "maintenance"],
        job_name="night run",
        ntasks_per_node=8,
        time_limit="2",
        partition="mi300",
        log_dir="/shared/my runs",
        exclusive=False,
        gpus_per_node=8,
        cpus_per_task=12,
        mem="500G",
        account="physics",
        qos="high",
        setup=["module load rocm", "export NCCL_DEBUG=WARN"],
        requeue=True,
    ),
    "het": SlurmJob(
        {
            "trainers": NodeSpec(4, gpus_per_node=8, constraint="mi300x", exclude="n7", spares=1),
            "data": NodeSpec(2, partition="cpu", mem="64G", exclusive=False, slurm_args=["--tmp=100G"]),
            "eval": 1,
        },
        python_exe="python",
        log_dir="/shared/runs",
        partition="gpu",
        time_limit="1-0",
        reservation="night",
        slurm_args=["--switches=1"],
    ),
    "site": SlurmJob(
        {"hosts": 2},
        log_dir="/shared/runs",
        nodelist="n[1-4]",
        dependency="afterok:12",
        comment="two words",
        gres="nvme:1",
        modules=["rocm/6.4", "gcc"],
        venv="/shared/my env",
        env={"NCCL_DEBUG": "WARN", "MESSAGE": "it's here"},
        setup=["ulimit -n 65536"],
        notice=300,
    ),
    "conda": SlurmJob({"hosts": 2}, log_dir="/shared/runs", conda="train"),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_script_is_the_recorded_one(name: str, fake_slurm: FakeSlurm, request: pytest.FixtureRequest) -> None:
    fake_slurm()
    path = RECORDED / f"{name}.sh"
    if request.config.getoption("--update"):
        path.write_text(JOBS[name].script())
    assert JOBS[name].script() == path.read_text()


def test_a_dry_run_shows_the_script_and_what_it_runs(fake_slurm: FakeSlurm) -> None:
    fake_slurm()
    container = Container("/images/rocm.sif", mounts=["/data:/data:ro"], args=["--rocm"], python="python3.12")
    job = SlurmJob(
        {"hosts": 2},
        python_exe="python",
        log_dir="/shared/runs",
        container=container,
        preflight=["rocm-smi -a"],
        srun_args=["--network=job_vni"],
    )
    folder = "/shared/runs/JOB_FOLDER"
    inside = f"apptainer exec --bind={folder} --bind=/data:/data:ro --rocm /images/rocm.sif python3.12"
    assert job.dry_run("train.py --steps 5") == (
        f"{job.script()}\n"
        f"# on the head node: {inside} train.py --steps 5\n"
        "# for each host: srun --nodes=1 --ntasks=1 --nodelist=NODE --overlap --mem=0 --cpu-bind=none --mpi=none "
        f"--input=none --export=ALL --job-name=host --output={folder}/logs/%N.log --open-mode=append "
        f"--network=job_vni {module_line(f'{inside} -u', 'monarch_slurm.job.node')} --folder={folder} --index=0 "
        "'--preflight=rocm-smi -a'\n"
    )
    assert f"exec {module_line('python -u', 'monarch_slurm.job.submitted')} {folder}" in job.script()


def test_pyxis_starts_the_container_by_srun(fake_slurm: FakeSlurm) -> None:
    fake_slurm()
    container = Container("nvcr.io#rocm/pytorch", runtime="pyxis", mounts=["/data"])
    job = SlurmJob({"a": NodeSpec(1), "b": 1}, log_dir="/shared/runs", container=container)
    folder = "/shared/runs/JOB_FOLDER"
    assert (
        f"'--container-image=nvcr.io#rocm/pytorch' --container-mounts={folder}:{folder},/data:/data "
        '/bin/sh -c \'exec "$0" "$@"\' python3 -u -c '
    ) in job.dry_run()
    assert (
        "# on the head node: srun --het-group=0 --nodes=1 --ntasks=1 --nodelist=NODE --overlap --mem=0 "
        "--cpu-bind=none --mpi=none --input=none --export=ALL --job-name=program --unbuffered "
        f"'--container-image=nvcr.io#rocm/pytorch' --container-mounts={folder}:{folder},/data:/data "
        '/bin/sh -c \'exec "$0" "$@"\' python3 train.py\n'
    ) in job.dry_run("train.py")


@pytest.mark.parametrize(
    ("image", "more", "match"),
    [
        ("docker://rocm/pytorch", {}, "say its runtime"),
        ("x.sif", {"runtime": "podman"}, "there are apptainer"),
        ("x.sif", {"mounts": ["data"]}, "mount 'data'"),
    ],
)
def test_a_container_that_cannot_be_started_is_refused(image: str, more: dict[str, Any], match: str) -> None:
    with pytest.raises(JobSpecError, match=match):
        Container(image, **more)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"venv": "x", "conda": "y"}, "exclude each other"),
        ({"notice": 0}, "notice is 0"),
        ({"srun_args": ["pmix"]}, "srun argument 'pmix'"),
        ({"env": {"A B": "1"}}, "environment variable 'A B'"),
    ],
)
def test_wishes_that_make_no_sense_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(JobSpecError, match=match):
        SlurmJob({"hosts": 1}, **arguments)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"address": "lo"}, "address 'lo' is a loopback address"),
        ({"address": "localhost"}, "a loopback address"),
        ({"data_address": "127.0.0.0/8"}, "data address '127.0.0.0/8' is a loopback address"),
        ({"address": "::1"}, "a loopback address"),
        ({"address": "fe80::/10"}, "a link-local address"),
        ({"address": "169.254.3.4"}, "a link-local address"),
        ({"address": "0.0.0.0"}, "an unspecified address"),
        ({"address": "224.0.0.1"}, "a multicast address"),
        ({"address": "10.1.2.3"}, "the address of one machine, and the job has 2 nodes"),
        ({"bind_to": "10.1.2.3"}, "the address of one machine"),
        ({"data_address": "2001:db8::1/128"}, "data address '2001:db8::1/128' is the address of one machine"),
    ],
)
def test_an_address_that_other_nodes_cannot_dial_is_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(JobSpecError, match=match):
        SlurmJob({"hosts": 2}, **arguments)
    with pytest.raises(JobSpecError, match=match):
        SlurmJob({"hosts": 1}, spares=1, **arguments)


@pytest.mark.parametrize("address", ["lo", "127.0.0.1", "10.1.2.3"])
def test_a_job_of_one_node_may_use_any_address(address: str) -> None:
    SlurmJob({"hosts": 1}, address=address)
    if address != "10.1.2.3":
        with pytest.raises(JobSpecError, match="loopback"):
            SlurmJob({"hosts": 1}, address=address, on_lost="request")


@pytest.mark.parametrize("address", ["ib0", "fastest", "10.1.0.0/16", "2001:db8::/32"])
def test_an_address_that_each_node_has_is_taken(address: str) -> None:
    SlurmJob({"hosts": 2}, address=address)
    SlurmJob({"hosts": 2}, address="10.1.2.3", data_address=address)  # of the head node


def test_meshes_can_be_added_before_the_job_is_applied(fake_slurm: FakeSlurm) -> None:
    fake_slurm(sinfo=SINFO, sbatch="echo Submitted batch job 12")
    job = SlurmJob({"hosts": 2})
    job.add_mesh("spare", 1)
    assert "--nodes=3" in job.script()
    with pytest.raises(JobSpecError, match="already"):
        job.add_mesh("spare", 1)
    job.add_mesh("data", NodeSpec(1, partition="cpu"))
    assert job.script().count("#SBATCH hetjob") == 2
    job.apply("true")
    with pytest.raises(JobError, match="has been applied"):
        job.add_mesh("late", 1)


def test_an_array_has_a_folder_and_a_program_for_each_task(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    fake_slurm(sinfo=SINFO, sbatch="echo Submitted batch job 12")
    tasks = SlurmJob({"hosts": 2}).apply_array(["python a.py", "python b.py", "python c.py"], parallel=2)
    assert [task.job_id for task in tasks] == ["12_0", "12_1", "12_2"]
    array = (tmp_path / "runs" / "12").resolve()
    assert [task.folder for task in tasks] == [array / "0", array / "1", array / "2"]
    assert all(task.folder.stat().st_mode & 0o077 == 0 and (task.folder / "job.pkl").exists() for task in tasks)
    script = (array / "submission.sh").read_text()
    assert "#SBATCH --array=0-2%2" in script
    assert f"#SBATCH --output={array}/%a/batch.log" in script
    assert (array / "submitit" / "12_2_submitted.pkl").exists()


def test_an_array_that_cannot_be_is_refused(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    fake_slurm(sinfo=SINFO, sbatch="echo 'sbatch: error: Invalid job array specification' >&2; exit 1")
    with pytest.raises(JobSpecError, match="at least one"):
        SlurmJob({"hosts": 1}).apply_array([])
    with pytest.raises(JobSpecError, match="heterogeneous"):
        SlurmJob({"a": NodeSpec(1)}).apply_array(["true"])
    with pytest.raises(SubmitError, match="Invalid job array"):
        SlurmJob({"hosts": 1}).apply_array(["true"])
    assert not (tmp_path / "runs").exists()


def test_options_are_taken_as_on_the_command_line() -> None:
    assert option_lines(["--exclude=n1", "-C", "a&b", "-w n[1-2]", "--comment=a b"]) == [
        "--exclude=n1",
        "-C 'a&b'",
        "-w 'n[1-2]'",
        "'--comment=a b'",
    ]


@pytest.mark.parametrize("arguments", [["mi300"], ["--x=1", "2"], ["-C", "a", "b"], ["--a\n#SBATCH -N9"]])
def test_a_value_without_option_is_not_dropped_in_silence(arguments: list[str]) -> None:
    with pytest.raises(JobSpecError):
        option_lines(arguments)


def test_what_an_enclosing_job_has_set_is_not_inherited() -> None:
    inside = {
        "SLURM_JOB_ID": "7",
        "SLURM_CPU_BIND": "x",
        "SLURM_MEM_PER_NODE": "1",
        "SRUN_CPUS_PER_TASK": "1",
        "SBATCH_MEM_BIND": "x",
        "PMIX_RANK": "0",
        "SUBMITIT_FOLDER": "x",
        "MONARCH_SLURM_JOB_FOLDER": "x",
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_ACCOUNT": "physics",
        "PATH": "/bin",
    }
    kept = {"SLURM_CONF", "SBATCH_ACCOUNT", "PATH"}
    assert set(inherited_variables(inside)) == set(inside) - kept
    outside = {name: value for name, value in inside.items() if name != "SLURM_JOB_ID"}
    assert inherited_variables(outside) == []


def test_sbatch_sees_a_scrubbed_environment(
    fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    fake_slurm(sinfo=SINFO, sbatch=f"env > {seen}; echo Submitted batch job 12")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CPU_BIND", "none")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    job = SlurmJob({"hosts": 2})
    job.apply("python train.py")
    assert job.job_id == 12
    names = {line.partition("=")[0] for line in seen.read_text().splitlines()}
    assert "SLURM_CONF" in names
    assert not names & {"SLURM_JOB_ID", "SLURM_CPU_BIND"}


def test_the_folder_of_a_job_can_be_read_by_its_owner_alone(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    fake_slurm(sinfo=SINFO, sbatch="echo Submitted batch job 12")
    job = SlurmJob({"hosts": 2}, job_name="my run/№1")
    job.apply(["python", "train.py"])
    assert job.folder.parent == tmp_path / "runs"
    assert job.folder.stat().st_mode & 0o077 == 0
    assert "my_run_1" in job.folder.name
    assert (tmp_path / "runs" / "12").resolve() == job.folder
    assert "#SBATCH --nodes=2" in (job.folder / "submission.sh").read_text()


def test_a_refused_job_leaves_nothing_and_says_what_slurm_said(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    fake_slurm(sinfo=SINFO, sbatch="echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1")
    job = SlurmJob({"hosts": 2}, partition="nope")
    with pytest.raises(SubmitError, match=r"invalid partition specified: nope.*debug\* \(4 nodes\), mi300 \(8 nodes\)"):
        job.apply("python train.py")
    assert not (tmp_path / "runs").exists()
    assert not job.active


def test_more_nodes_than_the_partition_has_are_refused_before_they_wait_for_ever(fake_slurm: FakeSlurm) -> None:
    fake_slurm(sinfo=SINFO, sbatch="echo Submitted batch job 12")
    with pytest.raises(SubmitError, match=r"9 nodes asked for, more than partition mi300 has"):
        SlurmJob({"hosts": 9}, partition="mi300").apply()
    with pytest.raises(SubmitError, match=r"5 nodes asked for, more than partition debug has"):
        SlurmJob({"hosts": 5}).apply()
    SlurmJob({"hosts": 8}, partition="debug,mi300").apply()


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (SlurmJob({"hosts": 1}, gres="nvme:1"), "1 node, --gres=nvme:1"),
        (SlurmJob({"hosts": 1}), "1 node"),
        (SlurmJob({"hosts": 3}, spares=1, gpus_per_node=9, mem="1T"), "4 nodes with 9 GPUs and 1T memory each"),
        (
            SlurmJob({"hosts": 2}, cpus_per_task=1, constraint="fast", slurm_args=["--switches=1"]),
            "2 nodes with 1 CPU each, --constraint=fast, --switches=1",
        ),
        (
            SlurmJob({"a": NodeSpec(2, partition="cpu"), "b": NodeSpec(1, gres="nvme:2", nodelist="n3")}, qos="high"),
            "2 nodes, --partition=cpu, --qos=high; 1 node, --gres=nvme:2, --nodelist=n3, --qos=high",
        ),
    ],
)
def test_a_refusal_names_all_that_was_asked_for(fake_slurm: FakeSlurm, job: SlurmJob, words: str) -> None:
    said = "sbatch: error: Batch job submission failed: Requested node configuration is not available"
    fake_slurm(sinfo=SINFO, sbatch=f"echo '{said}' >&2; exit 1")
    with pytest.raises(SubmitError) as error:
        job.apply()
    assert str(error.value).endswith(f"No nodes of the cluster have what was asked for: {words}")


def test_without_slurm_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoSlurmError, match="sbatch, srun, squeue, scancel not on PATH"):
        SlurmJob({"hosts": 1}).apply()


@pytest.mark.parametrize("limit", ["banana", "1h", "10:", "-5", "", "1-", "1:2:3:4"])
def test_a_bad_time_limit_is_refused(limit: str) -> None:
    with pytest.raises(JobSpecError, match="time limit"):
        SlurmJob({"hosts": 1}, time_limit=limit)


@pytest.mark.parametrize("limit", ["90", "10:30", "1:00:00", "2-12", "2-12:30", "1-0:0:0", "UNLIMITED"])
def test_a_time_limit_is_written_as_slurm_writes_it(limit: str) -> None:
    SlurmJob({"hosts": 1}, time_limit=limit)


@pytest.mark.parametrize("meshes", [{}, {"a": 0}, {"a": -1}, {"a": True}, {"a b": 1}, {"_a": 1}])
def test_meshes_need_names_and_sizes(meshes: dict[str, int]) -> None:
    with pytest.raises(JobSpecError):
        SlurmJob(meshes)


def test_a_folder_that_cannot_be_written_is_refused(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    fake_slurm(sinfo=SINFO)
    (tmp_path / "file").touch()
    with pytest.raises(JobFolderError, match="cannot make a folder"):
        SlurmJob({"hosts": 1}, log_dir=str(tmp_path / "file" / "runs")).apply()
    with pytest.raises(JobSpecError, match="another folder"):
        SlurmJob({"hosts": 1}, log_dir=str(tmp_path / "100%")).apply()


MONARCHS = [
    "meshes", "python_exe", "slurm_args", "monarch_port", "job_name", "ntasks_per_node", "time_limit", "partition",
    "log_dir", "exclusive", "gpus_per_node", "cpus_per_task", "mem", "job_start_timeout", "account", "qos",
    "out_of_cluster", "attach_to", "bind_to",
]  # fmt: skip
"""Parameters of Monarch's SlurmJob, in order."""


def test_keywords_of_monarch_are_taken_in_its_order() -> None:
    ours = list(inspect.signature(SlurmJob).parameters.values())
    assert [parameter.name for parameter in ours[: len(MONARCHS)]] == MONARCHS
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in ours[len(MONARCHS) :])
    job = SlurmJob({"hosts": 1}, monarch_port=22222, out_of_cluster=True, attach_to="x", bind_to="10.0.0.1")
    assert repr(job) == "SlurmJob({'hosts': 1})"


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::"])
def test_to_bind_to_everything_is_no_wish(everywhere: str, fake_slurm: FakeSlurm) -> None:
    fake_slurm()
    assert "--address" not in SlurmJob({"hosts": 1}, bind_to=everywhere).dry_run()
    assert "--address=ib0" in SlurmJob({"hosts": 1}, bind_to=everywhere, address="ib0").dry_run()


def test_what_is_bound_to_must_be_an_address() -> None:
    with pytest.raises(ValueError, match="does not appear to be an IPv4 or IPv6 address"):
        SlurmJob({"hosts": 1}, bind_to="ib0")
    with pytest.raises(JobSpecError, match="contradict each other"):
        SlurmJob({"hosts": 1}, bind_to="10.0.0.1", address="ib0")


def test_a_job_that_shares_nodes_gets_what_goes_with_its_gpus(fake_slurm: FakeSlurm) -> None:
    nodes = "96|512000|gpu:mi300x:8(S:0-1),nvme:2\n128|1000000|gpu:8\n16|64000|(null)\n8|64000|gpu:1"
    fake_slurm(sinfo=f"printf '{nodes}\n'")

    def wishes(**options: Any) -> list[str]:
        script = SlurmJob({"hosts": 1}, **{"partition": "gpu", "exclusive": False, **options}).script()
        return [line for line in script.splitlines() if re.match("#SBATCH --(cpus|mem)", line)]

    assert wishes(gpus_per_node=2) == ["#SBATCH --cpus-per-task=24", "#SBATCH --mem=128000M"]
    assert wishes(gpus_per_node=2, cpus_per_task=3) == ["#SBATCH --cpus-per-task=3", "#SBATCH --mem=128000M"]
    assert wishes(gpus_per_node=2, mem="9G") == ["#SBATCH --cpus-per-task=24", "#SBATCH --mem=9G"]
    assert wishes(gpus_per_node=2, slurm_args=["--mem-per-cpu=1G"]) == ["#SBATCH --mem-per-cpu=1G"]
    assert wishes(gpus_per_node=16) == wishes() == wishes(gpus_per_node=2, exclusive=True) == []


def test_a_wait_for_sbatch_is_announced(
    fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submission, "TELL_SECONDS", 0.1)
    fake_slurm(sbatch="sleep 2; echo Submitted batch job 12")
    SlurmJob({"hosts": 1}).apply("true")
    assert capfd.readouterr().err == "waiting for Slurm's controller to take the job; sbatch gives up by itself\n"
