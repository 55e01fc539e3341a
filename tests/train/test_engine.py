"""The engine in real processes: a run, deaths and returns, and the ways in which it refuses to go on."""

from __future__ import annotations

import math
import socket
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch
from trainers import Event, Run, Trainer, Zygote

from monarch_slurm.errors import ConfigError
from monarch_slurm.train.config import Place, TrainConfig
from monarch_slurm.train.corpus import DataError
from monarch_slurm.train.engine import LlamaEngine
from monarch_slurm.train.events import TRAINER_KINDS
from monarch_slurm.train.llama_config import CONFIGS, model_config

pytestmark = [pytest.mark.train, pytest.mark.slow]

SMALL = TrainConfig(model="tiny", seq_len=32, batch_size=2, sync_every=5, replicas=3, eval_batches=2)


def budget(config: TrainConfig, contributions: int) -> TrainConfig:
    """Let a run end when replicas have contributed so often to a sync."""
    return replace(config, tokens=contributions * config.tokens_per_sync)


def values(events: list[Event], *keys: str) -> list[tuple[object, ...]]:
    return [tuple(e[key] for key in keys) for e in events]


def test_a_killed_replica_returns(zygote: Zygote, tmp_path: Path) -> None:
    # In the fifth sync the replica that returns gets its state, and brings no work of its own.
    config = budget(SMALL, 3 + 3 + 2 + 2 + 2 + 3 + 3 + 3)
    gate = tmp_path / "gate"
    with Run(zygote, config) as run:
        # Everybody stops at a known step, so that who takes part in which sync does not depend on the machine's load.
        one, two = run.start(0, hold=(23, gate)), run.start(2, hold=(23, gate))
        victim = run.start(1, hold=(13, gate))
        run.begin()
        run.wait(lambda: victim.held_at(13), "the victim to be held")
        victim.kill()
        run.wait_ended(victim)
        run.wait(lambda: one.held_at(23) and two.held_at(23), "the survivors to be held")
        again = run.start(1, generation=1, committed_step=4)
        run.wait(lambda: bool(again.of("quorum_asked")), "the replica to ask for its state")
        gate.touch()
        finished = run.wait_finished(one, two, again)

    assert victim.status == -9
    for survivor in (one, two):
        assert [s["participants"] for s in survivor.of("sync")] == [3, 3, 2, 2, 3, 3, 3, 3]
        assert all(s["committed"] for s in survivor.of("sync"))
        assert not any(q["healing"] for q in survivor.of("quorum"))
    assert [q["healing"] for q in again.of("quorum")] == [True, False, False, False]
    received = again.only("state_received")
    (sent,) = one.of("state_sent") + two.of("state_sent")
    assert (sent["step"], sent["to"], received["step"]) == (4, 1, 4)
    assert sent["sha256"] == received["sha256"]
    assert len(received["sha256"]) == 64
    assert sent["bytes"] == received["bytes"] > 4 * 4 * 353_952  # model, AdamW's two moments, original parameters, ...
    # It goes on where its peers are, in its own part of the text, with their learning rate.
    by_step = {e["step"]: e for e in one.of("step")}
    assert again.of("step")[0]["step"] == 26
    assert all(by_step[e["step"]]["lr"] == e["lr"] for e in again.of("step"))
    assert all(by_step[e["step"]]["loss"] != e["loss"] for e in again.of("step"))
    assert len({(f["tokens"], f["step"], f["loss"], f["sha256"]) for f in finished}) == 1
    assert (finished[0]["tokens"], finished[0]["step"]) == (config.tokens, 8)


def test_a_death_inside_a_collective_is_noticed_by_all(zygote: Zygote) -> None:
    # In a ring of five, two of the four survivors have nothing to do with the dead one directly.
    config = budget(replace(SMALL, replicas=5), 5 * 2 + 4 * 2)
    with Run(zygote, config) as run:
        trainers = [run.start(replica, freeze=3 if replica == 2 else None) for replica in range(5)]
        run.begin()
        run.wait(lambda: all(len(t.of("quorum")) == 3 for t in trainers), "all to begin the third sync")
        trainers[2].kill()
        survivors = [t for t in trainers if t is not trainers[2]]
        finished = run.wait_finished(*survivors)
    for survivor in survivors:
        syncs = survivor.of("sync")
        assert values(syncs, "committed", "participants") == [(True, 5), (True, 5), (False, 5), (True, 4), (True, 4)]
        assert syncs[2]["seconds"] < config.collective_timeout / 2
    assert len({f["sha256"] for f in finished}) == 1


def test_a_silent_peer_is_left_as_soon_as_it_is_known_to_be_lost(zygote: Zygote) -> None:
    # A stopped process is as silent as a host without power: no connection breaks, and nothing but the news tells.
    config = budget(replace(SMALL, replicas=4), 4 * 2 + 3 * 2)
    with Run(zygote, config) as run:
        trainers = [run.start(replica, freeze=3 if replica == 2 else None) for replica in range(4)]
        run.begin()
        run.wait(lambda: all(len(t.of("quorum")) == 3 for t in trainers), "all to begin the third sync")
        run.lose_peer()
        survivors = [t for t in trainers if t is not trainers[2]]
        finished = run.wait_finished(*survivors)
        assert trainers[2].status is None
    for survivor in survivors:
        syncs = survivor.of("sync")
        assert values(syncs, "committed", "participants") == [(True, 4), (True, 4), (False, 4), (True, 3), (True, 3)]
        assert syncs[2]["seconds"] < config.collective_timeout / 2
    assert len({f["sha256"] for f in finished}) == 1


def failure_free(zygote: Zygote, config: TrainConfig) -> list[Trainer]:
    with Run(zygote, config) as run:
        trainers = [run.start(replica) for replica in range(config.replicas)]
        run.begin()
        run.wait_finished(*trainers)
    return trainers


def test_a_run_without_failures(zygote: Zygote) -> None:
    config = budget(replace(SMALL, replicas=2), 2 * 10)
    trainers = failure_free(zygote, config)
    for trainer in trainers:
        assert {e["kind"] for e in trainer.events} - {"imported", "held"} <= TRAINER_KINDS
        assert all(
            e["replica"] == trainer.place.replica and e["generation"] == e["rank"] == 0
            for e in trainer.events
            if e["kind"] in TRAINER_KINDS
        )
        assert [e["step"] for e in trainer.of("step")] == list(range(1, 51))
        assert [e["tokens"] for e in trainer.of("sync")] == [2 * n * config.tokens_per_sync for n in range(1, 11)]
        assert trainer.only("trainer_started")["pid"] == trainer.pid
        assert trainer.only("engine_ready")["parameters"] == 353_952
        phases = [e["phase"] for e in trainer.of("phase")]
        assert all(a != b for a, b in pairwise(phases))
        assert phases[:2] == ["compute", "sync"]
        assert phases[-2:] == ["sync", "eval"]
        rates = [e["lr"] for e in trainer.of("step")]
        assert max(rates) == pytest.approx(config.lr, rel=0.05)
        assert rates[-1] == pytest.approx(config.lr * config.min_lr_ratio)
    # One of them tells the validation loss, and it gets better.
    evals = [trainer.of("eval") for trainer in trainers]
    assert sorted(map(len, evals)) == [0, 10]
    losses = [e["loss"] for e in evals[0] or evals[1]]
    assert math.log(256) > losses[0] > losses[-1]
    assert losses[-1] == trainers[0].only("finished")["loss"]

    repeated = failure_free(zygote, config)
    for first, second in zip(trainers, repeated, strict=True):
        for kind, *keys in (("step", "loss", "lr", "tokens"), ("finished", "loss", "sha256"), ("eval", "loss")):
            assert values(first.of(kind), *keys) == values(second.of(kind), *keys)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_sharded_replica_returns(zygote: Zygote, tmp_path: Path) -> None:
    config = budget(replace(SMALL, replicas=2, procs_per_replica=2), 2 * 6)
    gate = tmp_path / "gate"
    on_gpu = torch.cuda.is_available()
    with Run(zygote, config) as run:
        ports = [free_port(), free_port()]
        stays = [run.start(0, rank, store_port=ports[0]) for rank in (0, 1)]
        goes = [run.start(1, rank, store_port=ports[1], hold=(8, gate)) for rank in (0, 1)]
        run.begin()
        run.wait(lambda: all(t.held_at(8) for t in goes), "both ranks to be held")
        goes[1].kill()
        gate.touch()
        if on_gpu:
            goes[0].kill()  # NCCL would wait for the dead rank until the collective times out
        run.wait_ended(*goes)
        port = free_port()
        again = [run.start(1, rank, 1, store_port=port, committed_step=1) for rank in (0, 1)]
        finished = run.wait_finished(*stays, *again)

    # Gloo tells the other rank of the death at once.
    assert goes[0].status == (-9 if on_gpu else 1)
    assert on_gpu or goes[0].of("error")
    for donor, joiner in zip(stays, again, strict=True):
        assert joiner.of("quorum")[0]["healing"]
        assert donor.only("state_sent")["sha256"] == joiner.only("state_received")["sha256"]
    # The ranks hold different parts; those of one rank are the same in every replica.
    assert stays[0].only("state_sent")["sha256"] != stays[1].only("state_sent")["sha256"]
    hashes = [f["sha256"] for f in finished]
    assert hashes[:2] == hashes[2:]
    assert hashes[0] != hashes[1]
    assert len({f["loss"] for f in finished}) == 1
    assert stays[0].only("engine_ready")["parameters"] == 353_952


def test_peers_go_on_without_one_that_raised(zygote: Zygote) -> None:
    with Run(zygote, budget(SMALL, 3 + 2 + 2)) as run:
        one, broken, two = run.start(0), run.start(1, fail=8), run.start(2)
        run.begin()
        run.wait_ended(broken)
        run.wait_finished(one, two)
    assert broken.status == 1
    error = broken.only("error")
    assert error["error"] == "in a test"
    assert "ArithmeticError: injected" in error["traceback"]
    assert [s["participants"] for s in one.of("sync") if s["committed"]] == [3, 2, 2]


def test_a_joiner_whose_donors_all_die_gives_up(zygote: Zygote, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with Run(zygote, budget(SMALL, 2 * 20)) as run:
        # Their state servers are closed before the joiner asks, as if each donor died at that moment.
        donors = [run.start(replica, hold=(8, gate), deaf=7) for replica in (0, 2)]
        run.begin()
        run.wait(lambda: all(t.held_at(8) for t in donors), "the donors to be held")
        joiner = run.start(1, generation=1, committed_step=1)
        run.wait(lambda: bool(joiner.of("quorum_asked")), "the joiner to ask")
        gate.touch()
        run.wait_ended(joiner)
        run.wait_finished(*donors)
    assert len(joiner.of("quorum_asked")) == 3
    assert "tried 3 times" in joiner.only("error")["error"]
    assert not joiner.of("state_received")
    assert not joiner.of("step")
    # Each try cost the donors one sync, at once and not after a time-out.
    lost = [s for s in donors[0].of("sync") if not s["committed"]]
    assert len(lost) == 3
    assert all(s["seconds"] < SMALL.collective_timeout / 2 for s in lost)
    assert donors[0].only("finished")["sha256"] == donors[1].only("finished")["sha256"]


def test_a_zygote_has_one_thread_and_everything_loaded(zygote: Zygote) -> None:
    assert zygote.ready["threads"] == 1
    with Run(zygote, budget(replace(SMALL, replicas=2), 2)) as run:
        trainers = [run.start(0), run.start(1)]
        run.begin()
        run.wait_finished(*trainers)
    assert [t.only("imported")["modules"] for t in trainers] == [[], []]


def test_sockets_stand_on_the_trainers_address_only(zygote: Zygote, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with Run(zygote, budget(replace(SMALL, replicas=2), 2 * 2)) as run:
        trainers = [run.start(r, hold=(6, gate), address=f"127.0.0.{r + 2}") for r in range(2)]
        run.begin()
        run.wait(lambda: all(t.held_at(6) for t in trainers), "a sync to be over")
        for trainer in trainers:
            open_sockets = psutil.Process(trainer.pid).net_connections()
            listening = [c.laddr.ip for c in open_sockets if c.status == psutil.CONN_LISTEN]
            # The manager, the store, the state server and Gloo.
            assert len(listening) >= 4
            assert set(listening) == {trainer.place.address}
        gate.touch()
        run.wait_finished(*trainers)


def test_a_run_whose_state_is_lost_does_not_start_again(zygote: Zygote) -> None:
    with Run(zygote, budget(replace(SMALL, replicas=2), 100)) as run:
        trainers = [run.start(replica, generation=1, committed_step=3) for replica in (0, 1)]
        run.wait_ended(*trainers)
    assert [t.status for t in trainers] == [1, 1]
    told = [t.only("error")["error"] for t in trainers]
    assert any("had committed 3 syncs, but the replicas that met know only of 0" in text for text in told)
    assert not any(t.of("step") for t in trainers)


def test_nothing_committed_is_nothing_lost(zygote: Zygote) -> None:
    with Run(zygote, budget(replace(SMALL, replicas=2), 2 * 2)) as run:
        trainers = [run.start(replica, generation=1) for replica in (0, 1)]
        run.wait_finished(*trainers)


def test_a_lone_replica_gets_no_quorum(zygote: Zygote) -> None:
    with Run(zygote, replace(SMALL, quorum_timeout=0.5)) as run:
        alone = run.start(0, generation=1)
        run.wait_ended(alone)
    assert "QuorumError: replica 0 got no quorum" in alone.only("error")["error"]


def test_a_diverged_replica_keeps_it_to_itself(zygote: Zygote) -> None:
    with Run(zygote, replace(SMALL, lr=1e30, warmup=0.0)) as run:
        wild = run.start(0)
        run.begin()
        run.wait_ended(wild)
    assert "NonFiniteLossError: the training loss of step" in wild.only("error")["error"]
    assert not wild.of("quorum_asked")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"model": "405b"}, ConfigError, "there is no model '405b'; choose one of tiny"),
        ({"data": "/no/such/text"}, DataError, "/no/such/text does not exist"),
    ],
)
def test_a_wrong_setting_is_told_before_anything_is_opened(
    change: dict[str, str], error: type[Exception], text: str
) -> None:
    told: list[Event] = []
    engine = LlamaEngine(replace(SMALL, **change), Place(0, 0, 1, 0, "http://127.0.0.1:1"), told.append)
    with pytest.raises(error, match=text):
        engine.run()
    assert [e["kind"] for e in told] == ["trainer_started", "error"]
    assert text in told[1]["error"]


def test_byte_tokens_need_a_small_vocabulary() -> None:
    assert model_config("8b").vocab == 256
    assert model_config("8b") == replace(CONFIGS["8b"], vocab=256)


def test_it_shows_itself() -> None:
    engine = LlamaEngine(SMALL, Place(2, 1, 4, 3, "http://127.0.0.1:1"), lambda _: None)
    assert repr(engine) == "<LlamaEngine tiny, replica 2 rank 1 generation 3, not running>"
