"""Which IP address of this machine others are to dial."""

from __future__ import annotations

import ipaddress
import re
import socket

from monarch_slurm.host.interfaces import addresses as _addresses
from monarch_slurm.host.interfaces import fastest_address
from monarch_slurm.job.errors import AddressError, JobError, NoSlurmError
from monarch_slurm.job.status import Run, run_command

FASTEST = "fastest"
"""Option of `find_address`: the address on the fastest link."""

_ANY_PORT = 9  # nothing is sent to it


def find_address(option: str | None, toward: str) -> str:
    """Return an IP address of this machine.

    Hostnames are not looked up: on clusters they often stand for another network.

    Args:
        option: name of an interface (``ib0``), a network (``10.1.0.0/16``), an IP address of this machine, or
            ``"fastest"`` for that on the link with the highest speed; None takes the address that packets to ``toward``
            leave from.
        toward: IP address of a machine that must be able to dial this one, or of this machine itself.

    Raises:
        AddressError: this machine has no such address, or no route.
    """
    if option is None:
        return _source_address(toward)
    addresses = _addresses()
    if option == FASTEST:
        fastest = fastest_address(addresses)
        found = [fastest] if fastest is not None else []
    elif option in addresses:
        found = addresses[option]
    else:
        try:
            network = ipaddress.ip_network(option, strict=False)
        except ValueError:
            raise AddressError(
                f"{option!r} is no interface of {socket.gethostname()}, no network such as 10.1.0.0/16 and no IP "
                f"address; there are {_describe(addresses)}"
            ) from None
        found = [one for some in addresses.values() for one in some if ipaddress.ip_address(one) in network]
    if not found:
        raise AddressError(f"{socket.gethostname()} has no address in {option!r}; there are {_describe(addresses)}")
    return found[0]


def _source_address(toward: str) -> str:
    family = socket.AF_INET6 if ":" in toward else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((toward, _ANY_PORT))
        except OSError as error:
            raise AddressError(f"{socket.gethostname()} has no route to {toward}: {error.strerror}") from None
        return str(probe.getsockname()[0])


def _describe(addresses: dict[str, list[str]]) -> str:
    return ", ".join(f"{interface} ({' '.join(some) or 'no address'})" for interface, some in addresses.items())


def node_address(name: str, run: Run = run_command) -> str:
    """Return the IP address at which Slurm itself reaches a node; without scontrol, what the node's name stands for.

    Raises:
        JobError: Slurm does not know the node, or its address cannot be resolved here.
    """
    try:
        match = re.search(r"\bNodeAddr=(\S+)", run(["scontrol", "show", "node", "-o", name]).stdout)
    except NoSlurmError:  # compute nodes may lack it; NodeAddr is the name unless a site says otherwise
        match = re.fullmatch(r"(\S+)", name)
    if match is None:
        raise JobError(f"Slurm does not tell the address of node {name}; give the job an address=")
    try:
        return str(socket.getaddrinfo(match.group(1), None, type=socket.SOCK_DGRAM)[0][4][0])
    except socket.gaierror as error:
        raise JobError(
            f"node {name} has the address {match.group(1)}, which cannot be resolved here ({error.strerror}); give the "
            "job an address="
        ) from None
