"""Processes of this package import nothing from the current folder, however they are started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from planted_modules import imported, plant
from support import DEADLINE, REPOSITORY

from monarch_slurm.actor import make_worker_key
from monarch_slurm.interpreter import (
    GIVEN_PATH_VARIABLE,
    SHELL_LINES,
    module_command,
    python_environment,
    restore_environment,
    user_path,
)

ACTOR = """
import os, sys
from monarch_slurm.actor import Actor, endpoint


class Where(Actor):
    @endpoint
    def modules(self):
        import beside
        return beside.__file__, os.getcwd() in sys.path, os.environ.get("PYTHONPATH")
"""

PROGRAMS = {
    "local": """
from monarch_slurm.actor import this_host
procs = this_host().spawn_procs()
""",
    "bootstrap": """
from monarch_slurm.actor import default_bootstrap_cmd, this_host
procs = this_host().spawn_procs(bootstrap_command=default_bootstrap_cmd())
""",
    "processes": """
from monarch_slurm.job import ProcessJob
job = ProcessJob({"hosts": 1}, env={"PYTHONPATH": ":".join(["", ".", os.environ["PYTHONPATH"]])})
procs = job.state().hosts.spawn_procs()
""",
    "worker": """
import subprocess
from monarch_slurm.actor import attach_to_workers
from monarch_slurm.interpreter import module_command, python_environment
address = "ipc://" + os.environ["KEY"] + ".sock"
ours, theirs = __import__("socket").socketpair()
worker = subprocess.Popen(
    module_command("monarch_slurm.job.store_worker", address, os.environ["KEY"], str(theirs.fileno())),
    pass_fds=[theirs.fileno()], env=python_environment({**os.environ, "PYTHONPATH": ":" + os.environ["PYTHONPATH"]}),
)
theirs.close()
assert ours.recv(1) == b"+"
procs = attach_to_workers(private_key=os.environ["KEY"], workers=[address]).spawn_procs()
""",
}

ASK = """
print(procs.spawn("where", Where).modules.call_one().get(60))
"""


@pytest.fixture
def planted(tmp_path: Path) -> tuple[Path, Path]:
    """A folder full of planted modules, and the file that tells which of them were imported."""
    folder, mark = tmp_path / "shared", tmp_path / "mark"
    folder.mkdir()
    plant(folder, mark)
    return folder, mark


def run(command: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **env}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=2 * DEADLINE, check=False
    )


@pytest.mark.parametrize("how", PROGRAMS)
def test_a_program_in_a_folder_of_planted_modules(how: str, planted: tuple[Path, Path], tmp_path: Path) -> None:
    """None is imported by us. The module beside the program is there for its actors, and PYTHONPATH is as it was."""
    folder, mark = planted
    home = tmp_path / "home"
    home.mkdir()
    (home / "beside.py").touch()
    (home / "program.py").write_text(ACTOR + PROGRAMS[how] + ASK)
    key = str(make_worker_key(tmp_path / "key"))
    done = run([sys.executable, str(home / "program.py")], folder, KEY=key)
    assert imported(mark) == []
    assert done.returncode == 0, done.stderr
    path = f":.:{REPOSITORY}" if how == "processes" else f":{REPOSITORY}" if how == "worker" else str(REPOSITORY)
    assert done.stdout.splitlines()[-1] == repr((f"{home}/beside.py", False, path))


@pytest.mark.parametrize("path", ["", ":", ".:", "lib:", f":{Path('/nowhere')}", None])
def test_the_path_of_a_process_of_ours(path: str | None, tmp_path: Path) -> None:
    """It has no folder that depends on the current one; the environment is what the user has set."""
    (tmp_path / "asked.py").write_text(
        "import json, os, sys\ndef main():\n    print(json.dumps([sys.path, os.environ.get('PYTHONPATH')]))\n"
    )
    (tmp_path / "lib").mkdir()
    base = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    given = os.pathsep.join(entry for entry in (path, str(REPOSITORY), str(tmp_path)) if entry is not None)
    env = {**base, "PYTHONPATH": given}
    here = tmp_path / "here"
    here.mkdir()
    done = subprocess.run(
        module_command("asked"), cwd=here, env=python_environment(env), capture_output=True, text=True, check=True
    )
    found, left = json.loads(done.stdout)
    assert left == given
    assert not [entry for entry in found if not entry or Path(entry) == here or here in Path(entry).parents]
    assert found[:1] == ["/nowhere"] or found[:2] == [str(REPOSITORY), str(tmp_path)]
    # The same where nobody has prepared the environment.
    direct = subprocess.run(module_command("asked"), cwd=here, env=env, capture_output=True, text=True, check=True)
    assert json.loads(direct.stdout) == [found, given]


@pytest.mark.parametrize("path", ["", ":", ".:", "lib:/a:", "/a:/b c:", "/a", None])
def test_a_batch_script_prepares_the_environment_as_a_process_does(path: str | None, tmp_path: Path) -> None:
    base = {"PATH": os.environ["PATH"]} | ({} if path is None else {"PYTHONPATH": path})
    script = "\n".join([*SHELL_LINES, "exec env"])
    said = subprocess.run(["bash", "-c", script], env=base, capture_output=True, text=True, check=True).stdout
    found = dict(line.split("=", 1) for line in said.splitlines())
    wanted = python_environment(base)
    assert found.get("PYTHONPATH") == wanted.get("PYTHONPATH")
    assert found.get(GIVEN_PATH_VARIABLE, path) == wanted.get(GIVEN_PATH_VARIABLE, path)


def test_a_path_that_an_image_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, left in (("/a", ".:/a"), ("/image", "/image")):
        monkeypatch.setenv("PYTHONPATH", found)
        monkeypatch.setenv(GIVEN_PATH_VARIABLE, ".:/a")
        restore_environment()
        assert os.environ["PYTHONPATH"] == left
        assert GIVEN_PATH_VARIABLE not in os.environ


def test_what_is_preloaded_is_found_where_the_program_finds_it(tmp_path: Path) -> None:
    """Beside the program, wherever that is started; what this package preloads is never looked for there."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "beside.py").write_text("import sys\nprint('preloaded', file=sys.stderr)")
    (home / "torch.py").write_text("raise SystemExit('planted')")
    (home / "program.py").write_text(ACTOR + PROGRAMS["local"] + ASK)
    preload = "beside,monarch_slurm.train.units"
    done = run([sys.executable, str(home / "program.py")], tmp_path, MONARCH_SLURM_PRELOAD=preload)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("preloaded") == 1, "by the zygote, once for all"
    assert "could not preload" not in done.stderr


def test_where_the_users_modules_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MONARCH_SLURM_PRELOAD_PATH", raising=False)
    monkeypatch.setenv("PYTHONPATH", "lib:/a")
    assert user_path() == [f"{tmp_path}/lib", "/a"]
    monkeypatch.setenv("MONARCH_SLURM_PRELOAD_PATH", "/program")
    assert user_path() == ["/program"]
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.delenv("MONARCH_SLURM_PRELOAD_PATH")
    assert user_path() == []


@pytest.mark.parametrize("arguments", [["--version"], ["doctor"], ["status"]], ids=lambda words: words[0])
def test_the_command_line(arguments: list[str], planted: tuple[Path, Path]) -> None:
    folder, mark = planted
    console_script = [sys.executable, "-c", "import sys; del sys.path[0]; from monarch_slurm.cli import main; main()"]
    run([*console_script, *arguments], folder)
    assert imported(mark) == []


def test_the_package_as_a_program(tmp_path: Path) -> None:
    """``python -m`` itself looks for the package in the current folder first; what the package imports is safe."""
    folder, mark = tmp_path / "shared", tmp_path / "mark"
    folder.mkdir()
    for name in ("click", "zmq", "rich", "msgpack"):
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write({name!r})")
    done = run([sys.executable, "-m", "monarch_slurm", "--version"], folder)
    assert done.returncode == 0, done.stderr
    assert imported(mark) == []
