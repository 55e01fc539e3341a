"""clang-tidy finds nothing in the sources of the native modules; native/.clang-tidy says what it looks for."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from monarch_slurm.native_build import EXTENSIONS, _recipe

pytest.importorskip("clang_tidy")


@pytest.mark.slow
def test_tidy() -> None:
    wanted: dict[str, list[str]] = {}
    for name, extension in EXTENSIONS.items():
        if not extension.links_torch:  # torch's headers would take a minute
            words = _recipe(name, "rocm", strict=False).arguments
            flags = [word for word in words if word.startswith(("-I", "-isystem", "-D", "-std"))]
            wanted.update({word: flags for word in words if word.endswith(".cpp")})

    def check(source: str) -> str:
        program = [str(Path(sys.executable).parent / "clang-tidy"), "--quiet", source, "--", *wanted[source]]
        done = subprocess.run(program, capture_output=True, text=True)
        return done.stdout + done.stderr if done.returncode else ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        complaints = list(pool.map(check, wanted))
    assert not any(complaints), "\n".join(complaints)
