"""Which procs a process has called how often, and which of them it has asked for a direct link. No I/O."""

from __future__ import annotations

import os

from monarch_slurm.config import settings

_MAX_COUNTED = 4096
"""Procs whose calls are counted."""

_AGAIN_AFTER = 1000
"""Calls after which a proc that had no room for a link is asked again."""


class Asks:
    """The procs that one process has asked for a link, by name. The caller holds a lock."""

    def __init__(self) -> None:
        self.after: int | None = None
        """Calls after which a proc is asked; 0: never. None: as the setting says."""
        self._calls: dict[str, int] = {}
        self._tokens: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def count(self, name: str) -> bool:
        """Count a call of a proc that was not asked; return whether it is to be asked now."""
        if self.after is None:
            self.after = settings().direct_link_after
        calls = self._calls.get(name, 0) + 1
        due = 0 < self.after <= calls
        if len(self._calls) >= _MAX_COUNTED:
            self._calls.clear()
        self._calls[name] = -_AGAIN_AFTER if due else calls
        return due

    def ask(self, name: str) -> str:
        """Note that a proc is asked; return what its answer has to tell."""
        token = self._tokens[name] = os.urandom(8).hex()
        return token

    def answered(self, name: str, token: str) -> bool:
        """A proc has answered; return whether that is the answer which is waited for."""
        if self._tokens.get(name) != token:
            return False
        del self._tokens[name]
        return True

    def withdraw(self, name: str) -> None:
        """Wait no longer for the answer of a proc."""
        self._tokens.pop(name, None)

    def forget(self, name: str) -> None:
        """A proc has ended."""
        self._tokens.pop(name, None)
        self._calls.pop(name, None)
