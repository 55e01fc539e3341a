"""A rank of a communicator in a process of its own, which joins the program that has made the invitation."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch

from monarch_slurm.collectives import Communicator, Invitation

DEADLINE_S = 120

# Processes that are forked from one that has imported torch, and that has no part in any program.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch", "torch.distributed", "rank_process", "monarch_slurm.collectives.gloo"])


def start_rank(body: Callable[..., Any], invitation: Invitation, rank: int, size: int) -> tuple[Any, Connection]:
    """Start a process that joins, calls ``body(communicator, pipe)`` and sends the outcome; return our end, too."""
    ours, theirs = _processes.Pipe()
    arguments = (cloudpickle.dumps(body), invitation, rank, size, theirs)
    process = _processes.Process(target=_main, args=arguments, daemon=True)
    process.start()
    return process, ours


def _main(body: bytes, invitation: Invitation, rank: int, size: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        communicator = Communicator.join(invitation, rank, size, timeout_s=DEADLINE_S)
        pipe.send(("result", cloudpickle.loads(body)(communicator, pipe)))
    except BaseException as error:
        pipe.send(("error", f"rank {rank}: {type(error).__name__}: {error}"))
    os._exit(0)
