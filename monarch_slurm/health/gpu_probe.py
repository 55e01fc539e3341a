"""Whether every GPU computes: tried in a process of its own, since one that hangs in a driver cannot be stopped."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from monarch_slurm.interpreter import SAFE_PATH, python_environment

_PROBE = """
import torch
print("seen", torch.cuda.device_count(), flush=True)
for index in range(torch.cuda.device_count()):
    ones = torch.ones(1 << 16, device=f"cuda:{index}")
    assert float(ones.sum()) == 1 << 16
    print("answered", index, flush=True)
"""


def probe_gpus(seconds: float, program: str = _PROBE) -> dict[str, Any]:
    """Return how many GPUs torch sees (``seen``), the indices of those that compute (``answered``, as texts), and what
    went wrong (``error``, empty if nothing did).

    Args:
        seconds: time for all of them.
        program: what is run; for tests.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", SAFE_PATH + program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=python_environment(),
    )
    started = time.monotonic()
    code: int | None = None  # what it has ended with by itself
    try:
        said, errors = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired as late:
        process.kill()  # not waited for: in a driver it may not end
        said, errors = (late.stdout or b"").decode() if isinstance(late.stdout, bytes) else late.stdout or "", ""
    seen, answered = 0, []
    for line in said.splitlines():
        name, _, value = line.partition(" ")
        if name == "seen":
            seen = int(value)
        elif name == "answered":
            answered.append(value)
    error = ""
    if code not in (0, None) and len(answered) == seen:
        error = (errors.strip().splitlines() or [f"the probe ended with {code}"])[-1]
    elif seen == 0 and code is None:
        error = f"torch did not say how many GPUs it sees within {time.monotonic() - started:.0f} s"
    return {"seen": seen, "answered": answered, "error": error}
