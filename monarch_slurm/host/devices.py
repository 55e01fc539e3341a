"""The GPUs of one host, as its agent deals them out: read from files, so that no device is touched."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from monarch_slurm.gpu import GpuDevice, gpu_devices, gpu_platform, places, restrict_to, settle, visible_indices

logger = logging.getLogger(__name__)


_ROOT = Path("/")


@functools.cache
def _devices(root: Path) -> tuple[str, list[GpuDevice]]:
    found = gpu_devices(root)
    platform = gpu_platform()
    # Both vendors' cards in one machine: those that the installed torch is made for.
    mine = [device for device in found if device.platform == platform]
    return (platform, mine) if mine or not found else (found[0].platform, found)


def settle_visibility(host: str, env: MutableMapping[str, str] = os.environ, root: Path = _ROOT) -> None:
    """Make the variables that say which GPUs are visible agree with each other in ``env``, and log what was wrong.

    Args:
        root: where ``sys`` and ``proc`` are.
    """
    platform, devices = _devices(root)
    changes, why = settle(platform, len(devices), [device.uuid for device in devices], env)
    if why is not None:
        logger.warning("host %s: %s", host, why)
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value


def deal_out(
    wanted: Sequence[Sequence[int]], env: Mapping[str, str] = os.environ, root: Path = _ROOT
) -> list[tuple[dict[str, str], tuple[int, ...]]]:
    """Return, for each proc, the variables that show it its GPUs alone, and the CPUs near them.

    Args:
        wanted: for each proc, positions among the GPUs that are visible in ``env``; none: it keeps them all.

    Raises:
        ConfigError: there are fewer GPUs, or the variables in ``env`` name one that is not there.
    """
    if not any(wanted):
        return [({}, ())] * len(wanted)
    platform, devices = _devices(root)
    indices = visible_indices(platform, len(devices), [device.uuid for device in devices], env)
    found = places([devices[index] for index in indices], wanted, sysfs=root / "sys")
    return [
        (restrict_to(place.devices, platform, env) if place.devices else {}, place.cpus if place.devices else ())
        for place in found
    ]
