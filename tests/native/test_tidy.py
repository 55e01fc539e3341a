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
    for name, extension in sorted(EXTENSIONS.items(), key=lambda item: item[1].links_torch):
        words = _recipe(name, "rocm", strict=False).complete()
        flags = [word for word in words if word.startswith(("-I", "-isystem", "-D", "-std"))]
        # The analyzer takes a minute and a half for what is in torch's headers.
        checks = ["--checks=-clang-analyzer-*"] if extension.links_torch else []
        for word in words:
            if word.endswith(".cpp"):
                wanted.setdefault(word, [*checks, word, "--", *flags])

    def check(source: str) -> str:
        program = [str(Path(sys.executable).parent / "clang-tidy"), "--quiet", *wanted[source]]
        done = subprocess.run(program, capture_output=True, text=True)
        return done.stdout + done.stderr if done.returncode else ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        complaints = list(pool.map(check, wanted))
    assert not any(complaints), "\n".join(complaints)
