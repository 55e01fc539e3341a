"""The real bookkeeping of casts on both sides, over ways that are late and lose what they have, at random."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from monarch_slurm.host.cast_order import CastOrder
from monarch_slurm.host.caster import Caster
from monarch_slurm.host.folds import Folder, entries
from monarch_slurm.host.relinking import MOST_BEATS
from monarch_slurm.host.shares import APART, divide
from monarch_slurm.wire import AGENT, CONTROLLER, Address, Message, UnknownPeerError


class Host:
    def __init__(self, job: Job, name: str) -> None:
        self.job, self.name = job, name
        self.got: list[Any] = []
        self.order = CastOrder(lambda message: self.got.append(message.body[0]))
        self.wanted: list[Any] = []
        self.links: dict[int, int] = {}
        """By slot of a host below, the number of its last link."""
        self.link = 0

    def take(self, message: Message) -> None:
        fields = message.fields
        if message.kind == "share":
            self.share(message)
        elif message.kind == "barrier":
            self.order.barrier(fields["casts"])
        elif message.kind == "tree_child":
            self.job.tell(self.name, "tree_door", slot=fields["slot"], link=fields["link"], endpoint="")
        elif message.kind == "tree_parent":
            self.hang_up()
            self.link = fields["link"]
            if fields["parent"] in self.job.hosts:
                slot = self.job.caster.tree.slot(self.name)
                self.job.hosts[fields["parent"]].links[slot] = self.link
                self.job.edges[fields["parent"], self.name, self.link] = deque(["above"])
        elif message.kind == "tree_cut":
            self.hang_up()
        elif message.kind not in APART:
            self.order.direct(message)

    def hang_up(self) -> None:
        self.job.edges.pop(next((edge for edge in self.job.edges if edge[1] == self.name), None), None)

    def share(self, message: Message) -> None:
        own, below = divide(message)
        for slot, part in below.items():
            link = self.links.get(slot, 0)
            edge = self.job.edges.get((self.name, self.job.caster.tree.host(slot), link))
            if edge is None:
                self.job.tell(self.name, "tree_lost", slot=slot, link=link)
            else:
                edge.append(part)
        if own is not None:
            after, directs, _ = own
            self.order.share(message.fields["number"], after, directs, message)


class Job:
    """A controller and hosts. What is sent waits in queues until `deliver` takes it."""

    def __init__(self, seed: int, hosts: int, fanout: int) -> None:
        self.random = random.Random(seed)
        self.caster = Caster(fanout, 1, self.send)
        self.hosts: dict[str, Host] = {}
        self.direct: dict[str, deque[Message]] = {}
        self.up: deque[Message] = deque()
        self.edges: dict[tuple[str, str | None, int], deque[Any]] = {}
        """What is on the way from a host to one below, by link."""
        self.names = iter(range(10_000))
        self.sent = 0
        for _ in range(hosts):
            self.join()

    def join(self) -> None:
        name = f"n{next(self.names)}"
        self.hosts[name] = Host(self, name)
        self.direct[name] = deque()
        self.caster.join(name)

    def send(self, message: Message, host: str) -> None:
        if host not in self.direct:
            raise UnknownPeerError(host)
        self.direct[host].append(message)

    def tell(self, host: str, kind: str, **fields: Any) -> None:
        self.up.append(Message(kind, CONTROLLER, Address(host, AGENT), fields))

    # ---- what may happen

    def one_direct(self) -> None:
        host = self.random.choice(list(self.hosts))
        self.sent += 1
        self.hosts[host].wanted.append(self.sent)
        self.caster.direct(Message("port", Address(host, "p"), CONTROLLER, {}, [self.sent]), host)  # type: ignore[list-item]

    def one_cast(self) -> None:
        names = list(self.hosts)
        targets = self.random.choice([names, names, names[::2], self.random.sample(names, len(names) // 2 + 1)])
        self.sent += 1
        for host in targets:
            self.hosts[host].wanted.append(self.sent)
        fields = {"targets": [(host, [0, 1]) for host in targets], "key": " ".join(targets)}
        absent, unreachable = self.caster.cast(Message("casts", CONTROLLER, CONTROLLER, fields, [self.sent]))  # type: ignore[list-item]
        assert not absent
        assert not unreachable

    def deliver(self) -> bool:
        """Let one message arrive, somewhere."""
        queues: list[Any] = [("up", "", self.up)] if self.up else []
        queues += [("direct", host, queue) for host, queue in self.direct.items() if queue]
        queues += [("edge", edge, queue) for edge, queue in self.edges.items() if queue]
        if not queues:
            return False
        kind, host, queue = self.random.choice(queues)
        message = queue.popleft()
        if kind == "up":
            if message.src.host in self.hosts:
                self.caster.take(message)
        elif kind == "direct":
            self.hosts[host].take(message)
        elif message == "above":
            parent, child, link = host
            self.tell(child, "tree_linked", parent=parent, link=link)
        else:
            self.hosts[host[1]].share(message)
        return True

    def heartbeat(self) -> None:
        host = self.random.choice(list(self.hosts))
        self.caster.heard(host, self.hosts[host].order.last)

    def break_an_edge(self) -> None:
        if self.edges:
            edge = self.random.choice(list(self.edges))
            del self.edges[edge]

    def lose_a_host(self) -> None:
        host = self.random.choice(list(self.hosts))
        if len(self.hosts) > 3:
            del self.hosts[host], self.direct[host]
            for edge in [edge for edge in self.edges if host in edge]:
                del self.edges[edge]
            self.caster.leave(host)

    def settle(self) -> None:
        """Let everything arrive that ever will."""
        for _ in range(6):
            self.one_beat()

    def one_beat(self) -> None:
        while self.deliver():
            pass
        for name, host in self.hosts.items():
            self.caster.heard(name, host.order.last)
        self.caster.beat()


@pytest.mark.parametrize("fanout", [1, 2, 3])
def test_everybody_alive_gets_everything_once_and_in_order(fanout: int) -> None:
    shared = again = 0
    for seed in range(32):
        job = Job(seed, 9, fanout)
        actions = [job.one_direct, job.one_cast, job.heartbeat, job.caster.beat]
        weights = [2, 3, 3, 1]
        if seed % 4:
            actions += [job.break_an_edge, job.lose_a_host, job.join]
            weights += [0.1, 0.1, 0.1]
        if seed % 2:
            job.settle()  # the tree is whole before it begins
        for _ in range(150):
            for action in job.random.choices(actions, weights, k=2):
                action()
            for _ in range(job.random.randrange(8)):
                job.deliver()
        job.settle()
        for host in job.hosts.values():
            assert host.got == host.wanted, (seed, host.name)
        assert not job.caster._kept, seed
        shared += sum(job.caster.tree.linked(host) for host in job.hosts)
        again += sum(host.link > 1 for host in job.hosts.values())
        for _ in range(2 * MOST_BEATS):
            if job.caster.tree.unlinked():
                job.one_beat()
        assert not job.caster.tree.unlinked(), "what was cut off is linked again"
        job.one_cast()
        job.settle()
        for host in job.hosts.values():
            assert host.got == host.wanted, (seed, host.name)
    assert shared > 50, "casts went down a tree"
    assert again > 50, "some were linked again while it went on"


class Source:
    """A host that answers, below others."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = Folder(name)
        self.wanted: list[int] = []
        self.direct: deque[Message | int] = deque()


def ordered(into: list[int]) -> CastOrder:
    return CastOrder(lambda message: into.extend(message.body))  # type: ignore[arg-type]


def test_folded_answers_arrive_once_and_in_order_with_what_is_sent_directly() -> None:
    for seed in range(60):
        random_ = random.Random(seed)
        sources = {name: Source(name) for name in ("a", "b", "c")}
        got: dict[str, list[int]] = {name: [] for name in sources}
        orders = {name: ordered(numbers) for name, numbers in got.items()}
        folded: deque[bytes] = deque()

        def arrive(source: Source, orders: dict[str, CastOrder] = orders) -> None:
            first = source.direct.popleft()
            if isinstance(first, int):
                orders[source.name].barrier(first)
            else:
                orders[source.name].direct(first)

        def unfold(data: bytes, orders: dict[str, CastOrder] = orders) -> None:
            for host, count, directs, replies, ends in entries([data]):
                values = [int(frames[0]) for _, _, _, frames in replies] + [end["rank"] for end in ends]
                orders[host].share(count, count - 1, directs, Message("ports", CONTROLLER, CONTROLLER, {}, values))  # type: ignore[arg-type]

        for number in range(300):
            source = sources[random_.choice("abc")]
            what = random_.randrange(10)
            if what < 4:
                fields = {"port": 1, "rank": 0, "status": "value"}
                source.folder.add(Message("port", CONTROLLER, CONTROLLER, fields, [str(number).encode()]))
                source.wanted.append(number)
                if what == 3:
                    source.folder.add(Message("proc_down", CONTROLLER, CONTROLLER, {"rank": -number}))
                    source.wanted.append(-number)
                    folded.append(source.folder.take(0.0))
            elif what < 6:
                folded.append(source.folder.take(0.0))
            elif what == 6:
                folded.append(source.folder.take(0.0))
                barrier = source.folder.direct()
                source.direct += [barrier] if barrier else []
                source.direct.append(Message("m", CONTROLLER, CONTROLLER, {}, [number]))  # type: ignore[list-item]
                source.wanted.append(number)
            elif what == 7 and folded:
                del folded[random_.randrange(len(folded))]  # an agent on the way is lost
            elif what == 8:
                folded.append(source.folder.kept())
                source.folder.acknowledged(orders[source.name].last)
            elif source.direct and random_.random() < 0.7:
                arrive(source)
            elif folded:
                unfold(b"".join(folded.popleft() for _ in range(random_.randint(1, len(folded)))))
        for source in sources.values():
            source.folder.take(0.0)
            unfold(source.folder.kept())
            while source.direct:
                arrive(source)
            assert got[source.name] == source.wanted, (seed, source.name)
            source.folder.acknowledged(orders[source.name].last)
            assert source.folder.kept() == b""
