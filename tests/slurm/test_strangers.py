"""Strangers attack a training run of two nodes: from another host of the network, and as another user of a node."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from slurm_nodes import SCRIPT, Cluster, wait_until
from test_train import PATIENT, committed_by, events, training, wait_for_replicas
from test_users import pid_in_node
from victims import FAILURES, STRANGER, attack, listeners, unlisted

pytestmark = [pytest.mark.slow, pytest.mark.train]

NODES = ("n1", "n2")


def own_address(towards: str) -> str:
    """The address that this machine has for who is at ``towards``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])


def pids_of(cluster: Cluster, node: str) -> list[int]:
    """Processes of the job on a node, without those of Slurm."""
    lines = cluster.processes(node)
    return [pid for pid, line in lines.items() if not line.startswith(("srun", "slurmstepd"))]


def refusals(out: Path) -> str:
    logs = [out.with_name("log"), *out.glob("*/logs/*")]
    return "\n".join(line for log in logs for line in log.read_text().splitlines() if "refused" in line)


def test_another_host_and_another_user_change_nothing(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    options = ["--nodes", "2", "--replicas", "2", "--tokens", "100000000", "--reference", "none", *PATIENT]
    with training(out, *options) as process:
        wait_for_replicas(out, process, 2)
        pids = {node: pids_of(cluster, node) for node in NODES}
        listening = [listener for node in NODES for listener in listeners(pids[node])]
        reachable = [listener for listener in listening if not listener.address.startswith("127.")]
        assert {listener.process for listener in reachable} >= {"controller", "trainer"}
        assert unlisted(reachable) == []
        assert attack(reachable, [], []) == {}

        folders = [tmp_path, Path(os.environ["XDG_RUNTIME_DIR"])]
        on_node = ("env", f"SLURM_LOCAL_DIR={cluster.folder}", "bash", str(SCRIPT), "exec", "n1")
        assert attack(listeners(pids["n1"]), [pid_in_node(pid) for pid in pids["n1"]], folders, on_node) == {}

        before = committed_by(out)
        wait_until(
            lambda: all(count >= before[replica] + 2 for replica, count in committed_by(out).items()),
            "both replicas to commit more syncs",
        )
        assert [item for item in events(out) if item["kind"] in FAILURES] == []
        assert {item["participants"] for item in events(out) if item["kind"] == "sync"} == {2}
        assert own_address(reachable[0].address) in refusals(out)
        assert f"uid {STRANGER}" in refusals(out)
        process.send_signal(signal.SIGINT)  # cancels the job
        assert process.wait(60) == 130
