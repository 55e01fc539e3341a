"""Two programs in one allocation, on different nodes: one calls actors of the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from slurm_nodes import Cluster
from support import wait_until

OWNER = """
import os, pickle, threading
from shared_actor import Who
from monarch_slurm.job import SlurmAllocation

who = SlurmAllocation.from_env().hosts().spawn_procs().spawn("who", Who)
who.initialized.get(60)
with open("reference.new", "wb") as file:
    pickle.dump(who, file)
os.rename("reference.new", "reference")
print("pid", os.getpid(), flush=True)
threading.Event().wait()
"""

CALLER = """
import pickle, socket
with open("reference", "rb") as file:
    who = pickle.load(file)
print("here", socket.gethostname(), flush=True)
print("answering:", *who.host.call().get(60).values(), flush=True)
print("length", who.slice(hosts=0).length.call_one(bytes(20_000_000)).get(60), flush=True)
print("end", who.never.call().exception(120), flush=True)
"""

ACTOR = """
import socket
from monarch_slurm.actor import Actor, endpoint

class Who(Actor):
    @endpoint
    def host(self): return socket.gethostname()
    @endpoint
    def length(self, data): return len(data)
    @endpoint(explicit_response_port=True)
    def never(self, port): self.kept = port
"""


def test_a_program_on_another_node_calls_and_hears_of_the_end(cluster: Cluster, tmp_path: Path) -> None:
    for name, text in (("owner.py", OWNER), ("caller.py", CALLER), ("shared_actor.py", ACTOR)):
        (tmp_path / name).write_text(text)
    script = (
        f"{sys.executable} owner.py > owner.out 2>&1 &\n"
        "while [ ! -e reference ]; do kill -0 $! || exit 1; sleep 0.1; done\n"
        f"srun --overlap -N1 -n1 -w n3 {sys.executable} caller.py > caller.out 2>&1\n"
    )
    with subprocess.Popen(["salloc", "-w", "n1,n2,n3", "--exclusive", "bash", "-c", script], cwd=tmp_path) as salloc:

        def says(file: str, start: str) -> str | None:
            path = tmp_path / file
            lines = path.read_text().splitlines() if path.exists() else []
            found = [line for line in lines if line.startswith(start)]
            outputs = [path.read_text() for path in tmp_path.glob("*.out")]
            assert found or salloc.poll() is None, f"ended without {start!r}: {outputs}"
            return found[0] if found else None

        try:
            assert wait_until(lambda: says("caller.out", "length")) == "length 20000000"
            assert says("caller.out", "here") == "here n3"
            assert says("caller.out", "answering") == "answering: n1 n2 n3"
            os.kill(int((says("owner.out", "pid") or "").split()[1]), signal.SIGKILL)
            assert "cannot be reached any more" in wait_until(lambda: says("caller.out", "end"))
        finally:
            if salloc.poll() is None:
                salloc.terminate()
