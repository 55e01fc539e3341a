"""Asking all hosts of a mesh at once, through one proc on each."""

from __future__ import annotations

import time
from typing import Any

from monarch_slurm.actor import Actor, HostMesh, MeshFailure, SupervisionError, endpoint, this_proc
from monarch_slurm.health.facts import Facts, collect
from monarch_slurm.health.findings import Finding, judge_answers, judge_host
from monarch_slurm.health.gpu_probe import probe_gpus

CHECK_SECONDS = 10.0


def ask_here(probe_seconds: float | None) -> Facts:
    """Return the facts of this host; with what its GPUs answer, unless ``probe_seconds`` is None."""
    facts = collect()
    if probe_seconds is not None and facts["gpus"]:
        facts["gpu_probe"] = probe_gpus(probe_seconds)
    return facts


class _Examiner(Actor):
    @endpoint
    def there(self) -> bool:
        return True

    @endpoint
    def ask(self, probe_seconds: float | None) -> Facts:
        return ask_here(probe_seconds)


class _Doctor(Actor):
    """Owns the examiners, so that a host which dies under examination is a finding and no failure of the program."""

    @endpoint
    def ask_all(self, hosts: HostMesh, seconds: float, touch_gpus: bool, start_seconds: float) -> dict[str, Facts]:
        procs = hosts.spawn_procs(name="health")
        examiners: Any = procs.spawn("examiner", _Examiner).flatten("host")
        probe_seconds = seconds * 0.7 if touch_gpus else None
        names = hosts.host_names
        deadline = time.monotonic() + start_seconds
        for future in [examiners.slice(host=rank).there.call_one() for rank in range(len(names))]:
            future.exception(timeout=max(0.0, deadline - time.monotonic()))
        deadline = time.monotonic() + seconds
        asked_at = time.time()
        pending = [examiners.slice(host=rank).ask.call_one(probe_seconds) for rank in range(len(names))]
        answers: dict[str, Facts] = {}
        for name, future in zip(names, pending, strict=True):
            try:
                facts = future.get(timeout=max(0.0, deadline - time.monotonic()))
            except (TimeoutError, SupervisionError):
                continue  # who is missing is a finding
            answers[name] = {**facts, "host": name, "asked_at": asked_at, "heard_at": time.time()}
        procs.stop()
        return answers

    def __supervise__(self, failure: MeshFailure) -> bool:
        return True


def check_hosts(
    hosts: HostMesh, *, seconds: float = CHECK_SECONDS, touch_gpus: bool = True, start_seconds: float = 0.0
) -> tuple[list[Finding], dict[str, Facts]]:
    """Examine every host of ``hosts``; return the findings, and the facts of the hosts that answered, by name.

    A host that does not answer within ``seconds`` is a finding, and holds nobody up longer.

    Args:
        touch_gpus: let each GPU compute something, in a process of its own.
        start_seconds: how long procs may take to start before the ``seconds`` begin; a zygote may have to preload.
    """
    doctor: Any = this_proc().spawn("doctor", _Doctor)
    answers = doctor.ask_all.call_one(hosts, seconds, touch_gpus, start_seconds).get()
    doctor.stop()
    findings = [finding for facts in answers.values() for finding in judge_host(facts)]
    return [*judge_answers(hosts.host_names, answers, seconds), *findings], answers
