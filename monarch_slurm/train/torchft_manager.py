"""TorchFT's manager with its servers left out, or where they belong. The one module that uses what is private there.

TorchFT's `Manager` makes three things by itself: a server for the ranks of its replica, which is a client of the
Lighthouse; a client of that server; and a client of the ``TCPStore`` by which the ranks find the server. These servers
do not ask who connects. Here the three names stand for others, in a second copy of the module ``torchft.manager`` that
is not in `sys.modules`: what others use of TorchFT stays as it is.

With a `Quorums` nothing of TorchFT listens or connects anywhere. Without one the manager uses TorchFT's own servers, on
one address instead of all.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

# The library reads this once, when it is loaded; its default is ten lines of log for every sync.
os.environ.setdefault("RUST_LOG", "warn")

import torchft.manager
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torchft.coordination import LighthouseServer as LighthouseServer

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.train.addresses import in_url
from monarch_slurm.train.quorum_rules import RankQuorum
from monarch_slurm.wire.ports import ports_to_try

_MESSAGES = "the job's messages"
"""Stands where TorchFT expects an address, and nothing is connected to."""


class TorchftChangedError(MonarchSlurmError):
    """The installed torchft has not what this package uses of it."""


class Quorums(Protocol):
    """Forms quorums in place of TorchFT's servers."""

    def ask(
        self, *, step: int, metadata: str, shrink_only: bool, commit_failures: int, timeout: timedelta
    ) -> tuple[RankQuorum, str]:
        """Return the next quorum, and how the state of the donor can be fetched if this rank needs one.

        Args:
            step: committed syncs that the state of this rank has.
            metadata: how it can be fetched.
            shrink_only: take no new members.
            commit_failures: syncs in a row that could not be committed.
            timeout: how long it may take.

        Raises:
            TimeoutError: it took longer.
        """

    def should_commit(self, vote: bool, timeout: timedelta) -> bool:
        """Return whether all ranks of the replica vote for it."""


class _Donor:
    """Stands for the address of a donor's manager, and for the client that TorchFT would connect to it."""

    def __init__(self, metadata: str) -> None:
        self._metadata = metadata

    def _checkpoint_metadata(self, rank: int, timeout: timedelta) -> str:
        return self._metadata


class _Client:
    """What TorchFT's manager asks."""

    def __init__(self, quorums: Quorums) -> None:
        self._quorums = quorums

    def _quorum(
        self,
        *,
        group_rank: int,
        step: int,
        checkpoint_metadata: str,
        shrink_only: bool,
        timeout: timedelta,
        init_sync: bool,
        commit_failures: int,
    ) -> Any:
        quorum, metadata = self._quorums.ask(
            step=step,
            metadata=checkpoint_metadata,
            shrink_only=shrink_only,
            commit_failures=commit_failures,
            timeout=timeout,
        )
        return SimpleNamespace(**vars(quorum), recover_src_manager_address=_Donor(metadata))

    def should_commit(self, group_rank: int, step: int, should_commit: bool, timeout: timedelta) -> bool:
        return self._quorums.should_commit(should_commit, timeout)


class _NoStore:
    """Stands for the store by which ranks find the server of their replica."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._values.get(key, b"")


class _NoServer:
    """Stands for the server of a replica."""

    def address(self) -> str:
        return ""

    def shutdown(self) -> None:
        pass


def _store(*, host_name: str, **named: Any) -> Any:
    return _NoStore() if host_name == _MESSAGES else TCPStore(host_name=host_name, **named)


def _server(*, lighthouse_addr: str, bind: str, hostname: str, **named: Any) -> Any:
    if lighthouse_addr == _MESSAGES:
        return _NoServer()
    named.update(lighthouse_addr=lighthouse_addr, hostname=hostname)
    return on_a_free_port(lambda port: torchft.manager.ManagerServer(bind=f"{hostname}:{port}", **named))


def _client(addr: Any, connect_timeout: timedelta) -> Any:
    if isinstance(addr, _Donor) or addr == "":
        return addr
    return torchft.manager.ManagerClient(addr, connect_timeout=connect_timeout)


_SUBSTITUTES: dict[str, Callable[..., Any]] = {
    "TCPStore": _store,
    "ManagerServer": _server,
    "ManagerClient": _client,
}

_USED = {
    "__init__": ("TCPStore", "ManagerServer", "ManagerClient", "_client", "_store", "_manager"),
    "_async_quorum": ("ManagerClient", "_quorum", "_checkpoint_metadata", *RankQuorum.__dataclass_fields__),
    "should_commit": ("_client", "should_commit"),
}
"""The methods of TorchFT's manager that are relied on, and names that they have to use."""


def check_torchft(module: ModuleType) -> None:
    """Make sure that ``module``, ``torchft.manager``, is as this module takes it to be.

    Raises:
        TorchftChangedError: it is not.
    """
    for method, names in _USED.items():
        function = getattr(module.Manager, method, None)
        code = inspect.unwrap(function).__code__ if function is not None else None
        used = {*code.co_names, *code.co_consts} if code is not None else set()
        missing = [name for name in names if name not in used]
        if missing:
            raise TorchftChangedError(
                f"torchft.manager.Manager.{method} does not use {', '.join(missing)}: monarch_slurm cannot work with "
                'this version of torchft; install the right one with: pip install "monarch_slurm[train]"'
            )


def _second_copy() -> Any:
    """Return a copy of the module ``torchft.manager`` with our names in it."""
    spec = importlib.util.find_spec("torchft.manager")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    check_torchft(module)
    for name, substitute in _SUBSTITUTES.items():
        setattr(module, name, substitute)
    return module


_copy = _second_copy()
assert sys.modules["torchft.manager"] is not _copy
LOGGER = torchft.manager.__name__
"""Name of the logger of TorchFT's manager."""


class Manager(_copy.Manager):  # type: ignore[misc, name-defined]  # torchft has no types
    """TorchFT's manager.

    Args:
        quorums: forms its quorums; None: TorchFT's servers do.
        address: IP address that the server of this replica binds and advertises, if it has one.
        store: host and port of the replica's store, in which its ranks find that server.
        lighthouse: URL of TorchFT's Lighthouse.
        named: other arguments of TorchFT's manager.
    """

    def __init__(
        self, quorums: Quorums | None, address: str, store: tuple[str, int], lighthouse: str, **named: Any
    ) -> None:
        os.environ.setdefault("TOKIO_WORKER_THREADS", "2")  # one thread per core otherwise, for a heartbeat
        if quorums is not None:
            store, lighthouse = (_MESSAGES, 1), _MESSAGES
        super().__init__(
            store_addr=store[0], store_port=store[1], lighthouse_addr=lighthouse, hostname=in_url(address), **named
        )
        if quorums is not None:
            self._client: Any = _Client(quorums)

    def wrap_client(self, wrap: Callable[[Any], Any]) -> None:
        """Put ``wrap(client)`` in the place of TorchFT's client of its own server."""
        self._client = wrap(self._client)


def connect(group: Any, store: Store, rank: int, world_size: int) -> None:
    """Connect a process group to its members, who meet at ``store``; its own ``configure`` would take a TCP store.

    Args:
        group: a ``torchft.process_group.ProcessGroupWrapper`` that wraps no other one.
        store: the same for all members.
        rank: of this member.
        world_size: number of members.
    """
    group.abort(errored=False)
    group._pg = group._create_pg(store, rank, world_size)


def on_a_free_port(start: Callable[[int], Any]) -> Any:
    """Call ``start`` with a port, and with others as long as it finds the port in use.

    Raises:
        RuntimeError: what ``start`` raised.
    """
    ports = ports_to_try()
    for port in ports[:-1]:
        try:
            return start(port)
        except RuntimeError as error:
            if "in use" not in str(error):
                raise
    return start(ports[-1])
