"""TorchTitan as an engine, as far as that needs no torchtitan: what is asked of it, and where its data goes on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support import run_command

from monarch_slurm.errors import ConfigError
from monarch_slurm.train import titan
from monarch_slurm.train.positions import Positions
from monarch_slurm.train.watchdog import START_DEADLINE, WARMUP_DEADLINE, Watchdog

BOX = """\
initial_load_model_only=True has no effect without an initial_load_path.
╭─ Unrecognized options ────────────────────────────────────────────────╮
│ Unrecognized options: --training.stepz, 3,                            │
│ --x                                                                   │
│ ───────────────────────────────────────────────────────────────────── │
│ Perhaps you meant:                                                    │
│     --training.steps INT                                              │
│         How many train steps to run (default: 10)                     │
│ ───────────────────────────────────────────────────────────────────── │
│ For full helptext, run - --help                                       │
╰───────────────────────────────────────────────────────────────────────╯
"""


def install(folder: Path, version: str) -> None:
    """Make pip's record of an installed torchtitan in ``folder``."""
    record = folder / f"torchtitan-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torchtitan\nVersion: {version}\n")


def test_without_torchtitan_nothing_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not _holds_torchtitan(path)])
    command = ["train", "--local", "--engine", "torchtitan", "--", "--module", "llama3"]
    code, output = run_command(monkeypatch, capsys, *command)
    assert (code, output.count("\n")) == (2, 1), output
    assert (
        'torchtitan, which is not installed: pip install ".[torchtitan]" where monarch_slurm was installed from'
        in output
    )
    assert os.listdir(tmp_path) == []


def _holds_torchtitan(path: str) -> bool:
    return any(Path(path or ".").glob("torchtitan-*.dist-info"))


@pytest.mark.parametrize(("version", "good"), [("0.3.0", True), ("0.3.1.dev5", True), ("0.2.2", False), ("1.3", False)])
def test_its_version_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, good: bool) -> None:
    install(tmp_path, version)
    monkeypatch.syspath_prepend(tmp_path)
    if good:
        titan.check_installed()
    else:
        with pytest.raises(ConfigError, match=rf"needs torchtitan 0\.3, but {version} is installed"):
            titan.check_installed()


def test_what_its_parser_says_becomes_one_line() -> None:
    said = "Unrecognized options: --training.stepz, 3, --x. Perhaps you meant: --training.steps INT"
    assert titan._gist(BOX) == said


def test_a_position_is_that_of_the_state_that_is_gone_on_from(tmp_path: Path) -> None:
    positions = Positions(str(tmp_path), replica=1, rank=0, save_every=0, keep=2)
    assert positions.read(7) is None
    for step in range(1, 6):
        positions.write(step, {"seen": step})
    assert [positions.read(step) for step in (0, 4, 5, 9)] == [None, {"seen": 4}, {"seen": 5}, {"seen": 5}]
    assert positions.read(2) == {"seen": 4}  # rather than from the beginning
    other = Positions(str(tmp_path), replica=0, rank=0, save_every=0, keep=2)
    assert other.read(5) is None


def test_positions_of_saved_states_are_kept(tmp_path: Path) -> None:
    positions = Positions(str(tmp_path), replica=0, rank=1, save_every=10, keep=2)
    for step in range(1, 48):
        positions.write(step, step)
    assert [positions.read(step) for step in (20, 30, 40, 46, 47)] == [20, 30, 40, 46, 47]
    assert len(list(tmp_path.rglob("*.json"))) == 5


def test_positions_of_an_earlier_start_that_went_further_are_forgotten(tmp_path: Path) -> None:
    positions = Positions(str(tmp_path), replica=0, rank=0, save_every=0, keep=2)
    positions.write(8, "earlier")
    positions.write(9, "earlier")
    positions.write(1, "now")
    assert positions.read(20) == "now"


def test_a_position_that_cannot_be_written_or_read_is_none(tmp_path: Path) -> None:
    positions = Positions(str(tmp_path), replica=0, rank=0, save_every=0, keep=2)
    with pytest.raises(TypeError):
        positions.write(1, {"generator": object()})
    positions.write(2, "whole")
    next(tmp_path.rglob("step-2.json")).write_text("{")
    assert positions.read(2) is None
    blocked = tmp_path / "file"
    blocked.touch()
    Positions(str(blocked), replica=0, rank=0, save_every=0, keep=2).write(1, 1)


def test_warming_up_has_a_deadline_of_its_own() -> None:
    watchdog = Watchdog(1, 2.0, 60.0, 0.0)
    watchdog.take({"kind": "phase", "rank": 0, "phase": "warmup"}, 5.0)
    assert watchdog.due() == 5.0 + WARMUP_DEADLINE
    watchdog.pulse_asked(0, 6.0)  # the interpreter may load large libraries then
    assert watchdog.due() == 6.0 + START_DEADLINE
    watchdog.take({"kind": "phase", "rank": 0, "phase": "compute"}, 90.0)
    assert watchdog.due() == 90.0 + 2.0
