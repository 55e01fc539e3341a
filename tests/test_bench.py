"""Every program of bench/ starts and ends well at its smallest size, so that none of them rots."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import REPOSITORY

from monarch_slurm.gpu import gpu_devices

BENCH = REPOSITORY / "bench"

SMALLEST = {
    "actors.py": ["--groups", "latency,mesh_call", "--passes", "1", "--scale", "0.01"],
    "busy_machine.py": ["--seconds", "2", "--load", "4", "--large-mb", "20", "--stop-seconds", "0.2", "--pause", "0.5"],
    "flood.py": ["--connections", "40", "--seconds", "0.2", "--passes", "1", "--modes", "idle,garbage"],
    "payloads.py": ["--sizes", "2", "--passes", "1"],
    "rdma.py": ["host", "--runs", "1"],
    "recovery.py": ["--injections", "1", "--kinds", "kill"],
    "rendezvous.py": ["--ranks", "2", "--rounds", "3"],
    "scale.py": ["--hosts", "2", "--procs", "1", "--processes", "1", "--seconds", "0.05"],
}
"""What measures on this machine alone; all of these take ``--json``."""

ON_SLURM = {
    "replacement.py": ["--runs", "1", "--kinds", "agent"],
    "slurm.py": ["--nodes", "1", "--runs", "1", "--test-cluster"],
}
"""What starts a Slurm cluster of its own."""

ON_GPUS = {
    "collectives.py": [],
    "gpu/hardware.py": [],
}

STARTED_BY_OTHERS = {
    "scale_agents.py": "scale.py",
    "runtimes/monarch_api.py": "actors.py",
    "runtimes/payload_api.py": "payloads.py",
    "runtimes/samples.py": "actors.py",
    "plots.py": "rdma.py",
    "gpu/meshes.py": "gpu/hardware.py",
    "slurm_cluster.py": "slurm.py",
}
"""Programs and modules that another one of these uses."""

OF_PEERS = {"runtimes/ray_api.py", "runtimes/monarch_rdma.py"}
"""What needs a peer's own environment."""

pytestmark = pytest.mark.slow


def run(name: str, *arguments: str, **env: str) -> str:
    """Run a program of bench/; return what it printed."""
    done = subprocess.run(
        [sys.executable, str(BENCH / name), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def numbers(value: object) -> list[float]:
    """All numbers in what a program has written."""
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, (int, float)) else []


def test_every_program_is_started_here() -> None:
    known = {*SMALLEST, *ON_SLURM, *ON_GPUS, *STARTED_BY_OTHERS, *OF_PEERS}
    assert {str(path.relative_to(BENCH)) for path in BENCH.rglob("*.py")} == known


@pytest.mark.parametrize("name", SMALLEST)
def test_on_this_machine(name: str, tmp_path: Path) -> None:
    plot = ["--plot", str(tmp_path / "plot.svg")] if name == "rdma.py" else []
    run(name, *SMALLEST[name], "--json", str(tmp_path / "figures.json"), *plot)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(numbers(figures)) > 5
    assert not plot or (tmp_path / "plot.svg").read_text().startswith("<svg ")


def test_make_bench_starts_the_one_of_recovery() -> None:
    made = subprocess.run(["make", "-n", "bench"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "bench/recovery.py" in made.stdout


@pytest.mark.slurm
@pytest.mark.skipif(os.environ.get("MONARCH_SLURM_TEST_NO_SLURM") == "1", reason="MONARCH_SLURM_TEST_NO_SLURM=1")
@pytest.mark.parametrize("name", ON_SLURM)
def test_on_a_cluster_of_its_own(name: str) -> None:
    assert "answered" in run(name, *ON_SLURM[name])


@pytest.mark.parametrize("name", ON_GPUS)
def test_on_gpus(name: str) -> None:
    """On GPUs it measures (see tests/hardware); elsewhere it must at least be importable and name its options."""
    if gpu_devices() and os.environ.get("MONARCH_SLURM_TEST_HARDWARE") == "1":
        run(name, *ON_GPUS[name])
    else:
        assert "--json" in run(name, "--help")


@pytest.mark.parametrize("name", sorted(OF_PEERS))
def test_of_a_peer(name: str) -> None:
    """Without the peer it says that this is missing, and nothing else."""
    peer = {"runtimes/ray_api.py": "ray", "runtimes/monarch_rdma.py": "monarch"}[name]
    if importlib.util.find_spec(peer) is not None:
        pytest.skip(f"{peer} is installed here, and takes long")
    done = subprocess.run([sys.executable, str(BENCH / name)], capture_output=True, text=True, check=False)
    assert done.stderr.rstrip().endswith(f"No module named '{peer}'"), done.stderr


def test_tools_that_are_missing_are_named() -> None:
    if shutil.which("iperf3") is None:
        done = subprocess.run(
            [sys.executable, str(BENCH / "rdma.py"), "tcp", "--runs", "1"], capture_output=True, text=True, check=False
        )
        assert "iperf3 is missing: apt-get install iperf3" in done.stderr
