from __future__ import annotations

from typing import Any

import pytest

from monarch_slurm.host.log_streams import BATCH_BYTES, MAX_BYTES_ON_THE_WAY, LogStreams
from monarch_slurm.host.proc import ProcSpec
from monarch_slurm.wire import CONTROLLER, Address, Loop, Message, unpack

AGENT = Address("n1#1", "agent")
SPEC = ProcSpec("n1#1", "n1", "w.0", "w", 0, "", "")


class Sent(list[Message]):
    """What the streams have sent."""

    def lines(self) -> list[str]:
        return [line for message in self if message.kind == "log" for *_, line in unpack(message.body[0])]

    def kinds(self) -> list[str]:
        return [message.kind for message in self]


def option(stream: bool = True, level: int | None = None, window: float | None = None) -> Message:
    fields: dict[str, Any] = {"mesh": "w", "ranks": [0], "stream": stream, "window": window, "level": level}
    return Message("logging", AGENT, CONTROLLER, {**fields, "port": 7, "rank": 0, "status": "value"})


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def streams(sent: Sent) -> LogStreams:
    return LogStreams(Loop(), AGENT, "n1", sent.append, lambda: None, is_clients_output=False)


def test_nothing_is_streamed_unasked(streams: LogStreams, sent: Sent) -> None:
    assert not streams.take(SPEC, 1, "hello")
    streams.flush()
    assert sent == []


def test_lines_go_in_one_batch_before_the_answer_that_ends_the_stream(streams: LogStreams, sent: Sent) -> None:
    streams.set_option(option(window=3))
    assert sent.kinds() == ["port"]
    streams.take(SPEC, 1, "one")
    streams.take(SPEC, 2, "two")
    streams.set_option(option(stream=False))
    assert sent.kinds() == ["port", "log", "port"]
    assert unpack(sent[1].body[0]) == [["w", 0, 1, "one"], ["w", 0, 2, "two"]]
    assert sent[1].fields == {"host": "n1", "windows": {"w": 3}, "bytes": 6, "left_out": 0}
    streams.take(SPEC, 1, "three")
    streams.flush()
    assert len(sent) == 3


def test_what_was_written_before_an_option_belongs_to_the_old_one(sent: Sent) -> None:
    written = ["said before"]

    def read() -> None:
        while written:
            streams.take(SPEC, 1, written.pop())

    streams = LogStreams(Loop(), AGENT, "n1", sent.append, read, is_clients_output=False)
    streams.set_option(option())
    assert sent.lines() == []
    written.append("said while on")
    streams.set_option(option(stream=False))
    assert sent.lines() == ["said while on"]


@pytest.mark.parametrize("is_clients_output", [True, False])
def test_a_client_that_does_not_read_makes_nobody_wait(sent: Sent, is_clients_output: bool) -> None:
    streams = LogStreams(Loop(), AGENT, "n1", sent.append, lambda: None, is_clients_output=is_clients_output)
    streams.set_option(option())
    line = "x" * 1024
    count = 2 * MAX_BYTES_ON_THE_WAY // len(line)
    for _ in range(count):
        assert streams.take(SPEC, 1, line) == is_clients_output
    streams.flush()
    arrived = len(sent.lines())
    assert 0 < arrived * len(line) <= MAX_BYTES_ON_THE_WAY + BATCH_BYTES
    assert sum(message.fields["left_out"] for message in sent[1:]) == count - arrived
    for message in [message for message in sent if message.kind == "log"]:
        streams.acknowledged(Message("log_ack", AGENT, CONTROLLER, {"bytes": message.fields["bytes"]}))
    streams.take(SPEC, 1, "again")
    streams.flush()
    assert sent.lines()[-1] == "again"


def test_lines_that_were_left_out_are_reported_even_if_nothing_follows(sent: Sent) -> None:
    loop = Loop()
    streams = LogStreams(loop, AGENT, "n1", sent.append, lambda: None, is_clients_output=False)
    streams.set_option(option())
    line = "x" * 1024
    for _ in range(MAX_BYTES_ON_THE_WAY // len(line) + 1):
        streams.take(SPEC, 1, line)
    streams.flush()
    before = len(sent)
    streams.take(SPEC, 1, "lost")
    streams.acknowledged(Message("log_ack", AGENT, CONTROLLER, {"bytes": MAX_BYTES_ON_THE_WAY}))
    loop.run_until(lambda: len(sent) > before)
    assert sent[-1].fields["left_out"] == 1


def test_the_level_is_told_now_and_to_a_proc_of_that_name_that_comes_later(streams: LogStreams, sent: Sent) -> None:
    streams.set_option(option(level=10))
    assert (sent[0].kind, sent[0].dst, sent[0].fields) == ("log_level", Address("n1#1", "w.0"), {"level": 10})
    assert [greeting.fields for greeting in streams.greetings("w.0")] == [{"level": 10}]
    assert streams.greetings("w.1") == []
