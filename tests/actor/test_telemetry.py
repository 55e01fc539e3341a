"""Spans, meters and prefixes of log records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from support import DEADLINE, Program

import monarch_slurm.actor.telemetry as telemetry
from monarch_slurm.actor import Actor, ProcMesh, config, current_actor_name, endpoint, get_meter, span, traced


@pytest.fixture(autouse=True)
def _debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "monarch_slurm.telemetry")


@pytest.fixture(params=["with OpenTelemetry", "without"])
def _installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without":
        monkeypatch.setattr(telemetry, "_installed", lambda: False)
    else:
        pytest.importorskip("opentelemetry.trace")


@pytest.mark.usefixtures("_installed")
def test_spans_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with span("outer"), pytest.raises(ValueError, match="on purpose"), span("inner"):
        raise ValueError("on purpose")

    @traced
    def plain(x: int) -> int:
        """Its text."""
        return x + 1

    @traced(name="named")
    async def coroutine(x: int) -> int:
        return x + 2

    assert plain(1) == 2
    assert (plain.__name__, plain.__doc__) == ("plain", "Its text.")
    assert asyncio.run(coroutine(1)) == 3
    told = [record.getMessage().split(": ")[0] for record in caplog.records]
    assert told == ["span inner", "span outer", f"span {plain.__qualname__}", "span named"]
    assert caplog.records[0].getMessage().endswith(", raised ValueError")


def test_spans_are_spans_of_opentelemetry(caplog: pytest.LogCaptureFixture) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    with span("outer"), span("inner"):
        pass
    inner, outer = exporter.get_finished_spans()
    assert (inner.name, outer.name) == ("inner", "outer")
    assert inner.parent is not None
    assert inner.parent.span_id == outer.context.span_id


@pytest.mark.usefixtures("_installed")
def test_meters() -> None:
    meter = get_meter()
    meter.create_counter("steps", unit="1").add(1, {"rank": 0})
    meter.create_up_down_counter("queue").add(-1)
    meter.create_histogram("loss").record(0.5)


def test_a_meter_without_opentelemetry_logs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_installed", lambda: False)
    counter = get_meter().create_counter("steps", unit="steps")
    counter.add(2)
    counter.add(3, {"rank": 1})
    assert caplog.messages[-1] == "metric steps: +3 = 5 steps {'rank': 1}"
    with pytest.raises(ValueError, match="cannot go down"):
        counter.add(-1)
    with pytest.raises(NotImplementedError, match="needs OpenTelemetry"):
        get_meter().create_observable_gauge("g")
    with pytest.raises(AttributeError):
        get_meter().nothing()


class Talker(Actor):
    """Logs, and keeps what was logged."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append((record.getMessage(), record.__dict__["actor_prefix"]))  # type: ignore[method-assign]
        for name in ("talk", "monarch_slurm.telemetry"):
            logging.getLogger(name).addHandler(handler)
            logging.getLogger(name).setLevel(logging.DEBUG)

    @endpoint
    def log(self, prefix: bool) -> None:
        config.prefix_python_logs_with_actor = prefix
        for message, *arguments in [("100 %",), ("%d %%", 7), ("",)]:
            logging.getLogger("talk").info(message, *arguments)

    @endpoint(instrument=False)
    def get(self) -> tuple[list[tuple[str, str]], str]:
        lines, self.lines = self.lines, []
        return lines, current_actor_name()


def test_log_records_say_which_actor_they_are_of(spawn: Callable[..., ProcMesh]) -> None:
    talker: Any = spawn().spawn("talk%er", Talker)
    for prefixed in (True, False):
        talker.log.call_one(prefixed).get(DEADLINE)
        lines, _ = talker.get.call_one().get(DEADLINE)
        spans = [line for line, _ in lines if "span talk%er.log: " in line]
        assert len(spans) == 1
        prefix = f"[actor=<root>.<{Talker.__module__}.Talker talk%er{{}}>] "
        shown = prefix if prefixed else ""
        assert lines[:3] == [(f"{shown}100 %", prefix), (f"{shown}7 %", prefix), ("", prefix)]


CLIENT = """
    import logging, threading
    from monarch_slurm.actor import config, context
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    log = logging.getLogger("program")
    log.info("before")
    context()
    log.info("%d %%", 7)
    other = threading.Thread(target=log.info, args=("of another thread",))
    other.start()
    other.join()
    config.prefix_python_logs_with_actor = False
    log.info("switched off")
"""


def test_log_records_of_the_program_say_that_they_are_of_the_root(program: Callable[..., Program]) -> None:
    running = program(CLIENT)
    assert running.wait() == 0, running.errors()
    assert running.errors().splitlines() == ["before", "[actor=<root>] 7 %", "of another thread", "switched off"]


SDK_WITHOUT_PROVIDER = """
    import sys
    import opentelemetry.sdk.trace
    import opentelemetry.trace
    from monarch_slurm.actor.telemetry import recording

    print("loaded", recording())
    opentelemetry.trace.set_tracer_provider(opentelemetry.sdk.trace.TracerProvider())
    print("set", recording())
"""


def test_an_sdk_without_a_provider_records_nothing(program: Callable[..., Program]) -> None:
    pytest.importorskip("opentelemetry.sdk.trace")
    running = program(SDK_WITHOUT_PROVIDER)
    assert running.wait() == 0, running.errors()
    assert running.output().splitlines() == ["loaded False", "set True"]
