"""Building and loading the native modules: C++ in ``native/``, compiled on this machine into a cache.

Nothing here is needed to install or import the package. A module is built by `build_native` (the explicit step), or by
`load_native` when it is first used and a C++ compiler is there. GPU runtimes, RCCL or NCCL and libibverbs are not
linked: each module opens them when they are needed, so that what a login node builds works on every node. What is built
is found by sources, Python, torch, platform and flags: a node that has another compiler or none takes it, too.

Settings, read from the environment:

- ``MONARCH_SLURM_GPU_PLATFORM``: ``rocm``, ``cuda`` or ``none``; unset: what the installed torch was made for, else
  what the machine has
- ``MONARCH_SLURM_NATIVE_CACHE``: the folder of built modules; unset: ``~/.cache/monarch_slurm/native``
- ``MONARCH_SLURM_NATIVE_BUILD=never``: `load_native` never compiles
- ``MONARCH_SLURM_NATIVE_SANITIZE``: what to give to ``-fsanitize=``, for tests
- ``MONARCH_SLURM_NATIVE_STRICT=1``: warnings are errors, as in this project's tests
- ``CXX``: the compiler; unset: ``c++`` or ``g++``
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from monarch_slurm.errors import ConfigError, MonarchSlurmError
from monarch_slurm.interpreter import SAFE_PATH
from monarch_slurm.owned_files import (
    FileRefusedError,
    append_owned,
    check_folder,
    make_folders,
    open_owned,
    read_data,
    write_whole,
)

PLATFORMS = ("rocm", "cuda", "none")

_log = logging.getLogger(__name__)
_loaded: dict[tuple[str, str], ModuleType] = {}
_loading = threading.Lock()  # a second thread would get a module that is not filled yet


class NativeBuildError(MonarchSlurmError):
    """A native module could not be built or is not there: the text quotes the compiler and says what to install."""


@dataclass(frozen=True)
class Extension:
    """One native module.

    Args:
        sources: patterns of files in ``native/src``; a pattern that finds nothing adds nothing.
        links_torch: compiled against torch's headers and linked with its libraries; the others need neither.
    """

    sources: tuple[str, ...]
    links_torch: bool = False


EXTENSIONS = {
    "_native": Extension(("dl.cpp", "gpu_*.cpp", "ccl.cpp", "native_module.cpp")),
    "_rdma": Extension(("dl.cpp", "rdma*.cpp")),
    "_c10d": Extension(("dl.cpp", "ccl.cpp", "c10d_*.cpp"), links_torch=True),
}
"""Every native module, by name. A module none of whose own sources is there is left out of a build."""


def gpu_platform() -> str:
    """Return the GPU platform to build for: ``rocm``, ``cuda`` or ``none``. Touches no device and imports no torch.

    Raises:
        ConfigError: ``MONARCH_SLURM_GPU_PLATFORM`` is something else.
    """
    wanted = os.environ.get("MONARCH_SLURM_GPU_PLATFORM", "")
    if wanted:
        if wanted not in PLATFORMS:
            raise ConfigError(f"MONARCH_SLURM_GPU_PLATFORM={wanted!r}: one of {', '.join(PLATFORMS)} expected")
        return wanted
    folder = torch_folder()
    version = folder / "version.py" if folder else None
    if version is not None and version.is_file():
        text = version.read_text()
        if re.search(r"^hip\b[^=\n]*=\s*['\"]", text, re.MULTILINE):
            return "rocm"
        if re.search(r"^cuda\b[^=\n]*=\s*['\"]", text, re.MULTILINE):
            return "cuda"
    if Path("/dev/kfd").exists():
        return "rocm"
    if Path("/proc/driver/nvidia/version").exists():
        return "cuda"
    return "none"


def torch_folder() -> Path | None:
    """Return where torch is installed, without importing it; None when it is not."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def sources_folder() -> Path:
    """Return the folder of the C++ sources: in the installed package, or in the source tree.

    Raises:
        NativeBuildError: this installation came without them.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "native_sources", package.parent / "native"):
        if (folder / "src").is_dir():
            return folder
    raise NativeBuildError(f"{package} was installed without the native sources; install monarch_slurm from its source")


def cache_folder() -> Path:
    """Return the folder that holds the built modules, one subfolder per key of versions and platform."""
    given = os.environ.get("MONARCH_SLURM_NATIVE_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "monarch_slurm" / "native"


def build_native(
    names: Iterable[str] | None = None, *, platform: str | None = None, strict: bool = False, force: bool = False
) -> dict[str, Path]:
    """Compile native modules into the cache; what is already there is not compiled again.

    Args:
        names: which of `EXTENSIONS`; None: all that the installed packages allow (``_c10d`` only when torch is there).
        platform: ``rocm``, ``cuda`` or ``none``; None: `gpu_platform`.
        strict: warnings are errors.
        force: compile again.

    Returns:
        The file of each module, by name.

    Raises:
        NativeBuildError: no compiler, no headers, or the compiler refused.
        ConfigError: an unknown name or platform.
    """
    platform = platform or gpu_platform()
    if platform not in PLATFORMS:
        raise ConfigError(f"platform {platform!r}: one of {', '.join(PLATFORMS)} expected")
    if names is None:
        names = [
            name for name in EXTENSIONS if _is_there(name) and (torch_folder() or not EXTENSIONS[name].links_torch)
        ]
    built = {}
    for name in names:
        recipe = _recipe(name, platform, strict)
        if force or not recipe.target.is_file():
            _build(recipe, force)
        built[name] = recipe.target
    return built


def load_native(name: str, *, platform: str | None = None) -> ModuleType:
    """Import a native module, building it first when it is not in the cache.

    The imported module stays: a second call with the same name and platform returns it.

    Raises:
        NativeBuildError: it is not built and cannot be, or it cannot be loaded on this machine.
    """
    platform = platform or gpu_platform()
    with _loading:
        if (name, platform) not in _loaded:
            _loaded[name, platform] = _load(name, platform)
        return _loaded[name, platform]


def _load(name: str, platform: str) -> ModuleType:
    qualified = f"monarch_slurm._{platform}.{name}"  # pybind11 knows one module of each name
    recipe = _recipe(name, platform, strict=False)
    if not recipe.target.is_file():
        if os.environ.get("MONARCH_SLURM_NATIVE_BUILD") == "never":
            raise NativeBuildError(f"{name} for {platform} is not built; run `monarch-slurm build-native` first")
        _log.info("building %s for %s, once", name, platform)
        _build(recipe, force=False)
    try:
        with open_owned(recipe.target, "to load it") as file:
            module = _load_checked(qualified, recipe.target, file.fileno())
    except FileRefusedError as error:
        raise NativeBuildError(f"{error}, or run `monarch-slurm build-native --force`") from None
    except ImportError as error:
        raise NativeBuildError(
            f"{recipe.target}, built by {_builder(recipe)}, cannot be loaded on this machine: {error}; where system "
            "libraries differ, build where they are oldest, or give each kind of machine a MONARCH_SLURM_NATIVE_CACHE"
        ) from error
    return module


def _load_checked(qualified: str, target: Path, fd: int) -> ModuleType:
    """Load the module at ``target`` if that still is the file ``fd``, whose owner and mode were checked.

    It is loaded by its own path: the dynamic loader takes two files of one name for one library, and numbers of
    descriptors in ``/proc/self/fd`` are used again.

    Raises:
        ImportError: another file is there now, or it cannot be loaded.
    """
    if not os.path.samestat(os.fstat(fd), os.stat(target)):
        raise ImportError("another file has taken its place meanwhile")
    loader = importlib.machinery.ExtensionFileLoader(qualified, str(target))
    spec = importlib.util.spec_from_file_location(qualified, target, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def built_native(platform: str | None = None) -> dict[str, Path]:
    """Return the file of each module that `load_native` would take from the cache, by name. Nothing is built.

    Raises:
        ConfigError: ``MONARCH_SLURM_GPU_PLATFORM`` is none of the platforms.
    """
    platform = platform or gpu_platform()
    built = {}
    for name in EXTENSIONS:
        try:
            target = _recipe(name, platform, strict=False).target
        except NativeBuildError:  # this installation cannot have it
            continue
        if target.is_file():
            built[name] = target
    return built


@dataclass(frozen=True)
class _Recipe:
    name: str
    target: Path
    arguments: list[str]
    """Of the compiler, which is only looked for when it is needed; without what `complete` adds."""

    def complete(self) -> list[str]:
        """Return all arguments but the output's. For a module that links torch another process asks torch for some."""
        return [*self.arguments, *(_torch_flags(self.name) if EXTENSIONS[self.name].links_torch else [])]


def _is_there(name: str) -> bool:
    return bool(_own_sources(name))


def _own_sources(name: str) -> list[Path]:
    folder = sources_folder() / "src"
    files = {path for pattern in EXTENSIONS[name].sources for path in folder.glob(pattern)}
    shared = {folder / "dl.cpp", folder / "ccl.cpp"} if name != "_native" else set()
    return sorted(files) if files - shared else []


def _recipe(name: str, platform: str, strict: bool) -> _Recipe:
    if name not in EXTENSIONS:
        raise ConfigError(f"there is no native module {name!r}; there are {', '.join(EXTENSIONS)}")
    sources = _own_sources(name)
    if not sources:
        raise NativeBuildError(f"{sources_folder() / 'src'} has no sources of {name}")
    sanitize = os.environ.get("MONARCH_SLURM_NATIVE_SANITIZE")
    flags = ["-O0" if sanitize else "-O2", "-g0", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"]
    if sanitize:
        flags += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-fno-sanitize-recover=undefined"]
    if strict or os.environ.get("MONARCH_SLURM_NATIVE_STRICT") == "1":
        flags.append("-Werror")
    flags += [f"-DMONARCH_PLATFORM_{platform.upper()}=1", f"-I{sources_folder() / 'include'}"]
    flags += [f"-isystem{path}" for path in (sysconfig.get_path("include"), *_binding_headers())]
    links = ["-ldl", "-lpthread"]
    if EXTENSIONS[name].links_torch and not (torch_folder() or Path()).joinpath("include", "torch").is_dir():
        raise NativeBuildError(f"{name} is built against torch's headers, but torch is not installed")
    flags.append("-std=c++20" if EXTENSIONS[name].links_torch else "-std=c++17")
    key = _key(name, platform, [*flags, *links])
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    target = cache_folder() / key / f"{name}{suffix}"
    return _Recipe(name, target, [*flags, *map(str, sources), *links])


def _binding_headers() -> list[Path]:
    """Where pybind11's headers are: torch carries them; the package pybind11 will do as well."""
    torch = torch_folder()
    if torch is not None and (torch / "include" / "pybind11").is_dir():
        return [torch / "include"]
    spec = importlib.util.find_spec("pybind11")
    if spec and spec.origin:
        return [Path(spec.origin).parent / "include"]
    raise NativeBuildError("neither torch nor pybind11 is installed; one of them must bring pybind11's headers")


_ASK_TORCH = f"""
{SAFE_PATH}
import json, torch
from torch.utils import cpp_extension
print(json.dumps([cpp_extension.include_paths(), cpp_extension.library_paths(), torch._C._GLIBCXX_USE_CXX11_ABI]))
"""


def _torch_flags(name: str) -> list[str]:
    """What torch.utils.cpp_extension gives. Another process asks it: importing it can start the GPU of this one."""
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")
    environment = {**os.environ, **hidden, "PYTHONPATH": os.pathsep.join(filter(os.path.isabs, sys.path))}
    command = [sys.executable, "-c", _ASK_TORCH]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise NativeBuildError(f"torch does not say how {name} is built against it:\n{_tail(done.stderr)}")
    headers, libraries, abi = json.loads(done.stdout.splitlines()[-1])
    flags = [f"-isystem{path}" for path in headers]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(abi)}")
    for path in libraries:
        flags += [f"-L{path}", f"-Wl,-rpath,{path}"]
    return [*flags, "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]


def _compiler() -> list[str]:
    given = os.environ.get("CXX")
    if given:
        command = shlex.split(given)
        if shutil.which(command[0]) is None:
            raise NativeBuildError(f"CXX={given}: there is no such program on the PATH")
        return command
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise NativeBuildError(
        "there is no C++ compiler; install g++ (Debian, Ubuntu: apt install g++; RHEL: dnf install gcc-c++), or run "
        "`monarch-slurm build-native` on a node that has one and shares this cache folder: " + str(cache_folder())
    )


def _key(name: str, platform: str, flags: list[str]) -> str:
    """Name the folder of a build: what a module must fit to. Not the compiler, which nodes need not have."""
    digest = hashlib.sha256()
    torch = torch_folder()
    torch_version = torch / "version.py" if torch else None
    abi = str(sysconfig.get_config_var("SOABI") or sys.version)
    for text in (name, platform, abi, " ".join(flags), str(torch) if EXTENSIONS[name].links_torch else ""):
        digest.update(text.encode() + b"\0")
    if torch_version is not None and torch_version.is_file():
        digest.update(torch_version.read_bytes())
    for path in sorted(
        [*_own_sources(name), *sources_folder().glob("include/**/*.h"), *sources_folder().glob("src/*.h")]
    ):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"{python}-{platform}-{digest.hexdigest()[:16]}"


def _build(recipe: _Recipe, force: bool) -> None:
    compiler = _compiler()
    try:
        make_folders(recipe.target.parent, 0o755)
        check_folder(recipe.target.parent, "to build modules there")
    except FileRefusedError as error:
        raise NativeBuildError(f"{error}, or set MONARCH_SLURM_NATIVE_CACHE to another folder") from None
    except OSError as error:
        raise NativeBuildError(
            f"cannot make the cache folder {recipe.target.parent}: {error.strerror}; set MONARCH_SLURM_NATIVE_CACHE to "
            "another one"
        ) from error
    with _locked(recipe.target.with_suffix(".lock")):
        if recipe.target.is_file() and not force:
            return  # another process of this node built it while we waited
        with tempfile.TemporaryDirectory(dir=recipe.target.parent) as scratch:
            output = Path(scratch) / recipe.target.name
            command = [*compiler, *recipe.complete(), "-o", str(output)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise NativeBuildError(
                    f"building {recipe.name} failed ({shlex.join(command)}):\n{_tail(done.stderr or done.stdout)}"
                )
            version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
            write_whole(_builder_file(recipe), (version.partition("\n")[0] or shlex.join(compiler)).encode(), 0o644)
            output.chmod(0o755)  # whatever the umask: it is code
            os.replace(output, recipe.target)  # a reader sees the whole file or none


def _builder_file(recipe: _Recipe) -> Path:
    return recipe.target.with_name(f"{recipe.name}.compiler")


def _builder(recipe: _Recipe) -> str:
    """The compiler that a module was built with, for an error's text."""
    try:
        return read_data(_builder_file(recipe)).decode(errors="replace")
    except (FileNotFoundError, FileRefusedError):
        return "a compiler that is not known"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    fd = append_owned(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _tail(text: str, lines: int = 40) -> str:
    return "\n".join(text.splitlines()[-lines:])
