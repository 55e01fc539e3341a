"""What a run needs and what there is: both figures against the real thing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import run_command

from monarch_slurm.errors import ConfigError
from monarch_slurm.train.config import TrainConfig
from monarch_slurm.train.llama import Llama, count_parameters, loss_function
from monarch_slurm.train.llama_config import CONFIGS, LlamaConfig
from monarch_slurm.train.memory_estimate import (
    FLOAT32,
    activations,
    asked_memory,
    check_memory,
    machine_memory,
    parameters,
    rank_bytes,
    slurm_memory,
)

FakeSlurm = Callable[..., Path]


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_model(name: str) -> None:
    with torch.device("meta"):
        assert parameters(CONFIGS[name]) == count_parameters(Llama(CONFIGS[name]))


@pytest.mark.parametrize(
    ("shape", "batch", "tokens"),
    [(CONFIGS["debug"], 4, 128), (CONFIGS["tiny"], 16, 256), (LlamaConfig(512, 6, 8, 4, 1376), 2, 256)],
)
def test_activations_are_those_that_autograd_keeps(shape: LlamaConfig, batch: int, tokens: int) -> None:
    model = Llama(shape)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    text = torch.randint(256, (batch, tokens))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_function(model(text), text)
    assert loss.isfinite()
    estimate = activations(shape, batch * tokens) * FLOAT32
    assert 0.8 < sum(kept.values()) / estimate < 1.1


def test_ranks_share_the_model() -> None:
    one = rank_bytes(TrainConfig(model="8b"))
    eight = rank_bytes(TrainConfig(model="8b", procs_per_replica=8))
    assert 205 * 2**30 < one < 215 * 2**30  # 7 billion parameters, of eight copies
    assert one / 8 < eight < one / 5


def test_too_little_memory_is_refused_with_both_figures() -> None:
    config = TrainConfig(model="8b", replicas=4, procs_per_replica=8)
    words = r"--model 8b needs about \d+ GiB of memory on each node \(8 trainers of .* GiB each\), and n1 has 62.5 GiB"
    with pytest.raises(ConfigError, match=words):
        check_memory(config, 4, 64000 * 2**20, "n1 has")
    check_memory(config, 4, 1 << 40, "n1 has")
    check_memory(config, 4, None, "")
    check_memory(TrainConfig(engine="torchtitan"), 1, 1, "n1 has")


def test_slurm_tells_the_smallest_node(fake_slurm: FakeSlurm) -> None:
    def run(command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, "debug*|64000\ndebug*|32000+\nbig|512000\n", "")

    assert slurm_memory(None, run) == 32000 * 2**20
    assert slurm_memory("big", run) == 32000 * 2**20, "what sinfo was asked for is of the partition"


@pytest.mark.parametrize(
    ("text", "size"), [("200G", 200 << 30), ("64000", 64000 << 20), ("1T", 1 << 40), ("0", None), ("some", None)]
)
def test_memory_as_sbatch_takes_it(text: str, size: int | None) -> None:
    assert asked_memory(text) == size


def test_the_memory_of_a_machine_is_that_of_its_cgroup_if_less(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       64000 kB\nMemFree: 1 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/system.slice/job_7/step_0\n")
    step = tmp_path / "sys/fs/cgroup/system.slice/job_7/step_0"
    step.mkdir(parents=True)
    (step / "memory.max").write_text("max\n")
    assert machine_memory(tmp_path) == 64000 * 2**10
    (step.parent / "memory.max").write_text("1000\n")
    assert machine_memory(tmp_path) == 1000
    (tmp_path / "proc/self/cgroup").write_text("5:cpu,memory:/job_8\n")
    (tmp_path / "sys/fs/cgroup/memory/job_8").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory/job_8/memory.limit_in_bytes").write_text("2000\n")
    assert machine_memory(tmp_path) == 2000
    here = machine_memory()
    assert here is not None
    assert here > 2**28


def test_a_job_that_cannot_fit_is_refused_unless_forced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    monkeypatch.chdir(tmp_path)
    fake_slurm(sinfo="echo 'debug*|64000'")
    command = ["train", "--nodes", "4", "--model", "8b", "--replicas", "4", "--procs-per-replica", "8", "--dry-run"]
    code, said = run_command(monkeypatch, capsys, *command)
    assert (code, "the smallest node of the partition has 62.5 GiB" in said) == (2, True), said
    code, said = run_command(monkeypatch, capsys, *command, "--mem", "32G")
    assert (code, "--mem 32G is 32.0 GiB" in said) == (2, True), said
    for more in (["--force"], ["--gpus-per-node", "8"], ["--gres", "gpu:8"]):
        code, said = run_command(monkeypatch, capsys, *command, *more)
        assert code == 0, said
