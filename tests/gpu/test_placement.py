"""Procs get the GPUs that they ask for and their share of the cores near them."""

from __future__ import annotations

from pathlib import Path

import pytest
from trees import mi300x_node

from monarch_slurm.gpu import PlacementError, gpu_devices, parse_cpu_list, places


def test_eight_procs_share_the_cores_of_their_socket(tmp_path: Path) -> None:
    devices = gpu_devices(mi300x_node(tmp_path))
    found = places(devices, [[index] for index in range(8)], range(32), tmp_path / "sys")
    assert [place.devices for place in found] == [(index,) for index in range(8)]
    assert [place.cpus for place in found[:2]] == [(0, 16, 1, 17), (2, 18, 3, 19)]
    assert sorted(cpu for place in found for cpu in place.cpus) == [*range(32)]
    for index, place in enumerate(found):
        assert {cpu % 16 // 8 for cpu in place.cpus} == {index // 4}


def test_only_cpus_of_the_job_are_dealt_out(tmp_path: Path) -> None:
    devices = gpu_devices(mi300x_node(tmp_path))
    first, last = places(devices, [[0], [7]], {0, 1, 16, 9}, tmp_path / "sys")
    assert (first.cpus, last.cpus) == ((0, 16, 1), (9,))


def test_a_device_far_from_every_cpu_of_the_job_takes_what_there_is(tmp_path: Path) -> None:
    devices = gpu_devices(mi300x_node(tmp_path))
    assert places(devices, [[7]], {0, 1}, tmp_path / "sys")[0].cpus == (0, 1)


def test_more_procs_than_cores_share_them_all(tmp_path: Path) -> None:
    devices = gpu_devices(mi300x_node(tmp_path, partitions=8))
    assert len(devices) == 64
    assert devices[9].pci_address == "0000:06:00.1"
    found = places(devices, [[index] for index in range(64)], range(32), tmp_path / "sys")
    assert {len(place.cpus) for place in found} == {16}


def test_a_proc_of_two_sockets_gets_cores_of_both(tmp_path: Path) -> None:
    devices = gpu_devices(mi300x_node(tmp_path))
    (place,) = places(devices, [[3, 4]], range(32), tmp_path / "sys")
    assert len(place.cpus) == 32


def test_a_gpu_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    devices = gpu_devices(mi300x_node(tmp_path))
    with pytest.raises(PlacementError, match=r"GPU 8 was asked for, but 8 can be seen here \(gfx942\)"):
        places(devices, [[7], [8]], range(4), tmp_path / "sys")
    with pytest.raises(PlacementError, match=r"but 0 can be seen here \(none\)"):
        places([], [[0]], range(4), tmp_path / "sys")


@pytest.mark.parametrize(("text", "numbers"), [("0-3,8\n", [0, 1, 2, 3, 8]), ("", []), ("5", [5])])
def test_lists_as_the_kernel_writes_them(text: str, numbers: list[int]) -> None:
    assert parse_cpu_list(text) == numbers


@pytest.mark.parametrize("text", ["a", "1-", "-3", "1-b", "1;2"])
def test_other_texts_are_no_lists(text: str) -> None:
    with pytest.raises(ValueError, match="a list such as"):
        parse_cpu_list(text)
