"""Gloo groups that torch makes over the job's store: their ranks prove that they belong to the job, too.

``init_process_group``, ``new_group`` and ``DeviceMesh`` make their gloo groups by one name in torch's module. Another
class is put there. It returns the same objects, after the exchange of `monarch_slurm.collectives.proof`. Groups over
other stores are made without it. So are those of ``split_group``, which torch makes in C++.
"""

from __future__ import annotations

from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from monarch_slurm.collectives.proof import agree_on_secret, prove

_NAME = "ProcessGroupGloo"


def have_groups_prove(kind: type) -> None:
    """Have every gloo group that this process makes over a store of class ``kind`` begin with a proof.

    A group whose ranks do not prove that they belong to it raises `monarch_slurm.collectives.errors.ProofError`.
    """
    original = getattr(c10d, _NAME, None)
    if original is not None and not isinstance(original, _Stand):
        setattr(c10d, _NAME, _Stand(_NAME, (), {"original": original, "kind": kind}))


class _Stand(type):
    """Stands for torch's class: makes objects of it, and answers for it in ``isinstance`` and ``issubclass``."""

    original: Any
    kind: type

    def __call__(cls, store: Any, rank: int, size: int, *more: Any, **named: Any) -> Any:
        group = cls.original(store, rank, size, *more, **named)
        if size > 1 and isinstance(_innermost(store), cls.kind):
            prove(group, rank, size, agree_on_secret(store), "torch")
        return group

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.original, name)


def _innermost(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
