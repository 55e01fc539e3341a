"""enable_transport, each case in a program of its own: it is a choice for the whole process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import Program

from monarch_slurm.actor import enable_transport


def test_transports_that_are_none() -> None:
    with pytest.raises(ValueError, match="unknown transport 'pigeon'"):
        enable_transport("pigeon")
    with pytest.raises(TypeError, match="a ChannelTransport or a str expected"):
        enable_transport(7)  # type: ignore[arg-type]


def test_a_transport_is_chosen_once_and_first(program: Callable[..., Program]) -> None:
    running = program(
        """
        from monarch_slurm.actor import ChannelTransport, enable_transport, this_host
        from monarch_slurm.config import get_global_config

        def attempt(transport):
            try:
                enable_transport(transport)
                print("enabled", get_global_config()["default_transport"])
            except RuntimeError as error:
                print("refused", error)

        enable_transport("tcp")
        enable_transport(ChannelTransport.TcpWithHostname)
        attempt("ipc")
        this_host()
        attempt("tcp")
        """
    )
    assert running.wait() == 0
    first, second = running.output().splitlines()
    assert first.startswith("refused Only one transport type may be enabled at one time; tcp(hostname)")
    assert second == "enabled tcp(hostname)"


def test_a_transport_after_the_start(program: Callable[..., Program]) -> None:
    running = program(
        """
        from monarch_slurm.actor import enable_transport, this_host
        this_host()
        enable_transport("ipc")
        try:
            enable_transport("tcp")
        except RuntimeError as error:
            print("refused", error)
        """
    )
    assert running.wait() == 0
    assert running.output().startswith("refused Only one transport")
