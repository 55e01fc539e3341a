"""TorchFT, set up for quick recovery on a cluster: manager, process group and DiLoCo between replicas.

Every replica runs `TorchFT's manager <https://github.com/pytorch/torchft>`_ and trains by DiLoCo (arXiv 2311.08105):
some inner steps by itself, then a *sync* in which the replicas agree on who takes part (a quorum), replicas that are
behind get the state of one that is not, and the changes of all are averaged and applied by an outer optimizer. What is
set here and why:

- The quorum is synchronous, as DiLoCo needs it, and the parameters start equal by seed (`init_sync` off), so the first
  sync does not throw the work of all replicas but one away.
- Between replicas the collectives are Gloo's by default: after a peer's death its sockets break at once. NCCL would
  hang; where it is wanted (``replica_backend``), the control plane ends what waits for the dead.
- Tensors are reduced one by one: TorchFT 0.2's buckets lose gradients as soon as there is more than one bucket.
- Nothing is quantised between replicas: TorchFT takes any device of compute capability 9 for one with e4m3 floats.
- Every socket is bound to the trainer's own address, and advertised as that address.
- Quorums are formed by the job's own actors (`monarch_slurm.train.quorum`), or by TorchFT's Lighthouse if that is asked
  for.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from monarch_slurm.train.torchft_manager import LOGGER, LighthouseServer, Manager, on_a_free_port  # isort: skip
from torchft.local_sgd import DiLoCo

from monarch_slurm.collectives.errors import ProofError
from monarch_slurm.errors import ConfigError, MonarchSlurmError
from monarch_slurm.train import state
from monarch_slurm.train.addresses import in_url
from monarch_slurm.train.config import Place, TrainConfig
from monarch_slurm.train.group import ReplicaGroup
from monarch_slurm.train.meeting import Meeting
from monarch_slurm.train.quorum import RankAsk
from monarch_slurm.train.quorum_client import QuorumClient
from monarch_slurm.train.quorum_rules import RankQuorum
from monarch_slurm.train.replica import Replica
from monarch_slurm.train.torchft_keys import TorchftKeys
from monarch_slurm.train.transfer import StateTransport, Transfer, UntrustedStateError
from monarch_slurm.wire.task_limits import start_thread

logger = logging.getLogger(__name__)

Emit = Callable[..., None]
"""Called as ``emit(kind, t=None, **fields)``, always on the thread that trains."""

_QUORUM_TICK = 0.01  # seconds between two looks of the Lighthouse at who is there
_WAITING_TICK = 0.1  # seconds between two looks at what else is to be done while a quorum forms
_LAST_WISH = 3.0  # seconds that a replica without a quorum may still be asked to save
_UNPROVED_QUORUMS = 5  # in a row, with a member that did not prove that it belongs to it, are no bad luck
_CONNECT_TIMEOUT = 10.0  # seconds to reach a Lighthouse or a peer's manager


class QuorumError(MonarchSlurmError):
    """No quorum formed in the time allowed: whoever forms it is gone, or too few replicas are left."""


class StateLostError(MonarchSlurmError):
    """The replicas that met know less than the run had committed: every replica that held its state is gone."""


def start_lighthouse(bind_address: str, config: TrainConfig) -> tuple[LighthouseServer, str]:
    """Start the server that forms quorums, on a free port of one address.

    Args:
        bind_address: IP address that the trainers can reach; not a wildcard, since it is also what they are told.
        config: its ``min_replicas`` and time-outs.

    Returns:
        The server (``shutdown()`` ends it, and so does letting go of it) and its URL, ``http://<address>:<port>``.

    Raises:
        ConfigError: the address is no IP address of this host, or is a wildcard.
    """
    if bind_address in ("0.0.0.0", "::"):  # noqa: S104
        raise ConfigError(f"the Lighthouse needs one address to be reached at, not {bind_address}")
    host = in_url(bind_address)

    def start(port: int) -> LighthouseServer:
        return LighthouseServer(
            bind=f"{host}:{port}",
            min_replicas=config.min_replicas,
            join_timeout_ms=round(config.join_timeout * 1000),
            quorum_tick_ms=round(_QUORUM_TICK * 1000),
            heartbeat_timeout_ms=round(config.heartbeat_timeout * 1000),
        )

    try:
        server = on_a_free_port(start)
    except RuntimeError as error:
        raise ConfigError(f"the Lighthouse cannot listen on {bind_address}: {error}") from error
    return server, f"http://{host}:{server.address().rsplit(':', 1)[1]}"


@dataclass(frozen=True)
class Sync:
    """What came of one sync.

    Attributes:
        committed: the averaged changes were applied; else the inner steps since the last sync are lost.
        participants: replicas in the quorum.
        healed: this replica got its state from another one.
        seconds: from asking for the quorum to the decision.
    """

    committed: bool
    participants: int
    healed: bool
    seconds: float


class ReplicaManager(Manager):
    """TorchFT's manager, which tells what happens in it.

    Args:
        config: time-outs and the smallest quorum.
        place: where this rank stands.
        replica: the replica's store.
        emit: told of quorums and transfers.
        on_sync: called when a sync begins.
        meshes: those that the replica's parameters are sharded over.
        while_waiting: called again and again while the replica waits for a quorum, on the thread that waits.

    Attributes:
        trained: how many replicas' work has been committed, summed over the syncs of the run. A replica that got the
            state in a sync brought none: TorchFT counts it, and its donor's change twice.
        joined: a quorum that this replica was part of has formed, and the state that it needed has come.
    """

    def __init__(
        self,
        config: TrainConfig,
        place: Place,
        replica: Replica,
        emit: Emit,
        on_sync: Callable[[], None],
        meshes: state.Meshes,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self.joined = False
        self.trained = 0
        self._emit, self._on_sync = emit, on_sync
        self._config, self._place = config, place
        self._saves: dict[str, Callable[[], Any]] = {}
        self._loads: dict[str, Callable[[Any], None]] = {}
        self._reports: list[tuple[str, Transfer]] = []
        self._sync_began = 0.0
        self._healed = False
        self._last_sync: Sync | None = None
        self.group = _replica_group(config, place)
        self.transport = StateTransport(place.address, config.collective_timeout, meshes)
        self._quorums: _JobQuorums | _LighthouseQuorums | None = None
        transport: Any = self.transport
        if place.member is not None:
            self._quorums = self._job_quorums(while_waiting)
        else:
            transport = TorchftKeys(transport, lambda: self._quorums.rank if self._quorums is not None else 0)
        try:
            super().__init__(
                self._quorums if isinstance(self._quorums, _JobQuorums) else None,
                place.address,
                (place.store_address if place.world_size > 1 else place.address, replica.port),
                place.lighthouse,
                pg=self.group,
                load_state_dict=None,
                state_dict=None,
                min_replica_size=config.min_replicas,
                use_async_quorum=False,
                timeout=timedelta(seconds=config.collective_timeout),
                quorum_timeout=timedelta(seconds=config.quorum_timeout),
                connect_timeout=timedelta(seconds=_CONNECT_TIMEOUT),
                rank=place.rank,
                world_size=place.world_size,
                # Ranks between replicas follow the order of these names as text, hence the zeros.
                replica_id=f"replica_{place.replica:06d}",
                heartbeat_interval=timedelta(seconds=config.heartbeat_interval),
                checkpoint_transport=transport,
                init_sync=False,
            )
        except RuntimeError as error:
            self.transport.shutdown()
            raise QuorumError(f"replica {place.replica} cannot reach the Lighthouse: {error}") from error
        if self._quorums is None:
            self._quorums = _LighthouseQuorums(self._client, while_waiting)
            self.wrap_client(lambda client: self._quorums)
        _one_line_per_failure.install()

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Add a part of the state that a joining replica is given."""
        self._saves[key], self._loads[key] = state_dict, load_state_dict
        super().register_state_dict_fn(key, load_state_dict, state_dict)

    def full_state(self) -> dict[str, Any]:
        """Return all that a joining replica is given, in the form in which TorchFT sends it."""
        return {"user": {key: save() for key, save in self._saves.items()}, "torchft": self.state_dict()}

    def load_full_state(self, saved: dict[str, Any]) -> None:
        """Load what `full_state` returned, before the first quorum."""
        for key, load in self._loads.items():
            load(saved["user"][key])
        self.load_state_dict(saved["torchft"])

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Agree with the other replicas on who takes part in this sync, and heal if this one is behind.

        Raises:
            QuorumError: it took longer than ``quorum_timeout``.
            StateLostError: nobody in the quorum has the steps that the run had committed.
            UntrustedStateError: the state that came is not what the donor has announced; nothing was loaded.
            ProofError: quorum after quorum a member did not prove that it belongs to it. A single one costs a sync.
        """
        self._on_sync()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # TorchFT copies the state on a stream of its own, which waits for no other
        _one_line_per_failure.rearm()
        self._last_sync, self._healed = None, False
        self._sync_began = time.time()
        self.transport.began_at = None
        received = len(self.transport.received)
        self._emit("quorum_asked", step=self.current_step())
        try:
            super().start_quorum(allow_heal, shrink_only, timeout)
        except (TimeoutError, RuntimeError) as error:
            if self.transport.began_at is not None:
                raise  # the quorum had formed; what failed is loading the state
            raise QuorumError(
                f"replica {self._place.replica} got no quorum from {self._place.lighthouse or 'the run'}: {error}"
            ) from error
        self._healed = len(self.transport.received) > received
        formed = self.transport.began_at or time.time()
        self._emit(
            "quorum",
            t=formed,
            quorum_id=self.group.quorum_id,
            participants=self.num_participants(),
            step=self.current_step(),
            healing=self._healed,
            seconds=formed - self._sync_began,
        )
        self._reports += [("state_sent", transfer) for transfer in self.transport.sent]
        self.transport.sent.clear()
        if self.errored() is not None:
            # This sync is lost. The peers must not wait for this replica in their collectives until those time out.
            self.group.hang_up()
            cause = self.errored().original_exception
            if isinstance(cause, UntrustedStateError):
                raise cause  # the next sync would have to trust the same donor
            if isinstance(cause, ProofError) and self.group.unproved >= _UNPROVED_QUORUMS:
                raise ProofError(f"{cause}; so did the last {self.group.unproved} quorums end")
            return
        _check_not_lost(self._place.committed_step, self.current_step())
        self.joined = True
        if self._healed:
            self._reports.append(("state_received", self.transport.received.pop()))

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Decide with the ranks of this replica whether the sync counts."""
        if self.errored() is not None:
            self.group.hang_up()
        committed = bool(super().should_commit(timeout))
        if committed:
            assert self._quorums is not None
            self.trained += self._quorums.up_to_date
        seconds = time.time() - self._sync_began
        self._last_sync = Sync(committed, self.num_participants(), self._healed, seconds)
        return committed

    def take_sync(self) -> Sync | None:
        """Return what came of the sync since the last call, None if there was none."""
        sync, self._last_sync = self._last_sync, None
        return sync

    def report_transfers(self, *, wait: bool = False) -> None:
        """Emit the transfers whose hashes are known by now, oldest first; all of them with ``wait``."""
        while self._reports:
            kind, transfer = self._reports[0]
            if not wait and not transfer.sha256.done():
                return
            fields: dict[str, Any] = {"to": transfer.receivers} if kind == "state_sent" else {}
            self._emit(
                kind,
                t=transfer.at,
                step=transfer.step,
                bytes=transfer.nbytes,
                sha256=transfer.sha256.result(),
                seconds=transfer.seconds,
                **fields,
            )
            self._reports.pop(0)

    def close(self) -> None:
        """Leave the run: peers see broken sockets at once, and nobody waits for this replica any more."""
        self.group.hang_up()
        if isinstance(self._quorums, _JobQuorums):
            self._quorums.leave()
        self.shutdown(wait=False)

    def _job_quorums(self, while_waiting: Callable[[], None]) -> _JobQuorums:
        place = self._place
        client = QuorumClient(place.member, place.rank, place.world_size, while_waiting, _WAITING_TICK)
        return _JobQuorums(client, place.committed_step, self.group, self.transport, self._config.collective_timeout)


def _replica_group(config: TrainConfig, place: Place) -> Any:
    if config.replica_backend == "ccl":
        from monarch_slurm.train.ccl_group import CclReplicaGroup

        return CclReplicaGroup(
            config.collective_timeout, config.connect_timeout, Meeting(place.store, config.connect_timeout)
        )
    meeting = Meeting(place.store, config.connect_timeout)
    return ReplicaGroup(place.address, config.collective_timeout, config.connect_timeout, meeting)


def make_diloco(
    manager: ReplicaManager, model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig
) -> DiLoCo:
    """Return DiLoCo over the whole model as one fragment, which syncs every ``sync_every`` steps of ``optimizer``.

    With one fragment the model equals the global parameters right after each sync.
    """
    outer = torch.optim.SGD(
        model.parameters(), lr=config.outer_lr, momentum=config.outer_momentum, nesterov=config.outer_momentum > 0
    )
    return DiLoCo(manager, [model], optimizer, outer, config.sync_every, use_bucketization=False, should_quantize=False)


class _JobQuorums:
    """Quorums over the job's messages.

    Args:
        client: asks for them.
        committed_step: committed syncs of the run when this trainer started.
        group: is told where the members of a quorum meet.
        transport: is told the keys of the transfers that a quorum brings.
        timeout: seconds that a donor may take to hash what it sends.

    Attributes:
        up_to_date: members of the last quorum that had the state of the run when they asked.
        rank: of this replica in it.
    """

    def __init__(
        self, client: QuorumClient, committed_step: int, group: Any, transport: StateTransport, timeout: float
    ) -> None:
        self._client, self._committed_step = client, committed_step
        self._group, self._transport, self._timeout = group, transport, timeout
        self.up_to_date = self.rank = 0

    def ask(
        self, *, step: int, metadata: str, shrink_only: bool, commit_failures: int, timeout: timedelta
    ) -> tuple[RankQuorum, str]:
        """See `monarch_slurm.train.torchft_manager.Quorums.ask`.

        Raises:
            StateLostError: nobody in the quorum has the steps that the run had committed.
        """
        answer = self._client.quorum(RankAsk(step, metadata, shrink_only, commit_failures), timeout)
        _check_not_lost(self._committed_step, answer.rank.max_step)
        self.up_to_date, self.rank = answer.rank.max_world_size, answer.rank.replica_rank
        self._group.meeting.store = answer.rank.store_address
        step, serial, donor = answer.rank.max_step, answer.serial, answer.donor
        if answer.keys.send:
            self._transport.admit(step, answer.keys.send)
            start_thread(threading.Thread(target=self._announce, args=(step, serial), name="announce", daemon=True))
        if donor:
            hash_of_donor = functools.partial(self._client.announced, serial, donor, self._timeout)
            self._transport.expect(step, answer.id, answer.keys.receive, hash_of_donor, donor)
        return answer.rank, answer.metadata

    def _announce(self, step: int, serial: int) -> None:
        """Tell the receivers the hash of what they are sent, once it is known."""
        try:
            self._client.announce(serial, self._transport.announced(step))
        except state.StateError as error:  # this sync is lost, and they wait for it in vain
            logger.warning("no state was announced: %s", error)

    def should_commit(self, vote: bool, timeout: timedelta) -> bool:
        """See `monarch_slurm.train.torchft_manager.Quorums.should_commit`."""
        return self._client.should_commit(vote, timeout)

    def leave(self) -> None:
        """Take part no more."""
        self._client.leave()


def _check_not_lost(committed: int, known: int) -> None:
    if known < committed:
        raise StateLostError(
            f"the run had committed {committed} syncs, but the replicas that met know only of {known}: every replica "
            "that held the state is gone, start the run anew"
        )


class _LighthouseQuorums:
    """TorchFT's client of its manager server, which keeps a number of the last quorum that the manager drops.

    Args:
        client: TorchFT's own.
        while_waiting: called every `_WAITING_TICK` seconds that a quorum takes to form.

    Attributes:
        up_to_date: members of the last quorum that had the state of the run when they asked.
        rank: of this replica in it.
    """

    def __init__(self, client: Any, while_waiting: Callable[[], None]) -> None:
        self._client, self._while_waiting = client, while_waiting
        self.up_to_date = self.rank = 0

    def _quorum(self, **asked: Any) -> Any:
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._client._quorum(**asked))
            except Exception as error:  # whatever it is, the thread that waits raises it
                answer.set_exception(error)

        threading.Thread(target=ask, name="monarch-quorum", daemon=True).start()
        while not wait([answer], _WAITING_TICK).done:
            self._while_waiting()
        if answer.exception() is not None:
            # The trainer ends with this error, and its state with it: if the Lighthouse is gone, the manager of the run
            # is about to ask for a save.
            for _ in range(round(_LAST_WISH / _WAITING_TICK)):
                self._while_waiting()
                time.sleep(_WAITING_TICK)
        quorum = answer.result()
        self.up_to_date, self.rank = int(quorum.max_world_size), int(quorum.replica_rank)
        return quorum

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class _OneLinePerFailure(logging.Filter):
    """Lets TorchFT's manager log one line for a failed sync; by itself it logs a traceback for every tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._armed = True

    def install(self) -> None:
        """Filter what the manager logs, once per process."""
        logging.getLogger(LOGGER).addFilter(self)  # a filter is added only once

    def rearm(self) -> None:
        """Let the next failure through: a new sync begins."""
        self._armed = True

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return "NCCL flight recorder" not in record.getMessage()
        record.msg, record.args = record.getMessage().partition("\n")[0], ()
        record.exc_info = record.exc_text = None
        passed, self._armed = self._armed, False
        return passed


_one_line_per_failure = _OneLinePerFailure()
