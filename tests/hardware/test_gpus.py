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


def test_tensors_of_a_gpu_travel_through_the_hosts_memory_to_the_same_device() -> None:
    import torch

    from monarch_slurm.wire import dumps, loads

    whole = torch.arange(2**20, dtype=torch.float32, device="cuda:0")
    sent = {"views": [whole[:10], whole[10:]], "parameter": torch.nn.Parameter(whole.clone())}
    got = loads(dumps(sent))
    assert all(str(tensor.device) == "cuda:0" for tensor in (*got["views"], got["parameter"]))
    assert torch.equal(torch.cat(got["views"]), whole)
    assert torch.equal(got["parameter"], whole)
    got["views"][0].as_strided((2**20,), (1,)).fill_(7)
    assert got["views"][1][-1] == 7, "they share their memory"
    assert whole[-1] != 7
