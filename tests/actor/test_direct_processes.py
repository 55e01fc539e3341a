"""Direct links between real processes: that they are used, and that nothing else changes."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import DEADLINE, hold, wait_until

from monarch_slurm.actor import (
    Accumulator,
    Actor,
    Channel,
    ProcMesh,
    RestartPolicy,
    SupervisionError,
    context,
    endpoint,
    send,
    this_host,
)
from monarch_slurm.actor.client import client
from monarch_slurm.actor.direct import DirectLinks
from monarch_slurm.config import configured


@pytest.fixture(params=[1, 0], ids=["direct", "routed"])
def after(request: pytest.FixtureRequest) -> int:
    """After how many calls there are links, in tests of what does not depend on them."""
    return int(request.param)


@pytest.fixture
def soon(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Links are made with the first call."""
    count = request.getfixturevalue("after") if "after" in request.fixturenames else 1
    monkeypatch.setattr(client().direct.asks, "after", count)
    with configured(direct_link_after=count):
        yield


pytestmark = pytest.mark.usefixtures("soon")


def links_here() -> DirectLinks:
    (found,) = (thing for thing in gc.get_objects() if isinstance(thing, DirectLinks))
    return found


class Peer(Actor):
    """Talks to others, and remembers what it was told."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, int]] = []
        self.children: list[int] = []

    @endpoint
    def add(self, sender: object, number: int) -> int:
        self.seen.append((sender, number))
        return number

    @endpoint
    def get(self) -> list[tuple[object, int]]:
        return self.seen

    @endpoint
    def weigh(self, data: bytes) -> int:
        return len(data)

    @endpoint
    def give(self, size: int) -> bytes:
        return bytes(size)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def linked(self) -> list[str]:
        links = links_here()
        return sorted(name for name, link in links._links.items() if link.agreed)

    @endpoint
    def talk(self, others: Any, count: int, seed: int) -> int:
        """Send to others in all ways; return the number of the last message."""
        return talk(others, f"actor {context().actor_instance.rank.rank}", count, seed)

    @endpoint
    def ask(self, other: Any, count: int) -> list[int]:
        return [other.add.call_one("asked", number).get(DEADLINE) for number in range(count)]

    @endpoint
    def flood(self, stopped: Any, size: int, count: int, other: Any) -> int:
        for number in range(count):
            stopped.add.broadcast(bytes(size), number)
        return int(other.add.call_one("flood", 1).get(DEADLINE))

    @endpoint
    def fork(self, seconds: float) -> int:
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            threading.Event().wait(seconds)
            os._exit(0)
        return pid

    @endpoint
    def make(self, procs: ProcMesh) -> Any:
        """Actors on procs, or on new ones, that the caller and others call at once."""
        self.made = procs.spawn("made", Peer)
        return self.made

    @endpoint
    def make_procs(self) -> Any:
        self.procs = this_host().spawn_procs({"n": 1})
        return self.procs.spawn("made", Peer)

    @endpoint
    def pass_on(self, maker: Any, procs: ProcMesh | None) -> int:
        made = (maker.make.call_one(procs) if procs is not None else maker.make_procs.call_one()).get(DEADLINE)
        answer = made.slice(n=0).add.call_one("passed on", 5).get(DEADLINE)
        return int(answer)

    @endpoint
    def answer_and_die(self, port: Any, count: int) -> None:
        for number in range(count):
            port.send(number)
        os.kill(os.getpid(), signal.SIGKILL)


def sockets_of(pid: int) -> set[str]:
    opened = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    return {name for name in opened if name.startswith("socket:")}


def talk(others: Any, me: str, count: int, seed: int) -> int:
    generator = random.Random(seed)
    ranks = len(others)
    pending = []
    for number in range(count):
        way = generator.random()
        one = others.flatten("n").slice(n=generator.randrange(ranks))
        if way < 0.5:
            pending.append(one.add.call_one(me, number))
        elif way < 0.7:
            one.add.broadcast(me, number)
        elif way < 0.9:
            pending.append(one.add.call(me, number))
        elif way < 0.95:
            pending.append(others.add.call(me, number))
        else:
            others.add.broadcast(me, number)
        if generator.random() < 0.2 and pending:
            pending.pop().get(DEADLINE)
    for future in pending:
        future.get(DEADLINE)
    others.add.call(me, count).get(DEADLINE)
    return count


def test_links_are_made_used_and_end_with_their_process(spawn: Callable[..., ProcMesh]) -> None:
    procs = spawn(per_host={"n": 2})
    peers: Any = procs.spawn("peer", Peer)
    first, second = peers.slice(n=0), peers.slice(n=1)
    for number in range(20):
        assert first.add.call_one("client", number).get(DEADLINE) == number
    assert first.ask.call_one(second, 20).get(DEADLINE) == list(range(20))
    here = client().direct._links
    names = [f"{procs._layout.mesh}.{rank}" for rank in range(2)]
    assert names[0] in here
    assert first.linked.call_one().get(DEADLINE) == sorted(["client", names[1]])
    assert names[0] in second.linked.call_one().get(DEADLINE)
    procs.stop().get(DEADLINE)
    assert not set(names) & set(client().direct._links)


def test_no_links_are_made_where_they_are_not_wanted(
    spawn: Callable[..., ProcMesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client().direct.asks, "after", 0)
    peer: Any = spawn(per_host={"n": 1}).spawn("peer", Peer)
    for number in range(20):
        assert peer.add.call_one("client", number).get(DEADLINE) == number
    assert peer.linked.call_one().get(DEADLINE) == []


def test_order_holds_over_all_ways_at_once(spawn: Callable[..., ProcMesh]) -> None:
    procs = spawn(per_host={"n": 4})
    peers: Any = procs.spawn("peer", Peer)
    count = 400
    talkers: Any = procs.spawn("talker", Peer)  # which would wait for one another, were they called, too
    running = [talkers.slice(n=rank).talk.call_one(peers, count, rank) for rank in range(4)]
    threads = [threading.Thread(target=talk, args=(peers, f"thread {i}", count, 10 + i)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE)
        assert not thread.is_alive()
    assert [future.get(2 * DEADLINE) for future in running] == [count] * 4
    by_sender: dict[object, list[int]] = {}
    for seen in peers.get.call().get(DEADLINE).values():
        senders = {sender for sender, _ in seen}
        assert len(senders) == 6
        for sender in senders:
            numbers = [number for by, number in seen if by == sender]
            assert numbers == sorted(set(numbers)), f"{sender}: order, or twice"
            by_sender.setdefault(sender, []).extend(numbers)
    for sender, numbers in by_sender.items():
        assert set(numbers) == set(range(count + 1)), f"{sender}: something was lost"
    assert all(len(linked) >= 3 for linked in peers.linked.call().get(DEADLINE).values())


def test_what_a_proc_answers_before_it_dies_comes_before_the_news_of_its_end(
    spawn: Callable[..., ProcMesh], faults: Any, after: int
) -> None:
    for _ in range(5):
        peer: Any = spawn(per_host={"n": 1}).spawn("peer", Peer)
        for number in range(10):
            peer.add.call_one("client", number).get(DEADLINE)
        port, receiver = Channel.open()
        last = peer.answer_and_die.call_one(port, 50)
        with pytest.raises(SupervisionError, match=r"Killed\(sig=9\)"):
            last.get(DEADLINE)
        assert [receiver.recv().get(0) for _ in range(50)] == list(range(50))


def test_the_end_of_a_proc_is_told_as_ever(spawn: Callable[..., ProcMesh], faults: Any) -> None:
    texts = []
    for count in (0, 1):
        client().direct.asks.after = count
        procs = spawn(per_host={"n": 2})
        peers: Any = procs.spawn("peer", Peer)
        for number in range(10):
            assert peers.slice(n=0).add.call_one("client", number).get(DEADLINE) == number
        pid = peers.slice(n=0).pid.call_one().get(DEADLINE)
        hold(pid)
        futures = [peers.slice(n=0).add.call_one("client", number) for number in range(3)]
        os.kill(pid, signal.SIGKILL)
        futures += [peers.slice(n=0).add.call_one("client", number) for number in range(3)]
        for future in futures:
            error = future.exception(DEADLINE)
            assert isinstance(error, SupervisionError)
            text = str(error).replace(procs._layout.mesh, "MESH").replace(str(pid), "PID")
            texts.append(re.sub(r"\d\d:\d\d:\d\d[.\d]*", "TIME", text))
        assert peers.slice(n=1).add.call_one("client", 1).get(DEADLINE) == 1
    assert len({re.sub(r"peer-\w+", "ACTOR", text) for text in texts}) == 1, texts


@pytest.mark.parametrize("caller", ["client", "actor"])
def test_calls_of_procs_that_start_again_reach_one_incarnation_or_are_told(
    spawn: Callable[..., ProcMesh], faults: Any, caller: str
) -> None:
    policy = RestartPolicy(max_restarts=100)
    peer: Any = spawn(per_host={"n": 1}, restart=policy).spawn("peer", Peer)
    asker: Any = spawn(per_host={"n": 1}).spawn("asker", Peer)
    generator = random.Random(3)
    for _ in range(6):
        pid = wait_until(lambda: peer.pid.call_one().exception(DEADLINE) is None and peer.pid.call_one().get(DEADLINE))
        if caller == "actor":
            assert asker.ask.call_one(peer, 20).get(DEADLINE) == list(range(20))
            asked = asker.ask.call_one(peer, 1000)
        futures = [peer.add.call_one(pid, number) for number in range(generator.randrange(40))]
        os.kill(pid, signal.SIGKILL)
        futures += [peer.add.call_one(pid, number) for number in range(100, 140)]
        if caller == "actor":
            error = asked.exception(DEADLINE)  # none, if it happened to have no call under way
            assert error is None or "restarted" in str(error)
        answered = [number for future in futures if (number := outcome(future)) is not None]
        wait_until(lambda: peer.pid.call_one().exception(DEADLINE) is None)
        numbers = [number for sender, number in peer.get.call_one().get(DEADLINE) if sender == pid]
        assert numbers == sorted(set(numbers)), "order, or twice"
        assert set(answered) <= set(range(40)) | set(range(100, 140))


def outcome(future: Any) -> Any:
    error = future.exception(DEADLINE)
    if error is None:
        return future.get(0)
    assert isinstance(error, SupervisionError), error
    return None


def test_a_stopped_receiver_holds_up_nobody_and_loses_nothing(spawn: Callable[..., ProcMesh]) -> None:
    peers: Any = spawn(per_host={"n": 3}).spawn("peer", Peer)
    sender, stopped, other = (peers.slice(n=rank) for rank in range(3))
    for one in (stopped, other):
        assert sender.ask.call_one(one, 10).get(DEADLINE) == list(range(10))
    assert len(sender.linked.call_one().get(DEADLINE)) >= 2
    pid = stopped.pid.call_one().get(DEADLINE)
    hold(pid)
    try:
        assert sender.flood.call_one(stopped, 50_000, 100, other).get(DEADLINE) == 1
        assert sender.add.call_one("client", 1).get(DEADLINE) == 1
        late = peers.add.call("all", 7)  # comes after the flood, by another way
    finally:
        os.kill(pid, signal.SIGCONT)
    late.get(DEADLINE)
    assert sender.flood.call_one(stopped, 1, 1, other).get(DEADLINE) == 1
    assert sender.ask.call_one(stopped, 1).get(DEADLINE) == [0]
    seen = stopped.get.call_one().get(DEADLINE)
    assert [number for by, number in seen if isinstance(by, bytes)] == [*range(100), 0]


def test_large_buffers_go_by_links(spawn: Callable[..., ProcMesh]) -> None:
    peers: Any = spawn(per_host={"n": 2}).spawn("peer", Peer)
    for size in (1, 100_000, 2**20, 5 * 2**20) * 3:
        for peer in (peers.slice(n=0), peers.slice(n=1)):
            assert peer.weigh.call_one(bytes(size)).get(DEADLINE) == size
            assert len(peer.give.call_one(size).get(DEADLINE)) == size
    assert len(peers.slice(n=0).linked.call_one().get(DEADLINE)) == 1


def test_a_forked_child_keeps_no_link(spawn: Callable[..., ProcMesh], faults: Any) -> None:
    procs = spawn(per_host={"n": 2})
    peers: Any = procs.spawn("peer", Peer)
    first, second = peers.slice(n=0), peers.slice(n=1)
    assert first.ask.call_one(second, 20).get(DEADLINE) == list(range(20))
    child = first.fork.call_one(600.0).get(DEADLINE)
    try:
        assert first.ask.call_one(second, 20).get(DEADLINE) == list(range(20))
        parent = first.pid.call_one().get(DEADLINE)
        assert len(sockets_of(child) & sockets_of(parent)) == 1, "that of the agent alone"
        os.kill(parent, signal.SIGKILL)
        wait_until(lambda: f"{procs._layout.mesh}.0" not in second.linked.call_one().get(DEADLINE))
    finally:
        with contextlib.suppress(ProcessLookupError):  # the agent ends what its procs have started
            os.kill(child, signal.SIGKILL)


def test_all_procs_talk_to_all(spawn: Callable[..., ProcMesh]) -> None:
    procs = spawn(per_host={"n": 6})
    peers: Any = procs.spawn("peer", Peer)
    askers: Any = procs.spawn("asker", Peer)  # which would wait for one another, were they asked, too
    for number in range(3):
        pending = [askers.slice(n=a).ask.call_one(peers.slice(n=b), 10) for a in range(6) for b in range(6) if a != b]
        for future in pending:
            assert future.get(DEADLINE) == list(range(10)), number
    assert all(len(linked) >= 5 for linked in peers.linked.call().get(DEADLINE).values())


def test_what_was_sent_before_a_stop_is_handled(spawn: Callable[..., ProcMesh], tmp_path: Path) -> None:
    for number in range(3):
        procs = spawn(per_host={"n": 1})
        writer: Any = procs.spawn("writer", Writer, str(tmp_path / f"{number}"))
        for _ in range(10):
            writer.write.call_one("x").get(DEADLINE)
        for _ in range(200):
            writer.write.broadcast("y")
        procs.stop().get(DEADLINE)
        assert (tmp_path / f"{number}").read_text() == "x" * 10 + "y" * 200


class Writer(Actor):
    def __init__(self, path: str) -> None:
        self.path = Path(path)

    @endpoint
    def write(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)


def test_what_others_have_made_is_there_when_they_say_so(spawn: Callable[..., ProcMesh]) -> None:
    procs = spawn(per_host={"n": 3})
    peers: Any = procs.spawn("peer", Peer)
    maker, asker, target = (peers.slice(n=rank) for rank in range(3))
    for one in (maker, asker, target):
        assert all(one.add.call_one("client", number).get(DEADLINE) == number for number in range(6))
    for one in (maker, target):
        assert asker.ask.call_one(one, 10).get(DEADLINE) == list(range(10))
    assert maker.ask.call_one(target, 10).get(DEADLINE) == list(range(10))
    for number in range(30):
        made = maker.make.call_one(procs.slice(n=slice(2, 3))).get(DEADLINE)
        assert made.slice(n=0).add.call_one("client", number).get(DEADLINE) == number
        assert asker.pass_on.call_one(maker, procs.slice(n=slice(2, 3))).get(DEADLINE) == 5
    for _ in range(5):
        made = maker.make_procs.call_one().get(DEADLINE)
        assert made.slice(n=0).add.call_one("client", 1).get(DEADLINE) == 1
        assert asker.pass_on.call_one(maker, None).get(DEADLINE) == 5


def test_ports_and_values_without_answers_use_links_in_order(spawn: Callable[..., ProcMesh]) -> None:
    peers: Any = spawn(per_host={"n": 1}).spawn("peer", Peer)
    port, receiver = Channel.open()
    for number in range(50):
        send(peers.add, ("client", number), {}, port)
    assert [receiver.recv().get(DEADLINE) for _ in range(50)] == list(range(50))
    assert Accumulator(peers.pid, 0, lambda total, pid: total + pid).accumulate().get(DEADLINE) > 0
    assert context().actor_instance is client().root
