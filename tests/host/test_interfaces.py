from __future__ import annotations

from pathlib import Path

import pytest

from monarch_slurm.host import interfaces
from monarch_slurm.host.interfaces import collective_settings, fastest_address, interface_of, link_speed

HELD = {
    "lo": ["127.0.0.1"],
    "eno1": ["10.1.0.7", "fd00::7"],
    "ib0": ["10.2.0.7"],
    "ib1": ["10.3.0.7"],
    "hsn0": ["169.254.0.7"],
    "docker0": ["172.17.0.1"],
    "down0": ["10.9.0.7"],
    "bare": [],
}


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A node with Ethernet, two InfiniBand ports, a bridge for containers and a link that is down."""

    def write(path: str, text: str) -> None:
        file = tmp_path / "class/net" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    for name in HELD:
        write(f"{name}/operstate", "down" if name == "down0" else "unknown" if name == "lo" else "up")
    write("eno1/speed", "25000")
    for name in ("ib0", "ib1"):
        write(f"{name}/device/infiniband/mlx5_{name[-1]}/ports/1/rate", "200 Gb/sec (4X HDR)")
    write("ib1/speed", "-1")
    write("docker0/speed", "10000000")
    write("docker0/bridge/stp_state", "0")
    write("down0/speed", "400000")
    write("hsn0/speed", "nonsense")
    return tmp_path


def test_speeds_are_read(sysfs: Path) -> None:
    assert [link_speed(name, sysfs) for name in ("eno1", "ib0", "ib1", "hsn0", "none")] == [25e3, 200e3, 200e3, 0, 0]


def test_the_fastest_link_that_is_up_and_leads_somewhere_is_taken(sysfs: Path) -> None:
    assert fastest_address(HELD, sysfs) == "10.2.0.7"
    without = {name: held for name, held in HELD.items() if not name.startswith("ib")}
    assert fastest_address(without, sysfs) == "10.1.0.7"
    assert fastest_address({"lo": ["127.0.0.1"]}, sysfs) is None


def test_collectives_are_told_of_the_interface_by_its_exact_name(monkeypatch: pytest.MonkeyPatch) -> None:
    collective_settings.cache_clear()
    monkeypatch.setattr(interfaces, "addresses", lambda: HELD)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eno1")  # what the user has set stays
    assert collective_settings("10.2.0.7") == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert collective_settings("127.0.0.1") == {}
    collective_settings.cache_clear()
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    assert collective_settings("10.1.0.7") == {"GLOO_SOCKET_IFNAME": "eno1", "NCCL_SOCKET_IFNAME": "=eno1"}
    collective_settings.cache_clear()


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.5.5.5") == "lo"
    assert interface_of("203.0.113.9") is None
