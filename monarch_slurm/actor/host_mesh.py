"""Host meshes: machines that procs are spawned on."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from monarch_slurm.actor.bootstrap import Bootstrap, command_fields
from monarch_slurm.actor.code_sync import SyncResult, Workspace
from monarch_slurm.actor.code_sync.sync import Copies, sync_workspace
from monarch_slurm.actor.context import context, publish
from monarch_slurm.actor.errors import SupervisionError
from monarch_slurm.actor.future import Future
from monarch_slurm.actor.guests import check_own, runtime_of
from monarch_slurm.actor.hosts_handle import HostsHandle, handle_of
from monarch_slurm.actor.layout import ProcLayout
from monarch_slurm.actor.log_options import set_logging
from monarch_slurm.actor.mesh_trait import ShapedMesh
from monarch_slurm.actor.ndslice import Slice
from monarch_slurm.actor.owned import OwnedProcs
from monarch_slurm.actor.per_host import bind_fields, check_sizes
from monarch_slurm.actor.proc_mesh import ProcMesh, note_spawned, set_host_maker
from monarch_slurm.actor.replies import VALUE, CountDown
from monarch_slurm.actor.restart import RestartPolicy
from monarch_slurm.actor.shape import Point, Shape
from monarch_slurm.actor.startup import with_startup
from monarch_slurm.config import get_global_config, settings
from monarch_slurm.wire import AGENT, Address, Message, dumps, loads

PROC_ENTRY = "monarch_slurm.actor.proc_main:main"


class HostMesh(ShapedMesh):
    """Hosts, each with an agent that spawns procs. Slices and pickled copies are references to the same hosts."""

    def __init__(
        self,
        hosts: tuple[str, ...],
        shape: Shape,
        owned: bool,
        python: str = "",
        ready: Future[bool] | None = None,
        handle: HostsHandle | None = None,
    ) -> None:
        self._hosts = hosts
        self._mesh_shape = shape
        self._owned = owned
        self._python = python
        self._ready = ready
        self._handle = handle or HostsHandle()
        self._copies: dict[str, Copies] = {}

    _program = ""
    """The other program that they belong to."""

    @classmethod
    def _reference(
        cls, hosts: tuple[str, ...], shape: Shape, python: str = "", key: str = "", program: str = ""
    ) -> HostMesh:
        mesh = cls(hosts, shape, owned=False, python=python, handle=handle_of(key) if key else None)
        mesh._program = program
        return mesh

    def _again(self) -> HostMesh:
        """Return a further mesh of the same hosts: `stop` of one leaves the procs of the other alone."""
        mesh = HostMesh(
            self._hosts, self._mesh_shape, self._owned, self._python, self._ready, HostsHandle(same_hosts=self._handle)
        )
        mesh._copies = self._copies
        return mesh

    @property
    def _shape(self) -> Shape:
        return self._mesh_shape

    def _new_with_shape(self, shape: Shape) -> HostMesh:
        mesh = HostMesh(self._hosts, shape, owned=False, python=self._python, ready=self._ready, handle=self._handle)
        mesh._copies, mesh._program = self._copies, self._program
        return mesh

    def with_python_executable(self, python_executable: str) -> HostMesh:
        """Return a reference to the same hosts whose procs run with another Python, as do those that they spawn.

        Such procs are not forked from the zygote, so each imports by itself what it needs. That Python must be able to
        import this package.
        """
        python = os.fspath(python_executable)
        mesh = HostMesh(self._hosts, self._mesh_shape, False, python, self._ready, self._handle)
        mesh._copies, mesh._program = self._copies, self._program
        return mesh

    @property
    def is_fake_in_process(self) -> bool:
        """False: hosts are always processes of their own."""
        return False

    @property
    def region(self) -> Shape:
        """The hosts' ranks and labels."""
        return self._mesh_shape

    @property
    def host_names(self) -> list[str]:
        """Names of the hosts, in order of rank, as people know them."""
        return [host.partition("#")[0] for host in self._now_at()]

    def _now_at(self) -> list[str]:
        """Return the ids of the hosts that are there now, in order of rank; lost ones may have been replaced."""
        places = runtime_of(self._program).places
        return [places.now(self._hosts[rank]) for rank in self._shape.ndslice]

    @property
    def stream_logs(self) -> bool:
        """Whether the program prints the lines of procs that are spawned here now, from their first: the setting
        ``enable_log_forwarding``. `ProcMesh.logging_option` changes it for procs that run.
        """
        return bool(get_global_config()["enable_log_forwarding"])

    @property
    def initialized(self) -> Future[bool]:
        """Resolves to True when the hosts are there. Only those of `attach_to_workers` may not be yet; it raises
        `AttachError` if one cannot be had.
        """
        return self._ready or Future._of(True)

    def spawn_procs(
        self,
        per_host: dict[str, int] | None = None,
        bootstrap: Callable[[], Any] | None = None,
        name: str | None = None,
        proc_bind: list[dict[str, str]] | None = None,
        bootstrap_command: Bootstrap | None = None,
        env: dict[str, str | None] | None = None,
        gpus_per_proc: int | None = None,
        restart: RestartPolicy | None = None,
    ) -> ProcMesh:
        """Start procs and return their mesh, without waiting for them. The calling actor owns them.

        Args:
            per_host: labels and sizes of the new dimensions, behind those of the hosts; None starts one proc per host.
            bootstrap: called in every proc before any actor is spawned on it, sync or async: to set variables before a
                GPU is used.
            name: what the procs are called in logs and reports.
            proc_bind: for each proc of a host, ``{"cpus": "0-3,8"}`` (or ``physcpubind``): the CPUs it runs on;
                ``cpunodebind``: NUMA nodes whose CPUs it runs on; ``membind``: NUMA nodes that it takes memory from.
                See also ``gpus_per_proc``.
            env: environment variables of the procs; None as a value removes one.
            bootstrap_command: runs the procs instead of a fork of the zygote; or a function that returns the command
                for a place in the new mesh.
            gpus_per_proc: each proc sees only so many of its host's GPUs, the next ones in order, and runs on its share
                of the cores near them; None shows all GPUs to each. ``proc_bind`` may say ``{"gpus": "0-1"}`` instead.
            restart: start procs that fail, and the actors on them, again in place; None leaves that to the owner, who
                is told of the failure.

        Raises:
            ValueError: labels that overlap, or a ``proc_bind`` of the wrong length or form.
            TypeError: ``bootstrap`` does not pickle.
            RuntimeError: the hosts have been shut down, or belong to another program.
        """
        self._check_usable()
        per_host = dict(per_host or {})
        overlap = set(per_host) & set(self._labels)
        if overlap:
            raise ValueError(f"per_host labels {list(per_host)} overlap with host labels {list(self._labels)}")
        check_sizes(per_host)
        per = math.prod(per_host.values())
        if proc_bind is not None and len(proc_bind) != per:
            raise ValueError(f"proc_bind length ({len(proc_bind)}) must equal procs_per_host ({per})")
        if gpus_per_proc is not None and gpus_per_proc < 1:
            raise ValueError(f"gpus_per_proc must be 1 or more: {gpus_per_proc}")
        binds = [bind_fields(bind) for bind in proc_bind or [{}] * per]
        if gpus_per_proc is not None:
            if any(bind["gpus"] for bind in binds):
                raise ValueError("gpus_per_proc and 'gpus' of proc_bind exclude each other")
            span = range(gpus_per_proc)
            binds = [{**bind, "gpus": [rank * gpus_per_proc + gpu for gpu in span]} for rank, bind in enumerate(binds)]
        body = dumps(with_startup(bootstrap))
        owner = context().actor_instance
        runtime = owner.runtime
        mesh = runtime.new_mesh_id(name or "anon")
        hosts = tuple(self._now_at())
        layout = ProcLayout(mesh, hosts, per, runtime.address if restart is not None else None)
        labels = [*self._labels, *per_host]
        shape = Shape(labels, Slice.new_row_major([*self.extent.sizes, *per_host.values()]))
        count = len(shape)
        points = (Point(rank, shape.extent) for rank in range(count))
        commands = [command_fields(bootstrap_command, self._python, point) for point in points]
        runtime.own_procs(OwnedProcs(layout, shape, name or "anon", owner, set(range(count)), self._handle))
        ready: Future[bool] = Future._pending()
        one_started = CountDown(count, lambda: ready._resolve(lambda: True))
        ready._what = lambda: f"the start of procs {name or 'anon'!r}: {one_started.left} of {count} have not reported"

        def arrived(rank: int, status: str, frames: Any) -> None:
            if status != VALUE:
                ready._fail(loads(frames))
            one_started()

        cwd = _working_folder()
        port = runtime.expect_from(
            None,
            layout,
            shape.ndslice,
            arrived,
            lambda rank, reason: ready._fail(SupervisionError(reason)),
            durable=True,
        )
        common = {
            "mesh": mesh,
            "entry": PROC_ENTRY,
            "env": dict(env or {}),
            "forwarded": _forwarded_env(),
            "sys_path": [path or cwd for path in sys.path if path or cwd],
            "cwd": cwd,
            "settings": asdict(settings()),
            "start": {
                "layout": layout.to_fields(),
                "shape": [labels, shape.ndslice.sizes],
                "ready": port,
                "python": self._python,
            },
            "restartable": restart is not None,
        }

        places = {host: self._copies[host].spawn_fields(common) for host in hosts if host in self._copies}

        def make_spawn(host: str, ranks: list[int], incarnation: int) -> Message:
            first = ranks[0] - ranks[0] % per
            procs = [{"rank": first + i, **binds[i], **commands[first + i]} for i in range(per)]
            here = {"procs": procs, "ranks": ranks, "incarnation": incarnation}
            fields = {**common, **places.get(host, {}), **here}
            return Message("spawn", Address(host, AGENT), runtime.address, fields, body)

        if restart is not None:
            runtime.keeper.keep(layout, restart, count, make_spawn)
        if self.stream_logs:  # asked for before there is a line
            set_logging(layout, range(count), stream=True, window=None, level=None)
        if callable(bootstrap_command) or places:  # not all hosts are asked for the same
            for host, ranks_there in layout.by_host(range(count)).items():
                runtime.send(make_spawn(host, ranks_there, 0))
        else:
            each = [{**binds[i], **commands[i]} for i in range(per)]
            runtime.cast(layout, shape.ndslice, {**common, "each": each, "incarnation": 0}, body)
        procs = ProcMesh(layout, shape, name or "anon", ready)
        note_spawned(procs)
        return procs

    def _renew(self) -> None:
        """Give each host a new zygote; procs that run are left alone."""
        runtime = context().actor_instance.runtime
        for host in self._now_at():
            runtime.send(Message("renew", Address(host, AGENT), runtime.address))

    async def sync_workspace(self, workspace: Workspace, conda: bool = False, auto_reload: bool = False) -> SyncResult:
        """Copy folders of this machine to all hosts, over the job's own connections: what has changed, and no more.

        They get into ``$WORKSPACE_DIR`` of each host, or into a folder that is gone with its agent. Procs that are
        spawned from then on have ``WORKSPACE_DIR`` set, and import from the copies.

        Args:
            workspace: the folders, and what in them is left out.
            conda: copy the workspace's conda environment (``env``), too. The same one, by its path, must be active
                where the hosts' agents were started; only what was copied there before is ever deleted. Procs
                that are spawned from then on have it.
            auto_reload: the calling actor's procs on these hosts load modules whose files have changed again. Actors
                that are there keep the code that they have.

        Raises:
            RuntimeError: this mesh is a slice or came from elsewhere.
            WorkspaceError: a file cannot be read here or written there, a module cannot be loaded again, or a host
                has another conda environment.
            SupervisionError: a host was lost meanwhile; synchronize those that are left again.
        """
        if not self._owned and self._hosts != (context().actor_instance.runtime.local_host,):
            raise RuntimeError(
                "cannot call sync_workspace on a sliced host mesh or one that was sent over an actor endpoint"
            )
        result, copies = await sync_workspace(self, workspace, conda, auto_reload)
        if conda:
            self._renew()
        for host, new in copies.items():
            known = self._copies.setdefault(host, new)
            known.folders += [pair for pair in new.folders if pair not in known.folders]
        return result

    def shutdown(self) -> Future[None]:
        """End the agents of these hosts with all their procs; the hosts cannot be used any more. Resolves when they
        have ended.

        Raises:
            RuntimeError: they have been shut down already, or this mesh is a slice or came from elsewhere; only its
                maker may end the hosts.
        """
        self._check_owned("shut down")
        self._check_usable()
        self._handle.shut_down()
        return self._end_agents(self._now_at(), release=False)

    def stop(self) -> Future[None]:
        """End the procs that were spawned through this mesh, its slices or its copies, and leave the hosts. Resolves
        when the procs are gone. Procs that were spawned through another mesh of the same hosts are left alone: each
        call of ``state()`` and `attach_to_workers` returns a mesh of its own.

        Workers that were attached to can be attached to again, by this program or another; this mesh cannot be used any
        more. Hosts of a job stay those of this program, and their mesh usable. Stopping again is harmless.

        Raises:
            RuntimeError: the hosts have been shut down, or this mesh is a slice or came from elsewhere.
        """
        self._check_owned("stop")
        if self._handle.stopped:
            return Future._of(None)
        self._check_usable()
        runtime = context().actor_instance.runtime
        free: Sequence[str] = ()
        if self._handle.release is not None:
            self._handle.stopped = True
            free = self._handle.release(self._handle, False)
        busy = [host for host in self._now_at() if host not in free]
        here = set().union(*(runtime.places.standing_for(host) for host in busy))
        mine = [mesh for mesh in list(runtime.owned.procs.values()) if mesh.hosts is self._handle]
        parts = [(mesh.layout, mesh.alive & mesh.layout.ranks_on(here)) for mesh in mine]
        future: Future[None] = Future._pending()
        future._what = f"stop() of {self!r}"
        one_ended = CountDown(len(parts) + 1, lambda: future._resolve(lambda: None))
        for layout, ranks in parts:
            runtime.stop_procs(layout, ranks, settings().process_exit_timeout, one_ended)
        self._end_agents(free, release=True)._on_done(one_ended)
        return future

    def _end_agents(self, hosts: Sequence[str], release: bool) -> Future[None]:
        runtime = context().actor_instance.runtime
        future: Future[None] = Future._pending()
        future._what = f"the end of {len(hosts)} hosts"
        one_ended = CountDown(len(hosts), lambda: future._resolve(lambda: None))
        for host in hosts:
            runtime.expect_end_of_host(host, one_ended)
            fields = {"timeout": settings().mesh_terminate_timeout, "release": release}
            runtime.send(Message("shutdown", Address(host, AGENT), runtime.address, fields))
        if not release and self._handle.release is not None:
            self._handle.release(self._handle, True)
        return future

    def _check_owned(self, what: str) -> None:
        if not self._owned:
            raise RuntimeError(f"cannot {what} hosts through a slice of their mesh or one that was sent here")

    def _check_usable(self) -> None:
        check_own(self._program, "spawn procs on hosts")
        if self._handle.ended:
            raise RuntimeError(f"HostMesh has already been {self._handle.ended}")

    async def __aenter__(self) -> HostMesh:
        self._check_usable()
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._handle.ended:
            await self.shutdown()

    def __enter__(self) -> HostMesh:
        self._check_usable()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._handle.ended:
            self.shutdown().get()

    def __reduce__(self) -> tuple[Any, ...]:
        return HostMesh._reference, (
            self._hosts,
            self._mesh_shape,
            self._python,
            self._handle.key,
            publish(self._program),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostMesh) and (self._hosts, self._mesh_shape) == (other._hosts, other._mesh_shape)

    def __hash__(self) -> int:
        return hash((self._hosts, self._mesh_shape))

    def __repr__(self) -> str:
        try:
            names = self.host_names
        except RuntimeError:  # no actor's thread, or the client has ended: who has taken a place is not known here
            names = [self._hosts[rank].partition("#")[0] for rank in self._shape.ndslice]
        return f"<HostMesh {self.extent} {', '.join(names[:8])}{'…' if len(self) > 8 else ''}>"


def this_proc() -> ProcMesh:
    """Return the proc that this code runs in, as a mesh of one."""
    return context().actor_instance.proc


def this_host() -> HostMesh:
    """Return the host that this code runs on, as a mesh of one."""
    runtime = context().actor_instance.runtime
    return HostMesh((runtime.local_host,), Shape.unity(), owned=False, python=runtime.python)


def _one_host(host: str, program: str) -> HostMesh:
    return HostMesh._reference((host,), Shape.unity(), program=program)


set_host_maker(_one_host)


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed: procs stay where their agent is
        return ""


def _forwarded_env() -> dict[str, str]:
    """The variables of this process that belong to a run rather than to a machine. A worker's own go before them."""
    return {name: value for name, value in os.environ.items() if name.startswith(("MONARCH_", "TORCHFT_"))}
