"""Who of the peers is still alive: heartbeats in, verdicts out. No I/O, no clock of its own."""

from __future__ import annotations


class Liveness:
    """Tells which peers have been silent for too long.

    Args:
        interval: seconds between two heartbeats of a peer.
        missed: a peer is dead after this many intervals of silence.
    """

    def __init__(self, interval: float, missed: int) -> None:
        self._limit = interval * missed
        self._heard: dict[str, float] = {}

    def heard(self, peer: str, now: float) -> None:
        """Note that something came from ``peer``; a new peer becomes watched."""
        self._heard[peer] = now

    def forget(self, peer: str) -> None:
        """Watch ``peer`` no longer."""
        self._heard.pop(peer, None)

    def silence(self, peer: str, now: float) -> float:
        """Return the seconds since ``peer`` was heard."""
        return now - self._heard[peer]

    def overslept(self, seconds: float) -> None:
        """Take ``seconds`` off every silence: this process did not run, so it could not have heard anybody."""
        for peer in self._heard:
            self._heard[peer] += seconds

    def dead(self, now: float) -> list[str]:
        """Return the peers that are dead at ``now``; each is told once and then forgotten."""
        gone = [peer for peer, heard in self._heard.items() if now - heard > self._limit]
        for peer in gone:
            del self._heard[peer]
        return gone
