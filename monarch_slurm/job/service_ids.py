"""Identities of workers: a worker is known by its id, not by how its address is spelled.

Whoever starts workers makes one id for each, and hands all of them to every worker in an environment variable; each
picks its own by its rank. Programs dial ``<id>@<url>``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from monarch_slurm.actor import ProcId, Uid
from monarch_slurm.job.errors import JobError

SERVICE_PROC_IDS_ENV = "MONARCH_SERVICE_PROC_IDS"
SERVICE_PROC_RANK_ENV = "MONARCH_SERVICE_PROC_RANK"


class ServiceIdError(JobError, ValueError):
    """The environment does not tell which worker this is."""


def new_service_proc_id() -> ProcId:
    """Return a new id for a worker."""
    return ProcId(Uid.instance("service"))


def serialize_service_proc_ids(proc_ids: Sequence[ProcId]) -> str:
    """Return ids as text, for the environment variable ``MONARCH_SERVICE_PROC_IDS``."""
    return json.dumps([str(one) for one in proc_ids])


def deserialize_service_proc_ids(serialized: str) -> list[ProcId]:
    """Return the ids that `serialize_service_proc_ids` was given.

    Raises:
        ValueError: the text is something else.
    """
    names = json.loads(serialized)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"a JSON list of ids expected, not {serialized!r}")
    return [ProcId.from_string(name) for name in names]


def service_proc_addr(address: str, proc_id: ProcId) -> str:
    """Return the address of the worker ``proc_id`` that listens at the URL ``address``."""
    return f"{proc_id}@{address}"


def service_proc_addrs(addresses: Sequence[str], proc_ids: Sequence[ProcId]) -> list[str]:
    """Return the address of each worker.

    Raises:
        ValueError: there are more of one than of the other.
    """
    if len(proc_ids) != len(addresses):
        raise ValueError(f"{len(proc_ids)} ids for {len(addresses)} addresses of workers")
    return [service_proc_addr(address, one) for address, one in zip(addresses, proc_ids, strict=True)]


def ranked_service_proc_id_from_env(rank_env: str = SERVICE_PROC_RANK_ENV) -> ProcId:
    """Return the id of the worker that this process is to be.

    Args:
        rank_env: environment variable with its rank, such as ``SLURM_NODEID``.

    Raises:
        ServiceIdError: a variable is missing or wrong.
    """
    try:
        ids, rank = deserialize_service_proc_ids(os.environ[SERVICE_PROC_IDS_ENV]), int(os.environ[rank_env])
    except KeyError as error:
        raise ServiceIdError(f"the environment variable {error.args[0]} is not set") from None
    except ValueError as error:
        raise ServiceIdError(f"{SERVICE_PROC_IDS_ENV} or {rank_env}: {error}") from None
    if not 0 <= rank < len(ids):
        raise ServiceIdError(f"{rank_env}={rank}, but {SERVICE_PROC_IDS_ENV} has {len(ids)} ids")
    return ids[rank]
