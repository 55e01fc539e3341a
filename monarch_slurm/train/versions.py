"""Which versions of what a run trains with."""

from __future__ import annotations

import platform
import socket
from importlib.metadata import version

from monarch_slurm.train.config import TrainConfig


def installed_versions(config: TrainConfig) -> dict[str, str]:
    """Return the versions of Python, torch, torchft, the kernel, and the GPU runtime if there is one."""
    import torch

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchft": version("torchft"),
        "kernel": platform.release(),
        "host": socket.gethostname(),
    }
    hip, cuda = getattr(torch.version, "hip", None), torch.version.cuda
    if hip or cuda:
        found["rocm" if hip else "cuda"] = str(hip or cuda)
    if config.engine != "llama":
        found[config.engine] = version(config.engine)
    return found
