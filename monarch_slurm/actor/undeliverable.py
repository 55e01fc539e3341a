"""Messages that have not reached their actor, as an actor that sent them gets to see them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UndeliverableMessageEnvelope:
    """What ``_handle_undeliverable_message`` is told of: a message without an answer that came to nobody."""

    _sender: str
    _dest: str
    _error_msg: str

    def sender(self) -> str:
        """Return the name of the actor that sent it."""
        return self._sender

    def dest(self) -> str:
        """Return the name of the actor that it was for, with the endpoint."""
        return self._dest

    def error_msg(self) -> str:
        """Return why it has not come there."""
        return self._error_msg

    def __str__(self) -> str:
        return f"undeliverable message for {self._dest} of {self._sender}: {self._error_msg}"
