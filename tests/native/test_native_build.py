"""Building, caching and loading native modules, with the real compiler."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_slurm.errors import ConfigError
from monarch_slurm.health.facts import collect
from monarch_slurm.native_build import (
    NativeBuildError,
    _recipe,
    build_native,
    built_native,
    gpu_platform,
    load_native,
    sources_folder,
)


@pytest.mark.slow
def test_the_c10d_backend_builds_without_a_warning() -> None:
    pytest.importorskip("torch")
    assert build_native(["_c10d"])["_c10d"].is_file()


def test_torch_says_how_to_build_against_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked when something is built, not to find what is built."""
    torch = pytest.importorskip("torch")
    from torch.utils import cpp_extension

    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho asked >> "$0.calls"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    recipe = _recipe("_c10d", "none", strict=True)
    calls = tmp_path / "python.calls"
    assert not calls.exists()
    arguments = recipe.complete()
    assert calls.read_text() == "asked\n"
    for path in cpp_extension.include_paths():
        assert f"-isystem{path}" in arguments
    for path in cpp_extension.library_paths():
        assert f"-L{path}" in arguments
    assert f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}" in arguments
    python.write_text("#!/bin/sh\necho torch is broken >&2; exit 3\n")
    with pytest.raises(NativeBuildError, match=r"torch does not say how _c10d is built[\s\S]*torch is broken"):
        recipe.complete()


@pytest.mark.parametrize("platform", ["rocm", "cuda", "none"])
def test_every_platform_builds_without_a_warning(platform: str) -> None:
    built = build_native(["_native"], platform=platform)
    assert built["_native"].is_file()


def test_a_module_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho x >> "$0.calls"\n'
        'while [ "$1" != -o ]; do shift; done\n: > "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MONARCH_SLURM_NATIVE_CACHE", str(tmp_path / "cache"))
    first = build_native(["_native"], platform="none")
    assert build_native(["_native"], platform="none") == first
    assert (tmp_path / "compiler.calls").read_text() == "x\n"
    assert build_native(["_native"], platform="cuda") != first


def test_what_a_login_node_has_built_is_loaded_where_there_is_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prebuilt = build_native(["_native"], platform="none")["_native"]
    cache = tmp_path / "cache"
    for name in ("_native", "_rdma"):  # of another Python, say
        (cache / "cp39-none-0123456789abcdef").mkdir(parents=True, exist_ok=True)
        (cache / "cp39-none-0123456789abcdef" / f"{name}.so").touch()
    monkeypatch.setenv("MONARCH_SLURM_NATIVE_CACHE", str(cache))
    monkeypatch.setenv("MONARCH_SLURM_GPU_PLATFORM", "none")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert collect()["native"] == []
    shutil.copytree(prebuilt.parent, cache / prebuilt.parent.name)
    assert built_native() == {"_native": cache / prebuilt.parent.name / prebuilt.name}
    assert collect()["native"] == ["_native"]
    code = "from monarch_slurm.native_build import load_native; print(load_native('_native').__name__)"
    for compiler in ({}, {"CXX": "some-other-compiler", "MONARCH_SLURM_NATIVE_BUILD": "never"}):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **compiler}
        )
        assert done.stdout == "monarch_slurm._none._native\n", done.stderr
    sources = tmp_path / "native"
    shutil.copytree(sources_folder(), sources)
    (sources / "src" / "dl.cpp").write_text("// changed\n")
    monkeypatch.setattr("monarch_slurm.native_build.sources_folder", lambda: sources)
    assert built_native() == {}


def test_a_module_that_cannot_be_loaded_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo other 1.0 && exit 0\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MONARCH_SLURM_NATIVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("monarch_slurm.native_build._loaded", {})
    with pytest.raises(
        NativeBuildError, match=r"built by other 1\.0, cannot be loaded on this machine: .*file too short"
    ):
        load_native("_native", platform="none")


def test_a_compiler_error_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "c++ -DMONARCH_PLATFORM_NONE=syntax -include no_such_header.h")
    monkeypatch.setenv("MONARCH_SLURM_NATIVE_CACHE", str(tmp_path))
    with pytest.raises(NativeBuildError, match=r"building _native failed[\s\S]*no_such_header.h"):
        build_native(["_native"], platform="none")


def test_without_a_compiler_the_text_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MONARCH_SLURM_NATIVE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(NativeBuildError, match="install g"):
        build_native(["_native"], platform="none")


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MONARCH_SLURM_NATIVE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(NativeBuildError, match=r"cannot make the cache folder .*Not a directory"):
        build_native(["_native"], platform="none")


def test_the_step_of_the_makefile() -> None:
    folder = sources_folder().parent
    command = ["make", "--no-print-directory", "--dry-run", "native", "PLATFORM=rocm", "VENV=venv"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, env=alone)
    assert done.stdout.splitlines()[-1] == "venv/bin/monarch-slurm build-native --platform rocm"
    phony = re.search(r"^\.PHONY:(.*)$", (folder / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert "native" in phony.group(1).split(), "a folder has the same name"


def test_platform_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_SLURM_GPU_PLATFORM", "rocm")
    assert gpu_platform() == "rocm"
    monkeypatch.setenv("MONARCH_SLURM_GPU_PLATFORM", "metal")
    with pytest.raises(ConfigError, match="metal"):
        gpu_platform()


@pytest.mark.parametrize(
    ("platform", "text"), [("rocm", "ROCm's runtime"), ("cuda", "NVIDIA's driver"), ("none", "no GPU")]
)
def test_without_a_gpu_the_error_says_what_to_install(platform: str, text: str) -> None:
    module = load_native("_native", platform=platform)
    with pytest.raises(module.LibraryMissing, match=text):
        module.Runtime(["libnot-there.so.1"], [])


def test_a_library_that_is_too_old_is_named() -> None:
    module = load_native("_native", platform="cuda")
    with pytest.raises(module.LibraryMissing, match=r"libc\.so\.6\) has no function cuInit"):
        module.Runtime(["libc.so.6"], [])
    with pytest.raises(module.LibraryMissing, match="has no function ncclGetVersion"):
        module.Ccl(["libc.so.6"])


def test_real_nccl_makes_a_unique_id_without_a_gpu() -> None:
    spec = importlib.util.find_spec("nvidia")
    places = [
        Path(sys.prefix) / "vendor/nvidia-nccl-cu13/nvidia",
        *(spec.submodule_search_locations or [] if spec else []),
    ]
    found = [path for place in places for path in Path(place).glob("nccl/lib/libnccl.so.2")]
    if not found:
        pytest.skip("NCCL is not here: MONARCH_SLURM_TEST_NCCL=1 make test fetches it (300 MB)")
    code = "from monarch_slurm.native_build import load_native; import sys\n"
    code += "ccl = load_native('_native', platform='cuda').Ccl([sys.argv[1]])\n"
    code += "print(len(ccl.unique_id()), ccl.version() > 21700)"
    environment = {**os.environ, "NCCL_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, "-c", code, str(found[0])], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["128", "True"], done.stderr


def test_sources_are_formatted() -> None:
    pytest.importorskip("clang_format")
    folder = sources_folder()
    ours = ["dl", "platform", "gpu_api", "gpu_memory", "ccl"]
    files = [*(folder / "include" / f"{name}.h" for name in ours), *folder.glob("src/[!r]*.cpp")]
    files += [*folder.glob("check/*.cpp"), *folder.glob("testlib/fake_[gc]*.cpp")]
    program = [str(Path(sys.executable).parent / "clang-format"), "--dry-run", "--Werror"]
    done = subprocess.run([*program, *map(str, files)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in a cache of its own, in folders that everybody may enter, as built by this user."""
    built = build_native(["_native"], platform="none")["_native"]
    monkeypatch.setenv("MONARCH_SLURM_NATIVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("monarch_slurm.native_build._loaded", {})
    target = _recipe("_native", "none", strict=False).target
    target.parent.mkdir(parents=True)
    shutil.copyfile(built, target)
    for path in (target, target.parent, target.parent.parent):
        path.chmod(0o755)
    return target


def make_link(path: Path) -> None:
    """Put a stranger's link in the place of a file."""
    path.rename(path.with_name("real"))
    path.symlink_to("real")
    os.lchown(path, 12345, -1)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda path: os.chown(path, 12345, -1), "belongs to uid 12345"),
        (lambda path: path.chmod(0o775), "has mode 0775: others can write it"),
        (lambda path: path.chmod(0o757), "has mode 0757: others can write it"),
        (
            lambda path: (path.rename(path.with_name("x")), path.symlink_to("x"), os.lchown(path, 12345, -1)),
            "is a link",
        ),
    ],
    ids=["owner", "group", "everybody", "link"],
)
def test_a_module_that_others_could_have_written_is_not_loaded(
    copied: Path, change: Callable[[Path], object], why: str
) -> None:
    """It is code. Nothing is built in its place unasked, for somebody wanted it there."""
    change(copied)
    with pytest.raises(NativeBuildError) as raised:
        load_native("_native", platform="none")
    assert str(copied) in str(raised.value)
    assert why in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_module_of_this_users_is_loaded_under_its_own_name(copied: Path) -> None:
    # In a process of its own: here another file of that name may have been loaded before.
    program = (
        "from monarch_slurm.native_build import load_native; print(load_native('_native', platform='none').__file__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == str(copied), done.stderr


COMPILER = """#!/bin/sh
[ "$1" = --version ] && exit 0
while [ "$1" != -o ]; do shift; done
: > "$2"
chmod 777 "$2"
"""


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022])
def test_whatever_the_umask_nobody_else_may_write_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MONARCH_SLURM_NATIVE_CACHE", str(tmp_path / "new" / "cache"))
    before = os.umask(umask)
    try:
        built = build_native(["_native"], platform="none")["_native"]
    finally:
        os.umask(before)
    found = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert built in found
    assert not [path for path in found if path.stat().st_mode & 0o022]


def test_nothing_is_built_where_others_may_put_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_SLURM_NATIVE_CACHE", str(tmp_path / "cache"))
    folder = _recipe("_native", "none", strict=False).target.parent
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(NativeBuildError, match=f"{folder} .* has mode 0777: others can write it.*NATIVE_CACHE"):
        build_native(["_native"], platform="none")
