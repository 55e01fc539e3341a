from __future__ import annotations

import socket

import pytest
from support import wait_until

from monarch_slurm.host.doorbell import Doorbell


@pytest.mark.parametrize("ip", ["127.0.0.1", "::1"])
def test_a_process_that_does_not_listen_any_more_is_gone(ip: str) -> None:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((ip, 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        bell = Doorbell(f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}")
        for _ in range(5):  # nobody takes the connections: as many come as wait in line, and later ones hang
            assert not bell.is_gone()
    wait_until(bell.is_gone, "the refusal is noticed")


def test_one_refusal_alone_tells_nothing() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # it does not listen yet
        bell = Doorbell(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        assert not bell.is_gone()
        listener.listen(8)
        for _ in range(4):
            assert not bell.is_gone()
