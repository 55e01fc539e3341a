"""What runs in each new proc before its mesh's bootstrap function: the way for state of this process to get there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Startup = Callable[[], Callable[[], None] | None]
_makers: list[Startup] = []


def register_startup_function(maker: Startup) -> None:
    """Call ``maker`` whenever this process spawns procs; what it returns, unless None, is called in each of them first.

    What it returns is pickled.
    """
    if maker not in _makers:
        _makers.append(maker)


class WithStartup:
    """A bootstrap function, and what is to run before it. It can be pickled if they can."""

    def __init__(self, before: list[Callable[[], None]], bootstrap: Callable[[], Any] | None) -> None:
        self._before = before
        self._bootstrap = bootstrap

    def __call__(self) -> Any:
        """Run all; return what the bootstrap function returned, if it is async to be awaited."""
        for function in self._before:
            function()
        return None if self._bootstrap is None else self._bootstrap()


def with_startup(bootstrap: Callable[[], Any] | None) -> Callable[[], Any] | None:
    """Return what new procs are to call: the registered functions, then ``bootstrap``; None if there is nothing."""
    before = [function for maker in _makers if (function := maker()) is not None]
    return WithStartup(before, bootstrap) if before else bootstrap
