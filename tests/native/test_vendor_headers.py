"""Our declarations against the vendors' own: those that ``make test`` fetches, else those that are installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pxd_header import c_header

from monarch_slurm.native_build import sources_folder

FETCHED = Path(sys.prefix) / "vendor"  # by vendor_headers.sh


def _find(variable: str, header: str, *places: Path) -> Path:
    given = [Path(os.environ[variable])] if variable in os.environ else []
    for place in [*given, *places]:
        if (place / header).is_file():
            return place
    fetches = "MONARCH_SLURM_TEST_NCCL=1 make test" if header == "nccl.h" else "make test"
    pytest.skip(f"no {header}: `{fetches}` fetches it; or set {variable} to a folder that has it")


def _wheel(fetched: str, package: str, folder: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    places = [FETCHED / fetched / package, *map(Path, spec.submodule_search_locations or [] if spec else [])]
    return [found for place in places for found in place.glob(folder)]


def _syntax_check(source: str, platform: str, include: Path, *more: str) -> subprocess.CompletedProcess[str]:
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-DMONARCH_PLATFORM_{platform}=1", *more]
    folders = [f"-I{sources_folder() / 'include'}", f"-isystem{include}"]
    command = ["c++", *flags, *folders, str(sources_folder() / "check" / source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _cuda() -> Path:
    places = [Path("/usr/local/cuda/include"), *_wheel("nvidia-cuda-runtime", "nvidia", "*/include")]
    return _find("MONARCH_SLURM_CUDA_HEADERS", "cuda.h", *places)


def test_cuda_driver() -> None:
    done = _syntax_check("check_gpu.cpp", "CUDA", _cuda())
    assert done.returncode == 0, done.stderr


def test_hip_runtime() -> None:
    places = [Path("/opt/rocm/include"), *_wheel("triton", "triton", "backends/amd/include")]
    include = _find("MONARCH_SLURM_HIP_HEADERS", "hip/hip_runtime_api.h", *places)
    done = _syntax_check("check_gpu.cpp", "ROCM", include, "-D__HIP_PLATFORM_AMD__")
    assert done.returncode == 0, done.stderr


def test_nccl() -> None:
    include = _find("MONARCH_SLURM_NCCL_HEADERS", "nccl.h", *_wheel("nvidia-nccl-cu13", "nvidia", "nccl/include"))
    done = _syntax_check("check_ccl.cpp", "CUDA", include, f"-isystem{_cuda()}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("package", "pxd", "constants"),
    [
        ("nccl4py", "nccl/bindings/cynccl.pxd", True),
        ("rocm-bindings-systems", "rocm/bindings/cyrccl.pxd", False),
    ],
)
def test_what_the_vendors_bindings_declare(package: str, pxd: str, constants: bool, tmp_path: Path) -> None:
    """Those of RCCL leave the values of constants to its header, which no package index has."""
    file = FETCHED / package / pxd
    if not file.is_file():
        pytest.skip(f"no {file.name}: `make test` fetches it")
    ours = (sources_folder() / "check" / "check_ccl.cpp").read_text()
    functions = re.findall(r"^SAME\(\w+, (\w+)\)", ours, re.MULTILINE)
    assert len(functions) > 15
    (tmp_path / "nccl.h").write_text(c_header(file, functions))
    done = _syntax_check("check_ccl.cpp", "CUDA", tmp_path, *([] if constants else ["-DMONARCH_NO_CONSTANTS=1"]))
    assert done.returncode == 0, done.stderr


def test_a_wrong_declaration_is_found(tmp_path: Path) -> None:
    text = (sources_folder() / "include" / "gpu_api.h").read_text()
    (tmp_path / "gpu_api.h").write_text(text.replace("kReadWrite = 3", "kReadWrite = 2"))
    done = _syntax_check("check_gpu.cpp", "CUDA", _cuda(), f"-I{tmp_path}")
    assert "static assertion failed" in done.stderr
