"""Fake GPU runtimes and RCCLs of host memory with the symbols of the real ones, from ``native/testlib``."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from monarch_slurm.native_build import sources_folder


def compile_fake(name: str, platform: str, folder: Path) -> Path:
    """Return the library ``testlib/<name>.cpp`` compiled for a platform into ``folder``."""
    target = folder / f"lib{name}-{platform}.so"
    if not target.is_file():
        flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
        if sanitize := os.environ.get("MONARCH_SLURM_NATIVE_SANITIZE"):
            flags += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=undefined"]
        define = f"-DMONARCH_PLATFORM_{platform.upper()}=1"
        source = sources_folder() / "testlib" / f"{name}.cpp"
        command = ["c++", *flags, define, f"-I{sources_folder() / 'include'}", str(source), "-o", str(target)]
        # A sanitizer's runtime that tests are run with is none of the compiler's business, and makes it slow.
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        subprocess.run(command, check=True, env=environment)
    return target
