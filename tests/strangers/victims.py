"""Programs that strangers attack, what listens in them, and what a listener says to who has no proof."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import REPOSITORY, descendants

STRANGER = 65534
"""A user who has nothing to do with the programs: nobody."""

FAILURES = {"detected", "respawn", "escalated", "replica_lost", "host_lost", "error", "quorum_refused", "state_sent"}
"""Kinds of events of a run that only a failure brings about."""

only_root = pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, which takes root")

NULL_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
STORE_PING = b"\x00" + struct.pack("=I", 0x3C85F7CE) + b"\x0d" + b"ping"
"""What a client of a ``TCPStore`` says first, and four bytes that come back."""
_SILENCE = 2.0  # seconds after which a listener is taken to say nothing


@dataclass(frozen=True)
class Listener:
    """A TCP socket that listens.

    Attributes:
        process: what the process is, in the words of site/security.md.
        address: it is bound to.
        port: likewise.
    """

    process: str
    address: str
    port: int


def family(pid: int) -> list[int]:
    """A process and those under it."""
    return [pid, *descendants(pid)]


def listeners(pids: list[int]) -> list[Listener]:
    """All that listens on TCP in processes, in whichever network namespace."""
    found = []
    for pid in pids:
        try:
            inodes = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
            rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):  # it has ended, or closed something, meanwhile
            continue
        for row in rows:
            if row[3] == "0A" and f"socket:[{row[9]}]" in inodes:
                address, _, port = row[1].partition(":")
                plain = socket.inet_ntoa(struct.pack("=I", int(address, 16)))
                found.append(Listener(kind_of(line), plain, int(port, 16)))
    return found


def kind_of(line: str) -> str:
    """What a process with that command line is, in the words of site/security.md."""
    named = re.match(r"monarch_slurm proc ([a-z_]+)", line)
    if named is not None:
        return {"trainer": "trainer", "lighthouse": "lighthouse"}.get(named[1], "proc")
    return "agent" if "monarch_slurm.host" in line else "controller"


def answer_of(listener: Listener) -> str:
    """What a listener answers a stranger with, in the words of site/security.md."""
    # In two parts: a socket of ZeroMQ hangs up on the second one, and what it has sent may be lost with that.
    said = reply(listener.address, listener.port, NULL_GREETING[:10], NULL_GREETING[10:])
    if said.startswith(b"\xff"):
        return "a ZeroMQ greeting"
    if len(said) == 32:
        return "32 random bytes"
    if not said and is_store(listener.address, listener.port):
        return "everything: it is a TCPStore"
    return repr(said) if said else "nothing"


def is_store(address: str, port: int) -> bool:
    """Whether a ``TCPStore`` of torch listens there, and answers whoever asks."""
    return reply(address, port, STORE_PING).endswith(STORE_PING[-4:])


def reply(address: str, port: int, *parts: bytes) -> bytes:
    """Return the first answer to ``parts``, which are sent one after the other as long as none comes."""
    came = b""
    with socket.create_connection((address, port), timeout=5) as connection:
        connection.settimeout(_SILENCE)
        for part in parts:
            with contextlib.suppress(TimeoutError, ConnectionError):
                connection.sendall(part)
                while len(came) < 4096 and (piece := connection.recv(4096)):
                    came += piece
            if came:
                break
    return came


def listed() -> dict[tuple[str, str], str]:
    """The page's table of listeners, but for those that an option opens: process and answer, with the name."""
    page = (REPOSITORY / "site" / "security.md").read_text()
    table = page.partition("\n## Listeners\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    head, _, *body = rows
    name, process, answer = (head.index(title) for title in ("Listener", "Process", "A stranger gets"))
    return {
        (kind.strip(), row[answer].partition(";")[0]): row[name]
        for row in body
        for kind in row[process].split(",")
        if not row[name].startswith("with `--")
    }


def unlisted(found: list[Listener]) -> list[tuple[Listener, str]]:
    """Return the listeners that the page does not list, or that answer otherwise than it says."""
    known = listed()
    with ThreadPoolExecutor(16) as pool:
        answers = list(zip(found, pool.map(answer_of, found), strict=True))
    return [(listener, answer) for listener, answer in answers if (listener.process, answer) not in known]


def attack(
    listening: list[Listener], pids: list[int], folders: list[Path], within: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Try all of `attacks` as another user; return what was found that should not be.

    Args:
        within: a command that it is started by, such as one that enters the namespaces of another host.
    """
    targets = [f"{listener.address}:{listener.port}" for listener in listening]
    lists = [",".join(map(str, values)) for values in (targets, pids, folders)]
    command = [*within, sys.executable, str(Path(__file__).with_name("attacks.py")), str(STRANGER), *lists]
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    env = {**os.environ, "PYTHONPATH": path, "RUST_LOG": "off"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/", env=env)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["uid"] == STRANGER
    return said["found"]  # type: ignore[no-any-return]


class Training:
    """A training run on this machine that trains until it is closed."""

    def __init__(self, folder: Path, replicas: int = 2) -> None:
        self.replicas = replicas
        self.out = folder / "out"
        options = "--model tiny --seq-len 32 --batch-size 1 --tokens 100000000 --reference none"
        deadlines = "--step-deadline 120 --sync-deadline 240"
        command = [sys.executable, "-m", "monarch_slurm", "train", "--local", "--replicas", str(replicas)]
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        self.log = folder / "log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [*command, *options.split(), *deadlines.split(), "--out", str(self.out)],
                stdout=log, stderr=log, env=env, cwd=folder, start_new_session=True,
            )  # fmt: skip

    def events(self) -> list[dict[str, Any]]:
        found = []
        for journal in self.out.glob("*/journal.jsonl"):
            found += [json.loads(line) for line in journal.read_text().split("\n")[:-1]]
        return found

    def syncs(self, after: int = 0) -> list[dict[str, Any]]:
        """Syncs that the run has committed, from the event of that number on."""
        return [item for item in self.events()[after:] if item["kind"] == "sync"]

    def failures(self) -> list[dict[str, Any]]:
        """What has gone wrong in the run so far."""
        return [item for item in self.events() if item["kind"] in FAILURES]

    def text(self) -> str:
        """All that the run and its processes have written."""
        logs = [
            self.log,
            *(path for path in self.out.rglob("*") if path.is_file() and path.suffix in (".log", ".jsonl")),
        ]
        return "\n".join(path.read_text(errors="replace") for path in logs)

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
