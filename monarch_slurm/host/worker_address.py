"""Addresses of workers: where they listen, where programs dial, and who must be there."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from dataclasses import dataclass

from monarch_slurm.errors import MonarchSlurmError

_URL = re.compile(r"(?:^|@)(?=[a-z]+://)")
_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]@]+):(?P<port>\d{1,5}|fd\d+)")
_LOCAL = ("ipc", "inproc")


class WorkerAddressError(MonarchSlurmError, ValueError):
    """This is no address of a worker."""


@dataclass(frozen=True)
class WorkerAddress:
    """``[<identity>@]<dial>[@<bind>]``, such as ``service<2MuAHe>@tcp://n1:4444@tcp://0.0.0.0:4444``.

    Attributes:
        identity: who must listen there; empty for anybody with the key.
        dial: URL that programs dial.
        bind: URL that the worker listens at; the same, if the address has no other.
    """

    identity: str
    dial: str
    bind: str

    @staticmethod
    def parse(text: str) -> WorkerAddress:
        """Return the address ``text``.

        Raises:
            WorkerAddressError: it is none.
            NotImplementedError: it is one that Monarch knows and this package does not.
        """
        identity, *urls = _URL.split(text)
        if not 1 <= len(urls) <= 2 or not all(urls):
            raise WorkerAddressError(f"worker address {text!r}: tcp://host:port or ipc://path expected")
        for url in urls:
            _check(url, text)
        urls = [_within_this_process(url) for url in urls]
        return WorkerAddress(identity, urls[0], urls[-1])

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine reach it."""
        return all(url.startswith("ipc:") or _is_loopback(url) for url in (self.dial, self.bind))

    @property
    def host(self) -> str:
        """Host that programs dial; of a Unix socket, its name."""
        host, _ = split_tcp(self.dial) if self.dial.startswith("tcp:") else (self.dial.rpartition("/")[2], "")
        return host

    def __str__(self) -> str:
        return f"{self.identity}@{self.dial}" if self.identity else self.dial


def split_tcp(url: str) -> tuple[str, str]:
    """Return host and port of ``tcp://host:port``."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), port


def resolve(host: str) -> str:
    """Return the IP address of ``host``.

    Raises:
        OSError: it has none.
    """
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def _check(url: str, text: str) -> None:
    scheme = url.partition("://")[0]
    if scheme in _LOCAL and len(url) > len(scheme) + 3:
        return
    if url.startswith("tcp://*:"):
        raise NotImplementedError(f"worker address {text!r}: name an address such as tcp://0.0.0.0:port in place of *")
    if scheme in ("metatls", "tls", "unix"):
        raise NotImplementedError(f"worker address {text!r}: workers listen at tcp:// (with CURVE) and ipc:// only")
    match = _TCP.fullmatch(url)
    if match is None or (match["port"].isdecimal() and int(match["port"]) >= 2**16):
        raise WorkerAddressError(f"worker address {text!r}: tcp://host:port or ipc://path expected")


def _within_this_process(url: str) -> str:
    name = url.removeprefix("inproc://")
    return url if name == url else f"ipc://@monarch-slurm/{os.getuid()}/{os.getpid()}/{name}"


def _is_loopback(url: str) -> bool:
    host, _ = split_tcp(url)
    try:
        return ipaddress.ip_address(resolve(host)).is_loopback
    except (OSError, ValueError):
        return False
