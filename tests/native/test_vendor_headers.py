"""Our declarations against the vendors' real headers, where they are installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from monarch_slurm.native_build import sources_folder


def _find(variable: str, header: str, *places: Path) -> Path:
    given = [Path(os.environ[variable])] if variable in os.environ else []
    for place in [*given, *places]:
        if (place / header).is_file():
            return place
    pytest.skip(f"no {header}; set {variable} to a folder that has it")


def _wheel(package: str, folder: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [
        found for place in (spec.submodule_search_locations or [] if spec else []) for found in Path(place).glob(folder)
    ]


def _syntax_check(source: str, platform: str, include: Path, *more: str) -> subprocess.CompletedProcess[str]:
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-DMONARCH_PLATFORM_{platform}=1", *more]
    folders = [f"-I{sources_folder() / 'include'}", f"-isystem{include}"]
    command = ["c++", *flags, *folders, str(sources_folder() / "check" / source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_cuda_driver() -> None:
    places = [Path("/usr/local/cuda/include"), *_wheel("nvidia", "*/include")]
    include = _find("MONARCH_SLURM_CUDA_HEADERS", "cuda.h", *places)
    done = _syntax_check("check_gpu.cpp", "CUDA", include)
    assert done.returncode == 0, done.stderr


def test_hip_runtime() -> None:
    places = [Path("/opt/rocm/include"), *_wheel("triton", "backends/amd/include")]
    include = _find("MONARCH_SLURM_HIP_HEADERS", "hip/hip_runtime_api.h", *places)
    done = _syntax_check("check_gpu.cpp", "ROCM", include, "-D__HIP_PLATFORM_AMD__")
    assert done.returncode == 0, done.stderr


def test_nccl() -> None:
    include = _find("MONARCH_SLURM_NCCL_HEADERS", "nccl.h", *_wheel("nvidia", "nccl/include"))
    cuda = _find(
        "MONARCH_SLURM_CUDA_HEADERS", "cuda.h", Path("/usr/local/cuda/include"), *_wheel("nvidia", "*/include")
    )
    done = _syntax_check("check_ccl.cpp", "CUDA", include, f"-isystem{cuda}")
    assert done.returncode == 0, done.stderr


def test_a_wrong_declaration_is_found(tmp_path: Path) -> None:
    include = _find(
        "MONARCH_SLURM_CUDA_HEADERS", "cuda.h", Path("/usr/local/cuda/include"), *_wheel("nvidia", "*/include")
    )
    text = (sources_folder() / "include" / "gpu_api.h").read_text()
    (tmp_path / "gpu_api.h").write_text(text.replace("kReadWrite = 3", "kReadWrite = 2"))
    done = _syntax_check("check_gpu.cpp", "CUDA", include, f"-I{tmp_path}")
    assert "static assertion failed" in done.stderr
