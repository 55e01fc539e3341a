"""What only GPUs can show: each check of bench/gpu/hardware.py. See site/native.md for the command."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

pytestmark = pytest.mark.hardware
if os.environ.get("MONARCH_SLURM_TEST_HARDWARE") != "1":
    pytest.skip("needs GPUs; run: MONARCH_SLURM_TEST_HARDWARE=1 pytest tests/hardware", allow_module_level=True)

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench" / "gpu"))
hardware = import_module("hardware")
CHECKS = {check.__name__: check for check in hardware.CHECKS}


@pytest.fixture(scope="module")
def gpus() -> int:
    count = len(hardware.gpu_devices())
    assert count > 0, "this machine has no GPU that the kernel tells of"
    hardware.build_native(["_native", "_c10d"])
    return count


@pytest.mark.parametrize("name", CHECKS)
def test_one_process_for_each_gpu(gpus: int, name: str) -> None:
    ok, text = hardware.run(CHECKS[name], gpus)
    print(text)
    assert ok, text


@pytest.mark.parametrize("name", hardware.MESH_CHECKS)
def test_a_mesh(gpus: int, name: str) -> None:
    ok, text = hardware.run_on_a_mesh(name, gpus)
    print(text)
    assert ok, text
