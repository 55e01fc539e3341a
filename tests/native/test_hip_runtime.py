"""The real HIP runtime, Debian's 5.2, on a machine without an AMD GPU: ``make test`` fetches it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.gpu.libraries import gpu_runtime
try:
    gpu_runtime()
except MonarchSlurmError as error:
    print(error)
maps = open("/proc/self/maps").read()
print([name in maps for name in ("libamdhip64.so.5", "libhsa-runtime64.so.1")])
"""


def test_the_real_hip_runtime_finds_no_gpu() -> None:
    """It has every function that is not optional, and is older than hipDrvGetErrorString."""
    if Path("/dev/kfd").exists():
        pytest.skip("this machine may have an AMD GPU: see tests/hardware")
    found = sorted((Path(sys.prefix) / "vendor" / "hip").glob("usr/lib/*/libamdhip64.so.5"))
    if not found:
        pytest.skip("no HIP runtime: `make test` fetches it where apt-get has libamdhip64-5 (Debian, Ubuntu)")
    environment = {
        **os.environ,
        "MONARCH_SLURM_GPU_PLATFORM": "rocm",
        "MONARCH_SLURM_GPU_LIBRARY": str(found[0]),
        "LD_LIBRARY_PATH": str(found[0].parent),
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    error, loaded = done.stdout.splitlines()
    assert error.startswith("rocm: Init failed: error 101 (hipErrorInvalidDevice"), error
    assert "there is no GPU here that this process may use" in error
    assert loaded == "[True, True]"
