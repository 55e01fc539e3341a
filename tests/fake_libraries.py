"""Fake GPU runtimes and RCCLs of host memory with the symbols of the real ones, from ``native/testlib``."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from monarch_slurm.native_build import _locked, _recipe, cache_folder, sources_folder


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
        _run(command)
    return target


def compile_fake_device() -> Path:
    """Return ``testlib/fake_device.cpp``, made against torch; kept among the native modules, as it takes 10 s.

    It is never under the sanitizers: it is not what they look for faults in.
    """
    words = _recipe("_c10d", "none", strict=True).complete()
    flags = [word for word in words if word.startswith(("-I", "-isystem", "-D", "-std"))]
    links = [word for word in words if word.startswith(("-L", "-l", "-Wl,"))]
    source = sources_folder() / "testlib" / "fake_device.cpp"
    texts = [path.read_bytes() for path in (source, source.with_name("fake_stream.h"))]
    command = ["c++", "-O0", "-g0", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", *flags, str(source), *links]
    digest = hashlib.sha256(b"\0".join([*texts, " ".join(command).encode()])).hexdigest()[:16]
    target = cache_folder() / f"libfake_device-{digest}.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")):
        if not target.is_file():
            made = target.with_suffix(".new")
            _run([*command, "-o", str(made)])
            made.replace(target)
    return target


def _run(command: list[str]) -> None:
    # A sanitizer's runtime that tests are run with is none of the compiler's business, and makes it slow.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run(command, check=True, env=environment)
