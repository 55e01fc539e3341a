"""Which peers on other machines are still there: signs of life in, verdicts out. No I/O, no clock of its own."""

from __future__ import annotations


class Liveness:
    """Tells which peers are lost.

    There are two signs of life. A peer says something itself; or its machine acknowledges what it is sent, which a
    kernel does also for a process that is busy, stopped or swapped out. Each has its own limit.

    All times are of an `AwakeClock`: only the time counts in which a peer could have been heard.

    Args:
        machine_limit: seconds of silence of a machine, after which its peer is lost.
        peer_limit: seconds that a peer may say nothing while its machine answers.
    """

    def __init__(self, machine_limit: float, peer_limit: float) -> None:
        self._machine_limit = machine_limit
        self.peer_limit = peer_limit
        self._heard: dict[str, float] = {}
        self._answered: dict[str, float] = {}

    def heard(self, peer: str, now: float) -> None:
        """Note that something came from ``peer``; a new peer becomes watched."""
        self._heard[peer] = self._answered[peer] = now

    def answered(self, peer: str, at: float) -> None:
        """Note that the machine of ``peer`` answered at the time ``at``."""
        self._answered[peer] = max(self._answered[peer], at)

    def forget(self, peer: str) -> None:
        """Watch ``peer`` no longer."""
        self._heard.pop(peer, None)
        self._answered.pop(peer, None)

    def silent(self, now: float, seconds: float) -> list[str]:
        """Return the peers that have said nothing for ``seconds``: their machines are to be looked at."""
        return [peer for peer, heard in self._heard.items() if now - heard >= seconds]

    def lost(self, now: float) -> list[tuple[str, bool]]:
        """Return the peers that are lost at ``now``, and whether their machines still answer.

        Each is returned once, and then forgotten.
        """
        found = []
        for peer, heard in self._heard.items():
            if now - self._answered[peer] > self._machine_limit:
                found.append((peer, False))
            elif now - heard > max(self.peer_limit, self._machine_limit):
                found.append((peer, True))
        for peer, _ in found:
            self.forget(peer)
        return found
