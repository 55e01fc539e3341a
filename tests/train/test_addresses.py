"""Sockets that stand where they are told to."""

from __future__ import annotations

import socket

import pytest

from monarch_slurm.errors import ConfigError
from monarch_slurm.train.addresses import family_of, in_url, interface_of, listen


def test_family() -> None:
    assert family_of("10.1.2.3") == socket.AF_INET
    assert family_of("fe80::1") == socket.AF_INET6
    with pytest.raises(ConfigError, match="'node-7' is not an IP address"):
        family_of("node-7")


def test_in_url() -> None:
    assert in_url("10.1.2.3") == "10.1.2.3"
    assert in_url("fd00::7") == "[fd00::7]"


def test_listen_on_one_address_only() -> None:
    with listen("127.0.0.2") as server:
        address, port = server.getsockname()
        assert address == "127.0.0.2"
        with socket.create_connection(("127.0.0.2", port)):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_a_foreign_address_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        listen("192.0.2.1")


def test_a_taken_port_is_refused() -> None:
    with listen("127.0.0.1") as server, pytest.raises(ConfigError, match="Address already in use"):
        listen("127.0.0.1", server.getsockname()[1])


def test_interface() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.9") == "lo"
    with pytest.raises(ConfigError, match="no network interface"):
        interface_of("192.0.2.1")
