"""Exceptions that a signal handler has raised into what the main thread was doing."""

from __future__ import annotations

import functools
import signal
import threading
from types import CodeType


def is_of_signal_handler(error: BaseException) -> bool:
    """Return whether ``error`` was raised by a handler of a signal, rather than by what it interrupted."""
    if threading.current_thread() is not threading.main_thread():  # handlers run there only
        return False
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: object) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    if not hasattr(function, "__code__"):
        function = getattr(type(handler), "__call__", None)  # noqa: B004 - its code, not whether it can be called
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
