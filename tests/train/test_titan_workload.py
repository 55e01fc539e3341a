"""torchtitan's trainer as the workload of one rank, in this process, on CPUs, by ``make test-torchtitan``."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if os.environ.get("MONARCH_SLURM_TEST_TORCHTITAN") != "1":
    pytest.skip("needs torchtitan; run: make test-torchtitan", allow_module_level=True)

from monarch_slurm.errors import ConfigError
from monarch_slurm.train import state
from monarch_slurm.train.config import Place, TrainConfig
from monarch_slurm.train.corpus import DataError
from monarch_slurm.train.titan import described
from monarch_slurm.train.titan_engine import _TitanWorkload

pytestmark = [pytest.mark.train, pytest.mark.usefixtures("titan_environment")]

TINY = ("--module", "titan_on_cpu", "--config", "tiny")
PER_STEP = 2 * 2 * 64  # tokens of both replicas


@contextlib.contextmanager
def workload(folder: Path, *options: str, replica: int = 0, committed_step: int = 0) -> Iterator[_TitanWorkload]:
    config = TrainConfig(engine="torchtitan", engine_options=(*TINY, *options), replicas=2, sync_every=5)
    place = Place(replica, 0, 1, 0, "", folder=str(folder), committed_step=committed_step)
    made = _TitanWorkload(described(config), place)
    try:
        made.warm_up()
        yield made
    finally:
        made.close()


def read(work: _TitanWorkload, steps: int) -> list[torch.Tensor]:
    """Do steps; return the tokens that they saw."""
    seen = []
    trainer: Any = work._trainer
    forward_backward = trainer.forward_backward_step

    def watched(**named: Any) -> torch.Tensor:
        seen.append(named["input_dict"]["input"].clone())
        return forward_backward(**named)  # type: ignore[no-any-return]

    trainer.forward_backward_step = watched
    for _ in range(steps):
        work.step(PER_STEP, lambda loss: None)
    trainer.forward_backward_step = forward_backward
    return seen


def test_the_learning_rate_is_torchtitans_at_the_tokens_of_the_run(tmp_path: Path) -> None:
    with workload(tmp_path, "--training.steps", "10") as work:
        used: list[float] = []
        work.optimizer.register_step_post_hook(lambda *_: used.append(work.learning_rate()))
        for step in range(1, 4):
            work.step(step * PER_STEP, lambda loss: None)
            assert work.steps == step
        # Of two warm-up steps, a stable one, and the decay.
        warm = [4e-4, 8e-4, 8e-4]
        assert used == pytest.approx(warm)
        work._set_learning_rate(1)
        assert work.learning_rate() == warm[0]
        for step, rate in enumerate([*warm, 7e-4, 6e-4, 5e-4, 4e-4, 3e-4, 2e-4, 1e-4], start=1):
            work._set_learning_rate(step * PER_STEP)
            assert work.learning_rate() == pytest.approx(rate)
        work._set_learning_rate(100 * PER_STEP)
        assert work.learning_rate() == pytest.approx(1e-4)


def test_the_loss_is_told_before_the_optimizer_uses_the_gradients(tmp_path: Path) -> None:
    with workload(tmp_path) as work:
        logged: list[float] = []
        work._trainer.metrics_processor.log = lambda step, average, *_, **__: logged.append(average)
        before = state.digest(dict(work.model.named_parameters()))
        told = []

        def computed(loss: float) -> None:
            told.append(loss)
            assert state.digest(dict(work.model.named_parameters())) == before

        work.step(PER_STEP, computed)
        assert told == pytest.approx(logged)
        assert state.digest(dict(work.model.named_parameters())) != before


def test_warming_up_changes_nothing_and_costs_no_data(tmp_path: Path) -> None:
    with workload(tmp_path) as work:
        before = state.digest(dict(work.model.named_parameters()))
        again = next(work._data)[0]["input"]
        work.warm_up()
        assert state.digest(dict(work.model.named_parameters())) == before
        assert work._trainer.ntokens_seen == 0
        assert not work._trainer.optimizers.optimizers[0].state
    with workload(tmp_path) as work:
        assert torch.equal(read(work, 1)[0], again)


def test_replicas_read_different_text_and_one_that_starts_again_goes_on_in_its_own(tmp_path: Path) -> None:
    with workload(tmp_path, replica=0) as work:
        first = read(work, 3)
    with workload(tmp_path, replica=1) as work:
        other = read(work, 3)
        work.committed(1)
        following = read(work, 2)
    assert not any(torch.equal(one, two) for one in first for two in other)
    with workload(tmp_path, replica=1, committed_step=1) as work:
        again = read(work, 2)
    assert all(torch.equal(one, two) for one, two in zip(following, again, strict=True))


def test_a_state_goes_to_another_replica_bit_for_bit(tmp_path: Path) -> None:
    with workload(tmp_path, replica=0) as donor:
        read(donor, 3)
        copy = state.snapshot(donor.state_dict())
        expected = state.digest(donor.state_dict())
    with workload(tmp_path, replica=1) as joiner:
        assert state.digest(joiner.state_dict()) != expected
        joiner.load_state_dict(state.restore(copy, state.meshes_of(joiner.model)))
        assert state.digest(joiner.state_dict()) == expected
        assert joiner.steps == 3
        # A state on disk has the parameters elsewhere.
        del copy["model"]
        joiner.load_state_dict(state.restore(copy, state.meshes_of(joiner.model)))


def test_replicas_start_with_the_same_parameters(tmp_path: Path) -> None:
    digests = []
    for replica in (0, 1):
        with workload(tmp_path, replica=replica) as work:
            digests.append(state.digest(dict(work.model.named_parameters())))
    assert digests[0] == digests[1]


def test_the_end_of_the_data_is_told(tmp_path: Path) -> None:
    with (
        workload(tmp_path, "--dataloader.no-infinite", "--training.seq_len", "2048") as work,
        pytest.raises(DataError, match=r"torchtitan's data ended in step \d+: give more of it"),
    ):
        read(work, 1000)


def test_the_validators_loss_is_the_runs(tmp_path: Path) -> None:
    with workload(tmp_path) as work:
        assert work.evaluate() is None
    with workload(tmp_path, "--validator.enable") as work:
        loss = work.evaluate()
        assert loss is not None
        assert 5 < loss < 10


def test_what_a_model_refuses_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"torchtitan cannot build its trainer: ValueError: .*exceeds"),
        workload(tmp_path, "--training.seq_len", "1000000"),
    ):
        pass
    assert not torch.distributed.is_initialized()


def test_a_zygote_gets_no_thread_and_no_torchtitan() -> None:
    code = (
        "import os, sys; from monarch_slurm.train.titan_engine import preload; preload(); "
        "print(len(os.listdir('/proc/self/task')), 'torchtitan' in sys.modules, 'pyarrow' in sys.modules)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["1", "False", "False"]
