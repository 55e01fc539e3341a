from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import DEADLINE, wait_until

from monarch_slurm.wire import Address, Loop, Message, SocketPathError, StreamLink, UnknownPeerError, WireError, loads
from monarch_slurm.wire.bulk import Handed
from monarch_slurm.wire.frames import encode
from monarch_slurm.wire.stream_peer import Ears

HERE, THERE = Address("h", "here"), Address("h", "there")
GREETING = b"monarch_slurm 1 "


class Ends:
    """A link that listens and links to it, each on a loop of its own."""

    def __init__(self, folder: Path, batch: bool) -> None:
        folder.chmod(0o700)
        self.path = folder / "sock"
        self.links: list[StreamLink] = []
        self.loops: list[Loop] = []
        self.faults: list[tuple[str, WireError]] = []
        self.arrived: list[tuple[str, Message]] = []
        self.gone: list[str] = []
        self.on_arrival: Callable[[str, Message], object] = lambda peer, message: self.arrived.append((peer, message))
        self.server = self.link(lambda peer, message: self.on_arrival(peer, message), batch=batch)
        self.server.listen(self.path)

    def link(
        self,
        on_message: Callable[[str, Message], object],
        on_quick: Callable[[str, Message], bool] = lambda peer, message: False,
        batch: bool = False,
    ) -> StreamLink:
        loop = Loop()
        link = StreamLink(
            loop,
            on_message,  # type: ignore[arg-type]
            lambda peer, error: self.faults.append((peer, error)),
            self.gone.append,
            on_quick,
            batch,
        )
        self.links.append(link)
        self.loops.append(loop)
        loop.start("link")
        return link

    def dialer(
        self,
        name: str,
        on_message: Callable[[str, Message], object] = lambda peer, message: None,
        on_quick: Callable[[str, Message], bool] = lambda peer, message: False,
    ) -> StreamLink:
        link = self.link(on_message, on_quick)
        link.connect(self.path, name)
        wait_until(lambda: self.server.knows(name))
        return link

    def raw(self, name: str | None = None) -> socket.socket:
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.settimeout(DEADLINE)
        raw.connect(str(self.path))
        if name is not None:
            raw.sendall(packet([GREETING + name.encode()]))
            wait_until(lambda: self.server.knows(name))
        return raw

    def answer(self, message: Message, peer: str) -> None:
        """Send from the server's loop, which alone may send where it batches."""
        self.loops[0].call_soon(lambda: self.server.send(message, peer))

    def close(self) -> None:
        for loop in self.loops:
            loop.stop()
            loop.join(DEADLINE)
        for link in self.links:
            link.close()


def packet(frames: list[bytes]) -> bytes:
    return struct.pack(f"<I{len(frames)}Q", len(frames), *map(len, frames)) + b"".join(frames)


def numbered(number: int) -> bytes:
    return packet([bytes(frame) for frame in encode(Message("m", HERE, THERE, {"n": 1}), number)])


@pytest.fixture(params=[False, True], ids=["direct", "batch"])
def ends(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(tmp_path, request.param)
    yield made
    made.close()


def number_of(message: Message) -> int:
    return int(message.fields["n"])


def test_messages_arrive_in_order_both_ways(ends: Ends) -> None:
    back: list[tuple[int, int]] = []
    dialer = ends.dialer("d", lambda _, message: back.append((number_of(message), len(message.body[0]))))
    sizes = [number * 7 for number in range(1000)] + [3_000_000, 0, 70_000]
    for number, size in enumerate(sizes):
        dialer.send(Message("m", HERE, THERE, {"n": number}, [bytes(size)]))
    wait_until(lambda: len(ends.arrived) == len(sizes))
    assert [(peer, number_of(m), len(m.body[0])) for peer, m in ends.arrived] == [
        ("d", number, size) for number, size in enumerate(sizes)
    ]
    for _, message in ends.arrived:
        ends.answer(message, "d")
    wait_until(lambda: len(back) == len(sizes))
    assert back == list(enumerate(sizes))
    assert ends.faults == []


def test_a_peer_that_does_not_read_blocks_nobody(ends: Ends) -> None:
    raw = ends.raw("sleeper")
    other = ends.dialer("d")
    for number in range(200):
        ends.answer(Message("m", THERE, HERE, {"n": number}, [bytes(10_000)]), "sleeper")
    other.send(Message("m", HERE, THERE, {"n": 1}))
    wait_until(lambda: ends.arrived)
    read = 0
    while read < 200 * 10_000:
        read += len(raw.recv(1 << 20))
    raw.close()


def test_who_is_not_there_is_not_known(ends: Ends) -> None:
    with pytest.raises(UnknownPeerError):
        ends.server.send(Message("m", THERE, HERE), "nobody")
    assert not ends.server.connected("nobody")


def test_a_missing_message_is_noticed_and_ends_the_connection(ends: Ends) -> None:
    raw = ends.raw("r")
    raw.sendall(numbered(0) + numbered(2))
    wait_until(lambda: ends.faults)
    ((peer, error),) = ends.faults
    assert peer == "r"
    assert "message 1 was lost on the way; 2 came instead" in str(error)
    assert len(ends.arrived) == 1
    assert raw.recv(1) == b""
    assert not ends.server.knows("r")
    raw.close()


@pytest.mark.parametrize(
    "garbage", [packet([b""]), packet([b"x"]), packet([bytes(8)]), packet([bytes(13), b"\x94"]), bytes(4), b"\xff" * 50]
)
def test_garbage_is_a_fault_of_its_sender_and_no_more(ends: Ends, garbage: bytes) -> None:
    dialer = ends.dialer("good")
    raw = ends.raw("bad")
    raw.sendall(garbage)
    wait_until(lambda: ends.faults)
    assert {peer for peer, _ in ends.faults} == {"bad"}
    dialer.send(Message("m", HERE, THERE, {"n": 1}))
    wait_until(lambda: ends.arrived)
    assert ends.arrived[0][0] == "good"
    raw.close()


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1", b"monarch_slurm 2 x", GREETING, GREETING + b"there"])
def test_who_does_not_greet_or_takes_another_name_is_refused(ends: Ends, greeting: bytes) -> None:
    there = ends.dialer("there")
    raw = ends.raw()
    raw.sendall(packet([greeting]) + numbered(0))
    assert raw.recv(1) == b""
    wait_until(lambda: ends.faults)
    there.send(Message("m", HERE, THERE, {"n": 1}))
    wait_until(lambda: ends.arrived)
    assert [peer for peer, _ in ends.arrived] == ["there"]
    raw.close()


def test_the_last_words_of_a_peer_are_read_before_its_end(ends: Ends) -> None:
    raw = ends.raw("r")
    raw.sendall(b"".join(numbered(number) for number in range(500)))
    raw.close()
    wait_until(lambda: ends.gone)
    assert ends.gone == ["r"]
    assert len(ends.arrived) == 500
    with pytest.raises(UnknownPeerError):
        ends.server.send(Message("m", THERE, HERE), "r")


def test_a_name_is_free_again_once_its_peer_is_forgotten(ends: Ends) -> None:
    raw = ends.raw("r")
    ends.loops[0].call_soon(lambda: ends.server.forget("r"))
    assert raw.recv(1) == b""
    again = ends.raw("r")
    again.sendall(numbered(0))
    wait_until(lambda: ends.arrived)
    assert ends.gone == [], "who was forgotten is no news"
    raw.close()
    again.close()


def test_a_closed_link_takes_no_more_and_what_it_was_given_arrives(ends: Ends) -> None:
    dialer = ends.dialer("d")
    for _ in range(500):
        dialer.send(Message("m", HERE, THERE, {"n": 1}, [bytes(5000)]))
    ends.loops[1].stop()
    ends.loops[1].join(DEADLINE)
    dialer.close(linger_ms=round(DEADLINE * 1000))
    dialer.send(Message("m", HERE, THERE, {"n": 2}))
    dialer.close()
    wait_until(lambda: ends.gone)
    assert len(ends.arrived) == 500


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    link = StreamLink(Loop(), lambda peer, message: None, lambda peer, error: None)
    with pytest.raises(SocketPathError, match="not a private folder"):
        link.listen(tmp_path / "sock")
    link.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_gets_nothing_parsed(ends: Ends) -> None:
    ends.path.chmod(0o777)
    for folder in (ends.path.parent, *ends.path.parent.parents[:4]):
        folder.chmod(0o755)
    pid = os.fork()
    if pid == 0:
        os.setuid(12345)
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.settimeout(DEADLINE)
        raw.connect(str(ends.path))
        try:
            raw.sendall(packet([GREETING + b"x"]) + numbered(0))
            os._exit(len(raw.recv(1)))
        except ConnectionError:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert ends.arrived == ends.faults == []


# ---- threads that read in the loop's place


def test_a_thread_that_waits_reads_for_itself(ends: Ends) -> None:
    took: list[int] = []
    dialer = ends.dialer("d", on_quick=lambda _, message: took.append(threading.get_ident()) or True)  # type: ignore[func-returns-value]
    ends.on_arrival = lambda peer, message: ends.answer(message, peer)
    for number in range(200):
        before = len(took)
        dialer.send(Message("m", HERE, THERE, {"n": number}))
        while len(took) == before:
            dialer.drive(lambda: len(took) > before, DEADLINE)  # noqa: B023
    assert threading.get_ident() in took


def test_order_holds_between_what_is_taken_at_once_and_what_is_left_to_the_loop(ends: Ends) -> None:
    order: list[int] = []
    quick_threads: set[int] = set()

    def quick(_: str, message: Message) -> bool:
        if number_of(message) % 7 == 0:
            return False
        quick_threads.add(threading.get_ident())
        order.append(number_of(message))
        return True

    def slow(_: str, message: Message) -> None:
        order.append(number_of(message))
        dialer.wake()

    dialer = ends.dialer("d", slow, quick)
    ends.on_arrival = lambda peer, message: ends.answer(message, peer)
    count = 5000
    for number in range(count):
        dialer.send(Message("m", HERE, THERE, {"n": number}))
        if number % 10 == 0:
            dialer.drive(lambda: len(order) > number - 20, 1.0)  # noqa: B023
    wait_until(lambda: len(order) == count)
    assert order == list(range(count))


def test_a_driver_is_woken_and_leaves_the_link_to_the_loop(ends: Ends) -> None:
    back: list[Message] = []
    dialer = ends.dialer("d", lambda _, message: back.append(message))
    done = threading.Event()
    drove: list[bool] = []
    thread = threading.Thread(target=lambda: drove.append(dialer.drive(done.is_set)))
    thread.start()
    wait_until(lambda: dialer._driver)
    assert not dialer.drive(done.is_set, 0.0), "two threads would read"
    ends.answer(Message("m", THERE, HERE), "d")
    wait_until(lambda: back)
    done.set()
    dialer.wake()
    thread.join(DEADLINE)
    assert drove == [True]
    ends.answer(Message("m", THERE, HERE), "d")
    wait_until(lambda: len(back) == 2)


def test_a_driver_gives_up_in_time_and_when_the_link_is_closed(ends: Ends) -> None:
    dialer = ends.dialer("d")
    assert dialer.drive(lambda: False, 0.01)
    thread = threading.Thread(target=lambda: dialer.drive(lambda: False))
    thread.start()
    wait_until(lambda: dialer._driver)
    ends.loops[1].stop()
    ends.loops[1].join(DEADLINE)
    dialer.close()
    thread.join(DEADLINE)
    assert not thread.is_alive()


# ---- connections that are apart


def test_a_socket_is_handed_on_through_a_third_process_and_is_a_peer_like_any_other(ends: Ends) -> None:
    ends.on_arrival = lambda peer, message: ends.answer(message, "taker" if peer == "giver" else "giver")
    handed: list[Handed] = []
    taker = ends.dialer("taker", lambda _, message: handed.extend(message.body))  # type: ignore[arg-type]
    giver = ends.dialer("giver")
    ours, theirs = socket.socketpair()
    heard: list[Message] = []
    closed = threading.Event()
    ears = Ears(heard.append, closed.set, lambda error: None)
    giver.adopt(ours, "direct", ears)
    giver.send(Message("m", HERE, THERE, {"n": 1}, [Handed(theirs.detach())]))
    wait_until(lambda: handed)
    assert isinstance(handed[0], Handed)
    back: list[Message] = []
    taker.adopt(socket.socket(fileno=os.dup(handed[0].fd)), "direct", Ears(back.append, lambda: None, lambda _: None))
    for number in range(300):
        giver.send(Message("m", HERE, THERE, {"n": number}, [bytes(1000 * number)]), "direct")
        taker.send(Message("m", HERE, THERE, {"n": number}), "direct")
    wait_until(lambda: len(back) == len(heard) == 300)
    assert [number_of(message) for message in back] == [number_of(message) for message in heard] == list(range(300))
    done = threading.Event()
    taker.between(lambda: (taker.forget("direct"), done.set()))  # type: ignore[func-returns-value,arg-type]
    assert done.wait(DEADLINE)
    handed.clear()
    assert closed.wait(DEADLINE)
    with pytest.raises(UnknownPeerError):
        giver.send(Message("m", HERE, THERE), "direct")
    assert ends.gone == ends.faults == []


def test_garbage_from_one_that_is_apart_is_told_to_its_ears(ends: Ends) -> None:
    dialer = ends.dialer("d")
    ours, theirs = socket.socketpair()
    faults: list[WireError] = []
    dialer.adopt(ours, "direct", Ears(lambda _: None, lambda: None, faults.append))
    theirs.sendall(b"\xff" * 50)
    wait_until(lambda: faults)
    assert ends.faults == []
    theirs.close()


def test_what_has_come_is_read_between_messages_while_another_thread_drives(ends: Ends) -> None:
    dialer = ends.dialer("d")
    ours, theirs = socket.socketpair()
    heard: list[Message] = []
    dialer.adopt(ours, "direct", Ears(heard.append, lambda: None, lambda _: None))
    done = threading.Event()
    thread = threading.Thread(target=lambda: dialer.drive(done.is_set))
    thread.start()
    theirs.sendall(b"".join(numbered(number) for number in range(500)))
    seen: list[int] = []
    dialer.between(lambda: (dialer.read_all("direct"), seen.append(len(heard))))  # type: ignore[func-returns-value,arg-type]
    wait_until(lambda: seen)
    assert seen == [500]
    done.set()
    dialer.wake()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    theirs.close()


def test_a_handed_socket_is_no_buffer(ends: Ends) -> None:
    ours, theirs = socket.socketpair()
    handed = Handed(theirs.detach())
    assert handed.is_whole()
    with pytest.raises(TypeError, match="a socket was handed on"):
        handed.view()
    with pytest.raises(TypeError, match="a socket was handed on"):
        loads([handed])
    ours.close()
