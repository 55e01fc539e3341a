"""Who a host is: an id that no agent had before, and the IP address that others reach it by."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

from monarch_slurm.errors import MonarchSlurmError

ADDRESS_VARIABLE = "MONARCH_SLURM_ADDRESS"
"""Procs find the IP address of their host in this environment variable."""

LOOPBACK = "127.0.0.1"

SUPERVISED_VARIABLE = "MONARCH_SLURM_SUPERVISED"
"""Set in an agent's environment: SIGTERM is not for the agent and its procs; its supervisor ends them by SIGHUP.

Slurm sends SIGTERM to every process of a job at once, also while the program still needs its procs to save something.
"""


def take_no_sigterm() -> bool:
    """Have SIGTERM do nothing here if this process is supervised; return whether it is."""
    if SUPERVISED_VARIABLE not in os.environ:
        return False
    signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN, which programs started from here would inherit
    return True


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that tell an agent to end; if it is supervised, SIGTERM does nothing from now on."""
    return (signal.SIGHUP,) if take_no_sigterm() else (signal.SIGTERM, signal.SIGHUP)


class NoControllerError(MonarchSlurmError):
    """No controller has published itself in the job folder, or it cannot be reached."""


def new_host_id(name: str) -> str:
    """Return an id for the host ``name`` that no agent had before."""
    return f"{name}#{os.urandom(4).hex()}"


def pid_space() -> str:
    """Return a text that only processes share to whom a pid means the same: of one boot and one PID namespace.

    Nodes that are containers may share a hostname, or a boot.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def address_towards(endpoint: str) -> str:
    """Return the IP address of this machine from which ``tcp://host:port`` is reached. Sends nothing.

    Raises:
        NoControllerError: there is no route.
    """
    ip, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    family = socket.AF_INET6 if "[" in ip else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((ip.strip("[]"), int(port)))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise NoControllerError(
            f"there is no way from this host to the controller at {endpoint}: {error.strerror}; have the controller "
            "publish an address of a network that this host is on"
        ) from None
