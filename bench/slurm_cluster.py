"""A Slurm cluster on this machine for benchmarks, each node in a network and PID namespace of its own (root)."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "tests" / "slurm_cluster.sh"


@contextmanager
def cluster(nodes: int) -> Iterator[Callable[..., None]]:
    """Have a cluster of its own for the time being; what is given runs the script: ``call("kill", "n2")``."""
    with tempfile.TemporaryDirectory(prefix="sl", dir="/tmp") as folder:
        env = {**os.environ, "SLURM_LOCAL_DIR": folder, "SLURM_LOCAL_DB": "0"}

        def call(*arguments: str) -> None:
            subprocess.run(["bash", str(SCRIPT), *arguments], env=env, check=True)

        call("up", str(nodes))
        os.environ["SLURM_CONF"] = f"{folder}/etc/slurm.conf"
        try:
            yield call
        finally:
            call("down")
