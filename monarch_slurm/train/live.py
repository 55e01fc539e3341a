"""What a person sees while a run goes on: a panel in a terminal, plain lines in a log.

`LiveView.update` only folds the event into a small state; the panel is drawn by a thread of its own, at most four
times a second, so a busy run does not wait for a slow terminal. In a batch job's log there is a line every few seconds
and one for each failure, recovery and escalation.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from monarch_slurm.train import units
from monarch_slurm.train.config import TrainConfig
from monarch_slurm.train.events import Event
from monarch_slurm.train.live_state import Notice, ReplicaState, RunState

REFRESH_HZ = 4
LOG_LINES = 200

_STATE_STYLES = {
    "training": "green",
    "syncing": "cyan",
    "joining": "blue",
    "restarting": "yellow",
    "down": "bold red",
    "lost": "bold red",
}
_LEVEL_STYLES = {"info": "dim", "bad": "red", "good": "green", "warn": "yellow"}
_WIDE = 100
"""Columns of a terminal from which on everything has room."""

_WORST_FIRST = ("down", "lost", "restarting", "joining", "starting")


class LiveView:
    """The live view of one run, to be used as a context manager.

    Args:
        config: the run's description; the token budget and the number of replicas are shown from it.
        console: where to draw; None is the standard output. Whether it is a terminal decides between panel and lines.
        interval: seconds between two progress lines when there is no terminal.
        clock: the time that ``interval`` is measured by, in seconds.

    A broken or closed output never stops the run: the view goes silent.
    """

    def __init__(
        self,
        config: TrainConfig,
        console: Console | None = None,
        *,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.console = console if console is not None else Console()
        self.state = RunState(replicas={r: ReplicaState() for r in range(config.replicas)})
        self.notices: deque[Notice] = deque(maxlen=LOG_LINES)
        self._interval = interval
        self._clock = clock
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._printed: tuple[float, float, int] | None = None  # when, tokens and step of the last progress line
        self._silent = False

    def __repr__(self) -> str:
        return f"<LiveView {self._progress_text()}>"

    def __enter__(self) -> LiveView:
        if self.console.is_terminal:
            self._live = Live(
                get_renderable=self.render,
                console=self.console,
                refresh_per_second=REFRESH_HZ,
                vertical_overflow="crop",
            )
            try:
                with _uninterrupted():
                    self._try(self._live.start)
            except BaseException:  # nobody leaves what nobody has entered
                self.__exit__(None, None, None)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            with _uninterrupted():
                self._try(self._live.stop)
            self._live = None
        elif self._printed is not None:
            self._print_progress()

    def update(self, event: Event) -> None:
        """Take one event, in constant time; what cannot be understood is passed over."""
        with self._lock:
            notices = self.state.apply(event)
            self.notices.extend(notices)
        if self.console.is_terminal:
            return
        for notice in notices:
            self._print(notice.t, notice.text)
        if isinstance(event, dict) and event.get("kind") in ("step", "sync"):
            self._print_progress(at_most_every=self._interval)

    def render(self) -> RenderableType:
        """Return the panel as it should be drawn now."""
        with self._lock:
            rows = max(1, min(len(self.state.replicas), self.console.height - 14))
            lines = max(2, min(8, self.console.height - rows - 11))
            parts = [self._head(), self._bar(), Text(), self._replica_table(rows), Text(), self._log(lines)]
        run = "training" if self.state.ok is None else "finished" if self.state.ok else "ended early"
        return Panel(Group(*parts), title=Text(f"{self.config.model}: {run}"), title_align="left", border_style="dim")

    def _head(self) -> RenderableType:
        s = self.state
        cells = (
            ("step", f"{s.step}"),
            ("tokens/s", units.count(s.tokens_per_second())),
            ("train loss", _loss(s.train_loss)),
            ("val loss", _loss(s.eval_loss)),
            ("participants", f"{units.MISSING if s.participants is None else s.participants}/{self.config.replicas}"),
            ("quorum", units.MISSING if s.quorum_id is None else units.quorum(s.quorum_id)),
            ("failures", f"{s.failures}, {s.recoveries} recovered"),
        )
        rows = [cells] if self.console.width >= _WIDE else [cells[:4], cells[4:]]
        grids = []
        for row in rows:
            grid = Table.grid(padding=(0, 3))
            grid.add_row(*(Text(name, style="dim", no_wrap=True) for name, _ in row))
            grid.add_row(*(Text(value, style="bold", no_wrap=True) for _, value in row))
            grids.append(grid)
        return Group(*grids)

    def _bar(self) -> RenderableType:
        s, budget = self.state, max(1, self.config.tokens)
        eta = s.eta(budget)
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        text = f"{units.count(s.tokens)} / {units.count(budget)} tokens"
        since = f"{units.elapsed(s.now - s.started)}" if s.started is not None else "0:00"
        left = f"ETA {units.elapsed(eta)}" if eta is not None and s.ok is None else f"after {since}"
        bar = ProgressBar(total=budget, completed=min(budget, s.tokens), complete_style="green", finished_style="green")
        grid.add_row(bar, Text(f"{text}  {100 * s.tokens / budget:.0f} %  {left}"))
        return grid

    def _replica_table(self, rows: int) -> RenderableType:
        replicas = sorted(self.state.replicas.items())
        hidden = 0
        if len(replicas) > rows:
            # What does not fit is what goes well.
            worst = sorted(replicas, key=lambda item: (_trouble(item[1]), item[0]))
            hidden = len(replicas) - rows
            replicas = sorted(worst[:rows])
        table = Table(box=None, padding=(0, 2, 0, 0), expand=True, header_style="dim")
        for name, width, right in (("replica", 7, True), ("state", 12, False), ("gen", 4, True), ("step", 8, True)):
            table.add_column(name, width=width, justify="right" if right else "left", no_wrap=True)
        wide = self.console.width >= _WIDE
        if wide:
            table.add_column("host", ratio=1, no_wrap=True)
        table.add_column("last failure", ratio=2, no_wrap=True)
        for r, s in replicas:
            style = _STATE_STYLES.get(s.state, "dim")
            table.add_row(
                Text(str(r)),
                Text(f"● {s.state}", style=style),
                Text(str(s.generation)),
                Text(str(s.step)),
                *([Text(s.host, overflow="ellipsis")] if wide else []),
                Text(s.last_failure, style="dim", overflow="ellipsis"),
            )
        return Group(table, Text(f"and {hidden} more", style="dim")) if hidden else table

    def _log(self, lines: int) -> RenderableType:
        shown = list(self.notices)[-lines:]
        return Group(
            *(
                Text.assemble(
                    (f"{units.clock(n.t)}  ", "dim"),
                    (n.text, _LEVEL_STYLES[n.level]),
                    no_wrap=True,
                    overflow="ellipsis",
                )
                for n in shown
            )
        )

    def _progress_text(self) -> str:
        s = self.state
        share = 100 * s.tokens / max(1, self.config.tokens)
        parts = [
            f"step {s.step}",
            f"{units.count(s.tokens)}/{units.count(self.config.tokens)} tokens ({share:.0f} %)",
            f"{units.count(s.tokens_per_second())} tokens/s",
            f"loss {_loss(s.train_loss)}",
            f"val {_loss(s.eval_loss)}",
            f"{units.MISSING if s.participants is None else s.participants} of {self.config.replicas} replicas",
        ]
        eta = s.eta(self.config.tokens)
        if eta is not None and s.ok is None:
            parts.append(f"ETA {units.elapsed(eta)}")
        return "  ".join(parts)

    def _print_progress(self, at_most_every: float = 0.0) -> None:
        now = self._clock()
        if self._printed is not None:
            when, tokens, step = self._printed
            if now - when < at_most_every or (tokens, step) == (self.state.tokens, self.state.step):
                return
        self._printed = (now, self.state.tokens, self.state.step)
        self._print(self.state.now, self._progress_text())

    def _print(self, t: float, text: str) -> None:
        line = f"{units.clock(t)}  {text}"
        self._try(lambda: self.console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True))

    def _try(self, action: Callable[[], Any]) -> None:
        """Write, and give up writing for good when the output is gone (a closed terminal, a full disk)."""
        if self._silent:
            return
        try:
            action()
        except (OSError, ValueError):  # ValueError: the file was closed
            self._silent = True


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put Ctrl-C off: half a start or stop would leave the terminal without cursor, and swallow what is said later."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[FrameType | None] = []
    before = signal.signal(signal.SIGINT, lambda _, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(signal.SIGINT, came[0])


def _loss(value: float | None) -> str:
    return units.MISSING if value is None else f"{value:.3f}"


def _trouble(replica: ReplicaState) -> int:
    return _WORST_FIRST.index(replica.state) if replica.state in _WORST_FIRST else len(_WORST_FIRST)
