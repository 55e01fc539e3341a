"""What a training run is: sizes, data, schedule, synchronisation and deadlines."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from monarch_slurm.train.saved import SavedState

TORCHFT = "torchft"
"""For ``lighthouse``: TorchFT's own, which the run starts."""

ENGINES = ("llama", "torchtitan")
"""The built-in engine, and those that are wrapped."""


@dataclass(frozen=True)
class TrainConfig:
    """The whole description of a run; every trainer gets the same one.

    Attributes:
        model: name of a configuration in `monarch_slurm.train.llama_config.CONFIGS`.
        data: text file or folder of text files; None means the source of the Python standard library.
        seq_len: tokens in a sequence.
        batch_size: sequences in the batch of one trainer rank.
        tokens: the run ends when the committed steps of all replicas have consumed this many tokens.
        replicas: number of replica groups.
        procs_per_replica: trainer procs in one replica; with more than one, parameters are sharded over them.
        min_replicas: the smallest quorum that may train. One would let a lone replica start again from nothing.
        sync_every: inner steps between two DiLoCo syncs.
        lr: peak learning rate of AdamW.
        min_lr_ratio: the cosine schedule ends at ``lr * min_lr_ratio``.
        warmup: fraction of the token budget over which the learning rate rises from 0.
        weight_decay: AdamW's decoupled weight decay.
        grad_clip: largest norm of the gradient.
        outer_lr: learning rate of the outer SGD with Nesterov momentum.
        outer_momentum: its momentum.
        eval_batches: batches of the held-out text behind each reported validation loss.
        seed: seed of parameters, sampler and failure schedule.
        threads: CPU threads of one trainer proc; 0 leaves it to torch.
        lighthouse: who forms the quorums. None: the run itself, over the job's messages. ``torchft``: TorchFT's
            Lighthouse, which the run starts. A URL: TorchFT's Lighthouse there. What is TorchFT's answers everybody
            who can reach its ports.
        heartbeat_timeout: seconds without a heartbeat after which TorchFT's Lighthouse leaves a replica out.
        heartbeat_interval: seconds between two heartbeats of a replica that TorchFT's Lighthouse is sent.
        join_timeout: seconds that a quorum waits for a replica that lives but does not ask.
        collective_timeout: seconds after which a collective between replicas fails. A joining replica's
            state transfer happens inside it.
        connect_timeout: seconds that the members of a new quorum may take to connect to one another.
        quorum_timeout: seconds after which waiting for a quorum kills the trainer.
        step_deadline: seconds that one inner step may take before the replica counts as hung.
        sync_deadline: seconds that one sync may take before the replica counts as hung.
        save_every: committed syncs from one save of the state to the next; 0 saves only when the run is asked to end.
        keep_saves: how many saved states are kept.
        replica_backend: what reduces between replicas: ``gloo``, or ``ccl`` (RCCL, NCCL) for GPUs.
        verify_state: hash the parameters at the end, which should be equal in all replicas. A state that is
            transferred is hashed on both sides in any case.
        engine: what trains, one of `ENGINES`. For torchtitan ``model``, ``seq_len``, ``batch_size`` and ``tokens``
            follow from its options, and what is said of data, learning rate, decay and gradients counts for nothing.
        engine_options: torchtitan's command line.
    """

    model: str = "debug"
    data: str | None = None
    seq_len: int = 128
    batch_size: int = 4
    tokens: int = 2_000_000
    replicas: int = 4
    procs_per_replica: int = 1
    min_replicas: int = 2
    sync_every: int = 20
    lr: float = 2e-3
    min_lr_ratio: float = 0.1
    warmup: float = 0.05
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    eval_batches: int = 8
    seed: int = 0
    threads: int = 1
    lighthouse: str | None = None
    heartbeat_timeout: float = 0.5
    heartbeat_interval: float = 0.05
    join_timeout: float = 10.0
    collective_timeout: float = 20.0
    connect_timeout: float = 3.0
    quorum_timeout: float = 600.0
    step_deadline: float = 10.0
    sync_deadline: float = 60.0
    save_every: int = 0
    keep_saves: int = 2
    verify_state: bool = True
    replica_backend: str = "gloo"
    engine: str = "llama"
    engine_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "engine_options", tuple(self.engine_options))  # JSON has made it a list

    @property
    def tokens_per_sync(self) -> int:
        """Tokens that one participant adds with one committed sync."""
        return self.sync_every * self.batch_size * self.procs_per_replica * self.seq_len

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, as ``report.json`` holds them."""
        return {**dataclasses.asdict(self), "engine_options": list(self.engine_options)}


@dataclass(frozen=True)
class Place:
    """Where one trainer rank stands, and how it reaches the others.

    Attributes:
        replica: index of the replica group, 0 to ``replicas - 1``.
        rank: rank inside the replica.
        world_size: ranks inside the replica.
        generation: how often this replica was started before; events of older generations are stale.
        lighthouse: ``http://host:port`` of TorchFT's Lighthouse, if that forms the quorums.
        address: IP address of the interface that this trainer binds and advertises, for every socket it opens.
        store_port: port of the replica's TCPStore at ``store_address``; rank 0 serves it. 0 when the replica has one
            rank.
        store_address: IP address of the replica's rank 0.
        device: index of the rank's GPU among those of its host; it is taken modulo their number.
        saved: the state that the run went on from; None if it began anew.
        folder: of the run, for its saved states.
        committed_step: the highest ``step`` of a committed sync that the supervisor has seen in the run so far. A
            trainer that meets a quorum which knows less raises instead of training from the start again.
        member: the actor of the replica that asks for quorums; None if ``lighthouse`` forms them.
        store: the actor of the replica in whose keys its ranks, and those of peers, can meet; None: they meet at TCP
            stores.
    """

    replica: int
    rank: int
    world_size: int
    generation: int
    lighthouse: str
    address: str = "127.0.0.1"
    store_port: int = 0
    store_address: str = "127.0.0.1"
    committed_step: int = 0
    device: int = 0
    saved: SavedState | None = None
    folder: str = ""
    member: Any = None
    store: Any = None
