"""Which IP address of this machine others are to dial."""

from __future__ import annotations

import ipaddress
import re
import socket

from monarch_slurm.host.interfaces import addresses as _addresses
from monarch_slurm.host.interfaces import fastest_address
from monarch_slurm.job.errors import AddressError, JobError, JobSpecError, NoSlurmError
from monarch_slurm.job.status import Run, run_command

FASTEST = "fastest"
"""Option of `find_address`: the address on the fastest link."""

_ANY_PORT = 9  # nothing is sent to it


def find_address(option: str | None, toward: str | None) -> str:
    """Return an IP address of this machine that others can dial.

    Hostnames are not looked up: on clusters they often stand for another network.

    Args:
        option: name of an interface (``ib0``), a network (``10.1.0.0/16``), an IP address of this machine, or
            ``"fastest"`` for that on the link with the highest speed; None takes the address that packets to ``toward``
            leave from.
        toward: IP address of a machine that must be able to dial this one, or of this machine itself; None for other
            machines whose addresses are not known, which needs an ``option``.

    Raises:
        AddressError: this machine has no such address, other machines cannot dial it, or there is no route.
    """
    if option is None:
        assert toward is not None
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
    if toward is not None and (_kind(toward) is not None or any(toward in some for some in addresses.values())):
        return found[0]  # whoever dials is this machine
    good = [one for one in found if _kind(one) is None]
    if not good:
        raise AddressError(
            f"{option!r} is {found[0]} on {socket.gethostname()}, {_kind(found[0])} address, which other machines "
            f"cannot dial; there are {_describe(addresses)}"
        )
    if toward is not None:
        _source_address(toward, good[0])
    return good[0]


def check_address(name: str, option: str | None) -> None:
    """Refuse an address option by which other machines can never be reached, as far as its text tells.

    Args:
        name: what the option is called.

    Raises:
        JobSpecError: it can only mean addresses that are loopback, link-local, multicast or unspecified.
    """
    if option is None:
        return
    kind = "a loopback" if option in ("lo", "localhost") else _kind(option)
    if kind is not None:
        raise JobSpecError(
            f"{name} {option!r} is {kind} address, which other machines cannot dial: name an interface such as ib0, a "
            "network such as 10.1.0.0/16, or 'fastest'"
        )


def check_many(name: str, option: str | None, nodes: int) -> None:
    """Refuse the address of one machine where each of several nodes needs one of its own.

    Raises:
        JobSpecError: ``option`` is a single IP address.
    """
    try:
        one = ipaddress.ip_network(option or "", strict=False).num_addresses == 1
    except ValueError:
        return
    if one:
        raise JobSpecError(
            f"{name} {option!r} is the address of one machine, and the job has {nodes} nodes: name an interface such "
            "as ib0, or a network such as 10.1.0.0/16, in which each node has an address"
        )


def _kind(text: str) -> str | None:
    """Return why no other machine can dial an address or a network; None if one may."""
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
    kinds = {
        "a loopback": network.is_loopback,
        "a link-local": network.is_link_local,
        "a multicast": network.is_multicast,
        "an unspecified": network.is_unspecified,
    }
    return next((name for name, holds in kinds.items() if holds), None)


def _source_address(toward: str, source: str | None = None) -> str:
    """Return the address that packets to ``toward`` leave from, which is ``source`` if that is given."""
    family = socket.AF_INET6 if ":" in toward else socket.AF_INET
    if source is not None and (":" in source) is not (":" in toward):
        return source  # of the other family; what route that has is not known here
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            if source is not None:
                probe.bind((source, 0))
            probe.connect((toward, _ANY_PORT))
        except OSError as error:
            way = "" if source is None else f" from {source}"
            raise AddressError(f"{socket.gethostname()} has no route{way} to {toward}: {error.strerror}") from None
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
