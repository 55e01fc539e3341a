"""The events of a run: plain dicts, the only thing that the report and the live view know.

Every event has ``kind`` and ``t`` (seconds since the epoch, of the host where it happened). Events of a replica also
have ``replica`` and ``generation``, those of a trainer ``rank`` besides. The kinds and their further fields:

From trainers (`TRAINER_KINDS`):

- ``trainer_started``: ``pid``, ``host``
- ``engine_ready``: ``parameters`` (count), ``seconds`` since ``trainer_started``
- ``phase``: ``phase`` is ``"warmup"``, ``"compute"``, ``"sync"``, ``"eval"`` or ``"save"``; sent on every change, so
  that a step deadline can be told from a wait for others
- ``step``: ``step`` (inner steps done by this trainer's state), ``loss`` (training loss), ``tokens`` (committed tokens
  of the whole run so far), ``lr``, ``seconds``
- ``quorum_asked``: ``step`` (manager step)
- ``quorum``: ``quorum_id``, ``participants``, ``step``, ``healing`` (bool), ``seconds`` (wait)
- ``state_sent``: ``step``, ``bytes``, ``sha256``, ``to`` (count of receivers)
- ``state_received``: ``step``, ``bytes``, ``sha256``, ``seconds``
- ``sync``: ``step``, ``committed`` (bool), ``participants``, ``tokens`` (committed tokens of the run), ``seconds`` (the
  whole sync)
- ``eval``: ``step``, ``tokens``, ``loss`` (validation loss of the global parameters)
- ``saved``: ``step`` (manager step), ``sha256``, ``bytes``, ``seconds``: this rank's state is on the disk; or ``error``
- ``loaded``: ``step``, ``seconds``: this rank goes on from a state that was saved
- ``error``: ``error`` (last line), ``traceback``
- ``finished``: ``tokens``, ``step``, ``loss`` (final validation loss)

From the manager and the replica supervisors:

- ``run_started``: ``run``, ``config``, ``hosts``, ``versions``, ``step`` (manager step that it goes on from), ``job``
  (Slurm's number or None); once for each start of a run. ``run_finished``: ``ok`` (bool), ``reason``
- ``state_saved``: ``step``: a whole state is on the disk, from which the run can go on
- ``quorum_service``: ``epoch``: an actor that forms quorums was started; ``cause`` (text) if the one before has failed
- ``quorum_refused``: ``error``: a member claims a state that nobody can have, and the run stops
- ``lighthouse``: ``address``: TorchFT's Lighthouse forms the quorums
- ``injected``: ``failure`` (running number), ``type`` (``kill``, ``segfault``, ``exception``, ``hang``), ``rank``
- ``detected``: ``failure`` (None if it was not injected), ``cause`` (text), ``host``, ``proc``, ``rank``, ``exit``
  (text such as ``"Killed(sig=9)"``), ``traceback`` (or None), ``stderr_tail`` (list of lines)
- ``respawn``: ``level`` (``"mesh"``, ``"hosts"``, or ``"supervisor"`` if that has failed), ``attempt``: a new mesh is
  about to be started
- ``escalated``: ``level``, ``reason``
- ``replica_lost``: ``reason``, ``awaits_host``: the replica will not be started again, or, if ``awaits_host``, not
  before its host is back or another has taken its place
- ``host_lost``: ``host``, ``cause``, ``replaced_by`` (name of the host in its place; empty if there is none)
"""

from __future__ import annotations

import time
from typing import Any

Event = dict[str, Any]

TRAINER_KINDS = frozenset(
    {
        "trainer_started",
        "engine_ready",
        "phase",
        "step",
        "quorum_asked",
        "quorum",
        "state_sent",
        "state_received",
        "sync",
        "eval",
        "saved",
        "loaded",
        "error",
        "finished",
    }
)


def event(kind: str, **fields: Any) -> Event:
    """Return an event of ``kind`` stamped with the present time."""
    return {"kind": kind, "t": time.time(), **fields}
