"""Workers that programs attach to: how they come, whom they serve, whom they refuse."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from job_agents import Worker as PidActor
from recorded_faults import Faults
from support import DEADLINE, REPOSITORY, Program, descendants, is_alive, wait_gone, wait_until

from monarch_slurm.actor import (
    Actor,
    AttachError,
    Channel,
    NoKeyError,
    SupervisionError,
    attach_to_workers,
    endpoint,
    make_worker_key,
    run_worker_loop_forever,
    start_worker_loop_forever,
    this_host,
)
from monarch_slurm.config import configured
from monarch_slurm.wire import BindError, dumps, loads

SCRIPT = """
import logging, sys
from monarch_slurm.actor import run_worker_loop_forever, run_worker_loop_until_shutdown
logging.basicConfig(level=logging.INFO)
if __name__ == "__main__":
    address, key, how = sys.argv[1:]
    arguments = dict(private_key=key or None, ca=None if key else "trust_all_connections", address=address)
    if how == "forever":
        run_worker_loop_forever(**arguments)
    run_worker_loop_until_shutdown(**arguments)
    print("returned")
"""


class Worker:
    """A worker of its own process."""

    def __init__(
        self,
        folder: Path,
        address: str,
        key: str,
        how: str,
        env: dict[str, str],
        fds: tuple[int, ...],
        within: Sequence[str] = (),
    ):
        self.address = address
        self.log = folder / "log"
        (folder / "worker.py").write_text(SCRIPT)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*within, sys.executable, str(folder / "worker.py"), address, key, how],
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", **env},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=fds,
            )  # fmt: skip

    def text(self) -> str:
        return self.log.read_text()

    def said(self, what: str) -> None:
        wait_until(lambda: what in self.text(), f"{what!r} in\n{self.text()}")

    def wait(self) -> int:
        return self.process.wait(DEADLINE)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_worker_key(tmp_path_factory.mktemp("key") / "key"))


@pytest.fixture
def worker(tmp_path: Path, key: str) -> Iterator[Callable[..., Worker]]:
    started: list[Worker] = []

    def start(
        address: str = "", how: str = "forever", with_key: str = key, env: dict[str, str] | None = None,
        fds: tuple[int, ...] = (), within: Sequence[str] = (),
    ) -> Worker:  # fmt: skip
        folder = tmp_path / f"worker{len(started)}"
        folder.mkdir()
        started.append(
            Worker(folder, address or f"tcp://127.0.0.1:{free_port()}", with_key, how, env or {}, fds, within)
        )
        return started[-1]

    yield start
    for one in started:
        family = descendants(one.process.pid) if is_alive(one.process.pid) else []
        one.process.kill()
        one.process.wait()
        wait_gone(*family)


def test_workers_are_hosts_of_one_program_after_the_other(
    worker: Callable[..., Worker], key: str, tmp_path: Path
) -> None:
    tcp, ipc = worker(), worker(f"ipc://{tmp_path}/w")
    hosts = attach_to_workers(private_key=key, workers=[tcp.address, ipc.address])
    assert str(hosts.extent) == "{hosts: 2}"
    actors: Any = hosts.spawn_procs({"gpus": 2}).spawn("actor", PidActor)
    pids = actors.pid.call().get(DEADLINE)
    assert hosts.initialized.get(DEADLINE) is True
    assert set(pids.slice(hosts=0).values()) <= set(descendants(tcp.process.pid))
    assert set(pids.slice(hosts=1).values()) <= set(descendants(ipc.process.pid))
    assert attach_to_workers(private_key=key, workers=[ipc.address, tcp.address]).host_names == ["w", "127.0.0.1"]
    secret = Path(key).read_text().strip().encode()
    for pid in {*descendants(tcp.process.pid), *descendants(ipc.process.pid), tcp.process.pid, ipc.process.pid}:
        for name in ("cmdline", "environ"):
            assert secret not in Path(f"/proc/{pid}/{name}").read_bytes()
    hosts.stop().get(DEADLINE)
    wait_gone(*pids.values())
    with pytest.raises(RuntimeError, match="HostMesh has already been stopped"):
        hosts.spawn_procs()

    again = attach_to_workers(private_key=Path(key).read_bytes().strip(), workers=[tcp.address])
    more: Any = again.spawn_procs().spawn("actor", PidActor)
    assert more.pid.call_one().get(DEADLINE) in descendants(tcp.process.pid)
    with pytest.raises(RuntimeError, match="cannot stop hosts through a slice"):
        again.slice(hosts=0).stop()
    again.shutdown().get(DEADLINE)
    assert tcp.wait() == 0
    assert is_alive(ipc.process.pid)
    assert secret.decode() not in tcp.text() + ipc.text()


def test_a_worker_that_is_not_there(key: str, faults: Faults) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with configured(mesh_attach_config_timeout=0.5):
        hosts = attach_to_workers(private_key=key, workers=[address, "tcp://no.such.host.invalid:1"])
        procs = hosts.spawn_procs()
        with pytest.raises(AttachError, match=r"cannot attach to the worker tcp://.*: (nothing listens there|Name or)"):
            hosts.initialized.get(DEADLINE)
    error = procs.initialized.exception(DEADLINE)
    assert isinstance(error, SupervisionError)
    assert "cannot attach to the worker" in str(error)
    faults.wait(2)  # the owner of the procs is told of each host


def test_another_key_is_refused_and_disturbs_nobody(worker: Callable[..., Worker], key: str, tmp_path: Path) -> None:
    one = worker()
    hosts = attach_to_workers(private_key=key, workers=[one.address])
    hosts.initialized.get(DEADLINE)
    other = make_worker_key(tmp_path / "other")
    url = one.address.replace("127.0.0.1", "127.0.0.2")  # nothing there
    with configured(mesh_attach_config_timeout=0.5), pytest.raises(AttachError, match="nothing listens there"):
        attach_to_workers(private_key=other, workers=[url]).initialized.get(DEADLINE)
    spelled = one.address.replace("127.0.0.1", "localhost")
    with pytest.raises(AttachError, match="it does not take this key"):
        attach_to_workers(private_key=other, workers=[spelled]).initialized.get(DEADLINE)
    one.said("that did not prove that they hold this job's key")
    actor: Any = hosts.spawn_procs().spawn("actor", PidActor)
    assert actor.pid.call_one().get(DEADLINE) in descendants(one.process.pid)
    hosts.stop().get(DEADLINE)


def test_a_program_that_attaches_twice(worker: Callable[..., Worker], key: str) -> None:
    one = worker()
    with pytest.raises(ValueError, match="is named 2 times"):
        attach_to_workers(private_key=key, workers=[one.address, one.address])
    hosts = attach_to_workers(private_key=key, workers=[one.address])
    hosts.initialized.get(DEADLINE)
    spelled = one.address.replace("127.0.0.1", "localhost")
    with pytest.raises(AttachError, match="this program has attached to it before"):
        attach_to_workers(private_key=key, workers=[spelled]).initialized.get(DEADLINE)
    hosts.stop().get(DEADLINE)


def test_stop_of_one_mesh_leaves_the_procs_of_another_on_the_same_workers_alone(
    worker: Callable[..., Worker], key: str
) -> None:
    shared, own = worker(), worker()
    first = attach_to_workers(private_key=key, workers=[shared.address, own.address])
    second = attach_to_workers(private_key=key, workers=[shared.address])
    of_first: Any = first.spawn_procs().spawn("actor", PidActor)
    of_slice: Any = first.slice(hosts=0).spawn_procs().spawn("actor", PidActor)
    of_second: Any = loads(dumps(second)).spawn_procs().spawn("actor", PidActor)
    pids = [*of_first.pid.call().get(DEADLINE).values(), of_slice.pid.call_one().get(DEADLINE)]
    pid = of_second.pid.call_one().get(DEADLINE)
    first.stop().get(DEADLINE)
    wait_gone(*pids)
    own.said("has left")
    assert of_second.pid.call_one().get(DEADLINE) == pid
    first.stop().get(DEADLINE)
    with pytest.raises(RuntimeError, match="has already been stopped"):
        first.spawn_procs()
    second.stop().get(DEADLINE)
    wait_gone(pid)
    shared.said("has left")


SECOND = """
    import sys
    from monarch_slurm.actor import attach_to_workers
    from monarch_slurm.config import configured
    if __name__ == "__main__":
        with configured(mesh_attach_config_timeout={timeout}):
            hosts = attach_to_workers(private_key={key!r}, workers=[{address!r}])
            print("attached", hosts.initialized.exception(60), flush=True)
            procs = hosts.spawn_procs({{"n": 2}})
            procs.initialized.get(60)
            print("procs", flush=True)
            sys.stdin.read()
            import time
            time.sleep(1000)
"""


def test_a_worker_serves_one_program_at_a_time(
    worker: Callable[..., Worker], key: str, program: Callable[..., Program]
) -> None:
    one = worker()
    first = program(SECOND.format(timeout=60, key=key, address=one.address))
    first.expect("procs")
    family = descendants(one.process.pid)
    with configured(mesh_attach_config_timeout=0.5), pytest.raises(AttachError) as error:
        attach_to_workers(private_key=key, workers=[one.address]).initialized.get(DEADLINE)
    assert f"it serves the program with pid {first.process.pid} on" in str(error.value)
    waiting = attach_to_workers(private_key=key, workers=[one.address])
    first.process.send_signal(signal.SIGKILL)
    assert waiting.initialized.get(DEADLINE) is True
    wait_gone(*family)
    waiting.stop().get(DEADLINE)


def test_a_program_of_another_machine_that_is_killed_lets_go_at_once(
    worker: Callable[..., Worker], key: str, program: Callable[..., Program]
) -> None:
    one = worker()
    far_off = f"""
    import monarch_slurm.host.hub
    from monarch_slurm.config import configure
    monarch_slurm.host.hub.pid_space = lambda: "another machine's"
    configure(mesh_orphan_timeout=None)
    {SECOND.format(timeout=60, key=key, address=one.address).lstrip()}"""
    first = program(far_off)
    first.expect("procs")
    family = descendants(one.process.pid)
    first.process.send_signal(signal.SIGKILL)
    waiting = attach_to_workers(private_key=key, workers=[one.address])
    assert waiting.initialized.get(DEADLINE) is True
    wait_gone(*family)
    waiting.stop().get(DEADLINE)


def test_a_worker_that_is_killed_takes_its_procs_along(worker: Callable[..., Worker], key: str, faults: Faults) -> None:
    one = worker()
    hosts = attach_to_workers(private_key=key, workers=[one.address])
    actor: Any = hosts.spawn_procs().spawn("actor", PidActor)
    actor.pid.call_one().get(DEADLINE)
    family = descendants(one.process.pid)
    one.process.kill()
    one.process.wait()
    wait_gone(*family)
    assert isinstance(actor.pid.call_one().exception(DEADLINE), SupervisionError)
    faults.wait()


def test_a_worker_that_is_told_to_end_ends_what_it_has(worker: Callable[..., Worker], key: str, faults: Faults) -> None:
    one = worker()
    hosts = attach_to_workers(private_key=key, workers=[one.address])
    hosts.spawn_procs().initialized.get(DEADLINE)
    family = descendants(one.process.pid)
    one.process.send_signal(signal.SIGINT)
    one.wait()
    wait_gone(*family)
    faults.wait()


def test_a_worker_is_known_by_its_identity(worker: Callable[..., Worker], key: str) -> None:
    port = free_port()
    worker(f"service<abc>@tcp://localhost:{port}@tcp://127.0.0.1:{port}")
    with pytest.raises(AttachError, match=r"it is service<abc>, not service<xyz>"):
        attach_to_workers(private_key=key, workers=[f"service<xyz>@tcp://localhost:{port}"]).initialized.get(DEADLINE)
    hosts = attach_to_workers(private_key=key, workers=[f"service<abc>@tcp://localhost:{port}"])
    assert hosts.initialized.get(DEADLINE)
    hosts.stop().get(DEADLINE)


@pytest.mark.parametrize("listens", [False, True])
def test_a_bound_socket_can_be_inherited(worker: Callable[..., Worker], key: str, listens: bool) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if listens:
            listening.listen()
        one = worker(f"tcp://127.0.0.1:fd{listening.fileno()}", how="until_shutdown", fds=(listening.fileno(),))
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ValueError, match="a descriptor cannot be dialled"):
            attach_to_workers(private_key=key, workers=[one.address])
        hosts = attach_to_workers(private_key=key, workers=[address])
        hosts.initialized.get(DEADLINE)
    hosts.shutdown().get(DEADLINE)
    assert one.wait() == 0
    assert "returned" in one.text()


def test_addresses_that_come_later_and_a_worker_inside_of_the_program(key: str) -> None:
    ended = start_worker_loop_forever(private_key=key, address="inproc://here")
    address, receiver = Channel.open()
    hosts = attach_to_workers(private_key=key, workers=[receiver.recv()], name="later")
    procs = hosts.spawn_procs()
    assert hosts.host_names == ["later-0"]
    assert isinstance(hosts.initialized.exception(0.0), TimeoutError)
    address.send("inproc://here")
    assert procs.initialized.get(DEADLINE)
    assert not ended._done
    hosts.shutdown().get(DEADLINE)
    ended.get(DEADLINE)
    failing = attach_to_workers(private_key=key, workers=[_failed()])
    with pytest.raises(AttachError, match="its address did not come"):
        failing.initialized.get(DEADLINE)


def _failed() -> Any:
    port, receiver = Channel.open()
    port.exception(RuntimeError("no address"))
    return receiver.recv()


def test_trust_all_connections_holds_for_this_machine_alone_and_must_be_allowed(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused = worker(with_key="")
    assert refused.wait() == 1
    assert "everybody who reaches their port runs code as you" in refused.text()
    with pytest.raises(NoKeyError):
        attach_to_workers(ca="trust_all_connections", workers=[refused.address])
    monkeypatch.setenv("MONARCH_SLURM_ALLOW_UNAUTHENTICATED", "1")
    with pytest.raises(NoKeyError, match="this machine alone"):
        attach_to_workers(ca="trust_all_connections", workers=["tcp://192.0.2.1:1"])
    with pytest.raises(NoKeyError, match="this machine alone"):
        run_worker_loop_forever(ca="trust_all_connections", address=f"tcp://0.0.0.0:{free_port()}")
    one = worker(f"ipc://{tmp_path}/w", with_key="")
    hosts = attach_to_workers(ca="trust_all_connections", workers=[one.address])
    assert hosts.initialized.get(DEADLINE)
    hosts.stop().get(DEADLINE)


def test_addresses_that_cannot_be_listened_at(key: str, tmp_path: Path) -> None:
    def start(address: str) -> None:
        start_worker_loop_forever(private_key=key, address=address).get(DEADLINE)

    with pytest.raises(BindError, match=r"cannot listen on tcp://192.0.2.1"):
        run_worker_loop_forever(private_key=key, address="tcp://192.0.2.1:7777")
    with pytest.raises(BindError, match=r"cannot listen on tcp://no.such.host.invalid"):
        start("tcp://no.such.host.invalid:7777")
    with pytest.raises(BindError, match="descriptor 999"):
        start("tcp://127.0.0.1:fd999")
    with socket.socket() as idle, pytest.raises(BindError, match="no TCP socket that is bound to a port"):
        start(f"tcp://127.0.0.1:fd{idle.fileno()}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(("127.0.0.1", 0))
        with pytest.raises(BindError, match="no TCP socket"):
            start(f"tcp://127.0.0.1:fd{datagrams.fileno()}")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(BindError, match="Address already in use"):
        start(f"tcp://127.0.0.1:{taken.getsockname()[1]}")
    for name in (str(tmp_path / "taken"), "@taken" + tmp_path.name):
        with socket.socket(socket.AF_UNIX) as taken:
            taken.bind("\0" + name[1:] if name.startswith("@") else name)
            taken.listen()
            with pytest.raises(BindError, match="Address already in use"):
                start(f"ipc://{name}")
            with socket.socket(socket.AF_UNIX) as dialling:
                dialling.connect("\0" + name[1:] if name.startswith("@") else name)
    with pytest.raises(ValueError, match="at least one worker"):
        attach_to_workers(private_key=key, workers=[])
    assert not [t for t in threading.enumerate() if t.name == "monarch-worker"]


STARTED = """
    import atexit, sys, time
    from monarch_slurm.actor import start_worker_loop_forever
    if __name__ == "__main__":
        atexit.register(print, "atexit")
        ended = start_worker_loop_forever(private_key={key!r}, address={address!r})
        print("started", flush=True)
        if {waits}:
            ended.get()
        else:
            time.sleep(1000)
        print("went on")
"""


@pytest.mark.parametrize("waits", [True, False])
def test_a_started_worker_ends_its_process_when_its_hosts_are_shut_down(
    program: Callable[..., Program], key: str, tmp_path: Path, waits: bool
) -> None:
    address = f"ipc://{tmp_path}/w"
    running = program(STARTED.format(key=key, address=address, waits=waits))
    running.expect("started")
    hosts = attach_to_workers(private_key=key, workers=[address])
    hosts.stop().get(DEADLINE)
    hosts = attach_to_workers(private_key=key, workers=[address])
    hosts.spawn_procs().initialized.get(DEADLINE)
    running.note_family()
    hosts.shutdown().get(DEADLINE)
    assert running.wait() == 0, running.errors()
    assert running.output() == "started\natexit\n"
    running.check_gone()


class Environment(Actor):
    @endpoint
    def get(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]


def test_a_workers_own_variables_go_before_those_of_the_program(
    worker: Callable[..., Worker], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCH_BOTH", "program")
    monkeypatch.setenv("TORCHFT_BOTH", "program")
    monkeypatch.setenv("MONARCH_PROGRAM", "program")
    one = worker(env={"MONARCH_BOTH": "worker", "TORCHFT_BOTH": "worker", "MONARCH_WORKER": "worker"})
    names = "MONARCH_BOTH", "TORCHFT_BOTH", "MONARCH_PROGRAM", "MONARCH_WORKER"
    hosts = attach_to_workers(private_key=key, workers=[one.address])
    theirs: Any = hosts.spawn_procs().spawn("environment", Environment)
    assert theirs.get.call_one(*names).get(DEADLINE) == ["worker", "worker", "program", "worker"]
    asked_for: Any = hosts.spawn_procs(env={"MONARCH_BOTH": "asked for"}).spawn("environment", Environment)
    assert asked_for.get.call_one("MONARCH_BOTH").get(DEADLINE) == ["asked for"]
    procs = this_host().spawn_procs()
    here: Any = procs.spawn("environment", Environment)
    assert here.get.call_one(*names).get(DEADLINE) == ["program", "program", "program", None]
    procs.stop().get(DEADLINE)
    hosts.stop().get(DEADLINE)


THROUGH = """
    import os, time
    from monarch_slurm.actor import attach, attach_to_workers, this_host
    from job_agents import Worker

    def attempt(address):
        try:
            attach(address, private_key={key!r})
        except RuntimeError as error:
            print("refused", error, flush=True)

    if __name__ == "__main__":
        attach({one!r}, private_key={key!r})
        attach({one!r}, private_key={key!r})
        attempt({other!r})
        hosts = attach_to_workers(private_key={key!r}, workers=[{one!r}, {other!r}])
        actors = hosts.spawn_procs({{"n": 2}}).spawn("actor", Worker)
        print("pids", *actors.pid.call().get(60).values(), flush=True)
        first = actors.slice(hosts=0, n=0)
        print("across", *first.call_other.call_one(actors.slice(hosts=1)).get(60), flush=True)
        local = this_host().spawn_procs().spawn("local", Worker)
        print("local", local.pid.call_one().get(60), flush=True)
        while not os.path.exists({go!r}):
            time.sleep(0.01)
        hosts.shutdown().get(60)
"""


def test_a_program_reaches_all_workers_through_one(
    worker: Callable[..., Worker], key: str, program: Callable[..., Program], tmp_path: Path
) -> None:
    one, other = worker(), worker()
    tests = str(Path(__file__).parents[1])
    text = THROUGH.format(key=key, one=one.address, other=other.address, go=str(tmp_path / "go"))
    running = program(text, env={"PYTHONPATH": f"{REPOSITORY}:{tests}"})
    running.expect(f"refused client is already attached through {one.address}")
    pids = [int(pid) for pid in running.expect("pids").split()]
    assert running.expect("across").split() == [str(pid) for pid in pids[2:]]
    assert int(running.expect("local")) in running.family
    assert set(pids[2:]) <= set(descendants(other.process.pid))
    # The program has one connection to the cluster, and nobody there has one to the program.
    own = {c.laddr.port for c in psutil.Process(running.process.pid).net_connections("tcp") if c.status == "LISTEN"}
    assert own
    for pid in {*descendants(one.process.pid), *descendants(other.process.pid)}:
        for connection in psutil.Process(pid).net_connections("tcp"):
            assert not connection.raddr or connection.raddr.port not in own
    (tmp_path / "go").touch()
    assert running.wait() == 0
    assert one.wait() == other.wait() == 0


def test_a_gateway_that_cannot_be_had(key: str, program: Callable[..., Program]) -> None:
    running = program(
        f"""
        from monarch_slurm.actor import AttachError, attach, context
        from monarch_slurm.config import configured
        try:
            with configured(mesh_attach_config_timeout=0.1):
                attach("tcp://127.0.0.1:{free_port()}", private_key={key!r})
        except AttachError as error:
            print("cannot", error)
        context()
        try:
            attach("tcp://127.0.0.1:1", private_key={key!r})
        except RuntimeError as error:
            print("late", error)
        """
    )
    assert running.wait() == 0, running.errors()
    assert "nothing listens there" in running.output()
    assert "late client was initialized without a remote attachment; call attach(addr) before" in running.output()


IN_A_CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc"]
"""What follows is process 1 of a PID namespace, to which the kernel sends no signal that it has no handler for."""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a PID namespace")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("within", [[], IN_A_CONTAINER], ids=["a process", "process 1"])
def test_a_worker_ends_its_procs_when_it_is_told_to_end(
    worker: Callable[..., Worker], key: str, within: list[str], number: int, faults: Faults
) -> None:
    one = worker(within=within)
    hosts = attach_to_workers(private_key=key, workers=[one.address])
    actors: Any = hosts.spawn_procs({"gpus": 1}).spawn("actor", PidActor)
    actors.pid.call_one().get(DEADLINE)
    family = descendants(one.process.pid)
    first = family[0] if within else one.process.pid
    if within:
        orphan = ["nsenter", "--target", str(first), "--pid", "sh", "-c", "sleep 0.01 &"]
        subprocess.run(orphan, check=True)
        wait_until(lambda: not [pid for pid in descendants(first) if not is_alive(pid)], "process 1 reaps orphans")
    os.kill(first, number)
    assert one.wait() == 128 + number
    wait_gone(*family)
    assert "Traceback" not in one.text()
    faults.wait(1)
