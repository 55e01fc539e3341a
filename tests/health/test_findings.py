"""What facts mean: each fault alone is found, on a node that is else as it should be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from monarch_slurm.health import BAD, OK, WARN, Facts, Finding, features, judge_answers, judge_host, worst

GIB = 2**30
PIDFD = {"name": "pidfd_open", "since": "5.3", "reason": "Function not implemented", "without": "it is noticed later"}
MEMFD = {"name": "memfd_create", "since": "3.17", "reason": "Operation not permitted", "without": ""}


def healthy(host: str = "n1") -> Facts:
    gpu = {
        "name": "gfx942", "platform": "rocm", "pci_address": "0000:05:00.0", "numa_node": 0, "partition": "SPX/NPS1",
        "memory_bytes": 192 * GIB, "memory_used_bytes": GIB // 4, "uncorrectable_errors": 0,
    }  # fmt: skip
    link = {
        "device": "mlx5_0", "port": 1, "state": "ACTIVE", "link_layer": "Ethernet", "rate_gbit_s": 400.0,
        "gid": {"index": 3, "kind": "RoCE v2"}, "routable": True,
    }  # fmt: skip
    return {
        "host": host, "time": 1000.0, "kernel": "6.8", "python": "3.12.4", "job_id": None, "cpus": 192, "load": 0.1,
        "packages": {"monarch_slurm": "1.0", "torch": "2.9", "torchft": "0.2", "numpy": "2.0"},
        "programs": dict.fromkeys(("sbatch", "srun", "squeue", "scontrol", "c++", "g++"), True),
        "memlock_bytes": None, "open_files": 65536, "numa_balancing": "0", "leftovers": [], "native": [],
        "refused_calls": [],
        "shm": {"total_bytes": 64 * GIB, "free_bytes": 60 * GIB},
        "tmp": {"total_bytes": 64 * GIB, "free_bytes": 60 * GIB},
        "gpu_platform": "rocm", "gpu_platform_set": False,
        "gpu_driver": "amdgpu 6.12", "rocm": "7.0.2", "torch_gpu": "rocm 7.0",
        "gpus": [dict(gpu) for _ in range(8)], "rdma": [dict(link) for _ in range(8)],
        "networks": {"ens1": {"mtu": 9000, "speed_mbit_s": 400_000, "physical": True}},
        "gpu_probe": {"seen": 8, "answered": [str(index) for index in range(8)], "error": ""},
    }  # fmt: skip


def test_a_healthy_node_has_nothing_to_mend() -> None:
    findings = judge_host(healthy())
    assert {finding.level for finding in findings} == {OK}
    assert not any(finding.advice for finding in findings)
    assert len({finding.check for finding in findings}) == len(findings) == 14


def breaks(*path: Any, value: Any) -> Callable[[Facts], None]:
    def change(facts: Facts) -> None:
        place: Any = facts
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "check", "level", "text"),
    [
        (breaks("gpus", 3, "partition", value="CPX/NPS4"), "GPUs", WARN, "CPX/NPS4"),
        (breaks("gpu_probe", "answered", value=[*"0123457"]), "GPUs answer", BAD, "GPU 6 does not"),
        (breaks("gpu_probe", "seen", value=7), "GPUs answer", WARN, "torch sees 7 of 8"),
        (breaks("gpu_probe", "error", value="HIP error"), "GPUs answer", BAD, "HIP error"),
        (breaks("gpus", 2, "memory_used_bytes", value=90 * GIB), "GPU memory", WARN, "GPU 2 90.0 GiB"),
        (breaks("gpus", 1, "uncorrectable_errors", value=2), "ECC", BAD, "GPU 1: 2"),
        (breaks("torch_gpu", value="cuda 13.0"), "GPU driver", BAD, "torch is made for cuda"),
        (breaks("torch_gpu", value=None), "GPU driver", BAD, "torch is made for CPUs"),
        (breaks("numa_balancing", value="1"), "NUMA balancing", WARN, "on"),
        (breaks("memlock_bytes", value=65536), "locked memory", BAD, "0.0625 MiB"),
        (breaks("open_files", value=1024), "open files", WARN, "1024"),
        (breaks("shm", "free_bytes", value=2**20), "shared memory", BAD, "0.0 of 64.0 GiB"),
        (breaks("shm", value=None), "shared memory", BAD, "not there"),
        (breaks("tmp", "free_bytes", value=GIB // 2), "temporary files", WARN, "0.5 of"),
        (breaks("rdma", 4, "state", value="DOWN"), "RDMA links", WARN, "7 of 8 links up; mlx5_0:1 DOWN"),
        (breaks("rdma", 0, "routable", value=False), "RDMA links", WARN, "link-local"),
        (breaks("networks", "ens1", "mtu", value=1500), "MTU", WARN, "ens1: 1500"),
        (breaks("refused_calls", value=[PIDFD]), "system calls", WARN, "(Linux 5.3): Function not implemented; it"),
        (breaks("refused_calls", value=[MEMFD]), "system calls", BAD, "nothing works without it"),
        (breaks("leftovers", value=[{"pid": 7, "job_id": "41"}]), "left processes", WARN, "1 process of yours"),
    ],
)  # fmt: skip
def test_each_fault_is_found_alone(change: Callable[[Facts], None], check: str, level: str, text: str) -> None:
    facts = healthy()
    change(facts)
    (found,) = [finding for finding in judge_host(facts) if finding.level != OK]
    assert (found.check, found.level) == (check, level)
    assert text in found.value
    assert found.advice


def test_no_link_at_all_is_worse_than_one_that_is_down() -> None:
    facts = healthy()
    for link in facts["rdma"]:
        link["state"] = "DOWN"
    assert worst([finding for finding in judge_host(facts) if finding.check == "RDMA links"]) == BAD


def test_a_laptop_lacks_things_and_is_fit() -> None:
    facts = healthy()
    facts.update(gpus=[], rdma=[], gpu_platform="none", gpu_driver=None, torch_gpu=None, memlock_bytes=65536)
    findings = judge_host(facts)
    assert worst(findings) == "absent"
    works = {feature.name: feature for feature in features(facts)}
    assert works["training"].works
    assert not works["training on GPUs"].works
    assert works["training on GPUs"].why == "there is no GPU"
    assert not works["GPU-direct RDMA"].works


def test_what_works_on_a_healthy_node_is_everything() -> None:
    assert [feature.name for feature in features(healthy()) if not feature.works] == []


@pytest.mark.parametrize(
    ("change", "feature", "why"),
    [
        (breaks("torch_gpu", value="cuda 13.0"), "training on GPUs", "torch is made for cuda, the GPUs are rocm"),
        (breaks("packages", "torchft", value=None), "training", "not installed: torchft"),
        (breaks("programs", "sbatch", value=False), "Slurm jobs", "sbatch not on the PATH"),
        (breaks("rdma", value=[]), "RDMA by ibverbs", "no RDMA link is up"),
        (breaks("refused_calls", value=[MEMFD]), "actors", "the kernel refuses memfd_create (Linux 3.17)"),
        (breaks("refused_calls", value=[MEMFD]), "training", "the kernel refuses memfd_create (Linux 3.17)"),
    ],
)
def test_what_does_not_work_says_why(change: Callable[[Facts], None], feature: str, why: str) -> None:
    facts = healthy()
    change(facts)
    (found,) = [part for part in features(facts) if part.name == feature]
    assert not found.works
    assert why in found.why


def test_without_a_compiler_built_modules_still_work() -> None:
    facts = healthy()
    facts["programs"].update({"c++": False, "g++": False})
    assert {part.name for part in features(facts) if not part.works} == {
        "native modules", "GPU collectives", "GPU memory for other processes", "RDMA by ibverbs", "GPU-direct RDMA",
    }  # fmt: skip
    facts["native"] = ["_c10d", "_native", "_rdma"]
    assert all(part.works for part in features(facts))


def test_modules_are_shown_on_a_node_without_gpus_too() -> None:
    facts = healthy()
    facts.update(gpus=[], native=["_native"])
    (part,) = [part for part in features(facts) if part.name == "native modules"]
    assert part.works
    assert part.why == ("for rocm: _native built; _rdma, _c10d when first used, or now by monarch-slurm build-native")
    facts.update(gpu_platform_set=True, native=["_c10d", "_native", "_rdma"])
    (part,) = [part for part in features(facts) if part.name == "native modules"]
    assert part.why == "for rocm (set by hand): _c10d, _native, _rdma built"


@pytest.mark.parametrize(
    ("torch_gpu", "platform", "by_hand", "said"),
    [
        ("rocm 7.0", "rocm", False, "torch is made for rocm 7.0, but the kernel has no such GPU"),
        (None, "cuda", True, "MONARCH_SLURM_GPU_PLATFORM=cuda is set, but the kernel has no such GPU"),
        (None, "none", True, ""),
        (None, "none", False, ""),
    ],
)
def test_a_node_without_gpus_says_only_what_is_so(
    torch_gpu: str | None, platform: str, by_hand: bool, said: str
) -> None:
    facts = healthy()
    facts.update(gpus=[], torch_gpu=torch_gpu, gpu_platform=platform, gpu_platform_set=by_hand)
    (found,) = [finding for finding in judge_host(facts) if finding.check == "GPUs"]
    assert (found.level, found.value, found.advice) == ("absent", "none", said)


# ---- several hosts


def cluster() -> dict[str, Facts]:
    return {host: copy.deepcopy(healthy(host)) for host in ("n1", "n2", "n3")}


def test_equal_hosts_have_no_differences() -> None:
    assert judge_answers(["n1", "n2", "n3"], cluster(), 10) == []


@pytest.mark.parametrize(
    ("change", "check", "level"),
    [
        (breaks("gpus", value=[]), "GPUs", WARN),
        (breaks("gpu_driver", value="amdgpu 6.10"), "GPU driver", WARN),
        (breaks("rocm", value="6.4"), "ROCm", WARN),
        (breaks("python", value="3.11.9"), "Python", BAD),
        (breaks("packages", "torch", value="2.8"), "torch", BAD),
        (breaks("networks", "ens1", "mtu", value=1500), "MTU", BAD),
    ],
)
def test_the_odd_host_is_named(change: Callable[[Facts], None], check: str, level: str) -> None:
    answers = cluster()
    change(answers["n2"])
    found = [finding for finding in judge_answers(["n1", "n2", "n3"], answers, 10) if finding.check == f"same {check}"]
    assert [(finding.host, finding.level) for finding in found] == [("n2", level)]


def test_patch_releases_of_python_may_differ() -> None:
    answers = cluster()
    answers["n2"]["python"] = "3.12.9"
    assert judge_answers(["n1", "n2", "n3"], answers, 10) == []


def test_a_silent_host_is_a_finding() -> None:
    answers = cluster()
    del answers["n3"]
    (found,) = judge_answers(["n1", "n2", "n3"], answers, 10)
    assert found == Finding("n3", "answer", BAD, "none within 10 s", "look at the node: scontrol show node n3")


def test_a_clock_is_judged_by_when_it_could_have_been_read() -> None:
    answers = cluster()
    for host, time_there in (("n1", 995.0), ("n2", 1010.0), ("n3", 1013.5)):
        answers[host].update(time=time_there, asked_at=998.0, heard_at=1011.0)
    found = judge_answers(["n1", "n2", "n3"], answers, 10)
    assert {finding.host: finding.value for finding in found if finding.check == "clock"} == {
        "n1": "3.0 s off", "n3": "2.5 s off",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("jobs", "said"),
    [
        ([""], "1 process of yours from no job"),
        (["41", "41"], "2 processes of yours from job 41"),
        (["101", "41", "", "41"], "4 processes of yours from jobs 41, 101 and no job"),
        (["7_1"] * 30, "30 processes of yours from job 7_1"),
    ],
)
def test_left_processes_are_counted_by_job_and_all_named(jobs: list[str], said: str) -> None:
    left = [{"pid": 1000 + number, "job_id": job} for number, job in enumerate(jobs)]
    found = next(each for each in judge_host({**healthy(), "leftovers": left}) if each.check == "left processes")
    assert found.value == said
    assert found.advice == "if that is over: kill " + " ".join(str(each["pid"]) for each in left)
