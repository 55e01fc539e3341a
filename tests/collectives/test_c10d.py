"""The backend is known to torch, says what is missing where there is no GPU, and does all of its operations right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

dist = pytest.importorskip("torch.distributed")

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys, torch.distributed as dist
import monarch_slurm.collectives.c10d as c10d
c10d.register()
assert dist.Backend.MONARCH == "monarch"
dist.init_process_group("cpu:gloo,cuda:monarch", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
"""


def test_programs_that_name_no_backend_can_be_given_this_one() -> None:
    from monarch_slurm.collectives import c10d

    before = dict(dist.Backend.default_device_backend_map)
    try:
        c10d.use_for_gpus()
        assert dist.Backend.default_device_backend_map["cuda"] == "monarch"
        assert dist.Backend.default_device_backend_map["cpu"] == before["cpu"]
    finally:
        dist.Backend.default_device_backend_map.update(before)


def test_without_the_library_the_error_says_what_to_install(tmp_path: Path) -> None:
    environment = {**os.environ, "MONARCH_SLURM_CCL_LIBRARY": "libnot-there.so"}
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    done = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "cannot load NCCL: install it" in done.stderr or "cannot load RCCL: install" in done.stderr


@pytest.mark.slow
def test_on_a_device_of_host_memory() -> None:
    """`c10d_cases`, in a process of its own."""
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=100"]
    program.append(str(ROOT / "tests" / "collectives" / "c10d_cases.py"))
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
