"""Facts of a host, from trees of sysfs as machines have them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import DEADLINE, wait_until
from trees import mi300x_node, write_tree

from monarch_slurm.health import collect


def test_a_node_with_gpus_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "gpu07")
    mi300x_node(tmp_path)
    port = "sys/class/infiniband/bnxt_re0/ports/1"
    write_tree(
        tmp_path,
        {
            "sys/bus/pci/devices/0000:05:00.0/mem_info_vram_total": "206141652992\n",
            "sys/bus/pci/devices/0000:05:00.0/mem_info_vram_used": "300000000\n",
            "sys/bus/pci/devices/0000:05:00.0/ras/umc_err_count": "ue: 2\nce: 7\n",
            "sys/bus/pci/devices/0000:05:00.0/ras/gfx_err_count": "ue: 1\nce: 0\n",
            "sys/module/amdgpu/version": "6.12.12\n",
            "opt/rocm/.info/version": "7.0.2\n",
            "proc/sys/kernel/numa_balancing": "1\n",
            f"{port}/state": "4: ACTIVE\n",
            f"{port}/link_layer": "Ethernet\n",
            f"{port}/rate": "400 Gb/sec (4X NDR)\n",
            f"{port}/gids/0": "fe80:0000:0000:0000:0a0b:0cff:fe0d:0e0f\n",
            f"{port}/gid_attrs/types/0": "RoCE v2\n",
            "sys/class/infiniband/bnxt_re1/ports/1/state": "1: DOWN\n",
            "sys/class/net/ens1/operstate": "up\n",
            "sys/class/net/ens1/mtu": "9000\n",
            "sys/class/net/ens1/speed": "400000\n",
            "sys/class/net/ens1/device/vendor": "0x14e4\n",
            "sys/class/net/off/operstate": "down\n",
        },
    )
    card = tmp_path / "sys/class/drm/card1"
    card.mkdir(parents=True)
    (card / "device").symlink_to(tmp_path / "sys/bus/pci/devices/0000:05:00.0")
    facts = collect(tmp_path)
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["host"], facts["gpu_driver"], facts["rocm"]) == ("gpu07", "amdgpu 6.12.12", "7.0.2")
    assert facts["numa_balancing"] == "1"
    first, *others = facts["gpus"]
    assert (first["memory_used_bytes"], first["uncorrectable_errors"], first["partition"]) == (300000000, 3, "SPX")
    assert {other["uncorrectable_errors"] for other in others} == {None}
    up, down = facts["rdma"]
    assert (up["state"], up["rate_gbit_s"], up["routable"]) == ("ACTIVE", 400.0, False)
    assert up["gid"] == {"index": 0, "kind": "RoCE v2"}
    assert (down["device"], down["state"], down["gid"]) == ("bnxt_re1", "DOWN", None)
    assert facts["networks"] == {"ens1": {"mtu": 9000, "speed_mbit_s": 400000, "physical": True}}


def test_this_machine() -> None:
    facts = collect()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["packages"]["monarch_slurm"]
    assert facts["cpus"] == len(os.sched_getaffinity(0))


def test_processes_of_an_earlier_job_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", "monarch_slurm.job.node"]
    with subprocess.Popen(command, env={**os.environ, "SLURM_JOB_ID": "41"}, stdin=subprocess.PIPE) as old:
        found = {"pid": old.pid, "job_id": "41"}
        wait_until(lambda: found in collect()["leftovers"], "the process of job 41 is found")
        monkeypatch.setenv("SLURM_JOB_ID", "41")
        assert found not in collect()["leftovers"]
        assert old.stdin is not None
        old.stdin.close()
        old.wait(DEADLINE)
