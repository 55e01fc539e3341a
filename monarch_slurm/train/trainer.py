"""The actor in a trainer's process: it runs the engine and sends the run's events to its supervisor."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from monarch_slurm.actor import Actor, Port, context, current_rank, endpoint
from monarch_slurm.collectives import StoreActor
from monarch_slurm.host import ADDRESS_VARIABLE
from monarch_slurm.train.addresses import listen
from monarch_slurm.train.config import Place, TrainConfig
from monarch_slurm.train.events import Event
from monarch_slurm.train.injection import check_injected
from monarch_slurm.train.quorum import MemberActor
from monarch_slurm.train.saved import SavedState
from monarch_slurm.train.versions import installed_versions

if TYPE_CHECKING:
    from monarch_slurm.train.engine import Engine


_engine: Engine | None = None
"""The engine of this process, for the actors beside the trainer's."""


class TrainerActor(Actor):
    """One rank of one replica.

    Args:
        config: the run.
        replica: index of the replica; ``generation`` says how often it was started before.
        lighthouse: address of TorchFT's Lighthouse, if that forms the quorums.
        committed_step: the highest committed step that the supervisor has seen.
        first_device: index of the GPU of the first trainer of this replica on each of its hosts.
        events: where events go.
        saved: the state that the run went on from.
        folder: of the run.
    """

    def __init__(
        self,
        config: TrainConfig,
        replica: int,
        generation: int,
        lighthouse: str,
        committed_step: int,
        first_device: int,
        events: Port[Event],
        saved: SavedState | None = None,
        folder: str = "",
    ) -> None:
        self._saved = saved
        self._folder = folder
        self._config = config
        self._replica = replica
        self._generation = generation
        self._lighthouse = lighthouse
        self._committed_step = committed_step
        self._first_device = first_device
        self._events = events
        self._address = os.environ.get(ADDRESS_VARIABLE, "127.0.0.1")

    @endpoint
    def store_address(self) -> tuple[str, int]:
        """Return IP address and a port that is free now, for the store of a replica whose rank 0 this is."""
        with listen(self._address, 0) as probe:
            return self._address, int(probe.getsockname()[1])

    @endpoint
    def train(self, store_address: str, store_port: int, member: MemberActor | None, store: StoreActor | None) -> None:
        """Train until the run is done. What it raises ends this actor; its supervisor is told the traceback.

        Args:
            store_address: IP address of the replica's rank 0.
            store_port: port of its store there.
            member: asks for quorums for the replica; None if TorchFT's Lighthouse forms them.
            store: where ranks meet instead of at the replica's TCP store; None if TorchFT's Lighthouse forms quorums.
        """
        global _engine

        rank = current_rank().rank
        place = Place(
            self._replica,
            rank,
            self._config.procs_per_replica,
            self._generation,
            self._lighthouse,
            self._address,
            store_port,
            store_address,
            self._committed_step,
            self._first_device + context().actor_instance.rank["gpus"],
            self._saved,
            self._folder,
            member,
            store,
        )
        _engine = _engine_class(self._config.engine)(self._config, place, self._events.send, check_injected)
        _engine.run()


def _engine_class(name: str) -> type[Engine]:
    if name == "torchtitan":
        from monarch_slurm.train.titan_engine import TitanEngine  # torch: only where training happens

        return TitanEngine
    from monarch_slurm.train.engine import LlamaEngine

    return LlamaEngine


class PulseActor(Actor):
    """Runs beside a trainer, in the same process: it answers as long as the interpreter there runs, and takes news."""

    @endpoint
    def pulse(self) -> None:
        """Give a sign of life."""

    @endpoint
    def peer_lost(self, patience: float) -> None:
        """A peer's host is lost: do not wait for it in a collective any longer than ``patience`` seconds."""
        if _engine is not None and _engine.let_go(patience):
            self.logger.warning("left a collective with a replica whose host is lost")

    @endpoint
    def save(self, wanted: bool) -> None:
        """Have the trainer save its state into the run's folder, or not any more."""
        if _engine is not None:
            _engine.save_soon(wanted)

    @endpoint
    def discard_save(self, step: int) -> None:
        """Remove what the trainer has saved of ``step``: another rank of its replica failed to."""
        if _engine is not None:
            _engine.discard_save(step)


class LighthouseActor(Actor):
    """Holds TorchFT's Lighthouse, in a process of its own."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._server: Any = None

    @endpoint
    def start(self) -> str:
        """Start the Lighthouse on this host's address and an ephemeral port; return its URL."""
        from monarch_slurm.train.fault_tolerance import start_lighthouse

        address = os.environ.get(ADDRESS_VARIABLE, "127.0.0.1")
        self._server, url = start_lighthouse(address, self._config)
        return str(url)

    @endpoint
    def versions(self) -> dict[str, str]:
        """Return versions of what trains; see `installed_versions`."""
        return installed_versions(self._config)
