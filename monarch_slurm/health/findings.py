"""What facts of hosts mean: one finding per check, pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_slurm.health.facts import Facts

OK, ABSENT, WARN, BAD = "ok", "absent", "warn", "bad"
LEVELS = (OK, ABSENT, WARN, BAD)
"""From the best: as it should be; not there, which is no fault; works, but badly; must be mended."""

GIB = 2**30
SKEW_SECONDS = 2.0
BUSY_SHARE = 0.02
"""Share of a GPU's memory that a driver may use while no program does."""


@dataclass(frozen=True)
class Finding:
    """What one check found on one host.

    Attributes:
        host: name of the host.
        check: name of the check.
        level: one of `LEVELS`.
        value: what was found.
        advice: what to do; empty when nothing.
    """

    host: str
    check: str
    level: str
    value: str
    advice: str = ""


def judge_host(facts: Facts) -> list[Finding]:
    """Return what every check finds in the facts of one host."""
    return [Finding(facts["host"], check, *found) for check, judge in _CHECKS.items() for found in judge(facts)]


def judge_answers(hosts: Sequence[str], answers: Mapping[str, Facts], seconds: float) -> list[Finding]:
    """Return findings on who answered at all within ``seconds``, and on how hosts differ that should be equal."""
    silent = [
        Finding(host, "answer", BAD, f"none within {seconds:g} s", "look at the node: scontrol show node " + host)
        for host in hosts
        if host not in answers
    ]
    return [*silent, *_differences(answers)]


def worst(findings: Sequence[Finding]) -> str:
    """Return the worst level among ``findings``."""
    return max((finding.level for finding in findings), key=LEVELS.index, default=OK)


Found = tuple[str, str, str]


def _gpus(facts: Facts) -> Iterator[Found]:
    gpus = facts["gpus"]
    names = Counter(gpu["name"] for gpu in gpus)
    text = ", ".join(f"{count} x {name}" for name, count in names.items())
    modes = sorted({gpu["partition"] for gpu in gpus if gpu["partition"]})
    if not gpus:
        advice = ""
        if facts["torch_gpu"]:
            advice = f"torch is made for {facts['torch_gpu']}, but the kernel has no such GPU"
        elif facts["gpu_platform_set"] and facts["gpu_platform"] != "none":
            advice = f"MONARCH_SLURM_GPU_PLATFORM={facts['gpu_platform']} is set, but the kernel has no such GPU"
        yield ABSENT, "none", advice
    elif len(modes) > 1:
        yield (
            WARN,
            f"{text} ({', '.join(modes)})",
            "the GPUs are partitioned differently: amd-smi set --compute-partition",
        )
    else:
        yield OK, f"{text} ({modes[0]})" if modes else text, ""


def _answers(facts: Facts) -> Iterator[Found]:
    probe = facts.get("gpu_probe")
    if probe is None or not facts["gpus"]:
        return
    silent = [str(index) for index in range(len(facts["gpus"])) if str(index) not in probe["answered"]]
    if probe["error"]:
        yield BAD, probe["error"], "run a small torch program on the node; look at dmesg"
    elif silent and probe["seen"] == len(facts["gpus"]):
        yield BAD, f"GPU {', '.join(silent)} does not answer", "reset it (amd-smi reset), or drain the node"
    elif probe["seen"] != len(facts["gpus"]):
        yield (
            WARN,
            f"torch sees {probe['seen']} of {len(facts['gpus'])}",
            "look at ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and at the job's GPUs",
        )
    else:
        yield OK, f"all {probe['seen']} compute", ""


def _gpu_memory(facts: Facts) -> Iterator[Found]:
    busy = []
    for index, gpu in enumerate(facts["gpus"]):
        used, total = gpu["memory_used_bytes"], gpu["memory_bytes"]
        if used is not None and total and used / total > BUSY_SHARE:
            busy.append(f"GPU {index} {used / GIB:.1f} GiB")
    if busy:
        yield (
            WARN,
            "in use: " + ", ".join(busy),
            "somebody's processes hold it: amd-smi process (or rocm-smi --showpids)",
        )
    elif any(gpu["memory_used_bytes"] is not None for gpu in facts["gpus"]):
        yield OK, "free", ""


def _ecc(facts: Facts) -> Iterator[Found]:
    counts = {index: gpu["uncorrectable_errors"] for index, gpu in enumerate(facts["gpus"])}
    known = {index: count for index, count in counts.items() if count is not None}
    sick = ", ".join(f"GPU {index}: {count}" for index, count in known.items() if count)
    if sick:
        yield BAD, f"uncorrectable errors since the driver was loaded: {sick}", "drain the node"
    elif known:
        yield OK, "no uncorrectable errors", ""


def _driver(facts: Facts) -> Iterator[Found]:
    if facts["gpus"]:
        versions = filter(None, [facts["gpu_driver"], facts["rocm"] and f"ROCm {facts['rocm']}", facts["torch_gpu"]])
        made_for = (facts["torch_gpu"] or "").partition(" ")[0]
        there = {gpu["platform"] for gpu in facts["gpus"]}
        if facts["packages"]["torch"] and made_for not in there:
            yield (
                BAD,
                f"torch is made for {made_for or 'CPUs'}, the GPUs are {'/'.join(sorted(there))}",
                "install the torch wheel of this platform (see README)",
            )
        else:
            yield OK, ", ".join(versions), ""


def _numa(facts: Facts) -> Iterator[Found]:
    if facts["numa_balancing"] not in (None, "0") and facts["gpus"]:
        yield WARN, "automatic NUMA balancing is on", "sysctl kernel.numa_balancing=0 (it slows collectives down)"
    elif facts["gpus"]:
        yield OK, "automatic NUMA balancing is off", ""


def _memlock(facts: Facts) -> Iterator[Found]:
    limit = facts["memlock_bytes"]
    if limit is None:
        yield OK, "unlimited", ""
    elif facts["rdma"]:
        yield (
            BAD if limit < GIB else WARN,
            f"{limit / 2**20:g} MiB",
            "RDMA pins memory: LimitMEMLOCK=infinity in slurmd's systemd unit (limits.conf does not reach its jobs)",
        )
    else:
        yield OK, f"{limit / 2**20:g} MiB (matters with RDMA only)", ""


def _files(facts: Facts) -> Iterator[Found]:
    limit = facts["open_files"]
    few = limit is not None and limit < 4096
    yield (WARN if few else OK), str(limit or "unlimited"), "raise it: ulimit -n 65536" if few else ""


def _shm(facts: Facts) -> Iterator[Found]:
    yield from _free(
        facts["shm"], bad=GIB // 16, warn=GIB, advice="mount it larger: -o size=50%; in a container --shm-size"
    )


def _tmp(facts: Facts) -> Iterator[Found]:
    yield from _free(facts["tmp"], bad=GIB // 16, warn=GIB, advice="remove old files, or set TMPDIR")


def _free(space: dict[str, int] | None, *, bad: int, warn: int, advice: str) -> Iterator[Found]:
    if space is None:
        yield BAD, "not there", advice
        return
    free = space["free_bytes"]
    level = BAD if free < bad else WARN if free < warn else OK
    yield level, f"{free / GIB:.1f} of {space['total_bytes'] / GIB:.1f} GiB free", "" if level == OK else advice


def _rdma(facts: Facts) -> Iterator[Found]:
    links = facts["rdma"]
    if not links:
        yield ABSENT, "no device", ""
        return
    down = [link for link in links if link["state"] != "ACTIVE"]
    names = ", ".join(f"{link['device']}:{link['port']} {link['state']}" for link in down)
    up = [link for link in links if link["state"] == "ACTIVE"]
    if not up:
        yield BAD, f"no link is up: {names}", "ibv_devinfo; look at cables and the switch"
    elif down:
        yield WARN, f"{len(up)} of {len(links)} links up; {names}", "ibv_devinfo; look at cables and the switch"
    elif lost := [link for link in up if not link["routable"]]:
        yield (
            WARN,
            f"{lost[0]['device']}:{lost[0]['port']} has no address but a link-local one",
            "give the interface an IP address, so that it has a RoCE v2 GID",
        )
    else:
        rates = sorted({f"{link['rate_gbit_s']:g} Gb/s" for link in up})
        yield OK, f"{len(up)} links, {', '.join(rates)}", ""


def _mtu(facts: Facts) -> Iterator[Found]:
    ethernet = any(link["link_layer"] == "Ethernet" for link in facts["rdma"])
    fast = {
        name: net["mtu"]
        for name, net in facts["networks"].items()
        if net["physical"] and (net["speed_mbit_s"] or 0) >= 100_000
    }
    small = [name for name, mtu in fast.items() if ethernet and mtu < 4200]
    if small:
        yield WARN, f"{', '.join(small)}: {fast[small[0]]}", "RoCE wants 4200 or more, on the switch, too (often 9000)"
    elif fast:
        yield OK, ", ".join(f"{name} {mtu}" for name, mtu in fast.items()), ""


def _leftovers(facts: Facts) -> Iterator[Found]:
    old = facts["leftovers"]
    if old:
        pids = " ".join(str(entry["pid"]) for entry in old)
        yield WARN, f"{_plural(len(old), 'process', 'es')} of yours from {_jobs(old)}", f"if that is over: kill {pids}"
    else:
        yield OK, "none", ""


def _jobs(processes: list[Facts]) -> str:
    ids = sorted({entry["job_id"] for entry in processes if entry["job_id"]}, key=lambda name: (len(name), name))
    parts = [f"job{'s' if len(ids) > 1 else ''} {', '.join(ids)}"] if ids else []
    parts += ["no job"] if any(not entry["job_id"] for entry in processes) else []
    return " and ".join(parts)


def _plural(count: int, what: str, ending: str) -> str:
    return f"{count} {what}{ending if count != 1 else ''}"


def _system_calls(facts: Facts) -> Iterator[Found]:
    if not facts["refused_calls"]:
        yield OK, "all there", ""
    for call in facts["refused_calls"]:
        advice = "use a newer kernel, or allow it in the seccomp list of the container"
        value = f"{call['name']} (Linux {call['since']}): {call['reason']}"
        if call["without"]:
            yield WARN, f"{value}; {call['without']}", advice
        else:
            yield BAD, f"{value}; nothing works without it", advice


_CHECKS: dict[str, Callable[[Facts], Iterator[Found]]] = {
    "GPUs": _gpus,
    "GPUs answer": _answers,
    "GPU memory": _gpu_memory,
    "ECC": _ecc,
    "GPU driver": _driver,
    "NUMA balancing": _numa,
    "locked memory": _memlock,
    "open files": _files,
    "system calls": _system_calls,
    "shared memory": _shm,
    "temporary files": _tmp,
    "RDMA links": _rdma,
    "MTU": _mtu,
    "left processes": _leftovers,
}

_EQUAL: dict[str, Callable[[Facts], Any]] = {
    "GPUs": lambda facts: f"{len(facts['gpus'])} x {facts['gpus'][0]['name']}" if facts["gpus"] else "none",
    "GPU partition": lambda facts: ", ".join(sorted({gpu["partition"] or "" for gpu in facts["gpus"]})),
    "GPU driver": lambda facts: facts["gpu_driver"],
    "ROCm": lambda facts: facts["rocm"],
    "Python": lambda facts: facts["python"].rpartition(".")[0],
    "kernel": lambda facts: facts["kernel"],
    "MTU": lambda facts: str(sorted(net["mtu"] for net in facts["networks"].values() if net["physical"])),
    **{name: lambda facts, name=name: facts["packages"][name] for name in ("monarch_slurm", "torch", "torchft")},  # type: ignore[misc]
}
_MUST_BE_EQUAL = {"Python", "monarch_slurm", "torch", "torchft", "MTU"}


def _differences(answers: Mapping[str, Facts]) -> Iterator[Finding]:
    for check, value in _EQUAL.items():
        values = {host: value(facts) for host, facts in answers.items()}
        usual, _ = Counter(values.values()).most_common(1)[0] if values else (None, 0)
        for host, mine in values.items():
            if mine != usual:
                level = BAD if check in _MUST_BE_EQUAL else WARN
                yield Finding(host, f"same {check}", level, f"{mine}; most hosts have {usual}", "make the hosts equal")
    for host, facts in answers.items():
        asked, heard = facts.get("asked_at", facts["time"]), facts.get("heard_at", facts["time"])
        skew = max(asked - facts["time"], facts["time"] - heard, 0.0)
        if skew > SKEW_SECONDS:
            yield Finding(host, "clock", WARN, f"{skew:.1f} s off", "start chronyd (or ntpd) on the node")
