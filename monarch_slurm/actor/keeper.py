"""Starting the procs of restartable meshes again, with their actors.

The process that spawned a mesh with a `RestartPolicy` is its keeper. It alone is told of the failures of its procs,
decides, and tells everybody else. In this order, so that no call is lost and none meets a proc without its actors:

1. A proc fails. Its agent tells the keeper, and holds what is sent to the proc from then on.
2. The keeper tells all processes that the proc starts again: calls that wait for it end.
3. The keeper sends the agent the spawn messages of the actors, and then that of the proc; once it runs it gets the
   actors first and then what was held, in the order in which it was sent.

If the keeper gives the proc up, everybody is told of its end instead, and the agent refuses what it has held.

When a host is lost and another takes its place, all kept procs of it fail at once. In place of step 1 the keeper tells
the agent of the other host to hold what is sent to them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from monarch_slurm.actor.layout import ProcLayout
from monarch_slurm.actor.messages import ProcsRestart
from monarch_slurm.actor.restart import RestartPolicy, Restarts
from monarch_slurm.host.exits import LOST_WITH_HOST, FailureKind, HostDown, ProcDown
from monarch_slurm.wire import AGENT, CONTROLLER, Address, Message
from monarch_slurm.wire.task_limits import start_thread

MakeSpawn = Callable[[str, list[int], int], Message]
"""Makes the message that spawns ranks on a host as their given incarnation."""


@dataclass
class _Actors:
    """One actor mesh on kept procs: the message that spawned it, and the ranks where it has not ended."""

    owner: Address
    message: Message
    ranks: set[int]


@dataclass
class _Procs:
    layout: ProcLayout
    restarts: Restarts
    make_spawn: MakeSpawn
    actors: dict[str, _Actors] = field(default_factory=dict)
    incarnation: int = 0
    logging: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What becomes of the lines of ranks, for the agent of another host."""
    causes: dict[int, ProcDown] = field(default_factory=dict)
    """For ranks that were killed to start again: the failure that was the reason."""
    timer: threading.Timer | None = None


class Keeper:
    """The restartable meshes that this process has spawned. For any thread.

    Args:
        address: this process.
        send: sends a message.
        ask_agents: `monarch_slurm.actor.runtime.Runtime.ask_agents`.
    """

    def __init__(self, address: Address, send: Callable[[Message], None], ask_agents: Callable[..., None]) -> None:
        self._address = address
        self._send = send
        self._ask_agents = ask_agents
        self._lock = threading.RLock()
        self._meshes: dict[str, _Procs] = {}

    def keep(self, layout: ProcLayout, policy: RestartPolicy, count: int, make_spawn: MakeSpawn) -> None:
        """Keep a mesh of ``count`` procs alive from now on."""
        with self._lock:
            self._meshes[layout.mesh] = _Procs(layout, Restarts(policy, count), make_spawn)

    def note_actors(self, message: Message, owner: Address) -> None:
        """Note that ``owner`` spawns actors on kept procs, with what is in ``message``."""
        fields = message.fields
        with self._lock:
            kept = self._meshes.get(fields["proc_mesh"])
            if kept is not None:
                kept.actors[fields["mesh"]] = _Actors(owner, message, set(fields["base_ranks"]))

    def note_logging(self, mesh: str, ranks: Collection[int], option: dict[str, Any]) -> None:
        """Note what is to become of the lines of procs, should they move to another host."""
        with self._lock:
            kept = self._meshes.get(mesh)
            if kept is not None:
                kept.logging |= dict.fromkeys(ranks, option)

    def forget_actors(self, proc_mesh: str, mesh: str, ranks: Collection[int]) -> None:
        """Note that actors have ended, or have been told to, and are not to be made anew."""
        with self._lock:
            kept = self._meshes.get(proc_mesh)
            actors = kept.actors.get(mesh) if kept is not None else None
            if kept is not None and actors is not None:
                actors.ranks -= set(ranks)
                if not actors.ranks:
                    del kept.actors[mesh]

    def forget_owned_by(self, gone: Callable[[Address], bool]) -> None:
        """Actors whose owner is gone are not made anew."""
        with self._lock:
            for kept in self._meshes.values():
                kept.actors = {mesh: actors for mesh, actors in kept.actors.items() if not gone(actors.owner)}

    def forget_procs(self, mesh: str, ranks: Collection[int]) -> None:
        """Procs end for good, or have done so."""
        with self._lock:
            kept = self._meshes.get(mesh)
            if kept is None:
                return
            kept.restarts.end(ranks)
            if not kept.restarts.left:
                self._forget(kept)

    def proc_failed(self, down: ProcDown) -> None:
        """A kept proc has ended, and its agent waits for what is to become of it."""
        with self._lock:
            kept = self._meshes.get(down.mesh)
            if kept is None:
                self._publish("proc_down", down.to_fields())
                return
            self.forget_owned_by(lambda owner: owner.proc == down.proc)
            verdict = kept.restarts.failed({down.rank}, time.monotonic())
            kept.causes.update(dict.fromkeys(verdict.killed, down))
            if down.rank in verdict.restarted:
                cause = kept.causes.pop(down.rank, down)
                restart = ProcsRestart(cause, (down.rank,), incarnation=kept.incarnation)
                self._publish("procs_restart", restart.to_fields())
            self._kill(kept, verdict.killed)
            if down.rank in verdict.given_up:
                self._publish("proc_down", down.to_fields())
            elif down.rank in kept.restarts.gone:
                self._publish("proc_down", {**down.to_fields(), "expected": True})
            self._start_due(kept)

    def host_failed(self, down: HostDown, ids: Collection[str]) -> None:
        """A host, for which ``ids`` stand, is lost with all kept procs on it."""
        with self._lock:
            for kept in list(self._meshes.values()):
                ranks = kept.layout.ranks_on(ids) - kept.restarts.gone
                if ranks and down.stand_in:
                    self._move(kept, sorted(ranks), down)
                else:
                    self._tell_lost(kept, ranks, down)

    def _move(self, kept: _Procs, ranks: list[int], down: HostDown) -> None:
        """The host of ``ranks`` is lost, and another has taken its place: that is one failure of all of them."""
        mesh = kept.layout.mesh
        self.forget_owned_by(lambda owner: owner.proc in {f"{mesh}.{rank}" for rank in ranks})
        verdict = kept.restarts.failed(ranks, time.monotonic())
        again = [rank for rank in ranks if rank not in verdict.given_up]
        if again:
            adopt = {"mesh": mesh, "ranks": again}
            agent = Address(down.stand_in, AGENT)
            self._send(Message("adopt", agent, self._address, adopt))
            for rank in kept.logging.keys() & set(again):
                option = {"mesh": mesh, "ranks": [rank], **kept.logging[rank], **_NO_ANSWER}
                self._send(Message("logging", agent, self._address, option))
            end = _lost_with(down, mesh, again[0])
            restart = ProcsRestart(end, tuple(again), down.replaced_by, kept.incarnation)
            self._publish("procs_restart", restart.to_fields())
            kept.causes.update(dict.fromkeys(verdict.killed, end))
        self._kill(kept, verdict.killed)
        self._tell_lost(kept, verdict.given_up, down)
        self._start_due(kept)

    def _tell_lost(self, kept: _Procs, ranks: Collection[int], down: HostDown) -> None:
        for rank in ranks:
            self._publish("proc_down", _lost_with(down, kept.layout.mesh, rank).to_fields())

    def _kill(self, kept: _Procs, ranks: Collection[int]) -> None:
        if ranks:
            self._ask_agents("kill", kept.layout, ranks, signal=9)

    def _publish(self, kind: str, fields: dict[str, Any]) -> None:
        self._send(Message("publish", CONTROLLER, self._address, {"kind": kind, "fields": fields}))

    def _start_due(self, kept: _Procs) -> None:
        now = time.monotonic()
        ranks = kept.restarts.start(now)
        if ranks:
            kept.incarnation += 1
            for host, there in kept.layout.by_host(sorted(ranks)).items():
                self._start(kept, host, there)
        due = kept.restarts.next_start()
        if kept.timer is not None:
            kept.timer.cancel()
            kept.timer = None
        if due is not None:
            kept.timer = threading.Timer(max(0.0, due - now), self._look_again, [kept])
            kept.timer.daemon = True
            start_thread(kept.timer)

    def _look_again(self, kept: _Procs) -> None:
        with self._lock:
            if self._meshes.get(kept.layout.mesh) is kept:
                self._start_due(kept)

    def _start(self, kept: _Procs, host: str, ranks: list[int]) -> None:
        for actors in kept.actors.values():
            there = [rank for rank in ranks if rank in actors.ranks]
            if there:
                fields = {**actors.message.fields, "base_ranks": there, "again": True}
                self._send(Message("cast", Address(host, AGENT), self._address, fields, actors.message.body))
        self._send(kept.make_spawn(host, ranks, kept.incarnation))

    def _forget(self, kept: _Procs) -> None:
        del self._meshes[kept.layout.mesh]
        if kept.timer is not None:
            kept.timer.cancel()


_NO_ANSWER = {"port": 0, "rank": 0, "status": "value"}
"""For an agent that answers: no port has this number."""


def _lost_with(down: HostDown, mesh: str, rank: int) -> ProcDown:
    """Return the end of a proc that was on a lost host."""
    return ProcDown(
        down.stand_in or down.host, down.host_name, f"{mesh}.{rank}", mesh, rank, 0, LOST_WITH_HOST, down.detected_at,
        event=down.describe(), kind=FailureKind.HOST_LOST,
    )  # fmt: skip
