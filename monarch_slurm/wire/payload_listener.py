"""Where the other end of a payload channel connects: a TCP port that is open only while somebody is expected."""

from __future__ import annotations

import hmac
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass

from monarch_slurm.wire.admission import PROOF_SECONDS, Admission, StrangerLog
from monarch_slurm.wire.channel_keys import GREETING_BYTES, ID_BYTES, PROOF_BYTES, ChannelKeys
from monarch_slurm.wire.guarded_listener import SHORTAGE_SECONDS, SHORTAGES, ShortageLog
from monarch_slurm.wire.loop import Loop, Timer
from monarch_slurm.wire.origin import Origin, origin_of
from monarch_slurm.wire.payload_channel import PayloadChannel
from monarch_slurm.wire.ports import listen_tcp

logger = logging.getLogger(__name__)

OFFER_SECONDS = 10.0
"""How long a host that was offered a channel may take to connect."""

_BACKLOG = 128

Opened = Callable[[PayloadChannel], None]


@dataclass
class _Offer:
    keys: ChannelKeys
    ip: str
    opened: Opened
    timer: Timer


class _Unproved:
    """A connection that was accepted, and what it has said."""

    def __init__(self, connection: socket.socket, origin: Origin) -> None:
        self.connection = connection
        self.fd = connection.fileno()
        self.origin = origin
        self.said = b""


class PayloadListener:
    """Offers channels. Everything happens on its loop's thread."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._offers: dict[bytes, _Offer] = {}
        self._listeners: dict[str, socket.socket] = {}
        self._unproved: dict[int, _Unproved] = {}
        self._admission: Admission[_Unproved] = Admission()
        self._strangers = StrangerLog("the port for payload channels", "do not hold the key of a channel")
        self._shortages = ShortageLog("the port for payload channels can take no connection now, and tries again")

    def offer(self, ip: str, opened: Opened, expired: Callable[[], None]) -> tuple[int, ChannelKeys]:
        """Expect a connection at a port of ``ip``, which is returned with the keys of the channel.

        Args:
            opened: called with the channel when it is there.
            expired: called when nobody has come in `OFFER_SECONDS`.

        Raises:
            OSError: nothing can be listened at.
            ConfigError: the setting ``port_range`` is no range.
        """
        listener = self._listeners.get(ip)
        if listener is None:
            listener = self._listeners[ip] = listen_tcp(ip, _BACKLOG)
            listener.setblocking(False)
            self._loop.add_reader(listener.fileno(), lambda: self._accept(listener))
        keys = ChannelKeys.make()

        def expire() -> None:
            if self._withdraw(keys.id):
                expired()

        timer = self._loop.call_at_deadline(OFFER_SECONDS, expire)
        self._offers[keys.id] = _Offer(keys, ip, opened, timer)
        return listener.getsockname()[1], keys

    def withdraw(self, keys: ChannelKeys) -> None:
        """Expect nobody with these keys any more."""
        self._withdraw(keys.id)

    def close(self) -> None:
        """Expect nobody any more."""
        for channel_id in list(self._offers):
            self._withdraw(channel_id)
        self._strangers.flush()

    def _withdraw(self, channel_id: bytes) -> _Offer | None:
        offer = self._offers.pop(channel_id, None)
        if offer is None:
            return None
        offer.timer.cancel()
        if not any(other.ip == offer.ip for other in self._offers.values()):
            listener = self._listeners.pop(offer.ip)
            self._loop.remove_reader(listener.fileno())
            listener.close()
        if not self._offers:
            for unproved in list(self._unproved.values()):
                self._hang_up(unproved)
        return offer

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in SHORTAGES:
                self._shortages.note(error.errno)
                fd = listener.fileno()
                self._loop.pause_reader(fd)
                self._loop.call_later(SHORTAGE_SECONDS, lambda: self._loop.resume_reader(fd))
            return  # or it has hung up already
        try:
            connection.setblocking(False)
            origin = origin_of(connection)
        except OSError:  # it has hung up already
            connection.close()
            return
        unproved = self._unproved[connection.fileno()] = _Unproved(connection, origin)
        self._loop.add_reader(unproved.fd, lambda: self._read(unproved))
        self._refuse(self._admission.enter(unproved, origin, self._loop.awake))
        self._loop.call_at_deadline(PROOF_SECONDS, lambda: self._refuse(self._admission.overdue(self._loop.awake)))

    def _refuse(self, strangers: list[tuple[_Unproved, Origin]]) -> None:
        for unproved, origin in strangers:
            self._strangers.note(origin)
            self._hang_up(unproved)

    def _read(self, unproved: _Unproved) -> None:
        try:
            said = unproved.connection.recv(GREETING_BYTES - len(unproved.said))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        unproved.said += said
        if not said:
            self._refuse([(unproved, unproved.origin)])
        elif len(unproved.said) == GREETING_BYTES:
            self._judge(unproved)

    def _judge(self, unproved: _Unproved) -> None:
        offer = self._offers.get(unproved.said[:ID_BYTES])
        if offer is None or not hmac.compare_digest(unproved.said, offer.keys.greeting()):
            self._refuse([(unproved, unproved.origin)])
            return
        self._forget(unproved)
        self._withdraw(offer.keys.id)  # so that nobody can say the same once more
        try:
            unproved.connection.sendall(offer.keys.answer())
            channel = PayloadChannel(self._loop, unproved.connection, *offer.keys.listener())
        except OSError as error:
            logger.debug("a payload channel ended at once: %s", error)
            unproved.connection.close()
            return
        offer.opened(channel)

    def _forget(self, unproved: _Unproved) -> None:
        self._admission.forget(unproved)
        del self._unproved[unproved.fd]
        self._loop.remove_reader(unproved.fd)

    def _hang_up(self, unproved: _Unproved) -> None:
        self._forget(unproved)
        unproved.connection.close()


def dial(loop: Loop, ip: str, port: int, keys: ChannelKeys, timeout: float) -> PayloadChannel:
    """Return the channel that another process has offered. May wait; for any thread.

    Args:
        timeout: seconds for each step.

    Raises:
        OSError: it cannot be reached, or does not hold the keys.
    """
    connection = socket.create_connection((ip, port), timeout)
    try:
        connection.sendall(keys.greeting())
        answer = b""
        while len(answer) < PROOF_BYTES and (said := connection.recv(PROOF_BYTES - len(answer))):
            answer += said
        if not hmac.compare_digest(answer, keys.answer()):
            raise ConnectionError("whatever listens there does not hold the key of the channel")  # noqa: TRY301
        return PayloadChannel(loop, connection, *keys.dialer())
    except BaseException:
        connection.close()
        raise
