"""Folders on their way to real agents, each with a workspace of its own."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from job_agents import Agent
from reading_actors import Reader
from support import DEADLINE

from monarch_slurm.actor import HostMesh, MeshFailure, Workspace, WorkspaceError
from monarch_slurm.actor.code_sync import ACTIVE_CONDA_ENV, CondaEnvironment
from monarch_slurm.actor.code_sync.receiver import _Target
from monarch_slurm.actor.code_sync.tree import Entry, scan
from monarch_slurm.controller import gather_hosts, publish, withdraw

HOSTS = 3


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of code on the program's machine, which is imported from."""
    folder = tmp_path / "project"
    write(folder, {
        "sample_code.py": "VALUE = 1\n", "pack/__init__.py": "", "pack/deep/data.txt": "data", "run.sh": "#!/bin/sh",
        ".git/config": "secret", "pack/__pycache__/x.pyc": "compiled", "empty": "",
    })  # fmt: skip
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("pack/deep")
    (folder / "outside").symlink_to("/etc")
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def hosts(tmp_path: Path, agents: Callable[..., Agent], failures: list[MeshFailure]) -> Iterator[HostMesh]:
    folder = tmp_path / "job"
    publish(folder, address="127.0.0.1")
    names = [f"n{number}" for number in range(HOSTS)]
    for name in names:
        agents(folder, name, env={"WORKSPACE_DIR": str(tmp_path / name)})
    mesh = gather_hosts(names, timeout=DEADLINE)
    yield mesh
    mesh.shutdown().get(DEADLINE)
    withdraw(folder)


def write(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def sync(hosts: HostMesh, *folders: Path, **options: Any) -> Any:
    return asyncio.run(hosts.sync_workspace(Workspace(list(folders)), **options))


def tree(folder: Path) -> dict[str, str]:
    found = {}
    for root, _, files in os.walk(folder):
        for name in files:
            path = Path(root, name)
            if "__pycache__" not in path.parts and ".git" not in path.parts and name[0] != "." and path.is_file():
                found[str(path.relative_to(folder))] = path.read_text()
    return found


def test_what_has_changed_is_copied_and_no_more(hosts: HostMesh, project: Path, tmp_path: Path) -> None:
    copies = [tmp_path / f"n{number}" / "project" for number in range(HOSTS)]
    expected = {
        "sample_code.py": "VALUE = 1\n",
        "pack/__init__.py": "",
        "pack/deep/data.txt": "data",
        "run.sh": "#!/bin/sh",
    }
    result = sync(hosts, project)
    for copy in copies:
        assert tree(copy) == {**expected, "empty": ""}
        assert (os.access(copy / "run.sh", os.X_OK), os.access(copy / "empty", os.X_OK)) == (True, False)
        assert os.readlink(copy / "link") == "pack/deep"
        assert not os.path.lexists(copy / "outside")
        assert not (copy / ".git").exists()
    assert (result.copied, result.deleted) == (6 * HOSTS, 0)
    again = sync(hosts, project)
    assert (again.copied, again.bytes, again.deleted) == (0, 0, 0)

    (copies[1] / "pack/deep/data.txt").unlink()  # one host has lost a file, and has some of its own
    write(copies[2], {"pack/deep/own.txt": "own", "results": "1"})
    assert sync(hosts, project).copied == 1

    before = (copies[0] / "run.sh").stat()
    write(project, {"sample_code.py": "VALUE = 2\n", "new/file": "x" * 10_000_000})
    (project / "pack/deep/data.txt").unlink()
    (project / "link").unlink()
    (project / "link").write_text("a file now")
    (project / "empty").unlink()
    write(project, {"empty/now_a_folder": "y"})
    result = sync(hosts, project)
    assert (result.copied, result.deleted) == (4 * HOSTS, 2 * HOSTS)
    assert result.bytes == HOSTS * (10 + 10_000_000 + 10 + 1)
    for copy in copies:
        kept = {"results": "1", "pack/deep/own.txt": "own"} if copy == copies[2] else {}
        assert tree(copy) == {**tree(project), **kept}
    assert not (copies[0] / "pack/deep").exists()
    assert (copies[0] / "run.sh").stat().st_ino == before.st_ino
    assert not list(copies[0].glob(".monarch-sync.*.*"))


def test_procs_import_from_the_copies_and_load_changes_again(hosts: HostMesh, project: Path, tmp_path: Path) -> None:
    early = hosts.spawn_procs(name="early")
    assert list(early.spawn("reader", Reader).value.call().get(DEADLINE).values()) == [1] * HOSTS  # from the project
    sync(hosts, project)
    procs = hosts.spawn_procs({"gpus": 2}, name="readers")
    readers = procs.spawn("reader", Reader)
    places = list(readers.place.call().get(DEADLINE).values())
    assert [Path(file).parent.parent.name for file, _ in places] == ["n0", "n0", "n1", "n1", "n2", "n2"]
    assert {variable for _, variable in places} == {str(tmp_path / f"n{number}") for number in range(HOSTS)}

    write(project, {"sample_code.py": "VALUE = 2\n"})  # of equal length, within the same second
    sync(hosts, project)
    assert list(readers.value.call().get(DEADLINE).values()) == [1] * 6, "without auto_reload they keep what they have"
    write(project, {"sample_code.py": "VALUE = 3\n"})
    assert sync(hosts, project, auto_reload=True).reloaded == ("sample_code",)
    assert list(readers.value.call().get(DEADLINE).values()) == [3] * 6
    late = hosts.spawn_procs(name="late").spawn("reader", Reader)
    assert list(late.value.call().get(DEADLINE).values()) == [3] * HOSTS

    write(project, {"sample_code.py": "VALUE = \n"})
    with pytest.raises(WorkspaceError, match="module sample_code has changed and cannot be loaded again: SyntaxError"):
        sync(hosts, project, auto_reload=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_conda_environment_is_copied_to_the_same_path(
    tmp_path: Path, agents: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, folder = tmp_path / "env", tmp_path / "job"
    write(prefix, {
        "conda-meta/history": "", "bin/tool": f"#!{prefix}/bin/python",
        "lib/pack/x.py": "1", "lib/pack/__pycache__/x.pyc": "",
    })  # fmt: skip
    monkeypatch.setenv("CONDA_PREFIX", str(prefix))
    publish(folder, address="127.0.0.1")
    mount = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"']
    for name in ("n0", "n1"):  # each host has a folder of its own there
        write(tmp_path / name, {"lib/own": "own"})
        agents(folder, name, within=[*mount, str(tmp_path / name), str(prefix)])
    agents(folder, "n2", env={"CONDA_PREFIX": "/envs/other"})
    hosts = gather_hosts(["n0", "n1"], timeout=DEADLINE)
    other = gather_hosts(["n2"], timeout=DEADLINE)
    try:
        result = asyncio.run(hosts.sync_workspace(Workspace(), conda=True))
        assert (result.copied, result.deleted) == (3 * 2, 0)
        for name in ("n0", "n1"):
            assert tree(tmp_path / name) == {**tree(prefix), "lib/own": "own"}
        (prefix / "lib/pack/x.py").write_text("22")
        (prefix / "bin/tool").unlink()
        result = asyncio.run(hosts.sync_workspace(Workspace(), conda=True))
        assert (result.copied, result.bytes, result.deleted) == (2, 4, 2)
        assert tree(tmp_path / "n1") == {**tree(prefix), "lib/own": "own"}

        with pytest.raises(WorkspaceError, match=f"active there is that of /envs/other, and not that of {prefix}"):
            asyncio.run(other.sync_workspace(Workspace(), conda=True))
        with pytest.raises(WorkspaceError, match="no conda environment to copy"):
            asyncio.run(hosts.sync_workspace(Workspace.null(), conda=True))
        with pytest.raises(WorkspaceError, match="it has no folder conda-meta"):
            asyncio.run(hosts.sync_workspace(Workspace(env=CondaEnvironment(str(tmp_path))), conda=True))
    finally:
        for mesh in (hosts, other):
            mesh.shutdown().get(DEADLINE)
        withdraw(folder)


def test_links_at_the_target_lead_nothing_out(hosts: HostMesh, project: Path, tmp_path: Path) -> None:
    outside = tmp_path / "precious"
    write(outside, {"deep/data.txt": "precious"})
    for number in range(HOSTS):
        copy = tmp_path / f"n{number}" / "project"
        copy.mkdir(parents=True)
        (copy / "pack").symlink_to(outside)
        (copy / "sample_code.py").symlink_to(outside / "deep/data.txt")
    sync(hosts, project)
    assert tree(outside) == {"deep/data.txt": "precious"}
    assert (tmp_path / "n1/project/pack/deep/data.txt").read_text() == "data"

    (tmp_path / "n1/project").rename(tmp_path / "elsewhere")
    (tmp_path / "n1/project").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WorkspaceError, match="n1/project is no folder of yours"):
        sync(hosts, project)
    (tmp_path / "n1/project").unlink()
    (tmp_path / "n1").chmod(0o777)
    with pytest.raises(WorkspaceError, match="n1 is no folder of yours"):
        sync(hosts, project)


def test_what_is_refused_at_the_call(hosts: HostMesh, project: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="sliced host mesh"):
        sync(hosts.slice(hosts=0), project)
    with pytest.raises(WorkspaceError, match=r"cannot copy .*nowhere: No such file"):
        sync(hosts, tmp_path / "nowhere")
    for dirs in ({project: "/etc"}, {project: "../x"}, {project: ".", tmp_path: "a"}, {project: "a", tmp_path: "a/b"}):
        with pytest.raises(WorkspaceError):
            Workspace(dirs).folders()
    assert Workspace.null().folders() == {}
    assert sync(hosts).copied == 0


def test_a_map_names_the_places_and_merge_does_the_same_here(project: Path, tmp_path: Path) -> None:
    workspace = Workspace({project: "code/mine"}, exclude=["*.sh", ".git", "__pycache__", "pack/deep"])
    workspace.merge(tmp_path / "out")
    assert set(tree(tmp_path / "out")) == {"code/mine/sample_code.py", "code/mine/pack/__init__.py", "code/mine/empty"}


FILE = Entry(0o644, 1, 0, "x", "")


@pytest.mark.parametrize(
    ("path", "entry"),
    [
        *[
            (path, FILE)
            for path in ("../x", "/etc/x", "a/../../x", "a//x", "", "a/.", "..", "a\0b", "/".join("a" * 99))
        ],
        ("a", Entry(0, 0, 0, "", "../x")),
        ("a/b", Entry(0, 0, 0, "", "../../x")),
        ("a", Entry(0, 0, 0, "", "/etc/passwd")),
        ("a", Entry(0, 0, 0, "", "b/../../x")),
    ],
)
def test_a_host_takes_no_path_that_leads_out(tmp_path: Path, path: str, entry: Entry) -> None:
    target = _Target(tmp_path / "w", "p")
    with pytest.raises(WorkspaceError):
        target.begin({path: entry})
    with pytest.raises(WorkspaceError):
        _Target(tmp_path / "w", "../p")
    assert sorted(tmp_path.iterdir()) == []


def test_a_host_takes_only_what_it_asked_for_and_only_whole(tmp_path: Path, project: Path) -> None:
    manifest, outside = scan(project, (".git", "__pycache__"), {})
    assert outside == ["outside"]
    target = _Target(tmp_path / "w", "p")
    assert "sample_code.py" in target.begin(manifest)
    with pytest.raises(WorkspaceError, match="was not asked for"):
        target.write([("other.py", 0, b"x")])
    with pytest.raises(WorkspaceError, match="does not follow"):
        target.write([("sample_code.py", 5, b"x")])
    target.write([(path, 0, b"wrong") for path in target._numbers])
    with pytest.raises(WorkspaceError, match="has changed while it was copied"):
        target.finish()
    target.discard()
    assert tree(tmp_path / "w") == {}


def test_a_record_that_is_none_of_ours_deletes_nothing(tmp_path: Path, project: Path) -> None:
    write(tmp_path / "w/p", {"keep": "1"})
    (tmp_path / "w").chmod(0o700)
    for record in ("no json", "[]", json.dumps({"../../x": FILE}), json.dumps({"keep": [1]})):
        (tmp_path / "w/p/.monarch-sync.json").write_text(record)
        target = _Target(tmp_path / "w", "p")
        target.begin({})
        assert target.finish() == ([], [])
    assert tree(tmp_path / "w") == {"p/keep": "1"}
    assert "sample_code" not in sys.modules


def test_without_a_workspace_the_copies_are_gone_with_the_host(
    project: Path, tmp_path: Path, agents: Callable[..., Agent], failures: list[MeshFailure]
) -> None:
    folder = tmp_path / "job"
    publish(folder, address="127.0.0.1")
    agent = agents(folder, "bare", env={"WORKSPACE_DIR": ""})
    hosts = gather_hosts(["bare"], timeout=DEADLINE)
    sync(hosts, project)
    ((file, variable),) = hosts.spawn_procs().spawn("reader", Reader).place.call().get(DEADLINE).values()
    assert file == f"{variable}/project/sample_code.py"
    assert stat.S_IMODE(Path(variable).stat().st_mode) == 0o700
    hosts.shutdown().get(DEADLINE)
    agent.wait()
    assert not Path(variable).parent.exists()
    withdraw(folder)


def test_variables_of_torchx_roles(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roles = [SimpleNamespace(env={}), SimpleNamespace(env={"WORKSPACE_DIR": "/w", "PYTHONPATH": "/a:/w/code"})]
    Workspace({project: "code"}).set_env_vars(SimpleNamespace(roles=roles))
    root = "${img_root}"
    first = {"WORKSPACE_DIR": f"{root}/workspace", "PYTHONPATH": f"{root}/workspace/code", "CONDA_DIR": f"{root}/conda"}
    assert roles[0].env == first
    assert roles[1].env == {"WORKSPACE_DIR": "/w", "PYTHONPATH": "/a:/w/code", "CONDA_DIR": f"{root}/conda"}
    flat = SimpleNamespace(env={})
    Workspace({project: ""}, env=None).set_env_vars(SimpleNamespace(roles=[flat]))
    assert flat.env == {"WORKSPACE_DIR": f"{root}/workspace", "PYTHONPATH": f"{root}/workspace"}


def test_the_active_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONDA_PREFIX", "/envs/mine")
    assert Workspace().env == ACTIVE_CONDA_ENV
    assert ACTIVE_CONDA_ENV.conda_prefix == "/envs/mine"
    assert CondaEnvironment("/envs/other").conda_prefix == "/envs/other"
    monkeypatch.delenv("CONDA_PREFIX")
    with pytest.raises(WorkspaceError, match="no conda environment is active"):
        _ = ACTIVE_CONDA_ENV.conda_prefix
