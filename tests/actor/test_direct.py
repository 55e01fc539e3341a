"""Direct links: the real bookkeeping over ways that are late at random, and real processes."""

from __future__ import annotations

import pickle
import random
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from monarch_slurm.actor import direct
from monarch_slurm.actor.direct import DirectLinks
from monarch_slurm.wire import AGENT, CONTROLLER, Address, Message, UnknownPeerError, WireError
from monarch_slurm.wire.stream_peer import Ears

HOST, MESH = "h", "m"
NEWS = ("proc_down", "procs_restart")


class Process:
    """A process: what it is sent waits until `step` takes it, as its reading thread or as its loop."""

    def __init__(self, job: Job, address: Address, incarnation: int) -> None:
        self.job, self.address, self.incarnation = job, address, incarnation
        self.inbox: deque[Message] = deque()
        self.outbox: deque[Message] = deque()
        self.lines: dict[str, tuple[socket.socket, Ears]] = {}
        self.handed: deque[Callable[[], None]] = deque()
        self.asked: deque[Callable[[], None]] = deque()
        self.got: list[Any] = []
        self.by_link = 0
        self.order = self
        self.links = DirectLinks(
            address, incarnation, self, self.outbox.append, lambda host: host == HOST, self.knows, self.quick,
            self.take, self.fault,
        )  # fmt: skip
        self.links.asks.after = job.after

    def fault(self, peer: Address, error: WireError) -> None:
        raise error

    def knows(self, message: Message) -> bool:
        return self.job.random.random() > 0.1

    def quick(self, message: Message) -> bool:
        if message.kind not in ("port", "cast"):
            return False
        self.take(message)
        return True

    def take(self, message: Message) -> None:
        if message.kind in NEWS:
            self.got.append((message.kind, message.fields["who"]))
        elif "n" in message.fields:
            self.got.append(tuple(message.fields["n"]))

    # ---- what a StreamLink does

    def adopt(self, connection: socket.socket, name: str, ears: Ears) -> None:
        self.lines[name] = connection, ears

    def send(self, message: Message, peer: str) -> None:
        if peer not in self.lines:
            raise UnknownPeerError(peer)
        data = pickle.dumps(message)
        try:
            self.lines[peer][0].sendall(len(data).to_bytes(4, "little") + data)
        except OSError:
            raise UnknownPeerError(peer) from None
        self.by_link += 1

    def between(self, call: Callable[[], None]) -> None:
        self.asked.append(call)

    def read_all(self, peer: str) -> None:
        while peer in self.lines and self.read_one(peer):
            pass

    def forget(self, peer: str) -> None:
        if peer in self.lines:
            self.lines.pop(peer)[0].close()

    def hand_over(self, call: Callable[[], None]) -> None:
        self.handed.append(call)

    def hand_on(self, name: str, message: Message, on_quick: Any, on_message: Any) -> None:
        if self.handed or not on_quick(name, message):
            self.hand_over(lambda: on_message(name, message))

    def read_one(self, name: str) -> bool:
        """Return whether anything came."""
        connection, ears = self.lines[name]
        connection.setblocking(False)
        try:
            head = connection.recv(4, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            head = b""
        if not head:
            self.forget(name)
            ears.on_closed()
            return False
        connection.setblocking(True)
        ears.on_message(pickle.loads(connection.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)))
        return True

    # ---- what happens in it

    def step(self, generator: random.Random) -> bool:
        """Do one thing that there is to do, if there is one."""
        able: list[Callable[[], object]] = []
        if self.handed:
            able.append(lambda: self.handed.popleft()())
        if self.asked:
            able.append(lambda: self.asked.popleft()())
        if self.inbox:
            able.append(self.read_inbox)
        lines = list(self.lines)
        if not able and not lines:
            return False
        choice = generator.randrange(len(able) + len(lines))
        if choice < len(able):
            able[choice]()
            return True
        return self.read_one(lines[choice - len(able)]) or bool(able)

    def read_inbox(self) -> None:
        message = self.inbox.popleft()
        if self.handed or self.links.blocks(message) or not self.quick(message):
            self.hand_over(lambda: None if self.links.take(message) else self.take(message))

    def die(self) -> None:
        for connection, _ in self.lines.values():
            connection.close()
        self.lines.clear()


class Job:
    """A client, procs of one host, and their agent."""

    def __init__(self, seed: int, procs: int, after: int) -> None:
        self.random = random.Random(seed)
        self.after = after
        names = [CONTROLLER, *(Address(HOST, f"{MESH}.{rank}") for rank in range(procs))]
        self.count = 0
        self.news: list[Message] = []
        self.mailboxes: dict[Address, list[Message]] = {}
        self.everybody: list[Process] = []
        self.alive: dict[Address, Process] = {}
        for address in names:
            self.start(address, 0)
        self.sent: dict[tuple[Process, Address], list[int]] = {}
        """By sender and receiver: the numbers."""

    def start(self, address: Address, incarnation: int) -> None:
        process = self.alive[address] = Process(self, address, incarnation)
        process.inbox.extend(self.mailboxes.pop(address, []))
        self.everybody.append(process)

    # ---- what may happen

    def send_one(self) -> None:
        sender = self.random.choice(list(self.alive.values()))
        if self.random.random() < 0.01:  # somebody's procs are made, of which a controller knows
            sender.links.make_way(Message("spawn", Address(HOST, AGENT), CONTROLLER))
        others = [address for address in self.alive | self.mailboxes if address != sender.address]
        procs = [address for address in others if address != CONTROLLER]
        way = self.random.random()
        if way < 0.90:
            to = [self.random.choice(others[:2] if way < 0.5 else others)]
        else:
            to = self.random.sample(procs, min(2, len(procs)))
        self.count += 1
        fields: dict[str, Any] = {"n": (sender.address.proc, sender.incarnation, self.count)}
        for address in to:
            self.sent.setdefault((sender, address), []).append(self.count)
        if len(to) > 1 or self.random.random() < 0.6:
            host, proc = to[0]
            mesh, _, _ = proc.rpartition(".")
            ranks = [int(address.proc.rpartition(".")[2]) for address in to] if host == HOST else [0]
            operation = "stop" if self.random.random() < 0.02 and host == HOST else "call"
            fields |= {"proc_mesh": mesh or "client", "base_ranks": ranks, "op": operation}
            sender.links.send(Message("cast", Address(host, AGENT), sender.address, fields))
        elif to[0] != CONTROLLER and self.random.random() < 0.05:
            fields |= {"name": to[0].proc}
            sender.links.send(Message("stop", Address(HOST, AGENT), sender.address, fields))
        else:
            kind = self.random.choice(["port", "port", "actor_down"])
            sender.links.send(Message(kind, to[0], sender.address, fields))

    def agent_step(self) -> bool:
        waiting = [process for process in self.alive.values() if process.outbox]
        if not waiting:
            return False
        self.route(self.random.choice(waiting).outbox.popleft())
        return True

    def route(self, message: Message) -> None:
        if message.kind == "cast" and message.dst.host == HOST:
            for rank in message.fields["base_ranks"]:
                self.bring(Address(HOST, f"{MESH}.{rank}"), message)
        elif message.kind == "stop":
            to = Address(HOST, message.fields["name"])
            self.bring(to, Message("exit", to, message.src, message.fields))
        elif message.kind == "cast":
            self.bring(CONTROLLER, message)
        else:
            self.bring(message.dst, message)

    def bring(self, address: Address, message: Message) -> None:
        if address in self.alive:
            self.alive[address].inbox.append(message)
        elif address in self.mailboxes:
            self.mailboxes[address].append(message)

    def kill_one(self) -> None:
        """End a proc; the news of it is told, and it is started again, at some time."""
        victims = [address for address in self.alive if address != CONTROLLER]
        if len(victims) < 3:
            return
        address = self.random.choice(victims)
        process = self.alive[address]
        process.die()
        while process.outbox:  # the agent reads all of it before it tells
            self.route(process.outbox.popleft())
        del self.alive[address]
        self.mailboxes[address] = []
        _, _, rank = address.proc.rpartition(".")
        down = {"down": {"mesh": MESH}, "ranks": [int(rank)], "incarnation": process.incarnation, "who": process}
        self.news.append(Message("procs_restart", Address(HOST, ""), Address(HOST, AGENT), down))

    def tell_one(self) -> bool:
        if not self.news:
            return False
        news = self.news.pop(0)
        for process in self.alive.values():
            process.inbox.append(news)
        return True

    def restart_one(self) -> bool:
        told = [a for a in self.mailboxes if self.random.random() < 0.1 or not self.is_news_of(a)]
        if told:
            before = max(p.incarnation for p in self.everybody if p.address == told[0])
            self.start(told[0], before + 1)
        return bool(told)

    def is_news_of(self, address: Address) -> bool:
        return any(f"{MESH}.{news.fields['ranks'][0]}" == address.proc for news in self.news)

    def run(self, rounds: int, deaths: float) -> None:
        for _ in range(rounds):
            what = self.random.random()
            if what < 0.25:
                self.send_one()
            elif what < 0.25 + deaths:
                self.kill_one()
            elif what < 0.26 + deaths:
                self.tell_one()
            elif what < 0.27 + deaths:
                self.restart_one()
            elif what < 0.5:
                self.agent_step()
            else:
                self.random.choice(list(self.alive.values())).step(self.random)

    def settle(self) -> None:
        """Let everything arrive that ever will."""
        for _ in range(20):
            while self.tell_one() or self.restart_one() or self.agent_step():
                pass
            for _ in range(3):
                for process in list(self.alive.values()):
                    while process.step(self.random):
                        pass
                    for name in list(process.lines):
                        process.read_all(name)

    def close(self) -> None:
        for process in self.everybody:
            process.die()


def numbers(receiver: Process, sender: Process) -> list[int]:
    me = sender.address.proc, sender.incarnation
    return [entry[2] for entry in receiver.got if len(entry) == 3 and entry[:2] == me]


@pytest.mark.parametrize("after", [1, 3])
def test_everything_arrives_once_and_in_order_by_whatever_way(after: int) -> None:
    by_link = 0
    for seed in range(12):
        job = Job(seed, 4, after)
        job.run(1500, deaths=0.0)
        job.settle()
        for (sender, address), sent in job.sent.items():
            assert numbers(job.alive[address], sender) == sent, seed
        by_link += sum(process.by_link for process in job.everybody)
        for process in job.everybody:
            assert not any(link.held or link.waiting for link in process.links._links.values())
        job.close()
    assert by_link > 300, "direct links were not used"


def test_who_has_no_room_for_more_links_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MAX_LINKS", 2)
    for seed in range(6):
        job = Job(seed, 4, 1)
        job.run(1500, deaths=0.0)
        job.settle()
        for (sender, address), sent in job.sent.items():
            assert numbers(job.alive[address], sender) == sent, seed
        assert max(len(process.lines) for process in job.everybody) == 2
        job.close()


@pytest.mark.parametrize("after", [1, 3])
def test_what_a_process_said_before_its_end_comes_before_the_news_of_it(after: int) -> None:
    by_link = ended = 0
    for seed in range(20):
        job = Job(seed, 4, after)
        job.run(3000, deaths=0.004)
        job.settle()
        for (sender, address), sent in job.sent.items():
            last = job.alive[address]
            arrived = [number for p in job.everybody if p.address == address for number in numbers(p, sender)]
            assert arrived == sorted(set(arrived)), f"seed {seed}: order, or twice"
            assert set(arrived) <= set(sent)
            if all(p.address != address for p in job.everybody if p is not last):
                assert arrived == sent, f"seed {seed}: {sender.address} to {address}, which has never ended"
        for receiver in job.everybody:
            for place, entry in enumerate(receiver.got):
                if entry[0] in NEWS:
                    ended += 1
                    gone = entry[1]
                    me = gone.address.proc, gone.incarnation
                    assert not [later for later in receiver.got[place:] if later[:2] == me], seed
        for address, receiver in job.alive.items():
            for link in receiver.links._links.values():
                assert not link.held, (seed, address)
                assert not link.waiting, (seed, address)
        by_link += sum(process.by_link for process in job.everybody)
        job.close()
    assert by_link > 300, "direct links were not used"
    assert ended > 30
