"""What a stranger tries on the listeners and files of somebody else's program; prints a line of JSON.

    python attacks.py UID TARGETS PIDS FOLDERS

TARGETS (ADDRESS:PORT), PIDS and FOLDERS are separated by commas. It imports what a stranger would have installed too,
becomes user UID, and has nothing else of the program that it attacks: no key, no file. What it prints maps each attack
to what came of it that should not have: nothing, if all is well.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import zmq
from torchft._torchft import LighthouseClient, ManagerClient
from victims import is_store

from monarch_slurm.train.transfer import StateTransport

SECOND = timedelta(seconds=1)
HELD = 60
"""Connections that say the same at one port."""
FLOOD_SECONDS = 4.0

ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x00"
SAID = {
    "nothing": b"",
    "garbage": bytes(range(256)) * 16,
    "a huge length": b"\xff" * 8 + b"\x7f" * 64,
    "HTTP": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n",
    "ZeroMQ without a key": ZMTP + b"NULL".ljust(20, b"\0") + bytes(32),
    "ZeroMQ with a key": ZMTP + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x06" + struct.pack(">Q", 2**30),
    "a store's request": b"\x00\xce\xf7\x85\x3c\x01" + b"\xff" * 7 + b"\x0f",
}

Attack = Callable[[str, int], Any]


def http_status(address: str, port: int) -> Any:
    """The dashboard of TorchFT's Lighthouse, and its kill button."""
    found = []
    for method, path in (("GET", "/status"), ("POST", "/replica/replica_000000/kill")):
        connection = http.client.HTTPConnection(address, port, timeout=1.0)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request(method, path)
            found.append(connection.getresponse().status)
    return found


def manager_metadata(address: str, port: int) -> Any:
    """What a manager of TorchFT tells a replica that needs the state."""
    with contextlib.suppress(RuntimeError, TimeoutError):
        return ManagerClient(f"http://{address}:{port}", SECOND)._checkpoint_metadata(0, SECOND)


def lighthouse_member(address: str, port: int) -> Any:
    """Heartbeats of a member that nobody started, and a quorum in which it is a million syncs ahead."""
    with contextlib.suppress(RuntimeError, TimeoutError):
        client = LighthouseClient(f"http://{address}:{port}", SECOND)
        client.heartbeat("stranger")
        return "heartbeat"


def store_keys(address: str, port: int) -> Any:
    """A torch store, by which ranks find each other."""
    return is_store(address, port)


def state(address: str, port: int) -> Any:
    """The weights, asked for as a replica does, by the names that replicas have."""
    own = StateTransport("127.0.0.1", 1.0, {})
    own.expect(1, "replica_000001", bytes(32), None)
    try:
        return sorted(own.recv_checkpoint(0, f"{port} {address}", 1, SECOND))
    except OSError:
        return None
    finally:
        own.shutdown()


def messages(address: str, port: int) -> Any:
    """Messages to the controller: in the clear, and with a key of the stranger's own."""
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context:
        for is_encrypted in (False, True):
            with context.socket(zmq.DEALER) as dealer:
                dealer.linger = 0
                if is_encrypted:
                    dealer.curve_publickey, dealer.curve_secretkey, dealer.curve_serverkey = public, secret, public
                dealer.connect(f"tcp://{address}:{port}")
                dealer.send(b"hello")
                if dealer.poll(500):
                    return dealer.recv()
    return None


def floods(address: str, port: int) -> Any:
    """Many connections that say something odd, or nothing, and stay."""
    held = []
    end = time.monotonic() + FLOOD_SECONDS
    for said in list(SAID.values()) * HELD:
        if time.monotonic() < end:
            connection = socket.socket()
            connection.settimeout(1.0)
            with contextlib.suppress(OSError):
                connection.connect((address, port))
                connection.sendall(said)
                connection.setblocking(False)
                held.append(connection)
    time.sleep(max(0.0, end - time.monotonic()))
    for connection in held:
        connection.close()


def files(folders: list[Path]) -> list[str]:
    """Names and contents below folders."""
    found = []
    for folder in folders:
        with contextlib.suppress(OSError):
            found += [str(path) for path in folder.rglob("*")]
    return found


def processes(pids: list[int]) -> list[str]:
    """Environments of processes, and signals to them."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found.append(f"environment of {pid}: {Path(f'/proc/{pid}/environ').read_bytes()[:20]!r}")
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
            found.append(f"signal to {pid}")
    return found


ATTACKS: tuple[Attack, ...] = (state, http_status, manager_metadata, lighthouse_member, store_keys, messages, floods)


def main() -> None:
    uid, targets, pids, folders = sys.argv[1:]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    importlib.import_module("encodings.idna")  # read later, from a folder that may be closed to the other user
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
    os.chdir("/")
    work = [(attack, *target.rsplit(":", 1)) for attack in ATTACKS for target in targets.split(",") if target]
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda item: item[0](item[1], int(item[2])), work))
    found = {
        f"{attack.__name__} at {address}:{port}": repr(answer)
        for (attack, address, port), answer in zip(work, answers, strict=True)
        if answer
    }
    for name, more in (
        ("files", files([Path(folder) for folder in folders.split(",") if folder])),
        ("processes", processes([int(pid) for pid in pids.split(",") if pid])),
    ):
        found |= {name: repr(more)} if more else {}
    print(json.dumps({"uid": os.getuid(), "found": found}), flush=True)


if __name__ == "__main__":
    main()
