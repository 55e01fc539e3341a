"""How two processes with a link agree on a payload channel. What they say travels on the link, which is encrypted.

The end that listens for links (a ROUTER) also listens for channels, at the same IP address; the other dials. If it
cannot, large frames travel on the link as well, in pieces, which is slower.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from typing import Any

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.wire.channel_keys import ID_BYTES, SECRET_BYTES, ChannelKeys
from monarch_slurm.wire.frames import WireError
from monarch_slurm.wire.limits import descriptors_left
from monarch_slurm.wire.loop import Loop
from monarch_slurm.wire.payload_channel import PayloadChannel
from monarch_slurm.wire.payload_listener import PayloadListener, dial
from monarch_slurm.wire.sealed_records import UNAVAILABLE
from monarch_slurm.wire.task_limits import start_thread

logger = logging.getLogger(__name__)

DIAL_SECONDS = 5.0
RETRY_SECONDS = 60.0
"""After a channel could not be opened, or has broken, none is tried for so long."""


class ChannelSetup:
    """The channels of one link. Everything happens on the loop's thread.

    Args:
        tell: sends a peer plain values.
        opened: called with a peer and the channel with it.
        failed: called with a peer with which there will be no channel for now.
        dialled: the endpoint that the link has dialled, ``tcp://host:port``; empty if it listens.
        endpoints: returns those that the link listens at.
    """

    def __init__(
        self,
        loop: Loop,
        tell: Callable[[str, dict[str, Any]], None],
        opened: Callable[[str, PayloadChannel], None],
        failed: Callable[[str], None],
        dialled: str = "",
        endpoints: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._loop = loop
        self._tell = tell
        self._opened = opened
        self._failed = failed
        self._dialled = dialled
        self._endpoints = endpoints
        self._listener = PayloadListener(loop)
        self._offered: dict[str, ChannelKeys] = {}
        self._asking: set[str] = set()
        self._not_before: dict[str, float] = {}
        self._told = self._closed = False

    def ask(self, peer: str) -> None:
        """Try to open a channel with ``peer``, unless that is under way or was tried a short time ago."""
        if peer in self._asking or self._closed:
            return
        if self._is_too_early(peer):
            self._failed(peer)
            return
        if UNAVAILABLE:
            self._give_up(peer, UNAVAILABLE)
            return
        self._asking.add(peer)
        self._tell(peer, {"op": "want", "endpoint": self._dialled} if self._dialled else {"op": "ask"})

    def take(self, peer: str, fields: dict[str, Any]) -> None:
        """Take what a peer says.

        Raises:
            WireError: it says what it should not.
        """
        operation = fields.get("op")
        if operation == "ask" and self._dialled:
            if self._is_too_early(peer):
                self._tell(peer, {"op": "failed", "why": "it has failed a short time ago"})
            elif UNAVAILABLE:
                self._tell(peer, {"op": "failed", "why": UNAVAILABLE})
            self.ask(peer)
        elif operation == "want" and not self._dialled:
            self._offer(peer, fields.get("endpoint"))
        elif operation == "offer" and self._dialled and peer in self._asking:
            self._dial(peer, fields)
        elif operation == "failed":
            self._give_up(peer, str(fields.get("why")))
        else:
            raise WireError(f"not what is said about a payload channel: {operation!r}")

    def broke(self, peer: str, why: str) -> None:
        """The channel with ``peer`` has ended."""
        logger.warning("the connection for large payloads with %s ended: %s. They travel on the control connection "
                       "now, which is slower", peer or "the controller", why)  # fmt: skip
        self._not_before[peer] = self._loop.clock() + RETRY_SECONDS

    def forget(self, peer: str) -> None:
        """Have nothing to do with ``peer`` any more."""
        self._asking.discard(peer)
        self._not_before.pop(peer, None)
        keys = self._offered.pop(peer, None)
        if keys is not None:
            self._listener.withdraw(keys)

    def close(self) -> None:
        """Open nothing more."""
        self._closed = True
        self._listener.close()

    def _is_too_early(self, peer: str) -> bool:
        return self._not_before.get(peer, 0.0) > self._loop.clock()

    # ---- the end that listens

    def _offer(self, peer: str, endpoint: object) -> None:
        self._asking.add(peer)
        old = self._offered.pop(peer, None)
        if old is not None:
            self._listener.withdraw(old)
        if endpoint not in self._endpoints():
            # Somebody in between listens at the address that the peer has dialled, and would not pass on a channel.
            self._refuse(peer, "it is reached through a gateway", expected=True)
            return
        ip = str(endpoint).removeprefix("tcp://").rpartition(":")[0].strip("[]")
        if UNAVAILABLE:
            self._refuse(peer, UNAVAILABLE)
            return
        if descriptors_left() < 2:
            self._refuse(peer, "too few file descriptors are left")
            return
        try:
            port, keys = self._listener.offer(
                ip, lambda channel: self._has_come(peer, channel), lambda: self._give_up(peer, "it has not connected")
            )
        except (OSError, MonarchSlurmError) as error:
            self._refuse(peer, f"no port can be listened at: {error}")
            return
        self._offered[peer] = keys
        self._tell(peer, {"op": "offer", "port": port, "id": keys.id, "secret": keys.secret})

    def _refuse(self, peer: str, why: str, expected: bool = False) -> None:
        self._tell(peer, {"op": "failed", "why": why})
        self._give_up(peer, why, expected)

    def _has_come(self, peer: str, channel: PayloadChannel) -> None:
        self._offered.pop(peer, None)
        self._asking.discard(peer)
        self._opened(peer, channel)

    # ---- the end that dials

    def _dial(self, peer: str, fields: dict[str, Any]) -> None:
        port, channel_id, secret = fields.get("port"), fields.get("id"), fields.get("secret")
        sound = isinstance(port, int) and isinstance(channel_id, bytes) and isinstance(secret, bytes)
        if not sound or (len(channel_id), len(secret)) != (ID_BYTES, SECRET_BYTES) or not 0 < port < 65536:  # type: ignore[arg-type,operator]
            raise WireError("not the offer of a payload channel")
        keys = ChannelKeys(channel_id, secret)  # type: ignore[arg-type]
        ip = self._dialled.removeprefix("tcp://").rpartition(":")[0].strip("[]")

        def work() -> None:
            try:
                channel = dial(self._loop, ip, port, keys, DIAL_SECONDS)  # type: ignore[arg-type]
            except OSError as error:
                why = f"cannot connect to {ip} port {port}: {error.strerror or error}"
                self._loop.call_soon(lambda: self._cannot(peer, why))
            else:
                self._loop.call_soon(lambda: self._came(peer, channel))

        try:
            start_thread(threading.Thread(target=work, name="payload-dial", daemon=True))
        except MonarchSlurmError as error:
            self._cannot(peer, str(error))

    def _came(self, peer: str, channel: PayloadChannel) -> None:
        if self._closed or peer not in self._asking:
            channel.close("it is not needed any more")
        else:
            self._asking.discard(peer)
            self._opened(peer, channel)

    def _cannot(self, peer: str, why: str) -> None:
        if not self._closed:
            self._tell(peer, {"op": "failed", "why": why})
            self._give_up(peer, why)

    def _give_up(self, peer: str, why: str, expected: bool = False) -> None:
        """Note that there is no channel with ``peer``; the end that listens, the program's, says so once."""
        self._asking.discard(peer)
        keys = self._offered.pop(peer, None)
        if keys is not None:
            self._listener.withdraw(keys)
        self._not_before[peer] = self._loop.clock() + RETRY_SECONDS
        told, self._told = self._told, True
        quiet = told or expected or bool(self._dialled)
        logger.log(
            logging.DEBUG if quiet else logging.WARNING,
            "no connection for large payloads with %s: %s. They travel on the control connection, which is slower",
            peer or "the controller", why,
        )  # fmt: skip
        self._failed(peer)
