"""References that go from one program to another: the other one joins as a guest, and calls."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from counter import Counter
from support import DEADLINE, REPOSITORY, Program, wait_until

from monarch_slurm.actor import Channel, Port, ProcMesh, SupervisionError, endpoint, send
from monarch_slurm.actor.guests import _guests
from monarch_slurm.host.identity import NoControllerError
from monarch_slurm.host.invitations import find_invitation

PATHS = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}:{REPOSITORY / 'tests' / 'actor'}"}


class Shared(Counter):
    """Is called by other programs."""

    kept: Any = None

    @endpoint
    def fail(self) -> None:
        raise ValueError("on purpose")

    @endpoint
    def send_to(self, port: Port[str], text: str) -> None:
        port.send(text)

    @endpoint
    def port_for_more(self) -> Port[str]:
        port, self.receiver = Channel[str].open()
        return port

    @endpoint
    def received(self) -> str:
        text: str = self.receiver.recv().get(DEADLINE)
        return text

    @endpoint(explicit_response_port=True)
    def never(self, port: Port[int]) -> None:
        self.kept = port

    @endpoint
    def length(self, data: bytes) -> int:
        return len(data)

    @endpoint
    def parent(self) -> int:
        return os.getppid()

    @endpoint
    def keep(self, thing: Any) -> None:
        self.kept = thing

    @endpoint
    def add_to_kept(self, n: int) -> list[int]:
        values: list[int] = self.kept.add.call(n).get(DEADLINE).values()
        return values

    @endpoint
    def end_kept(self) -> str:
        return str(self.kept.never.call().exception(DEADLINE))

    @endpoint
    def published(self, mesh: Any) -> bytes:
        """The pickle of a reference, made by a proc."""
        return pickle.dumps(mesh)


OWNER = """
    import os, pickle, signal, sys
    from pathlib import Path
    from test_guests import Shared
    from monarch_slurm.actor import Channel, this_host, this_proc
    procs = this_host().spawn_procs({"n": 2})
    shared, here = procs.spawn("shared", Shared, 0), this_proc().spawn("here", Shared, 0)
    shared.initialized.get(60)
    port, receiver = Channel.open()
    Path("references").write_bytes(pickle.dumps((shared, here, procs, this_host(), port)))
    print("published", flush=True)
    for command in open(os.environ["COMMANDS"]):
        if command.strip() == "stop":
            shared.stop().get(60)
        elif command.strip() == "receive":
            print("received", receiver.recv().get(60), flush=True)
"""


class Owner:
    """A program that has given references away."""

    def __init__(self, start: Callable[..., Program], folder: Path) -> None:
        commands = folder / "commands"
        os.mkfifo(commands)
        self.program = start(OWNER, env={**PATHS, "COMMANDS": str(commands)})
        self.commands = open(commands, "r+b", buffering=0)  # noqa: SIM115 - closed by the fixture; waits for no reader
        self.program.expect("published")
        self.pickled = (self.program.stdout.parent / "references").read_bytes()
        self.shared, self.here, self.procs, self.host, self.port = pickle.loads(self.pickled)

    def tell(self, command: str) -> None:
        self.commands.write(f"{command}\n".encode())


@pytest.fixture
def owner(program: Callable[..., Program], tmp_path: Path) -> Iterator[Owner]:
    started = Owner(program, tmp_path)
    yield started
    started.commands.close()


def guests_of(shared: Any) -> list[Any]:
    return [guest for program, guest in _guests.items() if program == shared._program]


def test_a_program_calls_actors_of_another(owner: Owner) -> None:
    shared = owner.shared
    assert shared.add.call(1).get(DEADLINE).values() == [1, 1]
    assert shared.slice(n=1).add.call_one(1).get(DEADLINE) == 2
    shared.add.broadcast(1)
    assert sorted(future.get(DEADLINE) for future in shared.add.stream(1)) == [3, 4]
    assert shared.slice(n=0).rank.choose().get(DEADLINE) == 0
    assert owner.here.add.call_one(5).get(DEADLINE) == 5
    assert owner.here.pid.call_one().get(DEADLINE) == owner.program.process.pid
    with pytest.raises(Exception, match="on purpose"):
        shared.fail.call().get(DEADLINE)
    assert shared.slice(n=0).length.call_one(bytes(20_000_000)).get(DEADLINE) == 20_000_000
    with pytest.raises(TypeError):
        shared.add.call()
    assert len(guests_of(shared)) == 1


def test_ports_go_both_ways(owner: Owner, grid: ProcMesh) -> None:
    one = owner.shared.slice(n=0)
    port, receiver = Channel[str].open()
    one.send_to.call_one(port, "an answer by a port").get(DEADLINE)
    assert receiver.recv().get(DEADLINE) == "an answer by a port"
    answers, ranked = Channel[Any].open_ranked()
    send(owner.shared.rank, (), {}, answers)
    assert sorted(ranked.recv().get(DEADLINE) for _ in range(2)) == [(0, 0), (1, 1)]
    theirs = one.port_for_more.call_one().get(DEADLINE)
    theirs.send("to a port that came as an answer")
    assert one.received.call_one().get(DEADLINE) == "to a port that came as an answer"
    owner.port.send("published")
    owner.tell("receive")
    assert owner.program.expect("received") == "published"
    theirs.send("mine")  # goes there, and no port here gets it
    # A mesh of this program in an actor of the other one, which joins this program in turn.
    mine: Any = grid.slice(x=0, y=0).spawn("mine", Shared, 100)
    one.keep.call_one(mine).get(DEADLINE)
    assert one.add_to_kept.call_one(1).get(DEADLINE) == [101]
    back = one.published.call_one(mine).get(DEADLINE)
    assert pickle.loads(back).add.call(1).get(DEADLINE).values() == [102]
    mine.stop().get(DEADLINE)


def test_procs_of_one_program_call_actors_of_another(owner: Owner, grid: ProcMesh) -> None:
    callers: Any = grid.spawn("callers", Shared, 0)
    callers.keep.call(owner.shared).get(DEADLINE)
    totals = callers.add_to_kept.call(1).get(DEADLINE).values()
    assert sorted(value for pair in totals for value in pair) == [1, 1, 2, 2, 3, 3, 4, 4]
    pending = callers.end_kept.call()
    os.kill(owner.program.process.pid, signal.SIGKILL)
    assert all("cannot be reached any more" in text for text in pending.get(DEADLINE).values())
    assert callers.pid.call().get(DEADLINE)  # they live
    callers.stop().get(DEADLINE)


def test_what_belongs_to_another_program_is_neither_spawned_on_nor_stopped(owner: Owner) -> None:
    uses: list[Callable[[], Any]] = [
        lambda: owner.procs.spawn("mine", Shared),
        lambda: owner.procs.slice(n=0).stop(),
        lambda: owner.procs.slice(n=0).host_mesh.spawn_procs(),
        lambda: owner.host.spawn_procs(),
        lambda: owner.shared.slice(n=0).stop(),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="of another program: only that program can"):
            use()
    assert owner.shared.add.call(1).get(DEADLINE).values() == [1, 1]


def test_ends_reach_a_guest_that_waits(owner: Owner) -> None:
    one, other = owner.shared.slice(n=0), owner.shared.slice(n=1)
    pid = one.pid.call_one().get(DEADLINE)
    pending = one.never.call_one(), other.never.call_one()
    os.kill(pid, signal.SIGTERM)
    with pytest.raises(SupervisionError, match=r"Killed\(sig=15\)"):
        pending[0].get(DEADLINE)
    with pytest.raises(SupervisionError, match=r"Killed\(sig=15\)"):
        one.add.call_one(1).get(DEADLINE)
    # A failure that nobody handles ends the other program.
    assert owner.program.wait() == 1
    assert isinstance(pending[1].exception(DEADLINE), SupervisionError)
    with pytest.raises(SupervisionError, match="belongs to another program, which cannot be reached: it has ended"):
        other.add.call_one(1).get(DEADLINE)


def test_a_mesh_that_its_owner_stops(owner: Owner) -> None:
    one = owner.shared.slice(n=0)
    pending = one.never.call_one()
    assert one.add.call_one(1).get(DEADLINE) == 1
    owner.tell("stop")
    with pytest.raises(SupervisionError):
        pending.get(DEADLINE)
    with pytest.raises(SupervisionError):
        one.add.call_one(1).get(DEADLINE)
    assert owner.here.add.call_one(1).get(DEADLINE) == 1


@pytest.mark.parametrize("agent", [True, False], ids=["agent", "controller"])
def test_a_program_that_is_killed(owner: Owner, agent: bool) -> None:
    waits = owner.shared.never.call(), owner.here.never.call_one()
    assert owner.shared.add.call(1).get(DEADLINE).values() == [1, 1]
    owner.program.note_family()
    if agent:
        parent = owner.shared.slice(n=0).parent.call_one().get(DEADLINE)
        os.kill(parent, signal.SIGKILL)
    else:
        os.kill(owner.program.process.pid, signal.SIGKILL)
    for future in waits:
        assert isinstance(future.exception(DEADLINE), SupervisionError)
    owner.program.wait()
    with pytest.raises(SupervisionError):
        owner.shared.add.call(1).get(DEADLINE)
    owner.program.check_gone()


CALLER = """
    import os, pickle
    shared, here, *_ = pickle.loads(bytes.fromhex(os.environ["REFERENCES"]))
    print("sum", sum(shared.add.call(1).get(60).values()), here.add.call_one(1).get(60), flush=True)
    here.add.broadcast(1)
"""


def test_a_script_that_has_no_procs_and_ends(owner: Owner, program: Callable[..., Program]) -> None:
    script = program(CALLER, env={**PATHS, "REFERENCES": owner.pickled.hex()})
    assert script.expect("sum") == "2 1"
    assert script.wait() == 0, script.errors()
    assert script.errors() == ""
    wait_until(lambda: owner.here.add.call_one(0).get(DEADLINE) == 2, "what the script has sent last")
    assert owner.program.errors() == ""


def test_a_script_in_another_pid_namespace_joins_by_tcp(owner: Owner, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root: a PID namespace of its own")
    script = tmp_path / "caller.py"
    script.write_text(
        "import pickle, sys\n"
        f"shared, *_ = pickle.loads(bytes.fromhex({owner.pickled.hex()!r}))\n"
        "print(sum(shared.add.call(1).get(60).values()), flush=True)\n"
        "print(shared.slice(n=0).length.call_one(bytes(20_000_000)).get(60), flush=True)\n"
        "print(shared.never.call().exception(120), flush=True)\n"
    )
    command = ["unshare", "--pid", "--mount-proc", "--fork", "--kill-child", sys.executable, str(script)]
    with subprocess.Popen(command, env={**os.environ, **PATHS}, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        assert [caller.stdout.readline(), caller.stdout.readline()] == ["2\n", "20000000\n"]
        os.kill(owner.program.process.pid, signal.SIGKILL)
        assert "cannot be reached any more" in caller.stdout.read()
        assert caller.wait(DEADLINE) == 0


def test_another_user_cannot_join(owner: Owner, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root: another user")
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            try:
                find_invitation(owner.shared._program)
            except NoControllerError:
                code = 0
            for folder in Path(os.environ["XDG_RUNTIME_DIR"]).glob("ms-0-*"):
                with contextlib.suppress(PermissionError):
                    list(folder.iterdir())
                    code = 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert owner.shared.add.call(1).get(DEADLINE).values() == [1, 1]


STORE_OWNER = """
    import pickle, threading
    from torch.distributed import TCPStore
    from test_guests import Shared
    from monarch_slurm.actor import this_host
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("mesh", pickle.dumps(this_host().spawn_procs({"n": 2}).spawn("shared", Shared, 0)))
    print("port", store.port, flush=True)
    threading.Event().wait()
"""

STORE_USER = """
    import os, pickle
    from torch.distributed import TCPStore
    import test_guests
    from counter import Counter
    from monarch_slurm.actor import this_host
    store = TCPStore("127.0.0.1", int(os.environ["PORT"]), is_master=False)
    shared = pickle.loads(store.get("mesh"))
    own = this_host().spawn_procs({"n": 2}).spawn("own", Counter, 10)
    print("sums", sum(own.add.call(1).get(60).values()), sum(shared.add.call(1).get(60).values()), flush=True)
"""


def test_a_reference_in_a_store(program: Callable[..., Program]) -> None:
    port = program(STORE_OWNER, env=PATHS).expect("port")
    user = program(STORE_USER, env={**PATHS, "PORT": port})
    assert user.expect("sums") == "22 2"
    assert user.wait() == 0
