"""Fake GPU runtimes and RCCLs of host memory with the symbols of the real ones, from ``native/testlib``."""

from __future__ import annotations

import subprocess
from pathlib import Path

from monarch_slurm.native_build import sources_folder


def compile_fake(name: str, platform: str, folder: Path) -> Path:
    """Return the library ``testlib/<name>.cpp`` compiled for a platform into ``folder``."""
    target = folder / f"lib{name}-{platform}.so"
    if not target.is_file():
        flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
        define = f"-DMONARCH_PLATFORM_{platform.upper()}=1"
        source = sources_folder() / "testlib" / f"{name}.cpp"
        command = ["c++", *flags, define, f"-I{sources_folder() / 'include'}", str(source), "-o", str(target)]
        subprocess.run(command, check=True)
    return target
