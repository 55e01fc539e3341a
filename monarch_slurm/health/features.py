"""What of this package works on a host, and why not."""

from __future__ import annotations

from dataclasses import dataclass

from monarch_slurm.health.facts import Facts
from monarch_slurm.native_build import EXTENSIONS


@dataclass(frozen=True)
class Feature:
    """A part of the package: whether it works on this host, and what with, or why not."""

    name: str
    works: bool
    why: str


def features(facts: Facts, no_controller: str = "") -> list[Feature]:
    """Return what works on the host of ``facts``.

    Args:
        no_controller: why no controller of Slurm answers there; empty if one does.
    """
    packages, programs = facts["packages"], facts["programs"]
    gpus = facts["gpus"]
    platforms = {gpu["platform"] for gpu in gpus}
    torch_gpu = (facts["torch_gpu"] or "").partition(" ")[0]
    compiler = programs["c++"] or programs["g++"]
    up = [link for link in facts["rdma"] if link["state"] == "ACTIVE"]

    def native(name: str) -> str | None:
        if name in facts["native"] or compiler:
            return None
        return f"the native module {name} is not built, and there is no C++ compiler: monarch-slurm build-native"

    built, wanted = facts["native"], [name for name in EXTENSIONS if packages["torch"] or name != "_c10d"]
    unbuilt = [name for name in wanted if name not in built]
    modules = f"for {facts['gpu_platform']}" + (" (set by hand)" if facts["gpu_platform_set"] else "")
    modules += f": {', '.join(built)} built" if built else ": none built"
    if unbuilt and compiler:
        modules += f"; {', '.join(unbuilt)} when first used, or now by monarch-slurm build-native"
    elif unbuilt:
        modules += f"; {', '.join(unbuilt)} not, and there is no C++ compiler: monarch-slurm build-native elsewhere"

    if not packages["torch"]:
        gpu_why = "torch is not installed"
    elif not gpus:
        gpu_why = "there is no GPU"
    elif torch_gpu not in platforms:
        gpu_why = f"torch is made for {torch_gpu or 'CPUs'}, the GPUs are {'/'.join(sorted(platforms))}"
    else:
        gpu_why = ""
    library = {"rocm": "RCCL", "cuda": "NCCL"}.get(torch_gpu, "")
    no_collectives = gpu_why or native("_native")
    no_verbs = None if up else "no RDMA link is up"
    missing = [name for name in ("sbatch", "srun", "squeue") if not programs[name]]
    no_slurm = f"{', '.join(missing)} not on the PATH" if missing else no_controller
    train = [name for name in ("torch", "torchft", "numpy") if not packages[name]]
    needed = [call for call in facts["refused_calls"] if not call["without"]]
    no_actors = ", ".join(f"the kernel refuses {call['name']} (Linux {call['since']})" for call in needed)
    return [
        Feature("actors", not no_actors, no_actors or "on this machine and in jobs"),
        Feature("Slurm jobs", not no_slurm, no_slurm or "submission and steps"),
        Feature(
            "training",
            not (train or no_actors),
            f"not installed: {', '.join(train)}" if train else no_actors or ("on CPUs" if gpu_why else "on GPUs"),
        ),
        Feature("training on GPUs", not gpu_why, gpu_why or f"{facts['torch_gpu']}, {len(gpus)} devices"),
        Feature("native modules", not unbuilt or bool(compiler), modules),
        Feature("GPU collectives", not no_collectives, no_collectives or library),
        Feature(
            "collectives on CPUs", bool(packages["torch"]), "gloo" if packages["torch"] else "torch is not installed"
        ),
        Feature("GPU memory for other processes", not no_collectives, no_collectives or "dmabuf and IPC handles"),
        Feature(
            "RDMA by ibverbs", not (no_verbs or native("_rdma")), no_verbs or native("_rdma") or f"{len(up)} links"
        ),
        Feature(
            "GPU-direct RDMA",
            not (no_verbs or no_collectives or native("_rdma")),
            no_verbs or no_collectives or native("_rdma") or "dmabuf, else peer memory, else through host memory",
        ),
        Feature("remote memory over TCP", True, "where RDMA is not there"),
    ]
