"""Elements of an array of Slurm, one of which has the array's own number as its job id."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_nodes import ROOT, Cluster, read, wait_until

from monarch_slurm.job import AllocationError, SlurmAllocation
from monarch_slurm.job.status import listed_id

COMMAND = [sys.executable, "-m", "monarch_slurm"]
TEMPLATE = str(ROOT / "sbatch_templates" / "preemptible.sbatch")
ELEMENTS = (0, 1, 2)

PROGRAM = """
import os, sys, time
from monarch_slurm.job import job_load, save_on_notice

job = job_load()
hosts = job.state().hosts
with save_on_notice(lambda: None):
    print("element", job.job_id, "start", os.environ.get("SLURM_RESTART_COUNT", "0"), flush=True)
    while not os.path.exists("stop"):
        time.sleep(0.05)
"""


def call(*arguments: str, code: int = 0) -> str:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


def restarts(cluster: Cluster, element: str) -> int:
    match = re.search(r"Restarts=([0-9]+)", cluster.run("scontrol", "show", "job", "-o", element))
    assert match is not None
    return int(match[1])


@pytest.fixture
def array(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the number of an array whose elements all run."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    Path("train.py").write_text(PROGRAM)
    options = ["--nodes=1", "--array=0-2", "--cpus-per-task=1", "--output=%A_%a.log"]
    job = cluster.run("sbatch", "--parsable", *options, TEMPLATE, "train.py").strip()
    for element in ELEMENTS:
        wait_until(lambda name=f"{job}_{element}": f"element {name} start 0" in output(name), f"element {element}")
    return job


def output(element: str) -> str:
    return read(Path(f"{element}.log"))


def job_ids(cluster: Cluster, array: str) -> dict[str, str]:
    """Return Slurm's job id of each element of an array."""
    return dict(line.split() for line in cluster.run("squeue", "-h", "-r", "-j", array, "-o", "%i %A").splitlines())


def test_commands_about_one_element_leave_the_others_alone(cluster: Cluster, array: str) -> None:
    ids = job_ids(cluster, array)
    # The dangerous one: a command that gets its job id acts on all elements.
    namesake = next(element for element, job_id in ids.items() if job_id == array)
    others = [element for element in ids if element != namesake]
    cluster.run("scancel", "--batch", "--signal=USR2", namesake)  # as near the time limit
    wait_until(lambda: f"element {namesake} start 1" in output(namesake), "the second start of one element")
    assert [restarts(cluster, element) for element in (namesake, *others)] == [1, 0, 0]
    assert [output(element).count("element") for element in (namesake, *others)] == [2, 1, 1]

    assert call("cancel", namesake) == f"cancelled job {namesake}\n"
    wait_until(lambda: namesake not in job_ids(cluster, array), "the end of one element")
    assert sorted(job_ids(cluster, array)) == sorted(others)
    Path("stop").touch()
    wait_until(lambda: not job_ids(cluster, array), "the end of the array")


def test_elements_are_found_by_their_names(cluster: Cluster, array: str) -> None:
    (listed, _, _) = sorted(json.loads(call("status", "--json")), key=lambda item: str(item["job_id"]))
    assert (listed["job_id"], listed["state"]) == (f"{array}_0", "RUNNING")
    ids = job_ids(cluster, array)
    for element, job_id in ids.items():
        assert f"job {element} is RUNNING" in call("status", element)
        assert call("logs", element).startswith(output(element))
        if job_id == array:
            assert f"job {array} is an array; name one of its elements, such as {array}_0" in call(
                "status", array, code=1
            )
            with pytest.raises(AllocationError, match="is an array; name one of its elements"):
                SlurmAllocation.from_job(int(array))
        else:
            assert json.loads(call("status", job_id, "--json"))["job_id"] == element
            assert SlurmAllocation.from_job(job_id).command_id == job_id
        assert listed_id(SlurmAllocation.from_job(element).command_id) == element
    Path("stop").touch()
    wait_until(lambda: not cluster.run("squeue", "-h", "-j", array).strip(), "the end of the array")
    assert f"job {array}_0 is COMPLETED" in call("status", f"{array}_0")


def test_five_hundred_elements_cost_slurmctld_one_question(cluster: Cluster) -> None:
    Path("sweep.py").write_text(
        "from monarch_slurm.job import SlurmJob\n"
        "job = SlurmJob({'hosts': 1}, log_dir='of the sweep', slurm_args=['--hold'])\n"
        "print(job.apply_array(['true'] * 500)[7].job_id)\n"
    )
    element = cluster.run(sys.executable, "sweep.py").strip()
    array = element.partition("_")[0]

    def questions() -> int:
        return sum(map(int, re.findall(r"REQUEST_JOB_INFO\w* .* count:([0-9]+)", cluster.run("sdiag"))))

    before = questions()
    listed = json.loads(call("status", "--json"))
    assert (len(listed), questions() - before) == (500, 1)
    assert {item["job_id"] for item in listed} == {f"{array}_{index}" for index in range(500)}
    assert f"job {element} is PENDING" in call("status", element)
    cluster.run("scancel", array)
