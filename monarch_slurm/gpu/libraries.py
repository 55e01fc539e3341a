"""Where the GPU runtime and RCCL or NCCL are: what torch loaded, else torch's and NVIDIA's wheels, else the system's.

The same copy that torch uses must be taken: two copies of a GPU runtime in one process do not know each other's memory.
``MONARCH_SLURM_GPU_LIBRARY`` and ``MONARCH_SLURM_CCL_LIBRARY`` name files to use instead.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from monarch_slurm.native_build import gpu_platform, load_native, torch_folder

_ROCM = Path("/opt/rocm/lib")


def native() -> ModuleType:
    """Return the native module of this process's platform.

    Raises:
        NativeBuildError: it is not built and cannot be.
    """
    return load_native("_native")


def gpu_runtime_files() -> list[str]:
    """Return the names under which the GPU runtime may be found, the one that is loaded first."""
    if gpu_platform() == "rocm":
        name, sonames = "libamdhip64.so", ["libamdhip64.so.7", "libamdhip64.so.6"]
    else:
        name, sonames = "libcuda.so", ["libcuda.so.1"]
    return _candidates(name, sonames, override="MONARCH_SLURM_GPU_LIBRARY")


@functools.cache
def gpu_runtime() -> Any:
    """Return the opened GPU runtime (``Runtime`` of the native module); the same one each time.

    Raises:
        MonarchSlurmError: no such library, or it finds no device.
    """
    hsa = _candidates("libhsa-runtime64.so", ("libhsa-runtime64.so.1",)) if gpu_platform() == "rocm" else []
    return native().Runtime(gpu_runtime_files(), hsa)


@functools.cache
def ccl_library() -> Any:
    """Return the opened RCCL or NCCL (``Ccl`` of the native module); the same one each time.

    Raises:
        MonarchSlurmError: there is none.
    """
    names = ("librccl.so", ("librccl.so.1",)) if gpu_platform() == "rocm" else ("libnccl.so", ("libnccl.so.2",))
    return native().Ccl(_candidates(*names, override="MONARCH_SLURM_CCL_LIBRARY"))


def _candidates(name: str, sonames: Sequence[str], override: str | None = None) -> list[str]:
    given = os.environ.get(override, "") if override else ""
    if given:
        return [given]
    found = _mapped(name)
    folder = torch_folder()
    if folder is not None:
        found += [str(path) for path in sorted((folder / "lib").glob(name + "*"))]
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        found += [str(path) for path in sorted(Path(place).glob(f"*/lib/{name}*"))]
    return [*found, *sonames, *(str(_ROCM / soname) for soname in sonames)]


def _mapped(name: str) -> list[str]:
    """The files of that name that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    return sorted(path for path in paths if Path(path).name.startswith(name))
