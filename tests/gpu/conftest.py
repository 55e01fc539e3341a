"""A cache of native modules that lives as long as the tests, and the fake libraries."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_slurm.native_build import sources_folder

os.environ["MONARCH_SLURM_NATIVE_STRICT"] = "1"


@pytest.fixture(scope="session")
def compile_fake(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Returns the fake library ``testlib/<name>.cpp`` compiled for a platform."""

    def compile_one(name: str, platform: str) -> Path:
        target = tmp_path_factory.mktemp("fake") / f"lib{name}-{platform}.so"
        flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
        source = sources_folder() / "testlib" / f"{name}.cpp"
        define = f"-DMONARCH_PLATFORM_{platform.upper()}=1"
        command = ["c++", *flags, define, f"-I{sources_folder() / 'include'}", str(source), "-o", str(target)]
        subprocess.run(command, check=True)
        return target

    return compile_one
