"""What Slurm says of nodes: whether it can give them to a job now, and why not."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from monarch_slurm.job.errors import NodeListError, NoSlurmError, SlurmUnreachableError
from monarch_slurm.job.nodelist import compress, expand
from monarch_slurm.job.request import SlurmRequest
from monarch_slurm.job.status import Run

FREE = ("idle", "mixed")
_USABLE = (*FREE, "allocated", "completing", "planned")
_IN_RESERVATION = (*_USABLE, "reserved")
_GPUS = re.compile(r"\bgpu:(?:[^:,(]+:)?([0-9]+)")
_FLAGS = "*~#!%$@^-+"
_LISTED_JOBS = 3


@dataclass(frozen=True)
class NodeState:
    """One look at a node.

    Attributes:
        name: Slurm's name of it.
        state: Slurm's own word, such as ``idle``, ``drained`` or ``allocated*``; ``*`` says that it does not answer.
        reason: why an administrator or Slurm has taken it out; empty if there is none.
        features: what a job may ask for by ``--constraint``.
        partitions: in which it is; the default one's name ends with ``*``.
        cpus: how many it has.
        memory: MiB that it has.
        resources: its generic resources, such as ``gpu:mi300x:8(S:0-1)``.
        jobs: ids and users of the jobs that run on it.
    """

    name: str
    state: str
    reason: str = ""
    features: frozenset[str] = frozenset()
    partitions: frozenset[str] = frozenset()
    cpus: int = 0
    memory: int = 0
    resources: str = ""
    jobs: tuple[str, ...] = field(default=(), compare=False)

    @property
    def word(self) -> str:
        """The state without Slurm's flags."""
        return self.state.rstrip(_FLAGS).lower()

    @property
    def answers(self) -> bool:  # noqa: D102
        return "*" not in self.state

    @property
    def usable(self) -> bool:
        """Whether Slurm gives it to jobs, at once or when the jobs that it has now have ended."""
        return self.answers and self.word in _USABLE

    @property
    def why_not_free(self) -> str:
        """Why a job that wants it now has to wait; empty if it need not."""
        if self.jobs and self.word not in ("down", "drained", "draining"):
            more = f" and {len(self.jobs) - _LISTED_JOBS} more" if len(self.jobs) > _LISTED_JOBS else ""
            text = (
                f"{'shared by' if self.word in FREE else f'{self.word} to'} {', '.join(self.jobs[:_LISTED_JOBS])}{more}"
            )
        elif self.word in FREE and self.answers:
            return ""
        else:
            text = f"{self.word} ({self.reason})" if self.reason else self.word
        return text if self.answers else f"{text}, and does not answer"


def node_states(run: Run, names: Sequence[str] | None = None) -> dict[str, NodeState]:
    """Return the state of nodes by name, of all nodes if ``names`` is None; empty if Slurm does not tell.

    Args:
        names: if given, the jobs on these nodes are asked for, too.
    """
    where = [] if names is None else ["-n", ",".join(names)]
    found: dict[str, NodeState] = {}
    try:
        for line in run(["sinfo", "-h", "-N", *where, "-o", "%N|%T|%P|%c|%m|%G|%f|%E"]).stdout.splitlines():
            name, state, partition, cpus, memory, resources, features, reason = line.split("|", 7)
            before = found[name].partitions if name in found else frozenset()
            found[name] = NodeState(
                name,
                state,
                "" if reason in ("none", "(null)") else reason,
                frozenset(features.split(",")) - {"(null)"},
                before | {partition},
                _number(cpus),
                _number(memory),
                resources,
            )
        if names is not None:
            jobs = _jobs_on(run, names)
            found = {name: _with_jobs(state, jobs.get(name, ())) for name, state in found.items()}
    except (NoSlurmError, SlurmUnreachableError, NodeListError):
        return found
    return found


def describe_nodes(states: Iterable[NodeState]) -> str:
    """Return why nodes are not free, the same of several nodes once."""
    why: dict[str, list[str]] = {}
    for state in states:
        why.setdefault(state.why_not_free or state.word, []).append(state.name)
    return "; ".join(f"{compress(names)} {'is' if len(names) == 1 else 'are'} {text}" for text, names in why.items())


def _jobs_on(run: Run, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    jobs: dict[str, tuple[str, ...]] = {}
    listed = run(["squeue", "-h", "-w", ",".join(names), "-t", "RUNNING,COMPLETING,SUSPENDED", "-o", "%i|%u|%N"]).stdout
    for line in listed.splitlines():
        job, user, nodes = line.split("|", 2)
        for name in expand(nodes):
            jobs[name] = (*jobs.get(name, ()), f"job {job} of {user}")
    return jobs


def nodes_for(requests: Sequence[SlurmRequest], run: Run) -> list[dict[str, NodeState]]:
    """Return, for each request, the nodes by name that Slurm can give it, now or when other jobs have ended.

    A node whose fitness cannot be told from here is left out.
    """
    states = node_states(run)
    return [_given(request, states, run) for request in requests]


def _given(request: SlurmRequest, states: Mapping[str, NodeState], run: Run) -> dict[str, NodeState]:
    try:
        excluded = set(expand(request.exclude or ""))
    except NodeListError:  # a file of names
        return {}
    reserved = None if request.reservation is None else _nodes_of_reservation(request.reservation, run)
    wanted = request.partition or os.environ.get("SBATCH_PARTITION")
    partitions = None if wanted is None else set(wanted.split(","))
    return {
        name: state
        for name, state in states.items()
        if name not in excluded
        and (state.usable if reserved is None else state.answers and name in reserved and state.word in _IN_RESERVATION)
        and any(
            part.endswith("*") if partitions is None else part.rstrip("*") in partitions for part in state.partitions
        )
        and _satisfies(state, request)
    }


def _satisfies(state: NodeState, request: SlurmRequest) -> bool:
    gpus = sum(map(int, _GPUS.findall(state.resources)))
    return (
        _has_features(state.features, request.constraint)
        and gpus >= (request.gpus_per_node or 0)
        and state.cpus >= (request.cpus_per_task or 1)
        and (request.mem is None or state.memory >= _mebibytes(request.mem))
        and all(_has_resource(state.resources, wish) for wish in (request.gres or "").split(",") if wish)
    )


def _has_features(features: frozenset[str], constraint: str | None) -> bool:
    """Return whether a node has what ``--constraint`` asks for; what is more than "and" and "or" cannot be told."""
    if not constraint:
        return True
    return any(all(word in features for word in part.split("&")) for part in re.split(r"[|,]", constraint))


def _has_resource(resources: str, wish: str) -> bool:
    """Return whether ``--gres=name[:type][:count]`` can be had."""
    name, *rest = wish.removeprefix("gres/").replace("=", ":").split(":")
    count = int(rest[-1]) if rest and rest[-1].isdecimal() else 1
    kind = next((word for word in rest if not word.isdecimal()), None)
    there = 0
    for entry in re.sub(r"\([^)]*\)", "", resources).split(","):
        words = entry.split(":")
        if words[0] == name and (kind is None or kind in words[1:]):
            there += int(words[-1]) if words[-1].isdecimal() else 1
    return there >= count


def _mebibytes(text: str) -> float:
    match = re.fullmatch(r"([0-9]+)([KMGT]?)B?", text.upper())
    return (
        float("inf")
        if match is None
        else int(match[1]) * {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}[match[2]]
    )


def _nodes_of_reservation(name: str, run: Run) -> set[str]:
    try:
        match = re.search(r"\bNodes=(\S+)", run(["scontrol", "show", "reservation", "-o", name]).stdout)
        return set(expand(match[1])) if match is not None and match[1] != "(null)" else set()
    except (NoSlurmError, SlurmUnreachableError, NodeListError):
        return set()


def _number(text: str) -> int:
    digits = re.match(r"[0-9]+", text)
    return int(digits[0]) if digits is not None else 0


def _with_jobs(state: NodeState, jobs: tuple[str, ...]) -> NodeState:
    return replace(state, jobs=jobs)
