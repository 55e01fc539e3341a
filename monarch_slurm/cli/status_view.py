"""How the state of one job is shown: by ``status`` once, by ``attach`` again and again."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

LAST_FAILURES = 5
_STYLES = {"up": "green", "silent": "yellow", "lost": "bold red"}


def describe(told: dict[str, Any]) -> RenderableType:
    """Return what `monarch_slurm.cli.status.look_at` has found, to be printed."""
    slurm, census, training = told["slurm"], told["census"], told["training"]
    head = Text(slurm["text"] if slurm is not None else f"job {told['job_id']}")
    if slurm is not None and slurm["nodes"]:
        head.append(f" on {slurm['nodes']}")
    parts: list[RenderableType] = [head, Text(f"folder {told['folder']}", style="dim")]
    if told["exit_code"] is not None:
        signal = f": killed by {told['signal']}" if told["signal"] else ""
        parts.append(Text(f"its program has ended with exit code {told['exit_code']}{signal}"))
    if told["resume"]:
        parts.append(Text(told["resume"]))
    if told["silence"]:
        parts.append(Text(told["silence"], style="yellow"))
    if census is not None:
        controller = census["controller"]
        since = span(time.time() - controller["started"])
        parts.append(Text(f"program: pid {controller['pid']} on {controller['host']}, for {since}"))
        if training is not None:
            parts += [Text(), describe_training(training)]
        parts += [Text(), _hosts(census["hosts"])]
        if census["failures"]:
            parts += [Text(), _failures(census["failures"])]
    return Group(*parts)


def describe_training(training: dict[str, Any]) -> RenderableType:
    """Return how a training run stands."""
    config, rate = training["config"], training["tokens_per_second"]
    replicas = ", ".join(f"{count} {state}" for state, count in sorted(training["replicas"].items()))
    lines = [
        f"training {config['model']}: step {training['step']}, {training['tokens']:,.0f} of {config['tokens']:,} tokens"
        + (f", {rate:,.0f} tokens/s" if rate else ""),
        f"loss {_loss(training['train_loss'])}, validation {_loss(training['validation_loss'])}",
        f"{training['participants'] or 0} of {config['replicas']} replicas take part ({replicas}); "
        f"{training['failures']} failures, {training['recoveries']} recovered",
        f"run folder {training['folder']}",
    ]
    return Text("\n".join(lines))


def _hosts(hosts: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("host", "state", "for", "starts", "procs", "doing"):
        table.add_column(name, overflow="fold", justify="right" if name in ("starts", "for") else "left")
    for host in hosts:
        state = Text(host["state"], style=_STYLES.get(host["state"], ""))
        doing = host["cause"] or _doing(host["procs"])
        cells = (span(time.time() - host["since"]), str(host["starts"]), _procs(host["procs"]), doing)
        table.add_row(Text(host["name"]), state, *map(Text, cells))
    return table


def _procs(procs: list[dict[str, Any]]) -> str:
    states = Counter(proc["state"] for proc in procs if proc["state"] != "running")
    other = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return f"{len(procs)}" + (f" ({other})" if other else "")


def _doing(procs: list[dict[str, Any]]) -> str:
    """What the actors of a host are in, the same of many ranks once."""
    actors = [actor for proc in procs for actor in proc["actors"]]
    busy = Counter(f"{actor['name']}.{actor['doing']}" for actor in actors if actor["doing"])
    waiting = sum(actor["waiting"] for actor in actors)
    parts = [name if count == 1 else f"{name} x{count}" for name, count in sorted(busy.items())]
    parts += [f"{waiting} messages wait"] if waiting else []
    return "; ".join(parts) or (f"{len(actors)} idle actors" if actors else "")


def _failures(failures: list[dict[str, Any]]) -> Text:
    lines = [
        f"{_clock(item['t'])}  {item['proc']} on {item['host']} (pid {item['pid']}): {item['exit']}"
        for item in failures[-LAST_FAILURES:]
    ]
    return Text("\n".join(["procs that ended by themselves, the last ones:", *lines]))


def _clock(t: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(t))


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def span(seconds: float) -> str:
    """``3700`` as ``1:01:40``."""
    whole = max(0, round(seconds))
    days, rest = divmod(whole, 86400)
    text = f"{rest // 3600}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{text}" if days else text
