"""``monarch-slurm stacks``: the Python stacks of all ranks of a running program, grouped by equal ones."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from monarch_slurm.cli.programs import Program, choose_programs
from monarch_slurm.cli.stack_groups import CONTROLLER_RANK, Rank, group_ranks

if TYPE_CHECKING:
    from monarch_slurm.host.stacks import Stacks


@click.command()
@click.option("--pid", type=click.IntRange(1), help="Only the program (controller) with this process id.")
@click.option("--job", help="Only the programs of this Slurm job.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--all-threads", is_flag=True, help="Show idle threads and the runtime's own frames, too.")
def stacks(pid: int | None, job: str | None, as_json: bool, all_threads: bool) -> None:
    """Show where every rank of your programs on this machine is now, hung ones too.

    Run it beside the controller: on the machine of `train --local` or your program, on the head node of a Slurm job.
    Ranks with equal stacks are shown once. The programs go on meanwhile.
    """
    programs = choose_programs(pid, job)
    answers = [(program, _ask(program)) for program in programs]
    if as_json:
        json.dump([_as_fields(program, *answer) for program, answer in answers], sys.stdout, indent=1)
        click.echo()
        return
    for program, (ranks, silent) in answers:
        click.echo(f"{program.title}: {len(ranks) - 1} ranks")
        for name, why in silent.items():
            click.echo(f"  host {name}: {why}")
        for group in group_ranks(ranks, all_threads):
            click.echo(f"\n{group.title}")
            for line in group.lines:
                click.echo(f"  {line}")
        click.echo()


def _ask(program: Program) -> tuple[list[Rank], dict[str, str]]:
    """Return the ranks, the controller first, and what is to be said of hosts that do not answer."""
    from monarch_slurm.host.stacks import Stacks

    ranks = [Rank(program.hostname, CONTROLLER_RANK, 0, own_stacks(program.pid))]
    answer = program.ask({"service": "stacks"}) if program.answers else None
    if answer is None:
        why = (
            "the controller does not answer, so its ranks cannot be asked: its I/O thread gets no turn (see its stack)"
        )
        return ranks, {program.hostname: why}
    for proc in answer["procs"]:
        mesh, _, rank = proc["proc"].rpartition(".")
        ranks.append(Rank(proc["host"], mesh, int(rank), Stacks.from_fields(proc)))
    ranks[1:] = sorted(ranks[1:], key=lambda rank: (rank.mesh, rank.number))
    return ranks, answer["silent"]


def own_stacks(pid: int) -> Stacks:
    """Return the stacks of a process of this machine."""
    from monarch_slurm.host.stacks import ANSWER_SECONDS, StackDump

    dump = StackDump(pid)
    deadline = time.monotonic() + ANSWER_SECONDS
    while not dump.poll() and time.monotonic() < deadline:
        time.sleep(0.005)
    dump.give_up()
    return dump.stacks


def _as_fields(program: Program, ranks: list[Rank], silent: dict[str, str]) -> dict[str, Any]:
    return {
        "pid": program.pid,
        "hostname": program.hostname,
        "command": program.command,
        "job": program.job,
        "silent_hosts": silent,
        "ranks": [
            {"host": rank.host, "mesh": rank.mesh, "rank": rank.number, **rank.stacks.to_fields()} for rank in ranks
        ],
    }
