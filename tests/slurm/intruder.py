"""What another user tries on a node where a job runs; prints a line of JSON. Run by a Python without this package."""

import json
import os
import socket
import struct
import sys

NULL_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
ERRORS = (OSError, ValueError)


def read(path):
    try:
        with open(path, "rb") as file:
            return file.read(1000).decode(errors="replace")
    except ERRORS as error:
        return type(error).__name__


def listing(path):
    try:
        return sorted(os.listdir(path))
    except ERRORS as error:
        return type(error).__name__


def unix(path):
    """Connect to a Unix socket and return what it says, or why not."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        try:
            client.connect(path)
            client.sendall(struct.pack("<I", 2) + b"\x81\xa0")
            return client.recv(100).decode(errors="replace")
        except ERRORS as error:
            return type(error).__name__


def tcp(address, port):
    """Speak ZeroMQ without a key, and return what comes after the greeting."""
    try:
        with socket.create_connection((address, port), timeout=5) as client:
            client.settimeout(5)
            client.sendall(NULL_GREETING)
            said = b""
            while len(said) < 64:
                part = client.recv(64 - len(said))
                if not part:
                    return "closed"
                said += part
            return client.recv(100).hex() or "closed"
    except ERRORS as error:
        return type(error).__name__


def console_names():
    with open("/proc/net/unix") as file:
        return sorted({line.split()[-1] for line in file if " @monarch" in line})


folder, sockets, address, port, target = sys.argv[1:6]
found = {
    "uid": os.getuid(),
    "folder": listing(folder),
    "files": [
        read(os.path.join(folder, name)) for name in ("controller.json", "admin.json", "controller.log", "batch.log")
    ],
    "logs": listing(os.path.join(folder, "logs")),
    "sockets": listing(sockets),
    "socket": unix(os.path.join(sockets, "agent.sock")),
    "consoles": {name: unix("\0" + name[1:]) for name in console_names()},
    "tcp": tcp(address, int(port)),
    "environ": read(f"/proc/{target}/environ"),
}
try:
    os.kill(int(target), 15)
    found["kill"] = "killed"
except ERRORS as error:
    found["kill"] = type(error).__name__
print(json.dumps(found), flush=True)
