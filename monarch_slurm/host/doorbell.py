"""Whether a process still listens at its address, without waiting for an answer."""

from __future__ import annotations

import errno
import socket

from monarch_slurm.host.worker_address import resolve, split_tcp

_REFUSALS = 2
"""So many in a row tell that nothing listens there."""


class Doorbell:
    """Dials an address each time that it is asked.

    A machine refuses when nothing listens. One that is cut off, or too busy, does not answer at all.

    Args:
        address: ``tcp://host:port``.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._dialled: socket.socket | None = None
        self._refusals = 0

    def is_gone(self) -> bool:
        """Dial; return whether that, or the last time, has been refused, and was so when this was asked before."""
        answers = self._answer_to_last(), self._dial()
        self._refusals = self._refusals + 1 if errno.ECONNREFUSED in answers else 0
        return self._refusals >= _REFUSALS

    def _answer_to_last(self) -> int:
        """Return the error that came since the last time; 0 for none."""
        if self._dialled is None:
            return 0
        with self._dialled:
            answer = self._dialled.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self._dialled = None
        return answer

    def _dial(self) -> int:
        """Return the error that is known at once; 0 for none."""
        host, port = split_tcp(self._address)
        try:
            ip = resolve(host)
            self._dialled = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
        except OSError:  # no descriptor is left: nothing is known of the other end
            return 0
        self._dialled.setblocking(False)
        return self._dialled.connect_ex((ip, int(port)))
