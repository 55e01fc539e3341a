"""A torchrun command line on a mesh of hosts."""

from __future__ import annotations

from collections.abc import Sequence

from monarch_slurm.actor import HostMesh
from monarch_slurm.collectives import StoreActor
from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.spmd.spmd_actor import SPMDActor

_WITH_VALUE = {"--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--rdzv-backend",
               "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--max-restarts", "--monitor-interval", "--role",
               "--log-dir", "--redirects", "--tee", "--start-method", "--local-addr"}  # fmt: skip
_FLAGS = {"--standalone", "--no-python", "--run-path"}


class TorchrunError(MonarchSlurmError, ValueError):
    """A command line that torchrun would not take, or that cannot be run on a mesh."""


def run_spmd(hosts: HostMesh, command: Sequence[str], nproc_per_node: int | None = None) -> None:
    """Run a program on every host as torchrun would, and return when all ranks are through.

    Hosts, rendezvous and restarts are the mesh's affair: options about them are taken and ignored.

    Args:
        command: such as ``["torchrun", "--nproc-per-node=8", "train.py", "--lr", "0.1"]``; ``torchrun`` may be left
            out, or be ``python -m torch.distributed.run``.
        nproc_per_node: overrides that of the command.

    Raises:
        TorchrunError: the command has no program, or an option that cannot be followed.
        ActorError: a rank failed; the others are ended.
    """
    count, program = parse_torchrun(command)
    procs = hosts.spawn_procs({"gpus": nproc_per_node or count}, name="spmd")
    try:
        actors = procs.spawn("spmd", SPMDActor)
        first = actors.slice(**dict.fromkeys(procs.sizes, 0))
        address, port = first.get_host_port.call_one(None).get()
        store = procs.slice(**dict.fromkeys(procs.sizes, 0)).spawn("store", StoreActor)
        actors.main.call(address, port, program, store).get()
    finally:
        procs.stop().get()


def parse_torchrun(command: Sequence[str]) -> tuple[int, list[str]]:
    """Return the procs per node, and the program with its arguments, of a torchrun command line.

    Raises:
        TorchrunError: it has no program, or an option that cannot be followed.
    """
    words = list(command)
    if words and words[0].rpartition("/")[2] == "torchrun":
        words = words[1:]
    elif words[1:3] in (["-m", "torch.distributed.run"], ["-m", "torchrun"]):
        words = words[3:]
    elif words and words[0].rpartition("/")[2] in ("python", "python3"):
        return 1, _program(words[1:])
    count = 1
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "-m" or word == "--module":
            return count, ["-m", *_program(words)]
        name, equals, value = word.partition("=")
        name = "--" + name.lstrip("-").replace("_", "-")
        if name in _WITH_VALUE:
            if not equals:
                if not words:
                    raise TorchrunError(f"{word} needs a value")
                value = words.pop(0)
            if name == "--nproc-per-node":
                if not value.isdecimal() or int(value) < 1:
                    raise TorchrunError(f"--nproc-per-node {value}: a number, 1 or more, expected")
                count = int(value)
        elif name not in _FLAGS:
            raise TorchrunError(f"{word}: torchrun's option is not known here")
        elif name != "--standalone":
            raise TorchrunError(f"{word}: only Python programs can run on a mesh, as __main__ of its procs")
    return count, _program(words)


def option_of(command: Sequence[str], name: str) -> str | None:
    """Return the value of torchrun's option ``name``, such as ``--nnodes``; None if the command does not have it."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        given, equals, value = word.partition("=")
        if given.replace("_", "-") == name:
            return value if equals else following
    return None


def _program(words: list[str]) -> list[str]:
    if not words:
        raise TorchrunError("the command names no program")
    return words
