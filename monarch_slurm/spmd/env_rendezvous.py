"""Where the ranks of an unchanged program for torchrun meet: at the job's store, which no stranger reaches.

``torch.distributed.init_process_group`` looks for the environment's ``MASTER_ADDR`` and ``MASTER_PORT`` and has rank 0
listen there for everybody (``env://``). In the procs of a mesh it takes a
`monarch_slurm.collectives.job_store.JobStore` instead. A ``TCPStore`` that a program makes itself stays what it is.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from monarch_slurm.collectives import StoreActor

_MODULE = "torch.distributed.rendezvous"
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def meet_at(store: StoreActor) -> None:
    """Have programs in this process that rely on the variables of torchrun meet at ``store`` from now on.

    A program that changes one of the variables, or gives another rank or size, gets torch's own rendezvous. torch is
    not imported; if the program does so later, it finds this.
    """
    global _place
    _place = _Place(store, {name: os.environ[name] for name in _VARIABLES})
    if _MODULE in sys.modules:
        _install(sys.modules[_MODULE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Place:
    """The store, the variables that stand for it, and how many groups have met there."""

    def __init__(self, store: StoreActor, variables: dict[str, str]) -> None:
        self.store = store
        self.variables = variables
        self.numbers = itertools.count()

    def is_meant(self, url: str) -> bool:
        given = dict(parse_qsl(urlsplit(url).query))
        meant = {**{name: os.environ.get(name, "") for name in _VARIABLES}}
        meant.update(
            {"RANK": given.get("rank", meant["RANK"]), "WORLD_SIZE": given.get("world_size", meant["WORLD_SIZE"])}
        )
        return meant == self.variables


_place: _Place | None = None
_original: Callable[..., Iterator[Any]] | None = None


def _install(module: Any) -> None:
    """Take the place of torch's handler, which its public function refuses to replace."""
    global _original
    if _original is None:
        _original = module._rendezvous_handlers["env"]
        module._rendezvous_handlers["env"] = _meet


def _meet(url: str, timeout: timedelta = timedelta(minutes=30), **named: Any) -> Iterator[Any]:
    """Yield store, rank and size, as a handler of torch does."""
    place = _place
    assert _original is not None
    if place is None or not place.is_meant(url):
        yield from _original(url, timeout, **named)
        return
    from torch._C._distributed_c10d import PrefixStore

    from monarch_slurm.collectives.job_store import JobStore

    # A group that is made after another one was destroyed must not find what that one has left.
    store = PrefixStore(f"group{next(place.numbers)}", JobStore(place.store, timeout))
    yield store, int(place.variables["RANK"]), int(place.variables["WORLD_SIZE"])
    raise RuntimeError("Unable to perform rerendezvous using env:// method")


class _Finder(MetaPathFinder):
    """Installs the handler once a program imports torch's module, right after it was executed."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        sys.meta_path.remove(self)
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_install(module: Any) -> None:
            execute(module)
            _install(module)

        loader.exec_module = execute_and_install
        return spec
