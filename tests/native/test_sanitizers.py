"""Native modules and fakes under AddressSanitizer and UndefinedBehaviorSanitizer, in the tests that use them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ["tests/gpu/test_memory.py", "tests/collectives/test_ccl.py", "tests/rdma/test_gpu_ipc.py"]
TESTS += ["tests/collectives/c10d_cases.py"]  # the last, as its device stays in the process


def _preload() -> str:
    """ASan's runtime must come first, and find the function that throws, which Python itself does not load."""
    paths = []
    for name in ("libasan.so", "libstdc++.so"):
        found = subprocess.run(["c++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        paths.append(found.stdout.strip())
        if not Path(paths[-1]).is_file():
            pytest.skip(f"the compiler has no {name}")
    return " ".join(paths)


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """What programs under the sanitizers need; the modules are built, by a compiler that runs without."""
    sanitize = {"MONARCH_SLURM_NATIVE_SANITIZE": "address,undefined"}
    code = "from monarch_slurm.native_build import build_native; build_native(['_native', '_c10d'], platform='cuda')"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={**os.environ, **sanitize})
    return {
        **os.environ,
        **sanitize,
        "MONARCH_SLURM_GPU_PLATFORM": "cuda",
        "LD_PRELOAD": _preload(),
        # Python itself leaves memory to the end of the process.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


@pytest.mark.slow
def test_under_sanitizers(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not bounces and not rocm", *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_the_sanitizers_are_at_work(environment: dict[str, str], tmp_path: Path) -> None:
    """Else the test above would say nothing: a read beyond the end of a buffer is found."""
    code = (
        "from monarch_slurm.native_build import load_native; import sys; from pathlib import Path\n"
        "sys.path.insert(0, 'tests'); from fake_libraries import compile_fake\n"
        "folder = Path(sys.argv[1]); rt = load_native('_native', platform='cuda')\n"
        "rt = rt.Runtime([str(compile_fake('fake_gpu', 'cuda', folder))], [])\n"
        "rt.read(0, rt.alloc(0, 10), 20)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert "heap-buffer-overflow" in done.stderr, done.stderr[-2000:]
