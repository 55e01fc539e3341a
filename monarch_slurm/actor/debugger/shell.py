"""The commands of whoever debugs a program, from whatever terminal they come."""

from __future__ import annotations

import queue
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from monarch_slurm.actor.debugger.desk import DebugDesk, Events, StoppedRank, Taken
from monarch_slurm.actor.debugger.ranks import RanksError, parse_cast
from monarch_slurm.rank_ranges import ranges

PROMPT = "debug> "

HELP = """\
list, l                          ranks that are stopped
attach, a ACTOR RANK             talk to one of them; Ctrl-D, Ctrl-C or `detach` returns here, and it stays stopped
cast ACTOR ranks(...) COMMAND    send a pdb command to several: ranks(:), ranks(3), ranks(1,4,6), ranks(0:8:2),
                                 ranks(host=0:2, gpu=(0,3))
continue, c                      clear all breakpoints, and let all ranks go on
quit, q                          leave; ranks stay stopped
help, h                          this
"""

NEWS_SECONDS = 0.2
"""Ranks that stop within this time are told of together."""

CAST_SECONDS = 5.0
"""How long the answers to a `cast` are waited for; a command such as `next` may take a rank any time."""


class Interrupt:
    """Ctrl-C."""


class EndOfInput:
    """Ctrl-D, or the end of a file of commands."""


class HangUp:
    """The terminal is gone."""


@dataclass
class _Cast:
    ranks: list[StoppedRank]
    missing: set[StoppedRank]
    deadline: float
    with_output: bool


class DebugShell:
    """One person's session.

    Args:
        show: called with text to print, and the prompt to read a line at; an empty one: none is read yet.
        until_all_go_on: end by itself once no rank is stopped any more.
    """

    def __init__(self, desk: DebugDesk, show: Callable[[str, str], None], until_all_go_on: bool = False) -> None:
        self.events: Events = queue.SimpleQueue()
        """Takes lines (str), `Interrupt`, `EndOfInput` and `HangUp`, besides what the desk tells."""
        self._desk = desk
        self._show = show
        self._until_all_go_on = until_all_go_on
        self._attached: StoppedRank | None = None
        self._cast: _Cast | None = None
        self._prompted = False
        self._known: dict[StoppedRank, int] = {}  # stops that the person has been told of
        self._news: dict[StoppedRank, str] = {}
        self._news_due = 0.0
        self._over = False

    def run(self) -> None:
        """Serve until the person leaves, or another one takes over."""
        self._desk.open(self.events)
        try:
            self._show(self._list(), PROMPT)
            while not self._over:
                self._step()
        finally:
            self._desk.close(self.events)

    def _step(self) -> None:
        due = self._cast.deadline if self._cast else self._news_due if self._news and not self._attached else None
        try:
            event = self.events.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
        except queue.Empty:
            if self._cast is not None:
                self._end_cast()
            else:
                self._tell_news()
            return
        if isinstance(event, StoppedRank):
            self._rank_changed(event)
        elif isinstance(event, str):
            self._line(event)
        elif isinstance(event, Taken):
            self._show("another terminal debugs this program now\n", "")
            self._over = True
        elif isinstance(event, HangUp):
            self._over = True
        elif self._attached is not None:
            self._detach()
        elif isinstance(event, Interrupt):
            self._end_cast() if self._cast else self._show("", PROMPT)
        else:
            self._over = True

    # ---- what ranks do

    def _rank_changed(self, rank: StoppedRank) -> None:
        if rank is self._attached:
            text = self._desk.take_text(rank)
            if rank.ended:
                self._attached = None
                self._to_prompt(f"{text}{_line_end(text)}{rank.title} {rank.ended}\n")
            elif rank.waits and (text or not self._prompted):
                self._show_rank(rank, text)
            elif text:
                self._show(text, "")
        elif self._cast is not None and rank in self._cast.missing:
            if rank.waits or rank.ended:
                self._cast.missing.discard(rank)
                if not self._cast.missing:
                    self._end_cast()
        elif rank.waits and self._known.get(rank) != rank.stops:
            self._add_news(rank, f"stopped at {rank.where}")
        elif rank.ended and self._known.pop(rank, 0):
            self._add_news(rank, rank.ended)

    def _add_news(self, rank: StoppedRank, what: str) -> None:
        if not self._news:
            self._news_due = time.monotonic() + NEWS_SECONDS
        self._news[rank] = what
        if not rank.ended:
            self._known[rank] = rank.stops

    def _tell_news(self) -> None:
        self._to_prompt(self._take_news())

    def _take_news(self) -> str:
        text = summarize(self._news)
        self._news.clear()
        return text

    def _to_prompt(self, text: str) -> None:
        if self._until_all_go_on and not self._desk.stopped():
            self._show(text, "")
            self._over = True
        else:
            self._show(text, PROMPT)

    # ---- what the person says

    def _line(self, line: str) -> None:
        if self._attached is not None:
            if line.strip() == "detach":
                self._detach()
            else:
                self._prompted = False
                self._desk.write(self._attached, line)
            return
        word, _, rest = line.strip().partition(" ")
        command = {
            "list": self._do_list, "l": self._do_list,
            "attach": self._do_attach, "a": self._do_attach,
            "cast": self._do_cast,
            "continue": self._do_continue, "c": self._do_continue,
            "quit": self._do_quit, "q": self._do_quit,
            "help": self._do_help, "h": self._do_help, "?": self._do_help,
            "": self._do_nothing,
        }.get(word)  # fmt: skip
        if command is None:
            self._show(f"unknown command {word!r}; `help` tells which there are\n", PROMPT)
        else:
            command(rest.strip())

    def _do_nothing(self, _: str) -> None:
        self._to_prompt("")

    def _do_list(self, _: str) -> None:
        self._news.clear()
        self._show(self._list(), PROMPT)

    def _do_help(self, _: str) -> None:
        self._show(HELP, PROMPT)

    def _do_quit(self, _: str) -> None:
        self._over = True

    def _do_attach(self, rest: str) -> None:
        actor, _, number = rest.partition(" ")
        there = [rank for rank in self._desk.stopped() if actor in (rank.actor, rank.mesh)]
        if number:
            there = [rank for rank in there if str(rank.rank) == number.strip()]
        if not actor or len(there) != 1:
            what = f"{actor} {number}".strip()
            problem = f"no stopped rank is called {what!r}" if not there else f"{what!r} is stopped {len(there)} times"
            hint = f": {', '.join(f'{r.mesh} {r.rank}' for r in there[:4])}" if there else "; `list` shows them"
            self._show(f"{problem}{hint}\n" if actor else "attach ACTOR RANK expected\n", PROMPT)
            return
        self._attached = rank = there[0]
        self._news.pop(rank, None)
        self._show_rank(
            rank, self._desk.take_text(rank), f"{rank.title} on {rank.host} (pid {rank.pid}), {rank.where}\n"
        )

    def _show_rank(self, rank: StoppedRank, text: str, before: str = "") -> None:
        """Show what a rank has said last; the line that it has not ended is its prompt."""
        body, newline, prompt = text.rpartition("\n")
        self._prompted = True
        self._known[rank] = rank.stops
        self._show(before + body + newline, prompt or "(Pdb) ")

    def _detach(self) -> None:
        rank, self._attached = self._attached, None
        assert rank is not None
        self._to_prompt(f"detached; {rank.title} {'stays stopped' if rank.waits else 'runs'}\n{self._take_news()}")

    def _do_cast(self, rest: str) -> None:
        try:
            actor, wanted, command = parse_cast(rest)
            ranks = [
                rank
                for rank in self._desk.stopped()
                if actor in (rank.actor, rank.mesh) and wanted(rank.rank, rank.coords)
            ]
        except RanksError as error:
            self._show(f"{error}\n", PROMPT)
            return
        if not ranks:
            self._show(f"no rank of {actor!r} that is meant is stopped; `list` shows which are\n", PROMPT)
            return
        self._begin_cast(command, ranks)

    def _begin_cast(self, command: str, ranks: list[StoppedRank], with_output: bool = True) -> None:
        for rank in ranks:
            self._desk.take_text(rank)
            self._news.pop(rank, None)
        sent = [rank for rank in ranks if self._desk.write(rank, command)]
        self._cast = _Cast(ranks, set(sent), time.monotonic() + CAST_SECONDS, with_output)
        if not sent:
            self._end_cast()

    def _end_cast(self) -> None:
        cast, self._cast = self._cast, None
        assert cast is not None
        said: dict[StoppedRank, str] = {}
        for rank in cast.ranks:
            text = self._desk.take_text(rank)
            body = text.rpartition("\n")[0] if cast.with_output else ""
            state = rank.ended if rank.ended else "" if rank.waits else "runs; `list` shows it when it has stopped"
            said[rank] = "\n".join(part for part in (body, state) if part) or "(no output)"
        self._to_prompt(summarize(said))

    def _do_continue(self, _: str) -> None:
        ranks = self._desk.stopped()
        if not ranks:
            self._show("no rank is stopped\n", PROMPT)
            return
        self._begin_cast("clear ;; continue", ranks, with_output=False)

    def _list(self) -> str:
        ranks = self._desk.stopped()
        self._known = {rank: rank.stops for rank in ranks}
        if not ranks:
            return "no rank is stopped\n"
        names: dict[str, set[str]] = defaultdict(set)
        for rank in ranks:
            names[rank.actor].add(rank.mesh)
        rows = [("ACTOR", "RANK", "COORDS", "HOST", "FUNCTION", "LINE")]
        for rank in ranks:
            coords = ",".join(f"{label}={value}" for label, value in rank.coords.items())
            name = rank.actor if len(names[rank.actor]) == 1 else rank.mesh
            rows.append((name, str(rank.rank), coords or "-", rank.host, rank.function, f"{rank.file}:{rank.line}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows)


def summarize(said: dict[StoppedRank, str]) -> str:
    """Return what ranks have said, equal texts once."""
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank, text in said.items():
        groups[rank.mesh, rank.actor, text].append(rank.rank)
    parts = []
    for (_, actor, text), numbers in groups.items():
        who = f"rank{'s' if len(numbers) > 1 else ''} {ranges(numbers)} of {actor}"
        parts.append(f"{who}:\n{_indent(text)}" if "\n" in text else f"{who}: {text}\n")
    return "".join(parts)


def _indent(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())


def _line_end(text: str) -> str:
    return "" if not text or text.endswith("\n") else "\n"
