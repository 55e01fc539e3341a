"""Where each trainer is in its data, on disk: for a dataloader whose position does not follow from a count of steps.

Every rank of every replica writes its own position after each committed sync, as JSON, into the run's folder. A replica
that starts again reads it there and goes on in its own part of the data, whatever replica gives it the run's state. A
position that is not found, since the folder is not on a file system that all hosts share, costs a second look at data.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from pathlib import Path
from typing import Any

from monarch_slurm.owned_files import LARGE_BYTES, FileRefusedError, make_folders, read_owned, write_whole

logger = logging.getLogger(__name__)

_FOLDER = "positions"
_NAME = re.compile(r"step-([0-9]+)\.json")


class Positions:
    """The positions of one rank of one replica.

    Args:
        folder: of the run.
        replica: index of the replica, ``rank`` that of the trainer in it.
        save_every: committed syncs from one saved state of the run to the next; 0 if there are none on the way.
        keep: how many saved states are kept.
    """

    def __init__(self, folder: str, replica: int, rank: int, save_every: int, keep: int) -> None:
        self._folder = Path(folder, _FOLDER, f"replica-{replica}", f"rank-{rank}")
        self._save_every, self._keep = save_every, keep

    def write(self, step: int, position: Any) -> None:
        """Write the position after the sync that made ``step``, and remove those that nobody goes back to.

        Later ones are of an earlier start of the run, which went further than what it has saved.

        Raises:
            TypeError, ValueError: JSON cannot hold it.
        """
        text = json.dumps(position)
        path = self._folder / f"step-{step}.json"
        try:
            make_folders(self._folder)
            write_whole(path, text.encode())
            self._prune(step)
        except (OSError, FileRefusedError) as error:  # the run itself can go on
            logger.warning("cannot write %s: %s", path, error)

    def read(self, step: int) -> Any:
        """Return the newest position at or before ``step``, that of the state that the run goes on from.

        An older one shows some data twice. A newer one would pass data over, and is taken only if there is no other;
        None if there is none at all.
        """
        steps = self._steps()
        if not steps or step == 0:
            return None
        chosen = max((known for known in steps if known <= step), default=steps[0])
        path = self._folder / f"step-{chosen}.json"
        try:
            return json.loads(read_owned(path, "to go on from it", limit=LARGE_BYTES))
        except (OSError, ValueError, RecursionError, FileRefusedError) as error:
            logger.warning("cannot read the position in %s: %s", path, error)
            return None

    def _steps(self) -> list[int]:
        try:
            names = [_NAME.fullmatch(path.name) for path in self._folder.iterdir()]
        except OSError:
            return []
        return sorted(int(name.group(1)) for name in names if name is not None)

    def _prune(self, now: int) -> None:
        known = self._steps()
        past = [step for step in known if step <= now]
        kept = set(past[-2:])
        if self._save_every > 0:
            kept.update([step for step in past if step % self._save_every == 0][-self._keep - 1 :])
        for step in known:
            if step not in kept:
                with contextlib.suppress(OSError):
                    (self._folder / f"step-{step}.json").unlink()
