"""Workers of programs that torchrun, or the like, has started: each node's first rank starts one, and rank 0 attaches.

Only addresses and the path of the key file go through the store, which need not be private. The key itself is in a file
that its owner alone can read.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from monarch_slurm.actor import NoKeyError, make_worker_key
from monarch_slurm.interpreter import module_command, python_environment
from monarch_slurm.job.errors import JobSpecError
from monarch_slurm.job.folder import FOLDER_VARIABLE
from monarch_slurm.wire.shared_key import KEY_VARIABLE

_WORKER = "monarch_slurm.job.store_worker"
_ADDRESS_KEY = "monarch/spmd/workers/{}"
_KEY_FILE_KEY = "monarch/spmd/key_file"


class StoreLike(Protocol):
    """The part of ``torch.distributed.Store`` that is needed."""

    def set(self, key: str, value: str | bytes) -> None:
        """Keep ``value``."""

    def get(self, key: str) -> bytes:
        """Return what was kept, waiting until it is there."""


def workers_from_store(
    store: StoreLike,
    *,
    monarch_port: int = 0,
    name: str = "monarch_worker",
    transport: str = "ipc",
    rank: int | None = None,
    local_rank: int | None = None,
    world_size: int | None = None,
    local_world_size: int | None = None,
) -> tuple[list[str], Path] | None:
    """Start the worker of this node, on its first rank; return the addresses of all, and their key file, on rank 0.

    To be called on every rank. A worker ends with the process that has started it.

    Args:
        monarch_port: port that workers listen on, with ``transport="tcp"``.
        transport: ``"ipc"``, if all ranks run on one machine, or ``"tcp"``.
        rank, local_rank, world_size, local_world_size: None takes what torchrun has put into the environment.

    Raises:
        RuntimeError: a rank or size is neither given nor in the environment.
        JobSpecError: sizes, transport and port do not make sense. It is a ValueError.
        NoKeyError: workers of several machines need a key, and none is named.
    """
    rank = _place("RANK", rank)
    local_rank = _place("LOCAL_RANK", local_rank)
    world_size = _place("WORLD_SIZE", world_size)
    local_world_size = _place("LOCAL_WORLD_SIZE", local_world_size)
    if local_world_size < 1 or world_size % local_world_size:
        raise JobSpecError(f"WORLD_SIZE ({world_size}) must be divisible by LOCAL_WORLD_SIZE ({local_world_size})")
    if transport not in ("ipc", "tcp"):
        raise JobSpecError(f"unsupported transport {transport!r}: 'ipc' (one machine) or 'tcp' expected")
    if transport == "tcp" and not 0 < monarch_port < 2**16:
        raise JobSpecError(f"monarch_port {monarch_port}: with transport='tcp', name a port from 1 to 65535")
    key_file = os.environ.get(KEY_VARIABLE)
    if not key_file and transport == "tcp" and not os.environ.get(FOLDER_VARIABLE):
        raise NoKeyError(
            f"workers of several machines need a key that all can read: name its file in {KEY_VARIABLE} "
            "(monarch_slurm.actor.make_worker_key makes one)"
        )
    if not key_file and rank == 0:
        key_file = str(make_worker_key(_private_folder() / f"workers-{os.getpid()}-{os.urandom(4).hex()}.key"))
        store.set(_KEY_FILE_KEY, key_file)
    if local_rank == 0:
        key_file = key_file or store.get(_KEY_FILE_KEY).decode()
        group = rank // local_world_size
        store.set(_ADDRESS_KEY.format(group), _start_worker(transport, monarch_port, f"{name}_{group}", key_file))
    if rank != 0:
        return None
    assert key_file is not None
    addresses = [store.get(_ADDRESS_KEY.format(group)).decode() for group in range(world_size // local_world_size)]
    return addresses, Path(key_file)


def _place(variable: str, given: int | None) -> int:
    if given is not None:
        return given
    text = os.environ.get(variable)
    if text is None:
        raise RuntimeError(
            f"{variable} is not in the environment: call this in a program that torchrun has started, or give "
            f"{variable.lower()}"
        )
    return int(text)


def _private_folder() -> Path:
    """Return a folder that only this user can enter: that of the job, which all its nodes see, or a temporary one."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        return Path(folder)
    made = Path(tempfile.mkdtemp(prefix="msworkers-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def _start_worker(transport: str, port: int, name: str, key_file: str) -> str:
    """Start a worker that ends with this process; return its address."""
    if transport == "ipc":
        folder = tempfile.mkdtemp(prefix="msworker-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        address = f"ipc://{folder}/{name}"
    else:
        address = f"tcp://{socket.getfqdn()}:{port}"
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            module_command(_WORKER, address, key_file, str(theirs.fileno())),
            env=_environment(name), stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
        )  # fmt: skip
    _watched.append((process, ours))
    if ours.recv(1) != b"+":
        raise JobSpecError(f"the worker {name} could not listen at {address}: see its message above")
    return address


def _environment(name: str) -> Mapping[str, str]:
    left_out = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {variable: value for variable, value in os.environ.items() if variable not in left_out}
    return python_environment({**kept, "HYPERACTOR_PROCESS_NAME": name}, find_package=True)


_watched: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
"""The workers that this process has started, each with the socket whose end it waits for."""
