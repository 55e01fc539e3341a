from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from support import DEADLINE, wait_until

from monarch_slurm.config import configured
from monarch_slurm.wire import (
    Address,
    Gatekeeper,
    Invitation,
    JobKeys,
    Link,
    Loop,
    Message,
    WireError,
    admission,
    channel_setup,
    dumps,
    loads,
    payload_listener,
)
from monarch_slurm.wire.arriving import LostPayloadError, when_whole
from monarch_slurm.wire.bulk import BULK_BYTES
from monarch_slurm.wire.channel_keys import GREETING_BYTES, ChannelKeys
from monarch_slurm.wire.payload_channel import PayloadChannel
from monarch_slurm.wire.payload_listener import PayloadListener, dial
from monarch_slurm.wire.sealed_records import HEADER_BYTES, LARGEST_BYTES
from monarch_slurm.wire.sockets import bind_tcp, connect_tcp, make_dealer, make_router

HERE, THERE = Address("h", "here"), Address("h", "there")
IP = "127.0.0.1"
PEER = "dealer"
MARKER = b"a marker that must not be readable on the way"
LARGE = MARKER + os.urandom(20 * BULK_BYTES) + MARKER


class Relay:
    """Stands between both ends of a payload channel. ``change`` gets what the dialling end sends, and the number of
    bytes that went before, and returns what is passed on; None: it hangs up.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.seen = [bytearray(), bytearray()]
        self.change: Callable[[int, bytes], bytes | None] = lambda at, data: data
        self._listener = socket.create_server((IP, 0))
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((IP, self._port))
                self._connections += near, far
                for number, (source, to) in enumerate(((near, far), (far, near))):
                    threading.Thread(target=self._carry, args=(number, source, to), daemon=True).start()

    def _carry(self, number: int, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                at = len(self.seen[number])
                self.seen[number] += data
                passed_on = data if number else self.change(at, data)
                if passed_on is None:
                    break
                to.sendall(passed_on)
        for connection in (source, to):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)


class Ends:
    """A ROUTER and a DEALER link with CURVE between them, and a relay in their payload channel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys = JobKeys.make()
        self.loops = [Loop(), Loop()]
        self.got: list[Message] = []
        self.back: list[Message] = []
        self.faults: list[WireError] = []
        self.relays: list[Relay] = []
        self.change: Callable[[int, bytes], bytes | None] = lambda at, data: data
        router = make_router(self.context)
        self.endpoint = bind_tcp(router, IP, keys)
        self.endpoints = [self.endpoint]
        self.gatekeeper = Gatekeeper(self.context, router, keys)
        self.gatekeeper.attach(self.loops[0])
        fault = lambda _, error: self.faults.append(error)  # noqa: E731
        self.router = Link(
            self.loops[0], router, lambda _, message: self.take(message), fault, endpoints=lambda: self.endpoints
        )
        self.take: Callable[[Message], None] = self.got.append
        dealer = make_dealer(self.context, PEER)
        connect_tcp(dealer, Invitation(self.endpoint, keys.server_public, keys.agent_public, keys.agent_secret))
        self.dealer = Link(
            self.loops[1], dealer, lambda _, message: self.back.append(message), fault, dialled=self.endpoint
        )
        monkeypatch.setattr(channel_setup, "dial", self._dial)
        for loop in self.loops:
            loop.start("link")

    def _dial(self, loop: Loop, ip: str, port: int, keys: ChannelKeys, timeout: float) -> PayloadChannel:
        self.relays.append(Relay(port))
        self.relays[-1].change = lambda at, data: self.change(at, data)
        return dial(loop, ip, self.relays[-1].port, keys, timeout)

    def there(self, value: object, **fields: Any) -> None:
        self.dealer.send(Message("m", THERE, HERE, fields, dumps(value)))

    def open_channel(self) -> None:
        """Send something large, so that there is a channel."""
        before = len(self.got)
        self.there(bytes(BULK_BYTES))
        wait_until(lambda: len(self.got) > before and PEER in self.router._channels and self.dealer._channels)
        assert loads(self.got.pop().body) == bytes(BULK_BYTES)

    def received(self, count: int = 1) -> list[Any]:
        wait_until(lambda: len(self.got) == count)
        return [loads(message.body) for message in self.got]

    def has_no_channel(self) -> bool:
        return not self.router._channels and not self.dealer._channels

    def close(self) -> None:
        for loop in self.loops:
            loop.stop()
            loop.join(DEADLINE)
        self.gatekeeper.close()
        for link in (self.router, self.dealer):
            link.close()
        for relay in self.relays:
            relay.close()
        self.context.destroy(linger=0)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    made = Ends(monkeypatch)
    yield made
    made.close()


def test_large_frames_go_by_the_channel_both_ways_and_cannot_be_read_there(ends: Ends) -> None:
    ends.open_channel()
    ends.there(LARGE)
    assert ends.received() == [LARGE]
    ends.router.send(Message("m", HERE, THERE, {}, dumps(LARGE)), PEER)
    wait_until(lambda: len(ends.back) == 1)
    assert loads(ends.back[0].body) == LARGE
    [relay] = ends.relays
    for seen in relay.seen:
        assert len(LARGE) < len(seen) < 1.2 * len(LARGE)
        assert MARKER not in seen
        assert MARKER[:12] not in seen
    assert ends.faults == []


def test_the_end_that_listens_may_be_the_first_to_send_something_large(ends: Ends) -> None:
    ends.dealer.send(Message("hello", THERE, HERE))
    wait_until(lambda: ends.got)
    for number in range(2):
        ends.router.send(Message("m", HERE, THERE, {}, dumps(LARGE)), PEER)
        wait_until(lambda number=number: len(ends.back) == number + 1)
        assert loads(ends.back[-1].body) == LARGE
    assert len(ends.relays) == 1
    assert len(ends.relays[0].seen[1]) > len(LARGE)


@pytest.mark.parametrize("place", [GREETING_BYTES + 1, GREETING_BYTES + 6, GREETING_BYTES + 300_000, 3 * BULK_BYTES])
def test_a_bit_that_is_changed_on_the_way_ends_the_channel_and_is_never_delivered(
    ends: Ends, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    ends.open_channel()
    start = len(ends.relays[0].seen[0]) - GREETING_BYTES

    def change(at: int, data: bytes) -> bytes:
        flip = start + place - at
        return data if not 0 <= flip < len(data) else data[:flip] + bytes([data[flip] ^ 1]) + data[flip + 1 :]

    ends.change = change
    with caplog.at_level(logging.WARNING):
        ends.there(LARGE)
        assert ends.received() == [LARGE], "it came by the control connection then"
        wait_until(ends.has_no_channel)
    assert "a record" in caplog.text or "within a record" in caplog.text
    ends.there(LARGE)
    assert ends.received(2) == [LARGE, LARGE]
    assert len(ends.relays) == 1, "no channel is opened soon after one was tampered with"
    assert ends.faults == []


@pytest.mark.parametrize("repeat", [0, 1])
def test_records_that_are_repeated_or_left_out_end_the_channel(
    ends: Ends, repeat: int, caplog: pytest.LogCaptureFixture
) -> None:
    ends.open_channel()
    start = len(ends.relays[0].seen[0])
    kept = bytearray()

    def change(at: int, data: bytes) -> bytes:
        held = at - start < 2 * LARGEST_BYTES
        kept.extend(data)
        if held and len(kept) < 2 * LARGEST_BYTES:
            return b""
        if not held:
            return data
        first, rest = bytes(kept[:LARGEST_BYTES]), bytes(kept[LARGEST_BYTES:])
        return first + first + rest if repeat else rest

    ends.change = change
    with caplog.at_level(logging.WARNING):
        ends.there(LARGE)
        assert ends.received() == [LARGE]
        wait_until(ends.has_no_channel)
    assert "a record was changed, repeated or left out on the way" in caplog.text
    assert ends.faults == []


@pytest.mark.parametrize("cut_at", [1, HEADER_BYTES + 5, 5 * BULK_BYTES])
def test_a_channel_that_is_cut_loses_nothing(ends: Ends, cut_at: int) -> None:
    ends.open_channel()
    start = len(ends.relays[0].seen[0])
    ends.change = lambda at, data: None if at + len(data) > start + cut_at else data
    for number in range(3):
        ends.there(LARGE, n=number)
    assert ends.received(3) == [LARGE] * 3
    assert [message.fields["n"] for message in ends.got] == [0, 1, 2]
    wait_until(ends.has_no_channel)
    assert ends.faults == []


def test_an_idle_channel_that_was_cut_is_replaced_later(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_setup, "RETRY_SECONDS", 0.0)
    ends.open_channel()
    ends.relays[0].close()
    wait_until(ends.has_no_channel)
    ends.open_channel()
    ends.there(LARGE)
    assert ends.received() == [LARGE]
    assert len(ends.relays) == 2


def test_many_transfers_at_once_both_ways_with_small_messages_between(ends: Ends) -> None:
    ends.open_channel()
    small = threading.Event()

    def take(message: Message) -> None:
        when_whole(message.body, lambda: ends.got.append(message))
        if message.kind == "small":
            small.set()

    ends.take = take

    def send(number: int) -> None:
        for _ in range(3):
            ends.there(bytes([number]) * (5 * BULK_BYTES), n=number)
            ends.router.send(Message("m", HERE, THERE, {"n": number}, dumps(bytes([number]) * (3 * BULK_BYTES))), PEER)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    ends.dealer.send(Message("small", THERE, HERE, {"n": -1}))
    assert small.wait(DEADLINE)
    for thread in threads:
        thread.join(DEADLINE)
    wait_until(lambda: len(ends.got) == 19 and len(ends.back) == 18)
    large = [message for message in ends.got if message.kind == "m"]
    assert all(loads(message.body) == bytes([message.fields["n"]]) * (5 * BULK_BYTES) for message in large)
    assert all(loads(message.body) == bytes([message.fields["n"]]) * (3 * BULK_BYTES) for message in ends.back)
    assert ends.faults == []


def test_small_messages_pass_a_large_one_that_the_channel_holds_up(ends: Ends) -> None:
    ends.open_channel()
    held, whole = threading.Event(), threading.Event()
    ends.change = lambda at, data: data if held.wait(DEADLINE) else None

    def take(message: Message) -> None:
        ends.got.append(message)
        when_whole(message.body, lambda: whole.set() if message.kind == "m" else None)

    ends.take = take
    ends.there(LARGE)
    for number in range(100):
        ends.dealer.send(Message("small", THERE, HERE, {"n": number}))
    wait_until(lambda: len(ends.got) == 101)
    assert not whole.is_set()
    held.set()
    assert whole.wait(DEADLINE)
    assert loads(ends.got[0].body) == LARGE


def test_what_a_lost_host_was_sending_never_comes(ends: Ends) -> None:
    ends.open_channel()
    ends.change = lambda at, data: b""
    ended = threading.Event()

    def take(message: Message) -> None:
        ends.got.append(message)
        when_whole(message.body, ended.set)

    ends.take = take
    ends.there(LARGE)
    wait_until(lambda: ends.got)
    assert not ended.is_set()
    ends.loops[0].call_soon(lambda: ends.router.forget(PEER))
    assert ended.wait(DEADLINE)
    with pytest.raises(LostPayloadError):
        loads(ends.got[0].body)


def refuse(*_: object) -> PayloadChannel:
    with socket.socket() as taken:
        taken.bind((IP, 0))
        socket.create_connection((IP, taken.getsockname()[1]))
    raise AssertionError("nobody listens there")


def test_without_a_channel_the_link_carries_all_and_one_line_says_so(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel_setup, "dial", refuse)
    monkeypatch.setattr(channel_setup, "RETRY_SECONDS", 0.0)
    with caplog.at_level(logging.WARNING):
        for number in range(1, 4):
            ends.there(LARGE)
            assert ends.received(number) == [LARGE] * number
        wait_until(lambda: "no connection for large payloads" in caplog.text)
    assert len([record for record in caplog.records if "large payloads" in record.message]) == 1
    assert "cannot connect to 127.0.0.1 port" in caplog.text
    assert ends.has_no_channel()


@pytest.mark.parametrize("end", ["there", "back"])
def test_without_the_package_that_encrypts_the_link_carries_all(
    ends: Ends, end: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel_setup, "UNAVAILABLE", "the package cryptography is older than version 47")
    with caplog.at_level(logging.DEBUG):
        ends.there(LARGE)
        assert ends.received() == [LARGE]
        if end == "back":
            ends.router.send(Message("m", HERE, THERE, {}, dumps(LARGE)), PEER)
            wait_until(lambda: ends.back)
            assert loads(ends.back[0].body) == LARGE
        wait_until(lambda: "cryptography is older" in caplog.text)
    assert ends.relays == []


def test_where_no_port_is_free_the_link_carries_all(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server((IP, 0)) as taken, caplog.at_level(logging.WARNING):
        port = taken.getsockname()[1]
        with configured(port_range=f"{port}-{port}"):
            ends.there(LARGE)
            assert ends.received() == [LARGE]
            wait_until(lambda: f"no port of {port}-{port} is free" in caplog.text)
    assert ends.relays == []


def test_a_port_of_the_range_is_listened_at(ends: Ends) -> None:
    with socket.create_server((IP, 0)) as probe:
        port = probe.getsockname()[1]
    with configured(port_range=f"{port}-{port}"):
        ends.open_channel()
    assert ends.relays[0]._port == port


def test_through_a_gateway_the_link_carries_all_and_nobody_listens(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    ends.endpoints = ["tcp://192.0.2.1:1"]
    with caplog.at_level(logging.WARNING):
        ends.there(LARGE)
        assert ends.received() == [LARGE]
    assert ends.relays == []
    assert "large payloads" not in caplog.text


# ---- strangers


class Offered:
    """A listener that has offered one channel."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.listener = PayloadListener(self.loop)
        self.opened: list[PayloadChannel] = []
        self.expired = threading.Event()
        ready = threading.Event()

        def offer() -> None:
            self.port, self.keys = self.listener.offer(IP, self.opened.append, self.expired.set)
            ready.set()

        self.loop.call_soon(offer)
        self.loop.start("listener")
        assert ready.wait(DEADLINE)

    def dial(self, said: bytes = b"") -> socket.socket:
        connection = socket.create_connection((IP, self.port), DEADLINE)
        connection.sendall(said)
        return connection

    def close(self) -> None:
        self.loop.call_soon(self.listener.close)
        for channel in self.opened:
            channel.close("the test ends")
        self.loop.call_soon(self.loop.stop)
        self.loop.join(DEADLINE)


@pytest.fixture
def offered() -> Iterator[Offered]:
    made = Offered()
    yield made
    made.close()


def is_refused(connection: socket.socket) -> bool:
    try:
        return connection.recv(1000) == b""
    except ConnectionResetError:
        return True


def test_whoever_does_not_hold_the_key_is_told_nothing(offered: Offered) -> None:
    wrong = [os.urandom(GREETING_BYTES), ChannelKeys.make().greeting(), b"GET / HTTP/1.1\r\n" * 10]
    wrong.append(offered.keys.greeting()[:-1] + bytes([offered.keys.greeting()[-1] ^ 1]))
    for said in wrong:
        assert is_refused(offered.dial(said))
    assert offered.opened == []
    channel = dial(offered.loop, IP, offered.port, offered.keys, DEADLINE)
    wait_until(lambda: offered.opened)
    channel.close("")


def test_a_greeting_is_good_for_one_connection_and_the_port_is_closed_then(offered: Offered) -> None:
    early = offered.dial()
    with offered.dial(offered.keys.greeting()) as first:
        assert first.recv(1000) == offered.keys.answer()
        wait_until(lambda: offered.opened)
        assert is_refused(early)
        with pytest.raises(ConnectionRefusedError):
            offered.dial(offered.keys.greeting())


def test_whoever_listens_instead_is_noticed(offered: Offered) -> None:
    with socket.create_server((IP, 0)) as other:
        port = other.getsockname()[1]

        def answer() -> None:
            connection, _ = other.accept()
            connection.sendall(offered.keys.greeting()[16:])  # all that it has heard
            connection.recv(1000)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(ConnectionError, match="does not hold the key"):
            dial(offered.loop, IP, port, offered.keys, DEADLINE)


def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "PROOF_SECONDS", 0.1)
    monkeypatch.setattr(payload_listener, "PROOF_SECONDS", 0.1)
    offered = Offered()
    for said in (b"", offered.keys.greeting()[:-1]):
        assert is_refused(offered.dial(said))
    assert offered.opened == []
    offered.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's connections")
def test_of_many_connections_of_another_user_the_oldest_are_closed_and_an_honest_one_gets_in(offered: Offered) -> None:
    more = 5
    program = f"""
import encodings.idna, os, socket  # the other user may not be able to read the library
os.setuid(65534)
silent = [socket.create_connection(("{IP}", {offered.port})) for _ in range({admission.MAX_PER_ORIGIN + more})]
print(all(one.recv(1) == b"" for one in silent[:{more}]), flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        with offered.dial(offered.keys.greeting()) as honest:
            assert honest.recv(1000) == offered.keys.answer()
        other.communicate("\n")


def test_an_offer_expires_and_the_port_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_listener, "OFFER_SECONDS", 0.1)
    offered = Offered()
    assert offered.expired.wait(DEADLINE)
    with pytest.raises(ConnectionRefusedError):
        offered.dial()
    offered.close()


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"op": "offer"},
        {"op": "offer", "port": 1, "id": b"x", "secret": b"y"},
        {"op": "offer", "port": 70000, "id": bytes(16), "secret": bytes(32)},
        {"op": "want", "endpoint": "x"},
    ],
)
def test_what_should_not_be_said_about_a_channel_is_a_fault(ends: Ends, said: dict[str, Any]) -> None:
    ends.there(b"")
    ends.received()
    ends.loops[1].call_soon(lambda: ends.dealer._setup._asking.add(""))  # type: ignore[union-attr]
    ends.loops[0].call_soon(lambda: ends.router._tell_about_channel(PEER, said))
    wait_until(lambda: ends.faults)
