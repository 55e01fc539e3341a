"""What is wrong with the controller's address, as seen from a host that cannot join.

ZeroMQ retries for ever and reports nothing: of an address that leads nowhere the controller would only see that the
host is missing.
"""

from __future__ import annotations

import socket
import time

import psutil

from monarch_slurm.host.identity import NoControllerError, pid_space
from monarch_slurm.host.interfaces import interface_of
from monarch_slurm.wire import Invitation

ATTEMPT_SECONDS = 5.0
"""Time for one attempt to connect."""

OWN_ATTEMPTS, OWN_PAUSE_SECONDS = 3, 0.5
"""So often an address that is this machine's own is dialled before it is given up, and the pause in between."""


def check_not_own(invitation: Invitation, name: str) -> None:
    """Make sure that a controller on another machine does not have an address that is this machine's, too.

    Args:
        name: of this host.

    Raises:
        NoControllerError: it has, and nobody listens there.
    """
    ip, port = _endpoint(invitation)
    interface = interface_of(ip)
    if interface is None:
        return  # only such an address is dialled: the controller reports strangers that say nothing
    for attempt in range(OWN_ATTEMPTS):
        time.sleep(OWN_PAUSE_SECONDS if attempt else 0)
        reason = _refusal(ip, port)
        if reason is None:
            return
    raise NoControllerError(
        f"host {name} cannot dial the controller at {ip} port {port}: {reason}. That is an address of "
        f"{socket.gethostname()} itself ({interface}), and the controller runs on another machine: give the job an "
        "address that its nodes do not share, such as --address with the name of their network"
    )


def connection_trouble(invitation: Invitation, pid: int) -> str | None:
    """Return why process ``pid`` and those under it have no connection with the controller; None if one has."""
    if invitation.controller_host == pid_space():
        return None  # it joins at a Unix socket
    ip, port = _endpoint(invitation)
    try:
        agent = psutil.Process(pid)
        for process in (agent, *agent.children(recursive=True)):
            for connection in process.net_connections("tcp"):
                if connection.raddr == (ip, port) and connection.status == psutil.CONN_ESTABLISHED:
                    return None
    except psutil.Error:  # it has just ended
        return None
    reason = _refusal(ip, port)
    return None if reason is None else f"cannot dial the controller at {ip} port {port}: {reason}"


def _endpoint(invitation: Invitation) -> tuple[str, int]:
    ip, _, port = invitation.address.removeprefix("tcp://").rpartition(":")
    return ip.strip("[]"), int(port)


def _refusal(ip: str, port: int) -> str | None:
    """Return why nothing can be connected to; None if it can be."""
    try:
        with socket.create_connection((ip, port), timeout=ATTEMPT_SECONDS):
            return None
    except OSError as error:
        return error.strerror or str(error)
