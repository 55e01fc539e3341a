"""``monarch-slurm doctor``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from monarch_slurm.cli.exit_codes import UNFIT

if TYPE_CHECKING:
    from monarch_slurm.health import Facts, Feature, Finding

CONTROLLER_SECONDS = 5.0
"""Time for Slurm's controller to answer."""

_MARKS = {"ok": "ok  ", "absent": "-   ", "warn": "warn", "bad": "BAD "}
_COLOURS = {"ok": "green", "absent": None, "warn": "yellow", "bad": "red"}


@click.command()
@click.option("--nodes", help="Nodes to examine, as Slurm writes them (n[1-4]); 'all': those of this job.")
@click.option("--partition", help="Partition that the nodes are in, outside of a job.")
@click.option("--account", help="Account to run under, outside of a job.")
@click.option(
    "--slurm-arg", "slurm_args", multiple=True, help="One more option for srun, such as --slurm-arg=--gpus=8."
)
@click.option(
    "--timeout",
    type=click.FloatRange(1, 600),
    default=10.0,
    show_default=True,
    help="Seconds for Slurm to allocate the nodes, and then until a node counts as silent.",
)
@click.option("--gpus/--no-gpus", "touch_gpus", default=True, show_default=True, help="Let each GPU compute something.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def doctor(
    nodes: str | None,
    partition: str | None,
    account: str | None,
    slurm_args: Sequence[str],
    timeout: float,
    touch_gpus: bool,
    as_json: bool,
) -> None:
    """Say whether this machine, or nodes of the cluster, are fit, what to mend, and what works here.

    \b
    Examples:
      monarch-slurm doctor                        this machine
      monarch-slurm doctor --nodes all            every node of the job around this shell
      monarch-slurm doctor --nodes 'gpu[01-16]'   nodes of the cluster, through srun

    Exit codes: 0 fit, 3 something must be mended, 1 the nodes could not be examined.
    """
    from monarch_slurm.health import ask_here, features, judge_host, worst
    from monarch_slurm.job.status import run_command
    from monarch_slurm.job.unreachable import controller_trouble

    if nodes is None:
        facts = ask_here(timeout * 0.7 if touch_gpus else None)
        findings, answers = judge_host(facts), {facts["host"]: facts}
        no_controller = controller_trouble(run_command, min(timeout, CONTROLLER_SECONDS))
    else:
        findings, answers = _ask_nodes(nodes, partition, account, slurm_args, timeout)
        no_controller = ""  # it has started the tasks
    parts = features(next(iter(answers.values())), no_controller) if len(answers) == 1 else []
    if as_json:
        told = {
            "findings": [asdict(finding) for finding in findings],
            "features": [asdict(part) for part in parts],
            "facts": answers,
        }
        click.echo(json.dumps(told, indent=2))
    else:
        _print(findings, parts, answers)
    if worst(findings) == "bad":
        raise SystemExit(UNFIT)


def _ask_nodes(
    nodes: str, partition: str | None, account: str | None, slurm_args: Sequence[str], timeout: float
) -> tuple[list[Finding], dict[str, Facts]]:
    from monarch_slurm.job.errors import NodeListError
    from monarch_slurm.job.health import ask_nodes
    from monarch_slurm.job.nodelist import expand

    if nodes == "all" and "SLURM_JOB_NODELIST" not in os.environ:
        raise click.UsageError("--nodes all: this shell is not in a job of Slurm (SLURM_JOB_NODELIST is not set)")
    try:
        names = expand(os.environ["SLURM_JOB_NODELIST"] if nodes == "all" else nodes)
    except NodeListError as error:
        raise click.BadParameter(str(error), param_hint="--nodes") from None
    if not names:
        raise click.BadParameter("no node is named", param_hint="--nodes")
    options = [f"--{name}={value}" for name, value in (("partition", partition), ("account", account)) if value]
    return ask_nodes(
        names,
        seconds=timeout,
        options=[*options, *slurm_args],
        waiting=lambda text: click.echo(text, err=True),
    )


def _print(findings: Sequence[Finding], parts: Sequence[Feature], answers: dict[str, Facts]) -> None:
    """Of one host every check is shown; of several what is not as it should be, the same on many hosts once."""
    several = len({finding.host for finding in findings} | answers.keys()) > 1
    shown: dict[tuple[str, str, str, str], list[str]] = {}
    for finding in findings:
        if not several or finding.level in ("warn", "bad"):
            key = (finding.level, finding.check, finding.value, finding.advice)
            shown.setdefault(key, []).append(finding.host)
    for (level, check, value, advice), hosts in (
        sorted(shown.items(), key=lambda item: item[0][0] != "bad") if several else (shown.items())
    ):
        where = f"{_hosts(hosts)}: " if several else ""
        click.echo(f"{click.style(_MARKS[level], fg=_COLOURS[level])}  {where}{check}: {value}")
        if advice:
            click.echo(f"      {advice}")
    if several:
        bad = {finding.host for finding in findings if finding.level == "bad"}
        hosts_in_all = {finding.host for finding in findings} | answers.keys()
        click.echo(f"{len(hosts_in_all) - len(bad)} of {len(hosts_in_all)} nodes are fit")
        if bad:
            click.echo(f"leave out: --exclude={_hosts(sorted(bad))}")
    if parts:
        click.echo("\nwhat works here:")
        for part in parts:
            mark = click.style("yes", fg="green") if part.works else "no "
            click.echo(f"{mark}   {part.name}: {part.why}")


def _hosts(names: Sequence[str]) -> str:
    from monarch_slurm.job.nodelist import compress

    return compress(names)
