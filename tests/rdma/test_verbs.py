"""ibverbs for real: soft-RoCE devices in QEMU guests that share this machine's files (tests/rdma_vm.sh)."""

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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.rdma,
    pytest.mark.skipif(
        os.environ.get("MONARCH_SLURM_TEST_RDMA") != "1",
        reason="needs QEMU guests and minutes; run: make test-rdma",
    ),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The native module, built here: a compiler in the guest would take minutes."""
    folder = tmp_path_factory.mktemp("native")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_SLURM_NATIVE_CACHE", str(folder))
        build_native(["_rdma"])
    return folder


def run_in_guest(cache: Path, command: list[str], *options: str) -> str:
    variables = {
        "MONARCH_SLURM_NATIVE_CACHE": str(cache),
        "MONARCH_SLURM_NATIVE_BUILD": "never",
        "MONARCH_SLURM_NATIVE_STRICT": "1",
        "MONARCH_SLURM_PROC_START_TIMEOUT": "200",
        "MONARCH_SLURM_HEARTBEAT_INTERVAL": "20",
        "MONARCH_SLURM_PROCESS_EXIT_TIMEOUT": "60",
        "PYTHONPATH": f"{ROOT}:{ROOT}/tests",
    }
    passed = [word for name in variables for word in ("--env", name)]
    line = f"exec {shlex.join([sys.executable, *command])}"
    done = subprocess.run(
        ["bash", str(SCRIPT), "--timeout", "240", *options, *passed, "-c", line],
        cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"the guest ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_one_guest(cache: Path) -> None:
    assert "all well" in run_in_guest(cache, ["-m", "rdma.guest_checks", "one"])


def test_two_guests(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir(mode=0o700)
    command = ["-m", "rdma.guest_checks", "two", str(folder)]
    assert "all well" in run_in_guest(cache, command, "--nodes", "2", "--rw", str(folder))
