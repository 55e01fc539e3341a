"""What every process of a job runs: it takes messages for the actors here, and sends for them.

Messages are handled on the I/O thread and only put into queues there; user code runs on the actors' own threads.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from monarch_slurm.actor.casting import TargetTable
from monarch_slurm.actor.cells import Cells
from monarch_slurm.actor.ends import Ends, whose, why_restarted
from monarch_slurm.actor.keeper import Keeper
from monarch_slurm.actor.layout import ActorRef, ProcLayout
from monarch_slurm.actor.messages import ActorDown, PortAddress, ProcsRestart
from monarch_slurm.actor.ndslice import Slice
from monarch_slurm.actor.owned import Notice, OwnedActors, OwnedMeshes, OwnedProcs, Ranks, all_of
from monarch_slurm.actor.replies import VALUE, CountDown, OfMesh, OnLost, OnReply, ReplyTable
from monarch_slurm.actor.shape import Shape
from monarch_slurm.actor.stopping import Stopping
from monarch_slurm.config import settings
from monarch_slurm.host.exits import FailureKind, HostDown, ProcDown
from monarch_slurm.host.places import Places
from monarch_slurm.wire import AGENT, Address, Message, dumps
from monarch_slurm.wire.large_buffers import Buffer

if TYPE_CHECKING:
    from monarch_slurm.actor.cell import Cell
    from monarch_slurm.actor.context import Instance

logger = logging.getLogger(__name__)
CellFactory = Callable[["Runtime", Message], "Cell"]

_MANY = 64
"""Answers of a larger mesh are not noted down one by one."""


class Runtime:
    """The actors, ports and owned meshes of one process.

    Args:
        address: this process.
        host_name: the name of its host that people know.
        transmit: sends a message to another process or an agent; for any thread.
        make_cell: makes a cell for a spawn message.
        incarnation: how often this process was started again.

    Attributes:
        replies: the ports that are open here.
        keeper: starts the procs again that were spawned from here with a restart policy.
        cells: the actors here.
        owned: the meshes that actors here own.
        places: which hosts have taken the place of others.
        local_host: id of the host whose agent spawns procs for `this_host`.
        python: interpreter of the procs that are spawned on `this_host`; empty for the agent's.
        home: layout, shape and base rank of the proc mesh that this process belongs to.
        on_retire: told of a host whose place nobody is to take.
        guest_of: the other program that this process has joined with this runtime; empty for its own.
        print_logs: prints lines that have come; in the client only.
    """

    def __init__(
        self,
        address: Address,
        host_name: str,
        transmit: Callable[[Message], None],
        make_cell: CellFactory,
        incarnation: int = 0,
    ) -> None:
        self.address = address
        self.host_name = host_name
        self._transmit = transmit
        self.replies = ReplyTable(incarnation)
        self.keeper = Keeper(address, transmit, self.ask_agents)
        self.cells = Cells(lambda message: make_cell(self, message), self._refuse)
        self.owned = OwnedMeshes()
        self.places = Places()
        self._targets = TargetTable()
        self._ends = Ends(self.places)
        self._lock = threading.RLock()
        self._mesh_numbers = itertools.count(1)
        self._mesh_token = os.urandom(3).hex()
        self.local_host = address.host
        self.python = ""
        self.home: tuple[ProcLayout, Shape, int] | None = None
        self.on_retire: Callable[[str], None] = lambda host: None
        self.guest_of = ""
        self.print_logs: Callable[[], None] = lambda: None

    def new_mesh_id(self, name: str) -> str:
        """Return an id for a mesh called ``name`` that is unique in the job, and fit for file names."""
        readable = re.sub(r"[^A-Za-z0-9_-]", "_", name)
        return f"{readable}-{self._mesh_token}{next(self._mesh_numbers)}"

    # ---- sending

    def send(self, message: Message) -> None:
        """Send ``message``; messages of one thread to one process keep their order."""
        self._transmit(message)

    def cast(
        self, layout: ProcLayout, base_ranks: Iterable[int], fields: dict[str, Any], body: Sequence[Buffer]
    ) -> None:
        """Send to the procs ``base_ranks``: one message per host, or if there are many hosts one for all of them."""
        if layout.keeper is not None:
            fields = {**fields, "kept": True}
        for message in self._targets.find(layout, base_ranks).messages(self.address, self.places, fields, body):
            self.send(message)

    def ask_agents(self, request: str, layout: ProcLayout, base_ranks: Iterable[int], **fields: Any) -> None:
        """Ask the agents of the procs ``base_ranks`` for something ("stop", "kill")."""
        self.cast(layout, base_ranks, {"request": request, "mesh": layout.mesh, **fields}, [])

    def post(self, port: PortAddress, rank: int, status: str, frames: Sequence[Buffer], **receipt: PortAddress) -> None:
        """Send an answer to a port; a ``receipt`` hears that it has come there."""
        fields = {"port": port[2], "rank": rank, "status": status, **receipt}
        self.send(Message("port", Address(*port[:2]), self.address, fields, frames))

    def expect_from(
        self,
        ref: ActorRef | None,
        layout: ProcLayout,
        ranks: Slice | list[tuple[int, int]],
        on_reply: OnReply,
        on_lost: OnLost,
        durable: bool = False,
    ) -> PortAddress:
        """Open a port for one answer from each of ``ranks``: the procs of a slice, or pairs of the rank of the answer
        and the base rank of the proc.

        Ranks that are known to be dead are lost at once.

        Args:
            durable: an answer of a process that was started again will do.
        """
        if isinstance(ranks, Slice) and layout.keeper is None and len(ranks) > _MANY:
            number = self.replies.expect(OfMesh(ref, layout, ranks), on_reply, on_lost, durable)
            with self._lock:
                ended = self._ends.among(layout, ref)
        else:
            pairs = enumerate(ranks) if isinstance(ranks, Slice) else ranks
            sources = {rank: (layout.address(base), ref) for rank, base in pairs}
            number = self.replies.expect(sources, on_reply, on_lost, durable, layout.keeper)
            ended = [process for process, _ in sources.values()]
        # Whoever ends from here on is noticed; now look for those that ended before.
        for process in ended:
            if (reason := self.why_down(process, ref, layout.keeper)) is not None:
                self.replies.lose([process], lambda *_, reason=reason: reason, ref.mesh if ref else None)
        return (*self.address, number)

    def expect_end_of_host(self, host: str, on_ended: Callable[[], None]) -> None:
        """Call ``on_ended`` when ``host`` has ended, which is no failure of what is there."""
        self.on_retire(host)
        with self._lock:
            self.owned.expect_end_of_host(self.places.standing_for(host))
        agent = Address(host, AGENT)
        self.replies.expect({0: (agent, None)}, lambda *_: None, lambda *_: on_ended())
        if self._ends.has_host(host):
            self.replies.lose([agent], lambda *_: "")

    def why_down(self, process: Address, ref: ActorRef | None, keeper: Address | None = None) -> str | None:
        """Return why an actor cannot answer, or None as far as is known.

        Args:
            keeper: who starts the process again.
        """
        return self._ends.why(process, ref, keeper)

    # ---- taking

    def handle_at_once(self, message: Message) -> bool:
        """Take a message that any thread may take: an answer, or a call of an actor here. False for any other."""
        fields = message.fields
        if message.kind == "port":
            self.replies.take(fields["port"], fields["rank"], fields["status"], message.body)
            if "receipt" in fields:
                self.post(fields["receipt"], 0, VALUE, [])
            return True
        return message.kind == "cast" and self.cells.take_at_once(message)

    def handle(self, message: Message) -> bool:
        """Take a message of the actor layer; False if it is of another kind. On the I/O thread."""
        kind = message.kind
        if self.handle_at_once(message):
            return True
        if kind == "cast":
            self.cells.take(message)
        elif kind == "proc_down":
            self._proc_down(ProcDown(**message.fields))
        elif kind == "host_down":
            self._host_down(HostDown(**message.fields))
        elif kind == "host_moved":
            self.places.move(message.fields["old"], message.fields["new"])
        elif kind == "actor_down":
            self._actor_down(ActorDown(**message.fields), message.src)
        elif kind == "describe":
            rows = dumps(self.cells.describe())
            self.post((*message.src, message.fields["port"]), message.fields["rank"], VALUE, rows)
        elif kind == "waits":
            self.cells.tell_wait(message)
        elif kind == "procs_restart":
            self._procs_restart(ProcsRestart.from_fields(message.fields))
        elif kind == "proc_failed":
            self.keeper.proc_failed(ProcDown(**message.fields))
        elif kind == "spawned":
            self.keeper.note_actors(message, message.src)
        elif kind == "forget_actors":
            self.keeper.forget_actors(**message.fields)
        else:
            return False
        return True

    def _refuse(self, asker: Address, mesh: str, why: str) -> None:
        """Tell ``asker`` that this process has no actor of ``mesh``."""
        self._tell_end(asker, ActorDown(mesh, -1, why, None, None, self.host_name, os.getpid()))

    def _tell_end(self, process: Address, down: ActorDown) -> None:
        self.send(Message("actor_down", process, self.address, asdict(down)))

    def _proc_down(self, down: ProcDown) -> None:
        with self._lock:
            text = self._ends.proc(down)
            notices = self.owned.proc_down(down)
        self.keeper.forget_procs(down.mesh, [down.rank])
        self.replies.lose([down.address], lambda process, ref: whose(text, process, ref))
        self._tell(notices)
        self._gone(lambda process: process.proc == down.proc, text)

    def _procs_restart(self, restart: ProcsRestart) -> None:
        procs = restart.procs
        with self._lock:
            self._ends.restart(procs)
            notices = self.owned.procs_restart(restart)
        ended = [Address("", name) for name in procs]
        self.replies.lose(ended, lambda process, ref: why_restarted(restart, process, ref), restarted=True)
        self._tell(notices)
        self._gone(lambda process: process.proc in procs, restart.down.describe())

    def _host_down(self, down: HostDown) -> None:
        with self._lock:
            again, ids, text = self._ends.host(down)
            notices = self.owned.host_down(down, ids)
        self._tell(notices)
        self._gone(lambda process: process.host in ids, text, ids)
        if not again:
            self.keeper.host_failed(down, ids)

    def _gone(self, gone: Callable[[Address], bool], why: str, ids: Collection[str] = ()) -> None:
        """What was owned or kept by processes that are ``gone`` ends with them."""
        self.keeper.forget_owned_by(gone)
        self.replies.lose(self.replies.processes(gone, ids), lambda process, ref: whose(why, process, ref))
        self.cells.end_owned_by(gone, why)

    def _actor_down(self, down: ActorDown, process: Address) -> None:
        with self._lock:
            self._ends.actor(down, process)
            notices = self.owned.actor_down(down)
        self.replies.lose([process], lambda *_: down.event, down.mesh)
        self._tell(notices)

    def _tell(self, notices: list[Notice]) -> None:
        for owner, failure in notices:
            owner.body.supervise(failure)

    # ---- ownership

    def own_procs(self, procs: OwnedProcs) -> None:
        """Note that an instance of this process owns a proc mesh."""
        with self._lock:
            self.owned.procs[procs.layout.mesh] = procs

    def own_actors(self, actors: OwnedActors) -> None:
        """Note that an instance of this process owns an actor mesh."""
        with self._lock:
            self.owned.actors[actors.ref.mesh] = actors

    def spawn_actors(self, ref: ActorRef, base_ranks: Slice, fields: dict[str, Any], body: Sequence[Buffer]) -> None:
        """Have actors made on procs, and made anew if their procs are started again."""
        layout = ref.layout
        fields = {"op": "spawn", "mesh": ref.mesh, "owner": self.address, **fields}
        if layout.keeper is not None:
            noted = {"proc_mesh": layout.mesh, "base_ranks": list(base_ranks), **fields}
            spawned = Message("spawned", layout.keeper, self.address, noted, body)
            if layout.keeper == self.address:
                self.keeper.note_actors(spawned, self.address)
            else:
                self.send(spawned)
        self.cast(layout, base_ranks, fields, body)

    def _forget_actors(self, layout: ProcLayout, mesh: str, ranks: list[int]) -> None:
        if layout.keeper == self.address:
            self.keeper.forget_actors(layout.mesh, mesh, ranks)
        elif layout.keeper is not None:
            fields = {"proc_mesh": layout.mesh, "mesh": mesh, "ranks": ranks}
            self.send(Message("forget_actors", layout.keeper, self.address, fields))

    def owns_anything(self, instance: Instance) -> bool:
        """Return whether ``instance`` owns meshes of which something is left."""
        with self._lock:
            return any(self.owned.of(instance))

    def owned_by(self, instance: Instance) -> tuple[list[tuple[ProcLayout, Shape]], list[tuple[type, ActorRef]]]:
        """Return the meshes that ``instance`` owns: procs with their layout and shape, actors with their class."""
        with self._lock:
            procs, actors = self.owned.of(instance)
            return [(mesh.layout, mesh.shape) for mesh in procs], [(mesh.actor_class, mesh.ref) for mesh in actors]

    def stop_procs(self, layout: ProcLayout, base_ranks: Ranks, timeout: float, on_stopped: Callable[[], None]) -> None:
        """End procs, which may take ``timeout`` seconds; ``on_stopped`` is called when all are gone."""
        ranks = sorted(base_ranks)
        with self._lock:
            self.owned.expect_end_of_procs(layout.mesh, set(ranks))
        self.keeper.forget_procs(layout.mesh, ranks)
        # No answer ever comes: what is waited for is the news that each proc is no more.
        count_down = CountDown(len(ranks), on_stopped)
        whom = base_ranks if isinstance(base_ranks, Slice) else [(rank, rank) for rank in ranks]
        self.expect_from(None, layout, whom, lambda *_: None, count_down, durable=True)
        self.ask_agents("stop", layout, base_ranks, timeout=timeout)

    def stop_actors(
        self, ref: ActorRef, base_ranks: Ranks, reason: str, timeout: float, on_stopped: Callable[[], None]
    ) -> None:
        """End actors after what was sent to them before; ``on_stopped`` is called when all have ended.

        Args:
            timeout: seconds after which those that have not ended are interrupted. A process that does not even answer
                that, since native code holds its interpreter, is killed.
        """
        ranks = sorted(base_ranks)
        with self._lock:
            self.owned.expect_end_of_actors(ref.mesh, set(ranks))
        self._forget_actors(ref.layout, ref.mesh, ranks)
        stopping = Stopping(self, ref, ranks, on_stopped)
        self.expect_from(ref, ref.layout, [(rank, rank) for rank in ranks], lambda *_: None, stopping.ended)
        stopping.watch(timeout + settings().cleanup_timeout)
        self.cast(ref.layout, base_ranks, {"op": "stop", "mesh": ref.mesh, "reason": reason, "timeout": timeout}, [])

    def release(self, instance: Instance, reason: str, timeout: float) -> threading.Event:
        """End everything that ``instance`` owns: a mesh never outlives its owner.

        Args:
            timeout: seconds that it may take.

        Returns:
            An event that is set when all of it has ended.
        """
        with self._lock:
            procs, actors = self.owned.of(instance)
            ending = {mesh.layout.mesh for mesh in procs}
            elsewhere = [mesh for mesh in actors if mesh.ref.layout.mesh not in ending]
            ranks_of_procs = [(mesh.layout, all_of(mesh.shape, mesh.alive)) for mesh in procs]
            ranks_of_actors = [(mesh.ref, all_of(mesh.ref.shape, mesh.alive)) for mesh in elsewhere]
        ended = threading.Event()
        one_ended = CountDown(len(ranks_of_procs) + len(ranks_of_actors), ended.set)
        for ref, ranks in ranks_of_actors:
            self.stop_actors(ref, ranks, reason, timeout or settings().stop_actor_timeout, one_ended)
        for layout, ranks in ranks_of_procs:
            self.stop_procs(layout, ranks, timeout, one_ended)
        return ended

    def cell_down(
        self, cell: Cell, told: Iterable[Address], event: str, traceback: str | None, kind: FailureKind | None
    ) -> None:
        """An actor here has failed, as ``kind`` says, or stopped: tell the processes ``told``.

        Where a restart policy holds, the process fails with its actor, whose restart is that of all that is in it.
        """
        if not self.cells.ended(cell, event, traceback, kind):
            return
        ref = cell.ref
        self._forget_actors(ref.layout, ref.mesh, [cell.base_rank])
        down = ActorDown(ref.mesh, cell.base_rank, event, traceback, kind, self.host_name, os.getpid())
        for process in told:
            self._tell_end(process, down)
