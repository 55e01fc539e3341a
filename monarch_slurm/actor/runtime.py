"""What every process of a job runs: it takes messages for the actors here, and sends for them.

Messages are handled on the I/O thread and only put into queues there; user code runs on the actors' own threads.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from monarch_slurm.actor.context import CreatorInstance, Instance
from monarch_slurm.actor.errors import MeshFailure
from monarch_slurm.actor.layout import ActorRef, ProcLayout
from monarch_slurm.actor.owned import Notice, OwnedActors, OwnedMeshes, OwnedProcs
from monarch_slurm.actor.replies import ReplyTable
from monarch_slurm.actor.shape import Shape, Slice
from monarch_slurm.host.exits import HostDown, ProcDown
from monarch_slurm.wire import AGENT, CONTROLLER, Address, Message
from monarch_slurm.wire.pickling import Buffer

if TYPE_CHECKING:
    from monarch_slurm.actor.cell import Call, Cell
    from monarch_slurm.actor.proc_mesh import ProcMesh

logger = logging.getLogger(__name__)

PortAddress = tuple[str, str, int]
"""Host, proc and number of a port."""

CellFactory = Callable[["Runtime", Message], "Cell"]


class Runtime:
    """The actors, ports and owned meshes of one process.

    Args:
        address: this process.
        host_name: the name of its host that people know.
        transmit: sends a message to another process or an agent; for any thread.
        make_cell: makes a cell for a spawn message.
    """

    def __init__(
        self, address: Address, host_name: str, transmit: Callable[[Message], None], make_cell: CellFactory
    ) -> None:
        self.address = address
        self.host_name = host_name
        self._transmit = transmit
        self._make_cell = make_cell
        self.replies = ReplyTable()
        self.cells: dict[str, Cell] = {}
        self.owned = OwnedMeshes()
        self._lock = threading.RLock()
        self._down: dict[Address, str] = {}
        self._down_hosts: dict[str, str] = {}
        self._failed_actors: dict[tuple[str, Address], str] = {}
        self._numbers = itertools.count(1)
        self._token = os.urandom(3).hex()
        self.local_host = address.host
        """Id of the host whose agent spawns procs for `this_host`."""
        self.home: tuple[ProcLayout, Shape, int] | None = None
        """Layout, shape and base rank of the proc mesh that this process belongs to."""

    # ---- identity

    def new_mesh_id(self, name: str) -> str:
        """Return an id for a mesh called ``name`` that is unique in the job."""
        return f"{name}-{self._token}{next(self._numbers)}"

    def proc_mesh_of(self, instance: Instance) -> ProcMesh:
        """Return the proc mesh that ``instance`` was spawned on, as a reference."""
        from monarch_slurm.actor.proc_mesh import ProcMesh

        if instance.ref is not None:
            return ProcMesh._reference(instance.ref.layout, instance.ref.shape)
        assert self.home is not None
        layout, shape, _ = self.home
        return ProcMesh._reference(layout, shape)

    def proc_of(self, instance: Instance) -> ProcMesh:
        """Return the mesh of the one proc that ``instance`` runs in."""
        mesh = self.proc_mesh_of(instance)
        here = instance.base_rank
        return mesh._new_with_shape(Shape((), Slice(offset=here, sizes=(), strides=())))  # type: ignore[no-any-return]

    # ---- sending

    def send(self, message: Message) -> None:
        """Send ``message``; messages of one thread to one process keep their order."""
        self._transmit(message)

    def cast(self, layout: ProcLayout, base_ranks: Iterable[int], fields: dict[str, Any], body: list[Buffer]) -> None:
        """Send one message per host; the agents there hand it to the procs ``base_ranks``."""
        for host, ranks in layout.by_host(base_ranks).items():
            to_host = {"proc_mesh": layout.mesh, "base_ranks": ranks, **fields}
            self.send(Message("cast", Address(host, AGENT), self.address, to_host, body))

    def post(self, port: PortAddress, rank: int, status: str, frames: list[Buffer]) -> None:
        """Send an answer to a port."""
        host, proc, number = port
        fields = {"port": number, "rank": rank, "status": status}
        self.send(Message("port", Address(host, proc), self.address, fields, frames))

    def expect_from(
        self,
        ref: ActorRef | None,
        layout: ProcLayout,
        ranks: list[tuple[int, int]],
        on_reply: Callable[[int, str, Any], None],
        on_lost: Callable[[int, str], None],
    ) -> PortAddress:
        """Open a port for one answer from each of ``ranks`` (rank of the answer, base rank of the proc).

        Ranks that are known to be dead are lost at once.
        """
        mesh = ref.mesh if ref else ""
        answers = {rank: (layout.address(base), mesh) for rank, base in ranks}
        number = self.replies.expect(answers, on_reply, on_lost)
        for process, _ in answers.values():
            reason = self.why_down(process, mesh, ref)
            if reason is not None:
                self.replies.lose([process], lambda _, reason=reason: reason, mesh)  # type: ignore[misc]
        return (*self.address, number)

    def why_down(self, process: Address, mesh: str, ref: ActorRef | None = None) -> str | None:
        """Return why an actor cannot answer, or None as far as is known."""
        failed = self._failed_actors.get((mesh, process))
        if failed is not None:
            return failed
        reason = self._down.get(process) or self._down_hosts.get(process.host)
        return reason and _whose(reason, process, ref)

    # ---- taking

    def handle(self, message: Message) -> bool:
        """Take a message of the actor layer; False if it is of another kind. On the I/O thread."""
        kind = message.kind
        if kind == "cast":
            self._cast(message)
        elif kind == "port":
            fields = message.fields
            self.replies.take(fields["port"], fields["rank"], fields["status"], message.body)
        elif kind == "proc_down":
            self._proc_down(ProcDown(**message.fields))
        elif kind == "host_down":
            self._host_down(HostDown(**message.fields))
        elif kind == "actor_down":
            self._actor_down(message)
        else:
            return False
        return True

    def _cast(self, message: Message) -> None:
        from monarch_slurm.actor.cell import Call

        fields = message.fields
        mesh, operation = fields["mesh"], fields["op"]
        if operation == "spawn":
            cell = self._make_cell(self, message)
            self.cells[mesh] = cell
            cell.start()
            return
        found = self.cells.get(mesh)
        if operation == "stop":
            if found is not None:
                found.end(fields["reason"], failed=False)
            return
        call = Call(message)
        if found is None or not found.put(call):
            self._tell_down(mesh, call, found)

    def _tell_down(self, mesh: str, call: Call, cell: Cell | None) -> None:
        reason = cell.down_reason if cell is not None else "this process has no such actor"
        fields = {"mesh": mesh, "base_rank": -1, "event": reason, "traceback": None, "failed": False}
        if call.port is not None:
            self.send(Message("actor_down", Address(*call.port[:2]), self.address, fields))

    def _proc_down(self, down: ProcDown) -> None:
        text = (
            down.describe() if not down.expected else f"the process this actor was running on was stopped ({down.exit})"
        )
        with self._lock:
            self._down[down.address] = text
            notices = self.owned.proc_down(down)
        self.replies.lose([down.address], lambda process: self._lost_text(text, process))
        self._tell(notices)
        self._end_owned_by(lambda owner: owner == down.address, text)

    def _host_down(self, down: HostDown) -> None:
        text = down.describe()
        with self._lock:
            self._down_hosts[down.host] = text
            notices = self.owned.host_down(down)
        self.replies.lose(self.replies.processes(down.host), lambda process: self._lost_text(text, process))
        self._tell(notices)
        self._end_owned_by(lambda owner: owner.host == down.host, text)

    def _lost_text(self, text: str, process: Address) -> str:
        for owned in list(self.owned.actors.values()):
            mesh, _, rank = process.proc.rpartition(".")
            if owned.ref.layout.mesh == mesh and int(rank) in owned.ref.shape.ndslice:
                return _whose(text, process, owned.ref)
        return text

    def _actor_down(self, message: Message) -> None:
        fields = message.fields
        mesh, event = fields["mesh"], fields["event"]
        with self._lock:
            self._failed_actors[mesh, message.src] = event
            notices = self.owned.actor_down(mesh, fields["base_rank"], event, fields["traceback"], fields["failed"])
        self.replies.lose([message.src], lambda _: event, mesh)
        self._tell(notices)

    def _tell(self, notices: list[Notice]) -> None:
        for owner, failure in notices:
            owner.body.supervise(failure)

    def _end_owned_by(self, gone: Callable[[Address], bool], why: str) -> None:
        for cell in list(self.cells.values()):
            if gone(cell.owner):
                cell.end(f"its owner is gone: {why}", failed=False)

    # ---- ownership

    def own_procs(self, procs: OwnedProcs) -> None:
        """Note that an instance of this process owns a proc mesh."""
        with self._lock:
            self.owned.procs[procs.layout.mesh] = procs

    def own_actors(self, actors: OwnedActors) -> None:
        """Note that an instance of this process owns an actor mesh."""
        with self._lock:
            self.owned.actors[actors.ref.mesh] = actors

    def stop_procs(self, mesh: str, timeout: float, on_stopped: Callable[[], None]) -> None:
        """End the procs of a mesh that this process owns; ``on_stopped`` is called when all are gone."""
        with self._lock:
            procs = self.owned.procs.get(mesh)
            if procs is None or not procs.alive:
                waiting = False
            else:
                procs.stopping = waiting = True
                procs.on_empty.append(on_stopped)
                hosts = procs.layout.by_host(procs.alive)
        if not waiting:
            on_stopped()
            return
        for host in hosts:
            fields = {"mesh": mesh, "ranks": None, "timeout": timeout}
            self.send(Message("stop", Address(host, AGENT), self.address, fields))

    def kill_procs(self, layout: ProcLayout, base_ranks: Iterable[int], number: int) -> None:
        """Send a signal to procs, whoever owns them."""
        for host, ranks in layout.by_host(base_ranks).items():
            fields = {"mesh": layout.mesh, "ranks": ranks, "signal": number}
            self.send(Message("kill", Address(host, AGENT), self.address, fields))

    def release(self, instance: Instance, reason: str) -> None:
        """End everything that ``instance`` owns: a mesh never outlives its owner."""
        with self._lock:
            procs, actors = self.owned.of(instance)
            on_ended_procs = {mesh.layout.mesh for mesh in procs}
            for mesh in actors:
                mesh.stopping = True
        for mesh in actors:
            if mesh.ref.layout.mesh not in on_ended_procs and mesh.alive:
                fields = {"op": "stop", "mesh": mesh.ref.mesh, "reason": reason}
                self.cast(mesh.ref.layout, sorted(mesh.alive), fields, [])
        for owned in procs:
            self.stop_procs(owned.layout.mesh, 0.0, lambda: None)

    def cell_down(self, cell: Cell, event: str, traceback: str | None, failed: bool) -> None:
        """An actor here has failed or stopped: tell its owner and everybody who has called it."""
        fields = {
            "mesh": cell.ref.mesh,
            "base_rank": cell.base_rank,
            "event": event,
            "traceback": traceback,
            "failed": failed,
        }
        for process in {cell.owner, *cell.callers}:
            self.send(Message("actor_down", process, self.address, fields))

    def stop_cells(self, reason: str) -> list[Cell]:
        """Ask every actor here to stop; return those that still have to."""
        cells = list(self.cells.values())
        for cell in cells:
            cell.end(reason, failed=False)
        return cells


def _whose(reason: str, process: Address, ref: ActorRef | None) -> str:
    if ref is None or process == CONTROLLER:
        return reason
    base_rank = int(process.proc.rpartition(".")[2])
    return f"The actor {ref.describe(base_rank)} and all its descendants have failed: {reason}"


def creator_of(fields: dict[str, Any], owner: Address) -> CreatorInstance:
    """Return the creator that a spawn message names."""
    name, class_name, rank, labels, sizes, display = fields
    from monarch_slurm.actor.shape import Extent, Point

    return CreatorInstance(name, class_name, Point(rank, Extent(labels, sizes)), display, owner)
