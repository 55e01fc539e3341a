"""The choice of a transport, which Monarch's programs make."""

from __future__ import annotations

import threading

from monarch_slurm.actor.client import has_client
from monarch_slurm.config import configure, settings
from monarch_slurm.transport import BindSpec, ChannelTransport

_lock = threading.Lock()
_enabled: BindSpec | None = None


def enable_transport(transport: ChannelTransport | str) -> None:
    """Say how hosts are to reach this program. Before any other call.

    Procs of a host always talk over Unix sockets and hosts always over TCP with CURVE, so names are only checked and
    remembered; of ``tcp://host:port``, workers that are attached (`attach_to_workers`) dial that host.

    Raises:
        ValueError: there is no such transport.
        TypeError: neither a text nor a `ChannelTransport`.
        RuntimeError: the client has started with another one, or another one was enabled before.
    """
    global _enabled
    wanted = BindSpec.of(transport)
    with _lock:
        if _enabled is not None and _enabled != wanted:
            raise RuntimeError(f"Only one transport type may be enabled at one time; {_enabled} is, not {wanted}")
        if has_client() and wanted != BindSpec.of(settings().default_transport):
            raise RuntimeError("`enable_transport()` must be called before any other calls in the monarch API")
        configure(default_transport=wanted)
        _enabled = wanted
