"""How procs start: bootstrap, environment, place, what they print."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded_faults import Faults
from sample_actors import AnyName, Environment, Executables, Log
from support import DEADLINE, REPOSITORY, Program, wait_until

from monarch_slurm.actor import (
    ActorError,
    BootstrapCommand,
    Point,
    ProcMesh,
    SupervisionError,
    default_bootstrap_cmd,
    this_host,
)
from monarch_slurm.actor.proc_mesh import (
    get_active_proc_meshes,
    register_proc_mesh_spawn_callback,
    unregister_proc_mesh_spawn_callback,
)
from monarch_slurm.gpu import gpu_devices
from monarch_slurm.host import numa


def environment_of(mesh: ProcMesh) -> Any:
    return mesh.spawn("environment", Environment)


def test_bootstrap_runs_before_any_actor(spawn: Callable[..., ProcMesh]) -> None:
    def bootstrap() -> None:
        os.environ["BOOTSTRAPPED"] = f"in {os.getpid()}"

    mesh = spawn(per_host={"n": 2}, bootstrap=bootstrap)
    assert mesh.initialized.get(DEADLINE)
    values = environment_of(mesh).variable.call("BOOTSTRAPPED").get(DEADLINE).values()
    assert len(set(values)) == 2
    assert all(value.startswith("in ") for value in values)


def test_bootstrap_may_be_async(spawn: Callable[..., ProcMesh]) -> None:
    async def bootstrap() -> None:
        os.environ["BOOTSTRAPPED"] = "async"

    assert environment_of(spawn(bootstrap=bootstrap)).variable.call_one("BOOTSTRAPPED").get(DEADLINE) == "async"


def test_a_bootstrap_that_fails(spawn: Callable[..., ProcMesh], faults: Faults) -> None:
    def bootstrap() -> None:
        raise ValueError("no bootstrap today")

    mesh = spawn(bootstrap=bootstrap, name="bad")
    error = mesh.initialized.exception(DEADLINE)
    assert isinstance(error, ActorError)
    assert "no bootstrap today" in str(error)
    error = environment_of(mesh).variable.call_one("HOME").exception(DEADLINE)
    assert isinstance(error, SupervisionError)
    assert "Exited(code=1)" in str(error)
    assert "no bootstrap today" in faults.wait()[0].report()


def test_a_bootstrap_must_pickle() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        this_host().spawn_procs(bootstrap=threading.Lock().acquire)


def test_wrong_arguments_of_spawn_procs() -> None:
    host = this_host()
    with pytest.raises(ValueError, match="sizes must be 1 or more"):
        host.spawn_procs({"n": 0})
    with pytest.raises(ValueError, match=r"proc_bind length \(1\) must equal procs_per_host \(2\)"):
        host.spawn_procs({"n": 2}, proc_bind=[{"cpus": "0"}])
    with pytest.raises(ValueError, match="a list such as"):
        host.spawn_procs(proc_bind=[{"cpus": "zero"}])
    with pytest.raises(ValueError, match="knows cpus, physcpubind, gpus"):
        host.spawn_procs(proc_bind=[{"nodes": "0"}])
    with pytest.raises(TypeError, match=r"per_host maps labels to numbers of procs, such as .*; not 'gpus' to 'eight'"):
        host.spawn_procs({"gpus": "eight"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="gpus_per_proc must be 1 or more"):
        host.spawn_procs(gpus_per_proc=0)
    with pytest.raises(ValueError, match="exclude each other"):
        host.spawn_procs(proc_bind=[{"gpus": "0"}], gpus_per_proc=1)


def test_environment_reaches_procs(spawn: Callable[..., ProcMesh], monkeypatch: pytest.MonkeyPatch) -> None:
    spawn().initialized.get(DEADLINE)  # the agent of this machine has the environment in which it was started
    monkeypatch.setenv("MONARCH_FORWARDED", "from the client")
    monkeypatch.setenv("OTHER", "not forwarded")
    actor = environment_of(spawn(env={"GIVEN": "given", "HOME": None}))
    assert actor.variable.call_one("GIVEN").get(DEADLINE) == "given"
    assert actor.variable.call_one("MONARCH_FORWARDED").get(DEADLINE) == "from the client"
    assert actor.variable.call_one("HOME").get(DEADLINE) is None
    assert actor.variable.call_one("OTHER").get(DEADLINE) is None
    assert actor.variable.call_one("MONARCH_SLURM_ADDRESS").get(DEADLINE) == "127.0.0.1"


def test_folder_and_search_path_reach_procs(
    spawn: Callable[..., ProcMesh], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "only_here.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    actor = environment_of(spawn())
    folder, _, search_path = actor.place.call_one().get(DEADLINE)
    assert folder == str(tmp_path)
    assert str(tmp_path) in search_path
    assert actor.import_it.call_one("only_here").get(DEADLINE) == str(tmp_path / "only_here.py")


def test_a_folder_that_is_gone(spawn: Callable[..., ProcMesh], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert environment_of(spawn()).place.call_one().get(DEADLINE)


def test_procs_can_be_bound_to_cpus(spawn: Callable[..., ProcMesh]) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    first, last = cpus[0], cpus[-1]
    mesh = spawn(per_host={"n": 2}, proc_bind=[{"cpus": f"{first}"}, {"cpus": f"{first},{last}"}])
    places = environment_of(mesh).place.call().get(DEADLINE).values()
    assert [bound for _, bound, _ in places] == [[first], sorted({first, last})]


def test_cpus_that_are_not_there(spawn: Callable[..., ProcMesh], faults: Faults) -> None:
    mesh = spawn(proc_bind=[{"cpus": "100000"}])
    assert isinstance(mesh.initialized.exception(DEADLINE), SupervisionError)
    assert "cannot bind" in faults.wait()[0].report()


@pytest.mark.skipif(bool(gpu_devices()), reason="this machine has GPUs")
def test_gpus_that_are_not_there(spawn: Callable[..., ProcMesh], faults: Faults) -> None:
    mesh = spawn(per_host={"gpus": 2}, gpus_per_proc=4)
    error = mesh.initialized.exception(DEADLINE)
    assert isinstance(error, SupervisionError)
    assert "GPU 0 was asked for, but 0 can be seen here" in str(error)
    faults.wait()


def test_names_of_meshes_may_hold_anything(spawn: Callable[..., ProcMesh]) -> None:
    mesh = spawn(name="a/b c.../ü\n%s")
    log: Any = mesh.spawn("x/y\n..", Log)
    assert log.add.call_one(1).get(DEADLINE) == 1


def test_an_environment_that_is_too_large_is_an_error(spawn: Callable[..., ProcMesh], faults: Faults) -> None:
    mesh = spawn(env={"LARGE": "x" * 200_000})
    error = mesh.initialized.exception(DEADLINE)
    assert "NotStarted(its environment and search path take" in str(error)
    faults.wait()


PRINTING = """
    import sys
    from monarch_slurm.actor import Actor, endpoint, this_host

    class Speaker(Actor):
        @endpoint
        def say(self, text, stream):
            print(text, file=getattr(sys, stream), flush=True)

        @endpoint
        def flood(self, lines):
            for number in range(lines):
                print(f"line {number} " + "x" * 500)
            sys.stdout.flush()

    if __name__ == "__main__":
        speakers = this_host().spawn_procs({"n": 2}, name="speakers").spawn("speaker", Speaker)
        speakers.say.call("to stdout", "stdout").get(30)
        speakers.slice(n=1).say.call_one("to stderr", "stderr").get(30)
        speakers.slice(n=0).say.call_one("no newline", "stdout").get(30)
        speakers.slice(n=0).flood.call_one(FLOOD).get(30)
        print("said")
"""


def test_lines_are_prefixed_with_host_mesh_and_rank(program: Callable[..., Program]) -> None:
    running = program(PRINTING.replace("FLOOD", "2000"))
    assert running.wait() == 0
    lines = running.output().splitlines()
    spoken = [line for line in lines if line.endswith("to stdout")]
    assert sorted(line.split()[-3] for line in spoken) == ["0]", "1]"]
    assert all(line.startswith(f"[{os.uname().nodename} speakers-") for line in spoken)
    assert any(line.endswith(" 1] to stderr") for line in running.errors().splitlines())
    assert [line.split()[4] for line in lines if " line " in line] == [str(number) for number in range(2000)]


def test_lines_can_go_to_files(program: Callable[..., Program], tmp_path: Path) -> None:
    running = program(PRINTING.replace("FLOOD", "10"), env={"MONARCH_SLURM_LOG_DIR": str(tmp_path / "logs")})
    assert running.wait() == 0
    assert "to stdout" not in running.output()
    texts = {path.name.rpartition(".log")[0][-1]: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert texts["0"].splitlines()[:2] == ["to stdout", "no newline"]
    assert texts["1"].splitlines() == ["to stdout", "to stderr"]


def test_output_that_nobody_reads_stops_nothing(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    text = PRINTING.replace("FLOOD", "3000").replace('print("said")', 'open("said", "w").close()')
    script.write_text(textwrap.dedent(text))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        wait_until((tmp_path / "said").exists, "the end of the program's work while its output is not read")
    finally:
        process.communicate(timeout=DEADLINE)
    assert process.returncode == 0


def test_a_command_of_the_users_runs_procs(spawn: Callable[..., ProcMesh], tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper"
    wrapper.write_text('#!/bin/sh\nWRAPPED="yes $1"; export WRAPPED; shift; exec "$@"\n')
    wrapper.chmod(0o755)
    plain = default_bootstrap_cmd()

    def command(point: Point) -> BootstrapCommand:
        arguments = [str(point["n"]), plain.program, *plain.args]
        return BootstrapCommand(str(wrapper), None, arguments, {"HOME": None}).with_env({"GIVEN": "given"})

    mesh = spawn(per_host={"n": 2}, bootstrap_command=command)
    actors = environment_of(mesh)
    assert actors.variable.call("WRAPPED").get(DEADLINE).values() == ["yes 0", "yes 1"]
    assert actors.variable.call("GIVEN").get(DEADLINE).values() == ["given"] * 2
    assert actors.variable.call("HOME").get(DEADLINE).values() == [None] * 2
    names = {name for name in os.environ if name.startswith("MONARCH_SLURM_PROC_SPEC")}
    assert not names


def test_a_command_can_be_changed() -> None:
    command = default_bootstrap_cmd()
    command.args.append("--more")  # type: ignore[attr-defined]
    command.arg0, command.program, command.env, command.inherit_env = "py", "python", {"A": "1"}, False
    assert command == BootstrapCommand("python", "py", [*default_bootstrap_cmd().args, "--more"], {"A": "1"}, False)
    assert command.with_env({"B": None}).env == {"A": "1", "B": None}


def test_a_proc_may_start_from_an_empty_environment(spawn: Callable[..., ProcMesh]) -> None:
    command = dataclasses.replace(default_bootstrap_cmd(), inherit_env=False, env={"ONLY": "this"})
    actor = environment_of(spawn(bootstrap_command=command))
    assert actor.variable.call_one("ONLY").get(DEADLINE) == "this"
    assert actor.variable.call_one("PATH").get(DEADLINE) is None


def test_a_command_that_cannot_be_run(spawn: Callable[..., ProcMesh], faults: Faults) -> None:
    mesh = spawn(bootstrap_command=BootstrapCommand("/no/such/program"))
    assert isinstance(mesh.initialized.exception(DEADLINE), SupervisionError)
    assert "cannot run the bootstrap command '/no/such/program': No such file" in faults.wait()[0].report()
    with pytest.raises(TypeError, match=r"a BootstrapCommand expected for \{\}, not str"):
        this_host().spawn_procs(bootstrap_command=lambda point: "python")  # type: ignore[arg-type,return-value]


def test_another_python_runs_procs_and_what_they_spawn(spawn: Callable[..., ProcMesh], tmp_path: Path) -> None:
    python = tmp_path / "my-python"
    python.write_text(f'#!/bin/sh\nMY_PYTHON=yes exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    mesh = this_host().with_python_executable(str(python)).spawn_procs()
    try:
        parent: Any = mesh.spawn("parent", Executables)
        assert parent.get.call_one().get(DEADLINE) == ("yes", "yes")
    finally:
        mesh.stop().get(DEADLINE)


@pytest.mark.skipif(
    not Path("/sys/devices/system/node/node0/cpulist").exists(), reason="this machine tells no NUMA nodes"
)
def test_procs_can_be_bound_to_numa_nodes(spawn: Callable[..., ProcMesh], faults: Faults) -> None:
    actor = environment_of(spawn(proc_bind=[{"cpunodebind": "0", "membind": "0"}]))
    _, bound, _ = actor.place.call_one().get(DEADLINE)
    assert set(bound) <= set(numa.cpus_of([0]))
    assert not faults.failures
    mesh = spawn(proc_bind=[{"cpunodebind": "999"}])
    assert isinstance(mesh.initialized.exception(DEADLINE), SupervisionError)
    assert "'cpunodebind': [999]" in faults.wait()[0].report()


def test_who_asked_is_told_of_new_procs(spawn: Callable[..., ProcMesh]) -> None:
    told: list[ProcMesh] = []
    register_proc_mesh_spawn_callback(told.append)
    mesh = spawn(name="announced")
    unregister_proc_mesh_spawn_callback(told.append)
    spawn()
    assert told == [mesh]
    with pytest.raises(ValueError, match="not in list"):
        unregister_proc_mesh_spawn_callback(told.append)
    assert mesh in get_active_proc_meshes()
    mesh.stop().get(DEADLINE)
    assert mesh not in get_active_proc_meshes()


def test_a_table_of_procs(spawn: Callable[..., ProcMesh]) -> None:
    mesh = spawn(per_host={"x": 1, "gpus": 2}, name="t")
    head, *rows = [line.split() for line in mesh.to_table().splitlines()]
    assert head == ["rank", "x", "gpus", "host", "proc"]
    assert [row[:4] for row in rows] == [[str(n), "0", str(n), os.uname().nodename] for n in range(2)]


def test_arguments_of_an_actor_may_be_called_anything(spawn: Callable[..., ProcMesh]) -> None:
    mesh = spawn().spawn(name="named", Class=AnyName, actor_class="mine")
    assert mesh.look.call_one().get(DEADLINE) == "mine"


def test_there_are_no_distributed_tensors(spawn: Callable[..., ProcMesh]) -> None:
    procs = spawn()
    mesh: Any = procs.spawn("log", Log)
    for ask in (mesh.add.rref, procs.activate, procs.rank_tensors, lambda: procs.rank_tensor("gpus")):
        with pytest.raises(NotImplementedError, match="no distributed tensors"):
            ask()
