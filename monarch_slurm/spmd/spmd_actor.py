"""One rank of a program for torchrun."""

from __future__ import annotations

import math
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from monarch_slurm.actor import Actor, current_rank, endpoint
from monarch_slurm.collectives import StoreActor
from monarch_slurm.host.identity import ADDRESS_VARIABLE
from monarch_slurm.host.interfaces import interface_of
from monarch_slurm.spmd.env_rendezvous import meet_at
from monarch_slurm.spmd.network import AddrType, get_ipaddr
from monarch_slurm.wire.ports import listen_tcp


class SPMDActor(Actor):
    """Knows its place as torchrun would tell it. The last dimension of its mesh is that of the procs of one node."""

    def __init__(self) -> None:
        point = current_rank()
        sizes = list(dict(point.extent).values())
        self.rank = point.rank
        self.world_size = math.prod(sizes)
        self.nproc_per_node = sizes[-1] if sizes else 1
        self.local_world_size = self.nproc_per_node
        self.local_rank = self.rank % self.nproc_per_node
        self.group_rank = self.rank // self.nproc_per_node
        self.group_world_size = self.world_size // self.nproc_per_node

    @endpoint
    def get_host_port(self, use_ipaddr: AddrType | None = None) -> tuple[str, int]:
        """Return an address of this host that the others can dial, and a port that is free now.

        Args:
            use_ipaddr: kind of the IP address that the host's name is looked up for; None takes the address that this
                host has in the job.
        """
        with listen_tcp("0.0.0.0", 1) as probe:  # noqa: S104 - it is closed at once
            port = int(probe.getsockname()[1])
        if use_ipaddr is None:
            return os.environ.get(ADDRESS_VARIABLE) or socket.gethostname(), port
        return get_ipaddr(socket.gethostname(), port, use_ipaddr), port

    @endpoint
    def setup_env(self, master_addr: str, master_port: int, store: StoreActor | None = None) -> None:
        """Set the variables that torchrun sets.

        Args:
            store: where groups that rely on these variables meet; None: torch listens at the address and port.
        """
        self._set_env(master_addr, master_port, store)

    @endpoint
    def main(
        self, master_addr: str, master_port: int, script_args: Sequence[str], store: StoreActor | None = None
    ) -> bool:
        """Run a program as ``__main__`` in this process and return True.

        Args:
            script_args: path and arguments, or ``-m``, module and arguments.
            store: see `setup_env`.

        Raises:
            ValueError: there is no program.
            Exception: what the program raises; a SystemExit with a status other than 0 as a RuntimeError.
        """
        arguments = list(script_args)
        if not arguments or arguments == ["-m"]:
            raise ValueError("script_args names no program: a path, or '-m' and a module, expected")
        self._set_env(master_addr, master_port, store)
        try:
            if arguments[0] == "-m":
                sys.argv = arguments[1:]
                runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = arguments
                sys.path.insert(0, str(Path(arguments[0]).absolute().parent))
                runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RuntimeError(f"rank {self.rank}: {arguments[0]} exited with {end.code}") from None
        return True

    def _set_env(self, master_addr: str, master_port: int, store: StoreActor | None) -> None:
        values = {
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": master_port,
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.group_rank,
            "GROUP_WORLD_SIZE": self.group_world_size,
            "ROLE_RANK": self.rank,
            "ROLE_WORLD_SIZE": self.world_size,
            "ROLE_NAME": "rank",
            "WORLD_SIZE": self.world_size,
        }
        os.environ.update({name: str(value) for name, value in values.items()})
        # Where there are other machines, procs have been started with it. Alone on one, gloo would take the address
        # that the machine's name stands for, which strangers may reach.
        address = os.environ.get(ADDRESS_VARIABLE)
        interface = interface_of(address) if address and self.group_world_size == 1 else None
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if store is not None:
            meet_at(store)
