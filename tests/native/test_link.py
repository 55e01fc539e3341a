"""The C++ of ibverbs under AddressSanitizer and UndefinedBehaviorSanitizer, on a fake device of host memory."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from monarch_slurm.native_build import sources_folder

FLAGS = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"]


@pytest.mark.slow
def test_links_on_a_fake_device(tmp_path: Path) -> None:
    if not Path("/usr/include/infiniband/verbs.h").is_file():
        pytest.skip("no libibverbs headers; Debian: libibverbs-dev")
    asan = subprocess.run(["c++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    if not Path(asan.stdout.strip()).is_file():
        pytest.skip("the compiler has no libasan.so")
    native = sources_folder()
    compiler = ["c++", *FLAGS, "-fno-sanitize-recover=undefined", f"-I{native / 'include'}"]
    fake = [*compiler, "-shared", "-fPIC", native / "testlib/fake_verbs.cpp", "-o", tmp_path / "libibverbs.so.1"]
    program = tmp_path / "check_link"
    sources = [native / "testlib/check_link.cpp", native / "src/rdma.cpp", native / "src/dl.cpp"]
    compiling = [
        subprocess.Popen(command) for command in (fake, [*compiler, *sources, "-o", program, "-ldl", "-pthread"])
    ]
    assert [process.wait() for process in compiling] == [0, 0]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "all well\n"), done.stderr[-4000:]
