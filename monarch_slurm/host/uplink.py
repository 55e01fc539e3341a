"""An agent's connection with its controller: a Unix stream on the controller's own machine, ZeroMQ from any other."""

from __future__ import annotations

import logging
from pathlib import Path

import zmq

from monarch_slurm.host.identity import pid_space
from monarch_slurm.wire import Invitation, Link, Loop, StreamLink, WireError
from monarch_slurm.wire.link import FaultHandler, MessageHandler
from monarch_slurm.wire.sockets import connect_tcp, make_dealer
from monarch_slurm.wire.stream_link import ClosedHandler

logger = logging.getLogger(__name__)


def dial_controller(
    loop: Loop,
    context: zmq.Context[zmq.Socket[bytes]],
    invitation: Invitation,
    host: str,
    on_message: MessageHandler,
    on_fault: FaultHandler,
    on_closed: ClosedHandler,
    batch: bool = True,
) -> Link | StreamLink:
    """Return a link to the controller of ``invitation``, which knows this agent, or this guest, as ``host``.

    Args:
        on_closed: called when the controller has hung up; where it is on another machine, only its silence tells.
        batch: the loop's thread alone sends.
    """
    if invitation.near and invitation.controller_host == pid_space():
        near = StreamLink(loop, on_message, on_fault, on_closed, batch=batch)
        try:
            near.connect(Path(invitation.near), host)
        except (OSError, WireError) as error:  # a container may share the machine, but not the folder
            logger.debug("host %s joins by TCP, not at %s: %s", host, invitation.near, error)
            near.close()
        else:
            return near
    dealer = make_dealer(context, host)
    connect_tcp(dealer, invitation)
    return Link(loop, dealer, on_message, on_fault, dialled=invitation.address)
