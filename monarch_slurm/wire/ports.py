"""TCP ports to listen on: the system's choice, or free ones of a range that a firewall lets through."""

from __future__ import annotations

import errno
import random
import re
import socket

from monarch_slurm.config import settings
from monarch_slurm.errors import ConfigError

_RANGE = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")


def ports_to_try() -> list[int]:
    """Return the ports to try to bind, one after the other: 0, or those of the setting ``port_range`` in random order.

    Raises:
        ConfigError: the setting is no range of ports.
    """
    text = settings().port_range
    if not text:
        return [0]
    match = _RANGE.fullmatch(text.strip())
    first, last = (int(match.group(1)), int(match.group(2))) if match is not None else (1, 0)
    if not 0 < first <= last < 65536:
        raise ConfigError(f"port_range={text!r}: the first and the last port expected, such as 40000-40999")
    ports = list(range(first, last + 1))
    random.shuffle(ports)  # so that jobs on one node seldom try the same one
    return ports


def none_free(address: str) -> str:
    """Return the text for when no port was free."""
    within = settings().port_range
    return f"no port of {within} is free on {address}: give a larger port_range" if within else f"no port on {address}"


def listen_tcp(address: str, backlog: int) -> socket.socket:
    """Return a socket that listens on a free port of the IP ``address``, and nowhere else.

    Raises:
        OSError: the address is not one of this machine, or no port is free.
        ConfigError: the setting ``port_range`` is no range.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports_to_try():
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(backlog)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return listener
    raise OSError(errno.EADDRINUSE, none_free(address))
