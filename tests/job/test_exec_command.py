"""Commands and terminals on hosts that are processes of this machine."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import DEADLINE, REPOSITORY, wait_until

from monarch_slurm.actor import ActorError, Channel, HostMesh
from monarch_slurm.job import BashActor, JobSpecError, ProcessJob, exec_command, hosts_from_config, shell


@pytest.fixture(scope="module")
def hosts() -> Iterator[HostMesh]:
    job = ProcessJob({"hosts": 2}, env={"PYTHONPATH": str(REPOSITORY)})
    yield job.state(cached_path=None).hosts
    job.kill()


def test_a_line_runs_on_every_host_and_its_output_comes_here(
    hosts: HostMesh, capsys: pytest.CaptureFixture[str]
) -> None:
    line = 'echo "host $MONARCH_RANK_HOSTS of $MONARCH_SIZE_HOSTS $WHAT"; echo oops >&2; exit $MONARCH_RANK_HOSTS'
    assert exec_command(hosts, line, env={"WHAT": "a 'b'"}).get(DEADLINE) == 1
    printed = capsys.readouterr()
    assert sorted(printed.out.splitlines()) == ["host 0 of 2 a 'b'", "host 1 of 2 a 'b'"]
    assert printed.err == "oops\noops\n"


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"rank": 3}, ["1/2 1/2"]),
        ({"point": {"hosts": 1}}, ["1/2 0/2", "1/2 1/2"]),
        ({"point": {"gpus": 1}}, ["0/2 1/2", "1/2 1/2"]),
        ({"point": {"hosts": 1, "gpus": 0}}, ["1/2 0/2"]),
    ],
)
def test_some_ranks_know_their_place_in_the_whole(
    hosts: HostMesh, capsys: pytest.CaptureFixture[str], where: dict[str, dict[str, int]], said: list[str]
) -> None:
    line = "echo $MONARCH_RANK_HOSTS/$MONARCH_SIZE_HOSTS $MONARCH_RANK_GPUS/$MONARCH_SIZE_GPUS"
    assert exec_command(hosts, line, per_host={"gpus": 2}, **where).get(DEADLINE) == 0  # type: ignore[arg-type]
    assert sorted(capsys.readouterr().out.splitlines()) == said


def test_a_python_program_runs_in_the_process_of_its_rank(
    hosts: HostMesh, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "helper.py").write_text("NAME = 'helped'")
    (tmp_path / "script.py").write_text(
        "import helper, os, sys; from monarch_slurm.actor import current_rank\n"
        "print(helper.NAME, current_rank()['hosts'], sys.argv, os.getcwd(), os.environ['X'])\n"
        "sys.exit(3 if current_rank().rank else 0)"
    )
    (tmp_path / "work").mkdir()
    ran = exec_command(hosts, ["script.py", "--a", "b c"], env={"X": "y"}, workdir=str(tmp_path / "work"))
    assert ran.get(DEADLINE) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"helped {rank} ['{tmp_path}/script.py', '--a', 'b c'] {tmp_path}/work y" for rank in (0, 1)]
    assert exec_command(hosts, ["-m", "helper"]).get(DEADLINE) == 0
    (tmp_path / "broken.py").write_text("1 / 0")
    assert exec_command(hosts, ["broken.py"], rank=0).get(DEADLINE) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_outputs_in_files_of_each_rank(hosts: HostMesh, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out" / "$SUBDIR")
    assert exec_command(hosts, ["echo", "a b"], output_dir=out, per_host={"gpus": 2}).get(DEADLINE) == 0
    names = [f"hosts_{host}_gpus_{gpu}" for host in (0, 1) for gpu in (0, 1)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert {(tmp_path / "out" / name / "stdout.log").read_text() for name in names} == {"a b\n"}
    (tmp_path / "hello.py").write_text("print('hello')")
    assert exec_command(hosts, ["hello.py"], output_dir=str(tmp_path / "second")).get(DEADLINE) == 0
    assert (tmp_path / "second" / "hosts_1" / "stdout.log").read_text() == "hello\n"
    assert capsys.readouterr().out == ""


def test_a_command_that_kills_its_process_is_an_error_and_not_a_wait(hosts: HostMesh) -> None:
    import monarch_slurm.actor as public

    told = []
    hook, public.unhandled_fault_hook = public.unhandled_fault_hook, told.append  # type: ignore[assignment]
    try:
        error = exec_command(hosts, "kill -9 $PPID; sleep 1000", rank=1).exception(DEADLINE)
        wait_until(lambda: told, "the fault")
    finally:
        public.unhandled_fault_hook = hook
    assert "Killed(sig=9)" in str(error)


def test_a_command_that_a_signal_ends(hosts: HostMesh) -> None:
    assert exec_command(hosts, "kill -TERM $$", rank=0).get(DEADLINE) == 128 + 15
    assert exec_command(hosts, "true", rank=0, workdir="/no/such/folder").get(DEADLINE) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"cmd": []}, "no command"),
        ({"cmd": " "}, "no command"),
        ({"rank": 2}, "no rank 2"),
        ({"rank": -1}, "no rank -1"),
        ({"rank": 0, "point": {"hosts": 0}}, "exclude each other"),
        ({"point": {"gpus": 0}}, "no dimension 'gpus'"),
        ({"point": {"hosts": 2}}, "outside of the mesh"),
    ],
)
def test_arguments_that_make_no_sense(hosts: HostMesh, arguments: dict[str, object], text: str) -> None:
    with pytest.raises(JobSpecError, match=text):
        exec_command(hosts, **{"cmd": "true", **arguments})  # type: ignore[arg-type]


def test_endpoints_of_the_actor(hosts: HostMesh) -> None:
    procs = hosts.spawn_procs()
    actors = procs.spawn("bash", BashActor)
    results = actors.run.call("echo $MONARCH_RANK_HOSTS; exit 2", [1]).get(DEADLINE)
    assert results.item(hosts=0) == {"returncode": 0, "stdout": "", "stderr": "", "skipped": True}
    assert results.item(hosts=1) == {"returncode": 2, "stdout": "1\n", "stderr": ""}
    port, receiver = Channel[str].open()
    actors.run_streaming.call("echo out; echo err >&2; exit 4", port, [0]).get(DEADLINE)
    said = [receiver.recv().get(DEADLINE) for _ in range(4)]
    assert sorted(said) == ["0:err:err", "0:out:out", "0:rc:4", "skip:1"]
    with pytest.raises(ActorError, match="FileNotFoundError"):
        actors.run_python.call(["x.py"], None, "/no/such/folder").get(DEADLINE)
    procs.stop().get(DEADLINE)


def test_a_shell_is_for_one_host(hosts: HostMesh) -> None:
    with pytest.raises(ValueError, match="slice it"):
        shell(hosts)


def test_hosts_by_name() -> None:
    assert len(hosts_from_config("any")) == 2


SHELL = """
from monarch_slurm.actor import this_host
from monarch_slurm.job import shell
code = shell(this_host(), env={"SHELL": "/bin/bash", "COLOUR": "blue"}, workdir="/")
print("exit code", code)
"""


def test_a_shell_in_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SHELL)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    os.close(theirs)
    os.set_blocking(ours, False)
    seen = ""

    def shows(text: str) -> bool:
        nonlocal seen
        with contextlib.suppress(OSError):  # nothing there now
            seen += os.read(ours, 65536).decode(errors="replace")
        return text in seen

    try:
        wait_until(lambda: shows("") and seen, "the prompt")
        os.write(
            ours, b"PS1='re''ady>'; pwd; echo is-$COLOUR; tty | cut -c-9; sh -c 'echo as''leep; exec sleep 1000'\n"
        )
        wait_until(lambda: shows("is-blue") and shows("/dev/pts/") and shows("asleep"), "the answers")
        assert "ready>" not in seen
        os.write(ours, b"\x03")  # Ctrl-C ends the sleep there, and not the program here
        wait_until(lambda: shows("ready>"), "the next prompt")
        os.write(ours, b"stty size; exit 7\n")
        wait_until(lambda: shows("exit code 7"), "the end")
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def piped_shell(folder: Path, typed: str) -> str:
    """Run a shell whose stdin is a pipe that ends after ``typed`` has been answered with ``ready``; return all that the
    program prints.
    """
    (folder / "program.py").write_text(SHELL)
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(folder / "program.py")],
            stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "HOME": str(folder)},
        )  # fmt: skip
    try:
        assert process.stdin is not None
        with process.stdin as stdin:
            if typed:
                stdin.write(typed.encode())
                stdin.flush()
                wait_until(lambda: "\nready" in said(folder) or process.poll() is not None, "what was typed")
        assert process.wait(DEADLINE) == 0, said(folder)
    finally:
        process.kill()
        process.wait()
    return said(folder)


def said(folder: Path) -> str:
    return (folder / "output").read_text().replace("\r", "")


@pytest.mark.parametrize("typed", ["", "echo re''ady; cat\n", "trap '' HUP; echo re''ady; while :; do sleep 1; done\n"])
def test_the_end_of_stdin_ends_the_shell(tmp_path: Path, typed: str) -> None:
    output = piped_shell(tmp_path, typed)
    assert re.search(r"exit code (129|137)\n", output), output


def test_what_a_shell_leaves_in_the_background_holds_nobody_up(tmp_path: Path) -> None:
    output = piped_shell(tmp_path, "trap '' HUP; sleep 1000 & echo pid=$!=; echo re''ady; exit 3\n")
    found = re.search(r"pid=(\d+)=", output)
    assert found is not None, output
    with contextlib.suppress(ProcessLookupError):  # its proc ended, and may have taken it along
        os.kill(int(found[1]), signal.SIGKILL)
    assert "exit code 3\n" in output


def test_a_shell_without_stdin_ends(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os, sys\nsys.stdin.close()\n" + SHELL)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert re.search(r"exit code (129|137)\n", done.stdout), done.stderr
