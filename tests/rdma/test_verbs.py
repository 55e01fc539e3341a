"""ibverbs for real: soft-RoCE devices in two QEMU guests that share this machine's files (tests/rdma_vm.sh)."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_slurm.native_build import build_native

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "rdma_vm.sh"
NO_RDMA = "MONARCH_SLURM_TEST_NO_RDMA"

pytestmark = [pytest.mark.slow, pytest.mark.rdma]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of the guests. What is slow there is done here: compiling the native module, and Python's modules."""
    if os.environ.get(NO_RDMA) == "1":
        pytest.skip(f"{NO_RDMA}=1")
    if subprocess.run(["bash", str(SCRIPT), "--check"], check=False).returncode != 0:
        pytest.skip("no QEMU, or no kernel for its guests; as root: bash tests/rdma_vm.sh install")
    folder = tmp_path_factory.mktemp("native")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_SLURM_NATIVE_CACHE", str(folder))
        build_native(["_rdma"])
    python = {"PYTHONPYCACHEPREFIX": str(folder / "pycache"), "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    for command in (["-m", "compileall", "-q", "monarch_slurm", "tests/rdma"], ["-c", "import rdma.guest_checks"]):
        variables = {**os.environ, **python, "PYTHONDONTWRITEBYTECODE": ""}
        subprocess.run([sys.executable, *command], cwd=ROOT, env=variables, check=True)
    return {
        **python,
        "MONARCH_SLURM_NATIVE_CACHE": str(folder),
        "MONARCH_SLURM_NATIVE_BUILD": "never",
        "MONARCH_SLURM_NATIVE_STRICT": "1",
        "MONARCH_SLURM_PRELOAD": "rdma.actors",
        "MONARCH_SLURM_HOST_SPAWN_READY_TIMEOUT": "300",
        "MONARCH_SLURM_PROC_START_TIMEOUT": "300",
        "MONARCH_SLURM_HEARTBEAT_INTERVAL": "60",
        "MONARCH_SLURM_MESH_ORPHAN_TIMEOUT": "600",
        "MONARCH_SLURM_PROCESS_EXIT_TIMEOUT": "100",
    }


def run_in_guests(environment: dict[str, str], command: list[str], *options: str) -> str:
    passed = [word for name in environment for word in ("--env", name)]
    line = f"exec {shlex.join([sys.executable, *command])}"
    done = subprocess.run(
        ["bash", str(SCRIPT), "--timeout", "600", *options, *passed, "-c", line],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, f"the guests ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_transfers_and_faults(environment: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir(mode=0o700)
    command = ["-m", "rdma.guest_checks", str(folder)]
    assert "all well" in run_in_guests(environment, command, "--nodes", "2", "--mem", "1536", "--rw", str(folder))
