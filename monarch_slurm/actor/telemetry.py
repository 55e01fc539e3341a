"""Spans and meters: OpenTelemetry's where it is installed, and lines of the log at DEBUG in any case."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

logger = logging.getLogger("monarch_slurm.telemetry")

_NAME = "monarch_slurm"
_PROVIDER_BY_NAME = "OTEL_PYTHON_TRACER_PROVIDER" in os.environ
"""OpenTelemetry makes the provider when it is first asked for."""


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Time a block of code: a span of OpenTelemetry, and a line in the log ``monarch_slurm.telemetry`` at DEBUG."""
    with contextlib.ExitStack() as stack:
        if _installed():
            tracer = importlib.import_module("opentelemetry.trace").get_tracer(_NAME)
            stack.enter_context(tracer.start_as_current_span(name))
        begin = time.perf_counter()
        failed = ""
        try:
            yield
        except BaseException as error:
            failed = f", raised {type(error).__name__}"
            raise
        finally:
            logger.debug("span %s: %.6f s%s", name, time.perf_counter() - begin, failed)


def traced(fn: Callable[..., Any] | None = None, *, name: str | None = None) -> Any:
    """Make each call of a function, sync or async, a `span` of its name or of ``name``."""
    if fn is None:
        return lambda fn: traced(fn, name=name)
    label = name or fn.__qualname__
    wrapped: Callable[..., Any] = fn

    if inspect.iscoroutinefunction(wrapped):

        @functools.wraps(wrapped)
        async def traced_coroutine(*args: Any, **kwargs: Any) -> Any:
            with span(label):
                return await wrapped(*args, **kwargs)

        return traced_coroutine

    @functools.wraps(wrapped)
    def traced_function(*args: Any, **kwargs: Any) -> Any:
        with span(label):
            return wrapped(*args, **kwargs)

    return traced_function


def recording() -> bool:
    """Return whether anybody in this process can see spans: a provider that was set for OpenTelemetry, or the log.

    The SDK may be loaded without one, as ``import torchft`` does.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    # Asked for by `get_tracer_provider`, it would be looked up in the environment, for each call.
    if trace is not None and (_PROVIDER_BY_NAME or getattr(trace, "_TRACER_PROVIDER", None) is not None):
        return True
    return logger.isEnabledFor(logging.DEBUG)


def get_meter() -> Any:
    """Return OpenTelemetry's meter, or one that logs what it is told at DEBUG.

    Either has ``create_counter``, ``create_up_down_counter`` and ``create_histogram``.
    """
    if _installed():
        return importlib.import_module("opentelemetry.metrics").get_meter(_NAME)
    return _LoggingMeter()


@functools.cache
def _installed() -> bool:
    return (
        importlib.util.find_spec("opentelemetry") is not None
        and importlib.util.find_spec("opentelemetry.trace") is not None
    )


class _Instrument:
    """A counter, an up-down counter or a histogram."""

    def __init__(self, name: str, unit: str, only_up: bool) -> None:
        self._name = name
        self._unit = unit
        self._only_up = only_up
        self._total = 0.0
        self._lock = threading.Lock()

    def add(self, amount: float, attributes: Mapping[str, Any] | None = None) -> None:
        """Add to the total.

        Raises:
            ValueError: the amount is negative, and this is a counter.
        """
        if self._only_up and amount < 0:
            raise ValueError(f"counter {self._name!r} cannot go down: {amount}")
        with self._lock:
            self._total += amount
            total = self._total
        logger.debug("metric %s: %+g = %g %s %s", self._name, amount, total, self._unit, dict(attributes or {}))

    def record(self, amount: float, attributes: Mapping[str, Any] | None = None) -> None:
        """Record one value."""
        logger.debug("metric %s: %g %s %s", self._name, amount, self._unit, dict(attributes or {}))


class _LoggingMeter:
    def create_counter(self, name: str, unit: str = "", description: str = "") -> _Instrument:
        return _Instrument(name, unit, only_up=True)

    def create_up_down_counter(self, name: str, unit: str = "", description: str = "") -> _Instrument:
        return _Instrument(name, unit, only_up=False)

    def create_histogram(self, name: str, unit: str = "", description: str = "", **_: object) -> _Instrument:
        return _Instrument(name, unit, only_up=False)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("create_"):
            raise NotImplementedError(f"{name} needs OpenTelemetry: pip install opentelemetry-sdk")
        raise AttributeError(name)
