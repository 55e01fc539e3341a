from __future__ import annotations

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import REPOSITORY

from monarch_slurm.config import configured
from monarch_slurm.wire import SocketPathError, make_runtime_dir, remove_runtime_dir
from monarch_slurm.wire.runtime_dir import check_private, check_runtime_dir, check_socket_path, sweep_away


def test_a_folder_is_private_and_can_be_removed(tmp_path: Path) -> None:
    with configured(runtime_dir=str(tmp_path)):
        before = len(os.listdir("/proc/self/fd"))
        folder = make_runtime_dir()
        assert folder.parent == tmp_path
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        check_private(folder)
        (folder / "agent.sock").touch()
        remove_runtime_dir(folder)
        assert list(tmp_path.iterdir()) == []
        assert len(os.listdir("/proc/self/fd")) == before


def test_folders_of_killed_processes_are_swept_away_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from monarch_slurm.wire import make_runtime_dir as make; print(make(), flush=True);"
        "sys.stdin.read() if len(sys.argv) > 1 else os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "MONARCH_SLURM_RUNTIME_DIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", code]
    living = subprocess.Popen(
        [*command, "live"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert living.stdout is not None
    kept = Path(living.stdout.readline().strip())
    killed = Path(
        subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    )
    assert kept.is_dir()
    assert killed.is_dir()
    foreign = tmp_path / f"ms-{os.getuid()}-not-private"
    foreign.mkdir(mode=0o755)
    with configured(runtime_dir=str(tmp_path)):
        folder = make_runtime_dir()
    assert sorted(tmp_path.iterdir()) == sorted([kept, folder, foreign])
    living.communicate()
    remove_runtime_dir(folder)


def test_folders_that_are_made_while_others_sweep(tmp_path: Path) -> None:
    def make_and_sweep() -> None:
        for _ in range(50):
            check_runtime_dir()

    with configured(runtime_dir=str(tmp_path)), ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(make_and_sweep) for _ in range(8)]:
            future.result()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    with configured(runtime_dir=str(tmp_path / "missing")), pytest.raises(SocketPathError, match="No such file"):
        make_runtime_dir()
    long = tmp_path / ("x" * 100)
    long.mkdir()
    with (
        configured(runtime_dir=str(long)),
        pytest.raises(SocketPathError, match="Unix sockets allow 107; set MONARCH_SLURM_RUNTIME_DIR"),
    ):
        make_runtime_dir()
    assert list(long.iterdir()) == []


def test_a_folder_of_the_session_that_is_too_long_or_gone_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (tmp_path / ("x" * 100), tmp_path / "missing"):
        if folder.name != "missing":
            folder.mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
        made = make_runtime_dir()
        assert made.parent == Path("/tmp")
        remove_runtime_dir(made)


def test_the_limit_of_socket_paths_is_exact(tmp_path: Path) -> None:
    import socket

    path = Path("/tmp") / ("x" * 102)
    assert len(str(path)) == 107
    check_socket_path(path)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(str(path))
    path.unlink()
    with pytest.raises(SocketPathError, match="has 108 bytes"):
        check_socket_path(path.with_name("x" * 103))
    with pytest.raises(SocketPathError, match="has 109 bytes"):
        check_socket_path(Path("/tmp") / ("ü" * 52))


def test_folders_that_others_can_enter_are_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with pytest.raises(SocketPathError, match="not a private folder"):
        check_private(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(SocketPathError, match="not a private folder"):
        check_private(link)


def test_only_a_folder_of_a_process_that_is_gone_is_swept_away(tmp_path: Path) -> None:
    held = make_runtime_dir()
    sweep_away(held)
    assert held.exists()
    left = held.with_name(f"{held.name}-left")
    left.mkdir(mode=0o700)
    sweep_away(left)
    assert not left.exists()
    tmp_path.chmod(0o700)
    sweep_away(tmp_path)
    assert tmp_path.exists(), "a folder of another name is not one of sockets"
    remove_runtime_dir(held)
