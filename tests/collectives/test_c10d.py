"""The backend is known to torch, and says what is missing where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

dist = pytest.importorskip("torch.distributed")

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
