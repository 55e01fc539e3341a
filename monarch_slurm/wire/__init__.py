"""Frames, pickles, ZeroMQ sockets and keys: how processes of one job talk. Knows nothing of hosts, procs or actors.

- `frames`: messages and process addresses
- `pickling`: values with out-of-band buffers; `plain`: values that need no pickle
- `loop`: the I/O loop
- `link`: a ZeroMQ socket with numbered messages, between machines
- `payload_channel`: large frames beside a link, encrypted (`sealed_records`); `channel_setup`: how it is opened
- `stream_link`: the same over Unix streams (`stream`), between processes of one machine; `agent_links`: both
- `order`: what a thread that reads takes itself, and what it leaves to the loop
- `sockets`: tcp with CURVE; `gatekeeper`: who may talk there
- `origin`, `admission`, `guarded_listener`: which peers may stay at a listener before they have proved themselves
- `runtime_dir`: that private folder
- `keys`: the job's keys and the file that hands them on
- `liveness`: who has been silent for too long
- `admin`: questions to a controller from outside
"""

from monarch_slurm.wire.admin import AdminClient, AdminServer, NoAnswerError, ask
from monarch_slurm.wire.frames import AGENT, CONTROLLER, Address, Message, WireError
from monarch_slurm.wire.gatekeeper import Gatekeeper
from monarch_slurm.wire.keys import Invitation, JobKeys, KeyFileError, read_invitation, write_invitation
from monarch_slurm.wire.link import Link, UnknownPeerError
from monarch_slurm.wire.liveness import Liveness
from monarch_slurm.wire.loop import Loop, Timer
from monarch_slurm.wire.pickling import dumps, loads
from monarch_slurm.wire.plain import pack, unpack
from monarch_slurm.wire.runtime_dir import SocketPathError, make_runtime_dir, remove_runtime_dir, sweep_runtime_dirs
from monarch_slurm.wire.sockets import BindError
from monarch_slurm.wire.stream_link import StreamLink

__all__ = [
    "AGENT",
    "CONTROLLER",
    "Address",
    "AdminClient",
    "AdminServer",
    "BindError",
    "Gatekeeper",
    "Invitation",
    "JobKeys",
    "KeyFileError",
    "Link",
    "Liveness",
    "Loop",
    "Message",
    "NoAnswerError",
    "SocketPathError",
    "StreamLink",
    "Timer",
    "UnknownPeerError",
    "WireError",
    "ask",
    "dumps",
    "loads",
    "make_runtime_dir",
    "pack",
    "read_invitation",
    "remove_runtime_dir",
    "sweep_runtime_dirs",
    "unpack",
    "write_invitation",
]
