"""What users write: actors with endpoints, spawned on meshes of procs, which are spawned on meshes of hosts.

Source-compatible with Monarch's ``monarch.actor``. The map of this folder:

- `ndslice`, `shape`, `mesh_trait`, `value_mesh`: labelled ranks and values
- `actor`, `endpoint`, `actor_mesh`, `proc_mesh`, `host_mesh`: what is written and called
- `future`, `port`: what comes back; `signal_frames`: what interrupts that
- `context`, `ids`: who is running
- `bootstrap`, `per_host`, `transports`, `returns_future`, `telemetry`, `config`, `log_prefix`: what else there is
- `cell`, `sync_cell`, `async_cell`: a running actor; `birth`: how it becomes one
- `runtime`: the actors of one process; `messages`: what runtimes tell each other; `owned`, `replies`: who is told of
failures
- `controllers`: actors of which a program has one
- `restart`, `budget`: which procs start again, and how often; `keeper`: doing it
- `workers`: hosts that wait for programs
- `code_sync`: folders of the program's machine on its hosts
- `debugger`: ``breakpoint()``, and who talks to what has stopped
- `client`, `proc_main`: the two kinds of processes; `local_host`: the client's own machine
"""

import importlib

from monarch_slurm.actor import config
from monarch_slurm.actor.actor import Actor
from monarch_slurm.actor.actor_mesh import ActorMesh
from monarch_slurm.actor.bootstrap import BootstrapCommand, default_bootstrap_cmd
from monarch_slurm.actor.client import shutdown_context, unhandled_fault_hook
from monarch_slurm.actor.code_sync import SyncResult, Workspace, WorkspaceError
from monarch_slurm.actor.context import Context, Instance, context, current_actor_name, current_rank, current_size
from monarch_slurm.actor.controllers import get_or_spawn_controller
from monarch_slurm.actor.debugger.controller import debug_controller
from monarch_slurm.actor.endpoint import Accumulator, Endpoint, as_endpoint, concurrent_endpoint, endpoint, send
from monarch_slurm.actor.errors import (
    ActorDeadlockError,
    ActorError,
    ActorRestartedError,
    MeshFailure,
    SupervisionError,
)
from monarch_slurm.actor.future import Future
from monarch_slurm.actor.host_mesh import HostMesh, this_host, this_proc
from monarch_slurm.actor.ids import ActorAddr, ProcId, Uid
from monarch_slurm.actor.ndslice import NDSlice, Slice
from monarch_slurm.actor.port import Channel, Port, PortReceiver
from monarch_slurm.actor.proc_mesh import ProcMesh
from monarch_slurm.actor.restart import RestartPolicy
from monarch_slurm.actor.returns_future import returns_future
from monarch_slurm.actor.shape import Extent, Point, Shape
from monarch_slurm.actor.telemetry import get_meter, span, traced
from monarch_slurm.actor.transports import enable_transport
from monarch_slurm.actor.undeliverable import UndeliverableMessageEnvelope
from monarch_slurm.actor.value_mesh import ValueMesh
from monarch_slurm.actor.workers import (
    attach,
    attach_to_workers,
    run_worker_loop_forever,
    run_worker_loop_until_shutdown,
    start_worker_loop_forever,
)
from monarch_slurm.host.attaching import AttachError
from monarch_slurm.host.exits import FailureKind
from monarch_slurm.transport import ChannelTransport
from monarch_slurm.wire.shared_key import NoKeyError
from monarch_slurm.wire.shared_key import make_key_file as make_worker_key

__all__ = [
    "Accumulator",
    "Actor",
    "ActorAddr",
    "ActorDeadlockError",
    "ActorError",
    "ActorMesh",
    "ActorRestartedError",
    "AttachError",
    "BootstrapCommand",
    "Channel",
    "ChannelTransport",
    "Context",
    "Endpoint",
    "Extent",
    "FailureKind",
    "Future",
    "HostMesh",
    "Instance",
    "MeshFailure",
    "NDSlice",
    "NoKeyError",
    "Point",
    "Port",
    "PortReceiver",
    "ProcId",
    "ProcMesh",
    "RestartPolicy",
    "Shape",
    "Slice",
    "SupervisionError",
    "SyncResult",
    "Uid",
    "UndeliverableMessageEnvelope",
    "ValueMesh",
    "Workspace",
    "WorkspaceError",
    "as_endpoint",
    "attach",
    "attach_to_workers",
    "concurrent_endpoint",
    "config",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "debug_controller",
    "default_bootstrap_cmd",
    "enable_transport",
    "endpoint",
    "get_meter",
    "get_or_spawn_controller",
    "make_worker_key",
    "returns_future",
    "run_worker_loop_forever",
    "run_worker_loop_until_shutdown",
    "send",
    "shutdown_context",
    "span",
    "start_worker_loop_forever",
    "this_host",
    "this_proc",
    "traced",
    "unhandled_fault_hook",
]


def __getattr__(name: str) -> object:
    if name == "hosts_from_config":  # of a higher layer, and here for Monarch's older programs
        hosts_from_config: object = importlib.import_module("monarch_slurm.job").hosts_from_config
        return hosts_from_config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
