"""Strangers at every door of a job: nothing of theirs is parsed, nothing crashes, the job goes on, one line tells."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from job_agents import Agent
from job_agents import Worker as PidActor
from support import DEADLINE, is_alive, wait_until

from monarch_slurm.actor import (
    Future,
    HostMesh,
    MeshFailure,
    attach_to_workers,
    make_worker_key,
    start_worker_loop_forever,
    this_host,
)
from monarch_slurm.actor.client import client
from monarch_slurm.controller import gather_hosts, publish
from monarch_slurm.host import worker as worker_module
from monarch_slurm.wire import (
    CONTROLLER,
    Address,
    Gatekeeper,
    Invitation,
    JobKeys,
    Message,
    admission,
    pack,
    read_invitation,
    unpack,
)
from monarch_slurm.wire.frames import encode
from monarch_slurm.wire.shared_key import choose_secret, derive_keys
from monarch_slurm.wire.sockets import connect_tcp, make_dealer

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""What a ZMTP 3 peer that speaks CURVE says first."""

HUGE = b"\x06" + struct.pack(">Q", 2**30)
"""A command of 1 GiB is announced."""

LARGE = 100 * 2**20


class Door:
    """Something of a job that listens on TCP, and what stands behind it."""

    def __init__(self, invitation: Invitation, hosts: HostMesh, gatekeeper: Gatekeeper, procs: Any) -> None:
        self.invitation = invitation
        self.hosts = hosts
        self.gatekeeper = gatekeeper
        self.actors = procs.spawn("actor", PidActor)
        self.pids = self.actors.pid.call().get(DEADLINE).values()
        self._refused = gatekeeper.refused

    def dial(self) -> socket.socket:
        host, _, port = self.invitation.address.removeprefix("tcp://").rpartition(":")
        raw = socket.create_connection((host, int(port)), timeout=DEADLINE)
        raw.settimeout(DEADLINE)
        return raw

    def works(self) -> bool:
        return bool(self.actors.pid.call().get(DEADLINE).values() == self.pids)

    def wait_refused(self, more: int = 1) -> None:
        wait_until(lambda: self.gatekeeper.refused >= self._refused + more, "a stranger is refused")


@pytest.fixture(params=["controller", "worker"])
def door(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    agents: Callable[..., Agent],
    failures: list[MeshFailure],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Door]:
    ended: Future[None] | None = None
    if request.param == "controller":
        publish(tmp_path / "job", address="127.0.0.1")
        agents(tmp_path / "job", "guarded")
        hosts = gather_hosts(["guarded"], timeout=DEADLINE)
        invitation = read_invitation(tmp_path / "job" / "controller.json")
        gatekeeper = client().hub._gatekeeper
    else:
        made: list[worker_module.Worker] = []
        monkeypatch.setattr(worker_module.Worker, "serve", _noting(made, worker_module.Worker.serve))
        key = make_worker_key(tmp_path / "key")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            url = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        ended = start_worker_loop_forever(private_key=key, address=url)
        keys = derive_keys(choose_secret(key, None)[0])
        invitation = Invitation(url, keys.server_public, keys.agent_public, keys.agent_secret)
        hosts = attach_to_workers(private_key=key, workers=[url])
        hosts.initialized.get(DEADLINE)
        gatekeeper = made[0]._gatekeeper
    procs = hosts.spawn_procs({"n": 2})
    monkeypatch.setattr(admission, "GATHER_SECONDS", 3600.0)  # the line comes when it is asked for
    with caplog.at_level(logging.WARNING, "monarch_slurm"):
        guarded = Door(invitation, hosts, gatekeeper, procs)
        yield guarded
        assert guarded.works()
        gatekeeper.strangers.flush()
        lines = [record for record in caplog.records if record.message.startswith("refused ")]
        assert len(lines) <= 1
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text
    assert not failures
    procs.stop().get(DEADLINE)
    hosts.shutdown().get(DEADLINE)
    if ended is not None:
        ended.get(DEADLINE)


def _noting(made: list[Any], serve: Callable[[Any], None]) -> Callable[[Any], None]:
    def note(worker: Any) -> None:
        made.append(worker)
        serve(worker)

    return note


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_peers_without_the_key(door: Door, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    hello = {"name": "stranger", "pid": 1, "hostname": "stranger", "address": "127.0.0.1"}
    frames = encode(Message("hello", CONTROLLER, Address("stranger#1", "agent"), hello, [bomb]), 0)
    right, other = door.invitation, JobKeys.make()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for number, keys in enumerate(
        (
            None,
            Invitation(right.address, right.server_public, other.agent_public, other.agent_secret),
            Invitation(right.address, other.server_public, right.agent_public, right.agent_secret),
            Invitation(right.address, other.server_public, other.agent_public, other.agent_secret),
        )
    ):
        stranger = make_dealer(context, f"stranger#{number}")
        if keys is None:
            stranger.connect(right.address)
        else:
            connect_tcp(stranger, keys)
        for parts in (frames, [bomb], [bomb, bomb]):
            stranger.send_multipart(parts)
        door.wait_refused(number + 1)
    assert door.works()
    context.destroy(linger=0)
    assert not (tmp_path / "exploded").exists()
    assert not [host for host in client().hub.hosts.values() if host.name == "stranger"]
    door.gatekeeper.strangers.flush()
    assert caplog.text.count("refused ") == 1


GARBAGE = (
    b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", bytes(5000), b"\xff" * 5000,
    GREETING + bytes(100), GREETING + b"\xff" * 5000, GREETING[:12] + b"PLAIN".ljust(20, b"\0") + bytes(5032),
)  # fmt: skip


def test_garbage(door: Door) -> None:
    for garbage in (*GARBAGE, *(os.urandom(number) for number in (10, 100, 1000, 10_000))):
        with door.dial() as raw:
            raw.sendall(garbage)
            if len(garbage) > 64:
                _wait_hung_up(raw)
    assert door.works()


def test_truncated_greetings_and_frames(door: Door) -> None:
    hello = GREETING + b"\x04\xc8\x05HELLO\x01\x00" + os.urandom(193)
    for length in (0, 1, 9, 10, 11, 12, 32, 63, 64, 65, 66, 100, len(hello) - 1):
        with door.dial() as raw:
            raw.sendall(hello[:length])
    assert door.works()


def test_a_frame_of_a_gibibyte_is_refused_before_there_is_memory_for_it(door: Door) -> None:
    process = psutil.Process()
    before = process.memory_info().vms
    with door.dial() as raw:
        raw.sendall(GREETING)
        received = b""
        while len(received) < 64:
            received += raw.recv(64)
        raw.sendall(HUGE)
        raw.settimeout(0.01)
        while not _hung_up(raw):
            assert process.memory_info().vms - before < LARGE


def test_who_only_looks_whether_somebody_listens_is_not_called_a_stranger(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        with door.dial():
            pass
    door.wait_refused(5)
    door.gatekeeper.strangers.flush()
    assert "refused " not in caplog.text


def test_many_who_say_next_to_nothing(door: Door) -> None:
    idle = [door.dial() for _ in range(200)]
    try:
        for raw in idle[:100]:
            raw.sendall(GREETING[:1])
        assert door.works()
        for raw in idle[:50]:
            raw.sendall(GREETING[1:40])
        assert door.works()
        late = door.hosts.spawn_procs()
        assert late.initialized.get(DEADLINE)
        late.stop().get(DEADLINE)
    finally:
        for raw in idle:
            raw.close()


@pytest.mark.parametrize("door", ["worker"], indirect=True)
def test_a_holder_of_the_key_who_asks_a_worker_no_sense(door: Door) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = make_dealer(context, "odd")
    connect_tcp(peer, door.invitation)
    invitation = {"address": 1, "server_public": 2, "agent_public": 3, "agent_secret": 4}
    request = {"identity": "", "program": "p", "host": 5, "name": 6, "who": 7, "settings": 8, "invitation": invitation}
    for frame in (
        b"", os.urandom(100), pack(None), pack([]), pack("op"), pack({}), pack({"op": 1}), pack({"op": "open"}),
        pack({"op": "data", "id": [], "data": 1}), pack({"identity": 1}), pack({"identity": "", "program": []}),
        pack({**request, "invitation": {"no": "invitation"}}), pack({**request, "program": {"x": 1}}),
        pickle.dumps(request),
    ):  # fmt: skip
        peer.send(frame)
    peer.send(pack({"identity": "somebody else", "program": "p"}))
    while "not somebody else" not in (answer := unpack(peer.recv())).get("why", ""):
        assert not answer["accepted"]
    context.destroy(linger=0)
    assert door.works()


def test_garbage_at_the_unix_sockets_of_a_job(
    tmp_path: Path, failures: list[MeshFailure], caplog: pytest.LogCaptureFixture
) -> None:
    """Only processes of the user reach them; those that speak no sense disturb nobody either."""
    actor: Any = this_host().spawn_procs().spawn("actor", PidActor)
    pid = actor.pid.call_one().get(DEADLINE)
    mine = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    paths = _listening_sockets(mine)
    assert paths
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    packets = (
        b"", b"\0", bytes(5000), b"\xff" * 5000, os.urandom(5000), struct.pack("<I", 2**32 - 1) + bytes(100),
        struct.pack("<IQ", 1, 2**62), struct.pack("<IQ", 1, len(bomb)) + bomb, struct.pack("<I", len(bomb)) + bomb,
    )  # fmt: skip
    for path in paths:
        for packet in packets:
            with socket.socket(socket.AF_UNIX) as raw:
                raw.settimeout(DEADLINE)
                raw.connect("\0" + path[1:] if path.startswith("@") else path)
                try:
                    raw.sendall(packet)
                except ConnectionError:
                    continue
    assert actor.pid.call_one().get(DEADLINE) == pid
    fresh: Any = this_host().spawn_procs().spawn("actor", PidActor)
    assert fresh.pid.call_one().get(DEADLINE) != pid
    assert not (tmp_path / "exploded").exists()
    assert not failures


def _hung_up(raw: socket.socket) -> bool:
    try:
        return raw.recv(65536) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def _wait_hung_up(raw: socket.socket) -> None:
    """Wait until the other end has closed the connection; it must not take what it is sent."""
    try:
        while raw.recv(65536):
            pass
    except ConnectionError:
        return


def test_a_holder_of_the_key_who_speaks_no_sense_loses_only_itself(
    tmp_path: Path, agents: Callable[..., Agent], failures: list[MeshFailure], caplog: pytest.LogCaptureFixture
) -> None:
    """Replays, gaps, garbage, other names and stale incarnations, of a host that has joined."""
    publish(tmp_path / "job", address="127.0.0.1")
    agents(tmp_path / "job", "good")
    good = gather_hosts(["good"], timeout=DEADLINE)
    actors: Any = good.spawn_procs().spawn("actor", PidActor)
    pid = actors.pid.call_one().get(DEADLINE)
    invitation = read_invitation(tmp_path / "job" / "controller.json")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    hub = client().hub
    good_id = good._hosts[0]

    def joins(host: str) -> zmq.Socket[bytes]:
        peer = make_dealer(context, host)
        connect_tcp(peer, invitation)
        fields = {"name": host.partition("#")[0], "pid": 1, "hostname": "bad", "address": "127.0.0.1"}
        peer.send_multipart(encode(Message("hello", CONTROLLER, Address(host, "agent"), fields), 0))
        wait_until(lambda: host in hub.hosts, f"{host} joins")
        return peer

    beat = Message("heartbeat", CONTROLLER, Address("bad#0", "agent"))
    for number, second in enumerate(
        (encode(beat, 0), encode(beat, 7), [b""], [bomb], [os.urandom(40)], [bytes(12) + b"more"])
    ):
        host = f"bad#{number}"
        peer = joins(host)
        peer.send_multipart(second)
        wait_until(lambda host=host: hub.has_ended(host), f"{host} is given up")
        # It is fenced: whatever it says under that name is refused for good.
        peer.send_multipart(encode(Message("hello", CONTROLLER, Address(host, "agent"), {}), 1))
        assert actors.pid.call_one().get(DEADLINE) == pid
        assert host not in hub.hosts
        peer.close(linger=0)

    liar = joins("liar#1")
    liar.send_multipart(encode(Message("bye", CONTROLLER, Address(good_id, "agent")), 1))
    spawn = Message("spawn", Address(good_id, "agent"), Address("controller", "client"), {}, [bomb])
    liar.send_multipart(encode(spawn, 2))
    wait_until(lambda: caplog.text.count("spoke as") >= 2, "both are dropped")
    assert actors.pid.call_one().get(DEADLINE) == pid
    context.destroy(linger=0)
    assert not (tmp_path / "exploded").exists()
    assert not [failure for failure in failures if failure.host == "good"]
    wait_until(lambda: hub.has_ended("liar#1"))


OTHER_USER = """
import json, os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
tried = {}
def attempt(name, do):
    try:
        do()
        tried[name] = "possible"
    except OSError as error:
        tried[name] = type(error).__name__
def dial(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(10)
        one.connect("\\0" + path[1:] if path[0] == "@" else path)
        one.sendall(b"x" * 1000)
        if not one.recv(1):
            raise ConnectionResetError
for path in sys.argv[1].split(":"):
    attempt(path, lambda: dial(path))
for path in sys.argv[2].split(":"):
    attempt(path, lambda: open(path, "rb").read())
print(json.dumps(tried))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, which takes root")
def test_another_user_of_this_machine_reaches_nothing(
    tmp_path: Path, agents: Callable[..., Agent], failures: list[MeshFailure], caplog: pytest.LogCaptureFixture
) -> None:
    import json

    publish(tmp_path / "job", address="127.0.0.1")
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/tmp") and folder.is_relative_to("/tmp"):
            folder.chmod(0o755)  # so that only our own modes stand in the way
    (tmp_path / "job").chmod(0o700)
    key = make_worker_key(tmp_path / "key")
    ended = start_worker_loop_forever(private_key=key, address=f"ipc://{tmp_path}/worker")
    hosts = attach_to_workers(private_key=key, workers=[f"ipc://{tmp_path}/worker"])
    here: Any = this_host().spawn_procs().spawn("actor", PidActor)
    there: Any = hosts.spawn_procs().spawn("actor", PidActor)
    pids = [here.pid.call_one().get(DEADLINE), there.pid.call_one().get(DEADLINE)]
    mine = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    assert set(pids) <= mine
    paths = _listening_sockets(mine)
    assert paths
    files = [str(key), f"{tmp_path}/job/controller.json", f"{tmp_path}/job/admin.json"]
    files += [f"/proc/{pid}/environ" for pid in mine] + [f"/proc/{pid}/mem" for pid in pids]
    command = [sys.executable, "-c", OTHER_USER, ":".join(paths), ":".join(files)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd="/")
    tried = json.loads(run.stdout)
    assert len(tried) == len({*paths, *files})
    assert "possible" not in tried.values(), tried
    assert [here.pid.call_one().get(DEADLINE), there.pid.call_one().get(DEADLINE)] == pids
    hosts.shutdown().get(DEADLINE)
    ended.get(DEADLINE)
    assert not failures


def _listening_sockets(pids: set[int]) -> list[str]:
    """Paths of Unix sockets that these processes listen at; the abstract ones begin with @."""
    inodes = set()
    for pid in filter(is_alive, pids):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(fd)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    paths = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        row = line.split()
        if len(row) == 8 and row[6] in inodes and int(row[3], 16) & 0x10000:
            paths.append(row[7])
    return paths


def test_secrets_are_in_no_command_line_environment_log_or_open_file(
    tmp_path: Path, agents: Callable[..., Agent], failures: list[MeshFailure]
) -> None:
    publish(tmp_path / "job", address="127.0.0.1")
    agent = agents(tmp_path / "job", "one")
    key = make_worker_key(tmp_path / "key")
    ended = start_worker_loop_forever(private_key=key, address="inproc://secret")
    hosts = attach_to_workers(private_key=key, workers=["inproc://secret"])
    meshes = [gather_hosts(["one"], timeout=DEADLINE), hosts, this_host()]
    for mesh in meshes:
        mesh.spawn_procs(name="secret").initialized.get(DEADLINE)
    invitation = read_invitation(tmp_path / "job" / "controller.json")
    hub, shared = client().hub._keys, derive_keys(choose_secret(key, None)[0])
    secrets = [
        key.read_bytes().strip(),
        *(
            text.encode()
            for text in (
                invitation.agent_secret,
                hub.server_secret,
                hub.agent_secret,
                shared.server_secret,
                shared.agent_secret,
            )
        ),
    ]
    mine = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True)), *agent.family()}
    procs = 0
    for pid in filter(is_alive, mine):
        for name in ("cmdline", "environ"):
            text = Path(f"/proc/{pid}/{name}").read_bytes()
            procs += b"MONARCH" in text
            assert not [secret for secret in secrets if secret in text], (pid, name)
    assert procs
    assert not [secret for secret in secrets if secret in agent.log.read_bytes()]
    for text in (repr(invitation), repr(hub), str(shared), repr(hosts)):
        assert not [secret for secret in secrets if secret.decode() in text]
    for path in (tmp_path / "job").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    hosts.shutdown().get(DEADLINE)
    ended.get(DEADLINE)
