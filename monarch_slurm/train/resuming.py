"""A run that goes on: what it was, and which of its options may be others now."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from monarch_slurm.controller.journal import read_journal
from monarch_slurm.errors import ConfigError, MonarchSlurmError
from monarch_slurm.owned_files import check_folder
from monarch_slurm.train import units
from monarch_slurm.train.config import TrainConfig
from monarch_slurm.train.event_index import EventIndex
from monarch_slurm.train.events import Event
from monarch_slurm.train.inputs import changed_inputs, inputs_of
from monarch_slurm.train.manager import JOURNAL
from monarch_slurm.train.report import REPORT, load_report
from monarch_slurm.train.run_lock import LOCK, alone_in
from monarch_slurm.train.saved import find_saved
from monarch_slurm.train.titan import without_steps

FIXED = ("model", "data", "seq_len", "batch_size", "replicas", "procs_per_replica", "sync_every", "seed", "engine",
         "engine_options")  # fmt: skip
"""What cannot change when a run goes on, for the saved state and the count of its tokens depend on it."""

Changes = dict[str, tuple[Any, Any]]
"""Fields of a run's description that are others than at its last start: what they were, and what they are."""


def resumed_config(folder: Path, given: Mapping[str, Any], allow_changed_data: bool = False) -> TrainConfig:
    """Return the description of the run in ``folder`` with the fields in ``given`` in place of its own.

    Args:
        allow_changed_data: whether ``data`` may be another path.

    Raises:
        ConfigError: ``folder`` holds no run, the run has trained all its tokens, or it cannot go on with what is given.
        MonarchSlurmError: the run has only just been started.
    """
    check_unfinished(folder)
    events = history(folder)
    last = last_config(events)
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    before = {name: value for name, value in (last or {}).items() if name in known}
    try:
        config = TrainConfig(**before | dict(given))
    except MonarchSlurmError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise ConfigError(f"{folder / JOURNAL} does not tell what the run was ({error}): it cannot continue") from None
    check_changes(folder, events, config, allow_changed_data)
    return config


def checked_inputs(folder: Path, config: TrainConfig, allow_changed: bool = False) -> dict[str, str]:
    """Return the digests of what the run reads; they must be those of the state that the run in ``folder`` has saved.

    Args:
        allow_changed: only tell the user what has changed.

    Raises:
        ConfigError: something has changed, or cannot be read.
        SavedStateError: no saved state of the run is whole.
    """
    inputs, saved = inputs_of(config), find_saved(folder)
    changed = [] if saved is None else changed_inputs(dict(saved.inputs), inputs)
    if saved is not None and changed:
        what = f"{' and '.join(changed)} {'is' if len(changed) == 1 else 'are'} not what the run in {folder} has read"
        where = f"--data {config.data}" if config.data is not None else "the options after --"
        if config.engine == "llama" and config.data is None:
            where = "the source of Python's standard library"
        if not allow_changed:
            raise ConfigError(
                f"{what} until its saved state (sync {saved.step}): {where} has changed since. Restore it, or give "
                "--allow-changed-data to continue with what is there now, or start a new run without --resume"
            )
        print(f"{what} until sync {saved.step}; continuing all the same (--allow-changed-data)", flush=True)
    return inputs


def check_unfinished(folder: Path) -> None:
    """Make sure that there is a run in ``folder`` that may go on.

    Raises:
        ConfigError: ``folder`` holds no run, or the run has trained all its tokens.
        MonarchSlurmError: the run has only just been started.
    """
    with contextlib.suppress(FileNotFoundError):
        check_folder(folder, "to continue the run in it", root=False)
    if not (folder / JOURNAL).exists():
        if (folder / LOCK).exists():
            with alone_in(folder):  # or the one that starts has not come to write anything yet
                pass
        raise ConfigError(f"{folder} is not the folder of a run: it has no {JOURNAL}")
    if finished_report(folder) is not None:
        raise ConfigError(
            f"the run in {folder} has trained all its tokens and gets no longer; start a new one without --resume"
        )


def history(folder: Path) -> list[Event]:
    """Return the events of earlier starts of the run in ``folder`` in time order; none if there was no start."""
    if not (folder / JOURNAL).exists():
        return []
    events = read_journal(folder / JOURNAL)
    if (folder / REPORT).exists():  # steps are not in the journal, for there are too many
        events += EventIndex(load_report(folder, to_continue=True)["events"]).kind("step")
    return EventIndex(events).events


def last_config(events: Sequence[Event]) -> dict[str, Any] | None:
    """Return the description that the last start of a run had; None if there was none."""
    started = (
        e["config"] for e in reversed(events) if e["kind"] == "run_started" and isinstance(e.get("config"), dict)
    )
    return next(map(dict, started), None)


def check_changes(
    folder: Path, events: Sequence[Event], config: TrainConfig, allow_changed_data: bool = False
) -> Changes:
    """Return what is different in ``config`` from the last start of the run, of which ``events`` tell.

    Args:
        allow_changed_data: whether ``data`` may be another path.

    Raises:
        ConfigError: the run cannot go on with it.
    """
    last, wanted = last_config(events), config.to_dict()
    if last is None:
        return {}
    changes = {name: (last[name], value) for name, value in wanted.items() if name in last and last[name] != value}
    options = [without_steps(value) for value in changes.get("engine_options", ())]
    if options and options[0] == options[1]:
        del changes["engine_options"]  # how many steps there are is told as tokens
    fixed = [name for name in FIXED if name in changes and not (name == "data" and allow_changed_data)]
    if fixed:
        named = ", ".join(named_change(name, *changes[name]) for name in fixed)
        advice = "give --allow-changed-data if that is what you want" if fixed == ["data"] else "leave the option out"
        raise ConfigError(
            f"the run in {folder} cannot continue with {named}: its saved state depends on it; {advice}, or start a "
            "new run without --resume"
        )
    if "tokens" in changes and config.tokens <= (trained := saved_tokens(folder, events)):
        raise ConfigError(
            f"the run in {folder} cannot continue with --tokens {config.tokens}: its saved state has {trained} already"
        )
    return changes


def named_change(name: str, before: Any, now: Any) -> str:
    """Return a change in words: the option, its value now, and the one before."""
    if name == "engine_options":
        return f"other options after --: {' '.join(now)} (they were {' '.join(before)})"
    default = "its default"
    return (
        f"--{name.replace('_', '-')} {default if now is None else now} (it was {default if before is None else before})"
    )


def saved_tokens(folder: Path, events: Sequence[Event]) -> int:
    """Return how many tokens the run's saved state has trained; 0 if none was saved."""
    saved = find_saved(folder)
    if saved is None:
        return 0
    of_step = (e for e in reversed(events) if e["kind"] == "sync" and e.get("committed") and e["step"] == saved.step)
    return int(units.number(next(of_step, {}).get("tokens")) or 0)


def finished_report(folder: Path) -> dict[str, Any] | None:
    """Return the report of the run in ``folder``, if it has trained all its tokens."""
    if not (folder / REPORT).exists():
        return None
    report = load_report(folder, to_continue=True)
    return report if report["summary"].get("ok") else None
