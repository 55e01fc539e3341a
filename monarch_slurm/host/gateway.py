"""Reaching hosts through one worker: both ends of it.

A program that is not on the cluster's network attaches to one worker. The worker listens for agents on the program's
behalf, and dials other workers for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from monarch_slurm.host.attaching import AttachError, TryAgainError, ask_worker
from monarch_slurm.host.tunnel import Target, Tunnel
from monarch_slurm.host.worker_address import WorkerAddress, resolve, split_tcp
from monarch_slurm.wire import JobKeys, Loop, pack, unpack
from monarch_slurm.wire.task_limits import zmq_context

SILENCE_SECONDS = 60.0
"""After so long without a sign of life from its program, a tunnel is closed."""

PING_SECONDS = 5.0
LOOPBACK = "127.0.0.1"
_PAUSE_SECONDS = 0.2


class GatewayEnd:
    """The worker's end: the tunnels of programs that came for one, by the name of their connection."""

    def __init__(self, loop: Loop, reply: Callable[[bytes, dict[str, Any]], None], address: WorkerAddress) -> None:
        self._loop = loop
        self._reply = reply
        self._address = address
        self._tunnels: dict[bytes, Tunnel] = {}
        self._heard: dict[bytes, float] = {}
        """When each program was heard last, in the time in which this process could hear it."""

    def open(self, peer: bytes) -> dict[str, Any]:
        """Listen for agents of the program that is connected as ``peer``; return the answer to it."""
        if not self._address.bind.startswith("tcp:"):
            return {"accepted": False, "why": f"it listens at {self._address.bind}, not on a network", "later": False}

        def send(packet: dict[str, Any]) -> None:
            self._loop.call_soon(lambda: self._reply(peer, packet))

        tunnel = self._tunnels[peer] = Tunnel(send, 1, None)
        port = tunnel.listen(resolve(split_tcp(self._address.bind)[0]), None)
        self._heard[peer] = self._loop.awake
        self._loop.call_later(SILENCE_SECONDS, lambda: self._look(peer))
        return {"accepted": True, "relay": [self._address.host, port]}

    def take(self, peer: bytes, packet: dict[str, Any]) -> None:
        """Take a packet of a program."""
        tunnel = self._tunnels.get(peer)
        if tunnel is not None:
            self._heard[peer] = self._loop.awake
            tunnel.take(packet)

    def close(self) -> None:
        """End all tunnels."""
        for peer in list(self._tunnels):
            self._tunnels.pop(peer).close()

    def _look(self, peer: bytes) -> None:
        if self._loop.awake - self._heard[peer] > SILENCE_SECONDS:
            del self._heard[peer]
            self._tunnels.pop(peer).close()
        else:
            self._loop.call_later(SILENCE_SECONDS / 2, lambda: self._look(peer))


class Gateway:
    """The program's end.

    Args:
        keys: of `monarch_slurm.wire.shared_key.derive_keys`.
        address: of the worker.
        program: id of this program.
        hub: where the program listens for agents; asked when the first of them comes.
        timeout: seconds that the worker may take to come.

    Raises:
        AttachError: it cannot be had.
    """

    def __init__(
        self, keys: JobKeys, address: WorkerAddress, program: str, hub: Callable[[], Target], timeout: float
    ) -> None:
        end = time.monotonic() + timeout
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq_context()
        request = {"gateway": True, "identity": address.identity, "program": program}
        while True:
            try:
                self._socket, answer = ask_worker(self._context, keys, address.dial, request, lambda _: False)
                break
            except TryAgainError as error:
                if time.monotonic() > end:
                    raise AttachError(f"cannot attach to the worker {address}: {error}") from None
            except AttachError as error:
                raise AttachError(f"cannot attach to the worker {address}: {error}") from None
            time.sleep(_PAUSE_SECONDS)
        host, port = answer["relay"]
        self.relay = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        """What agents dial to reach this program."""
        self._urls: dict[str, str] = {}
        self._lock = threading.Lock()
        self._loop = Loop()
        self._tunnel = Tunnel(lambda packet: self._loop.call_soon(lambda: self._send(packet)), 0, hub)
        self._loop.call_soon(self._attach)
        self._loop.start("monarch-gateway")

    def reach(self, url: str) -> str:
        """Return what to dial in place of ``url``, which only the gateway reaches."""
        if not url.startswith("tcp:"):
            return url
        with self._lock:
            if url not in self._urls:
                host, port = split_tcp(url)
                self._urls[url] = f"tcp://{LOOPBACK}:{self._tunnel.listen(LOOPBACK, (host, int(port)))}"
            return self._urls[url]

    def _attach(self) -> None:
        self._loop.add_reader(int(self._socket.getsockopt(zmq.FD)), self._read)
        self._read()
        self._ping()

    def _ping(self) -> None:
        self._send({"op": "ping"})
        self._loop.call_later(PING_SECONDS, self._ping)

    def _send(self, packet: dict[str, Any]) -> None:
        with contextlib.suppress(zmq.Again):  # the gateway is gone; that its hosts are silent tells so
            self._socket.send(pack(packet), zmq.NOBLOCK)
        self._read()

    def _read(self) -> None:
        while True:
            try:
                self._tunnel.take(unpack(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return
