"""Which devices a process may see, in the variables that the GPU runtimes read.

On AMD two layers filter one after the other: the ROCm runtime takes ``ROCR_VISIBLE_DEVICES``, and HIP numbers what is
left and takes ``HIP_VISIBLE_DEVICES``, else ``CUDA_VISIBLE_DEVICES``. ``GPU_DEVICE_ORDINAL`` filters at the layer of
HIP, too. Sources: ROCm's page "GPU isolation techniques", HIP's "environment variables", and
``torch.cuda._parse_visible_devices``. Slurm sets the first, the third and the fourth to the same text, which is right
only when its cgroups renumber the devices from 0: on other nodes the second filter finds no device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monarch_slurm.errors import ConfigError

ROCR, HIP, CUDA, ORDINAL = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"
_HIP_LAYER = (HIP, CUDA, ORDINAL)


class VisibilityError(ConfigError):
    """Variables that say which devices are visible name one that is not there."""


def visible_indices(platform: str, count: int, uuids: Sequence[str | None], env: Mapping[str, str]) -> list[int]:
    """Return the indices, among a machine's devices, of those that programs see, in the order in which they see them.

    Args:
        platform: ``rocm``, ``cuda`` or ``none``.
        count: number of devices of the machine.
        uuids: for each device what names it in these variables (``GPU-…``); None where that is not known.
        env: environment of the program.

    Raises:
        VisibilityError: a variable names a device that is not there, or not any more after the filter before it.
    """
    devices = list(range(count))
    if platform == "rocm":
        if ROCR in env:
            devices = _select(ROCR, env[ROCR], devices, uuids)
        name = next((name for name in _HIP_LAYER if name in env), None)
    else:
        name = CUDA if CUDA in env else None
    return _select(name, env[name], devices, uuids) if name else devices


def settle(
    platform: str, count: int, uuids: Sequence[str | None], env: Mapping[str, str]
) -> tuple[dict[str, str | None], str | None]:
    """Return the variables to change (None: to remove) so that no two contradict each other, and what was wrong.

    What the user or Slurm has chosen is kept: ``ROCR_VISIBLE_DEVICES`` as it is, and behind it the one list that HIP
    would have taken, told to every other reader, too. A list that does not fit behind ``ROCR_VISIBLE_DEVICES`` becomes
    all of that one's devices.
    """
    if platform != "rocm" or count == 0:
        return {}, None
    name = next((name for name in _HIP_LAYER if name in env), None)
    if name is None:
        return {}, None
    wanted, why = env[name], None
    try:
        visible_indices(platform, count, uuids, env)
    except VisibilityError as error:
        if ROCR not in env:
            return {}, str(error)
        left = len(_entries(env[ROCR]))
        wanted = ",".join(map(str, range(left)))
        why = (
            f"{name}={env[name]} names devices as if {ROCR}={env[ROCR]} had not been applied before; it is {wanted} now"
        )
    readers = [HIP, CUDA, *([ORDINAL] if ORDINAL in env else [])]
    return {reader: wanted for reader in readers if env.get(reader) != wanted}, why


def restrict_to(chosen: Sequence[int], platform: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that show a program only some of the devices that a program in ``env`` sees.

    ``ROCR_VISIBLE_DEVICES`` is left alone: memory shared between processes of a job needs the devices of the others at
    that layer.

    Args:
        chosen: positions among the visible devices.
    """
    visible = next((env[name] for name in (_HIP_LAYER if platform == "rocm" else (CUDA,)) if name in env), None)
    entries = _entries(visible) if visible is not None else None
    text = ",".join(entries[index] if entries is not None else str(index) for index in chosen)
    return {HIP: text, CUDA: text} if platform == "rocm" else {CUDA: text}


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def _select(name: str, text: str, devices: list[int], uuids: Sequence[str | None]) -> list[int]:
    found: list[int] = []
    for entry in _entries(text):
        if entry.isdecimal():
            if int(entry) >= len(devices):
                raise VisibilityError(f"{name}={text}: there are {len(devices)} devices, numbered from 0")
            device = devices[int(entry)]
        elif entry == "-1" or entry.lower() == "nodevfiles":
            break  # both mean: none from here on
        else:
            matches = [index for index in devices if _same_uuid(uuids[index], entry)]
            if len(matches) != 1:
                raise VisibilityError(f"{name}={text}: no device {entry}")
            device = matches[0]
        if device in found:
            raise VisibilityError(f"{name}={text}: {entry} stands there twice")
        found.append(device)
    return found


def _same_uuid(uuid: str | None, entry: str) -> bool:
    # CUDA takes the beginning of a UUID, as far as it is unambiguous.
    return uuid is not None and uuid.lower().startswith(entry.lower())
