"""Log records of actors say which actor they are of."""

from __future__ import annotations

import logging
from typing import Any

from monarch_slurm.actor import config
from monarch_slurm.actor.context import acting_instance


def prefix_log_records() -> None:
    """Let every log record that an actor of this process makes begin with its name, and have it as ``actor_prefix``. So
    do records of the program's threads that have called `context`, with ``<root>``.

    Empty messages stay empty: torch's structured logging needs them so.
    """
    make = logging.getLogRecordFactory()

    def make_prefixed(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        actor = acting_instance()
        prefix = f"[actor={actor}] " if actor is not None else ""
        record.__dict__["actor_prefix"] = prefix
        if prefix and record.msg and config.prefix_python_logs_with_actor:
            record.msg = f"{prefix.replace('%', '%%') if record.args else prefix}{record.msg}"
        return record

    logging.setLogRecordFactory(make_prefixed)
