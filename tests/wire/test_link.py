from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from support import DEADLINE, wait_until

from monarch_slurm.wire import Address, Link, Loop, Message, UnknownPeerError, WireError
from monarch_slurm.wire.frames import encode
from monarch_slurm.wire.sockets import make_dealer, make_router

HERE, THERE = Address("h", "here"), Address("h", "there")


class Ends:
    """A ROUTER link and DEALER links to it, each on a loop of its own."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.folder = folder
        folder.chmod(0o700)
        self.links: list[Link] = []
        self.loops: list[Loop] = []
        self.faults: list[tuple[str, WireError]] = []
        self.arrived: list[tuple[str, Message]] = []
        self.on_arrival = lambda peer, message: self.arrived.append((peer, message))
        router = make_router(self.context)
        self.address = f"ipc://{folder / 'sock'}"
        router.bind(self.address)
        self.router = self.link(router, lambda peer, message: self.on_arrival(peer, message))

    def link(self, socket: zmq.Socket[bytes], on_message: object) -> Link:
        loop = Loop()
        link = Link(loop, socket, on_message, lambda peer, error: self.faults.append((peer, error)))  # type: ignore[arg-type]
        self.links.append(link)
        self.loops.append(loop)
        loop.start("link")
        return link

    def dealer(self, name: str, on_message: object = lambda peer, message: None) -> Link:
        socket = make_dealer(self.context, name)
        socket.connect(self.address)
        return self.link(socket, on_message)

    def raw(self, name: str) -> zmq.Socket[bytes]:
        socket = make_dealer(self.context, name)
        socket.connect(self.address)
        return socket

    def close(self) -> None:
        for loop in self.loops:
            loop.stop()
            loop.join(DEADLINE)
        for link in self.links:
            link.close()
        self.context.destroy(linger=0)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path)
    yield made
    made.close()


def number_of(message: Message) -> int:
    return int(message.fields["n"])


def test_messages_arrive_in_order_both_ways(ends: Ends) -> None:
    back: list[int] = []
    dealer = ends.dealer("d", lambda _, message: back.append(number_of(message)))
    for number in range(1000):
        dealer.send(Message("m", HERE, THERE, {"n": number}, [b"x" * number]))
    wait_until(lambda: len(ends.arrived) == 1000)
    assert [(peer, number_of(message), len(message.body[0])) for peer, message in ends.arrived] == [
        ("d", number, number) for number in range(1000)
    ]
    for number in range(1000):
        ends.router.send(Message("m", THERE, HERE, {"n": number}), "d")
    wait_until(lambda: len(back) == 1000)
    assert back == list(range(1000))
    assert ends.faults == []


def test_a_router_knows_whom_it_does_not_know(ends: Ends) -> None:
    with pytest.raises(UnknownPeerError):
        ends.router.send(Message("m", THERE, HERE), "nobody")


def test_no_wake_up_is_lost_when_a_send_fails(ends: Ends) -> None:
    """A send to a peer that is not there takes the signal of messages that wait, too."""
    holding, held = threading.Event(), threading.Event()
    ends.loops[0].call_soon(lambda: holding.set() or (held.wait(DEADLINE) and None))  # type: ignore[func-returns-value]
    assert holding.wait(DEADLINE)
    raw = ends.raw("d")
    raw.send_multipart(encode(Message("m", HERE, THERE), 0))
    signal = select.poll()
    signal.register(ends.router._fd, select.POLLIN)
    # Taken once for the connection and once for the message; the loop is held, so nobody else takes either.
    wait_until(lambda: signal.poll(0) and _fails(ends.router) and ends.router._readable())
    held.set()
    wait_until(lambda: len(ends.arrived) == 1)
    raw.close()


def _fails(link: Link) -> bool:
    with pytest.raises(UnknownPeerError):
        link.send(Message("m", THERE, HERE), "nobody")
    return True


def test_no_wake_up_is_lost_when_many_threads_send_while_messages_come_in(ends: Ends) -> None:
    """ZeroMQ signals edges, and every send may take one. Each round waits for its answer, so a lost one hangs here."""
    rounds, senders = 400, 6
    answered = [threading.Semaphore(0) for _ in range(senders)]

    def answer(peer: str, message: Message) -> None:
        ends.router.send(Message("back", THERE, HERE, message.fields, message.body), peer)

    ends.on_arrival = answer
    dealer = ends.dealer("d", lambda _, message: answered[number_of(message)].release())

    def talk(me: int) -> None:
        for round_number in range(rounds):
            burst = 1 + (round_number + me) % 3
            for _ in range(burst):
                dealer.send(Message("m", HERE, THERE, {"n": me}, [b"x" * (round_number % 5) * 1000]))
            for _ in range(burst):
                assert answered[me].acquire(timeout=DEADLINE), f"sender {me} waits for ever in round {round_number}"
        done.append(me)

    done: list[int] = []
    threads = [threading.Thread(target=talk, args=(me,)) for me in range(senders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * DEADLINE)
    assert sorted(done) == list(range(senders))
    assert ends.faults == []


def test_no_wake_up_is_lost_between_two_links_that_both_send_all_the_time(ends: Ends) -> None:
    got = {"router": 0, "dealer": 0}
    finished = threading.Event()
    total = 20_000

    def count(side: str) -> None:
        got[side] += 1
        if got == {"router": total, "dealer": total}:
            finished.set()

    ends.on_arrival = lambda peer, message: count("router")
    dealer = ends.dealer("d", lambda peer, message: count("dealer"))
    dealer.send(Message("m", HERE, THERE))
    wait_until(lambda: got["router"] == 1)

    def send(link: Link, peer: str, count: int) -> None:
        for _ in range(count):
            link.send(Message("m", HERE, THERE), peer)

    threads = [threading.Thread(target=send, args=(ends.router, "d", total // 4)) for _ in range(4)]
    threads += [threading.Thread(target=send, args=(dealer, "", total // 4)) for _ in range(3)]
    threads += [threading.Thread(target=send, args=(dealer, "", total // 4 - 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * DEADLINE)
    assert finished.wait(DEADLINE), got
    assert ends.faults == []


def test_a_missing_message_is_noticed(ends: Ends) -> None:
    raw = ends.raw("r")
    message = Message("m", HERE, THERE, {"n": 1})
    raw.send_multipart(encode(message, 0))
    raw.send_multipart(encode(message, 2))
    wait_until(lambda: ends.faults)
    (peer, error), *_ = ends.faults
    assert peer == "r"
    assert "message 1 was lost on the way; 2 came instead" in str(error)
    assert len(ends.arrived) == 1
    ends.router.forget("r")
    raw.send_multipart(encode(message, 0))
    wait_until(lambda: len(ends.arrived) == 2)


@pytest.mark.parametrize(
    "frames", [[b""], [b"x"], [b"", b""], [bytes(8)], [bytes(12)], [bytes(12), b"garbage"], [bytes(13), b"\x94"]]
)
def test_garbage_is_a_fault_of_its_sender_and_no_more(ends: Ends, frames: list[bytes]) -> None:
    dealer = ends.dealer("good")
    raw = ends.raw("bad")
    raw.send_multipart(frames)
    wait_until(lambda: ends.faults)
    assert {peer for peer, _ in ends.faults} == {"bad"}
    dealer.send(Message("m", HERE, THERE, {"n": 1}))
    wait_until(lambda: ends.arrived)
    assert ends.arrived[0][0] == "good"


def test_a_closed_link_takes_no_more(ends: Ends) -> None:
    dealer = ends.dealer("d")
    dealer.send(Message("m", HERE, THERE, {"n": 1}))
    wait_until(lambda: ends.arrived)
    dealer.close()
    dealer.send(Message("m", HERE, THERE, {"n": 2}))
    dealer.close()
    assert len(ends.arrived) == 1
