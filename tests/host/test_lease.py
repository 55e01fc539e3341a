from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_slurm.config import configured
from monarch_slurm.host.lease import Lease
from monarch_slurm.wire import Loop
from monarch_slurm.wire.keys import CONTROLLER_FILE


class World:
    """A lease of 60 seconds whose loop has a clock of its own."""

    def __init__(self, folder: Path | None, beside: bool, machine_silence: Callable[[], float | None]) -> None:
        self.time = 1000.0
        self.loop = Loop(clock=lambda: self.time)
        self.over: list[str] = []
        self.beats = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.lease = Lease(self.loop, folder, self._beat, self.over.append, self.address, beside, machine_silence)
        self.lease.beat()

    def _beat(self) -> None:
        self.beats += 1

    def stop_listening(self) -> None:
        self._listener.close()

    def run(self, seconds: float) -> None:
        """Let time pass in which the process runs."""
        end = self.time + seconds
        while self.time < end and not self.over:
            self.time += 0.1
            self.loop.call_soon(lambda: None)  # or the loop would wait for its timer in real time
            self.loop._round()

    def sleep(self, seconds: float) -> None:
        """Let time pass in which the process is stopped."""
        self.time += seconds


def world(
    folder: Path | None = None, beside: bool = False, machine_silence: Callable[[], float | None] = lambda: None
) -> World:
    return World(folder, beside, machine_silence)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / CONTROLLER_FILE).touch()
    return tmp_path


def test_a_silent_controller_on_another_machine_is_gone_after_the_lease(folder: Path) -> None:
    far = world(folder)
    far.run(59.0)
    assert far.over == []
    far.lease.heard()
    far.run(59.0)
    assert far.over == []
    far.run(5.0)
    (why,) = far.over
    assert why.startswith("nothing heard from the controller for 6")
    beats = far.beats
    far.run(10.0)
    assert far.beats == beats > 50


def test_a_controller_on_the_same_machine_may_be_silent_forever(folder: Path) -> None:
    near = world(folder, beside=True)
    near.lease.heard()
    near.run(1000.0)
    assert near.over == []


def test_a_controller_on_the_same_machine_that_never_spoke_may_be_another_process(folder: Path) -> None:
    near = world(folder, beside=True)
    near.run(70.0)
    assert near.over == ["nothing heard from the controller for 60 s"]


def test_a_controller_whose_machine_answers_may_be_silent_forever(folder: Path) -> None:
    far = world(folder, machine_silence=lambda: 0.5)
    far.run(1000.0)
    assert far.over == []


def test_the_lease_begins_when_the_machine_answers_no_more(folder: Path) -> None:
    since = 1e9
    far = world(folder, machine_silence=lambda: max(0.5, far.time - since))
    far.run(100.0)
    since = far.time
    far.run(59.0)
    assert far.over == []
    far.run(5.0)
    assert len(far.over) == 1


def test_time_in_which_the_agent_was_stopped_does_not_count(folder: Path) -> None:
    far = world(folder)
    for _ in range(5):
        far.run(5.0)
        far.sleep(3600.0)
    far.run(20.0)
    assert far.over == []


def test_a_lease_without_a_limit(folder: Path) -> None:
    with configured(mesh_orphan_timeout=None):
        far = world(folder)
        far.run(1000.0)
        assert far.over == []


@pytest.mark.parametrize("beside", [True, False])
def test_a_controller_that_has_taken_its_invitation_back_is_gone(folder: Path, beside: bool) -> None:
    left = world(folder, beside)
    (folder / CONTROLLER_FILE).unlink()
    left.run(4.0)
    assert left.over == ["the controller has ended"]


def test_a_program_whose_machine_refuses_connections_is_gone() -> None:
    attached = world()
    attached.run(10.0)
    assert attached.over == []
    attached.stop_listening()
    attached.run(10.0)
    assert attached.over == ["the controller has ended: nothing listens at its address any more"]


def test_a_program_is_not_dialled_while_its_machine_answers() -> None:
    attached = world(machine_silence=lambda: 0.5)
    attached.stop_listening()
    attached.run(100.0)
    assert attached.over == []
