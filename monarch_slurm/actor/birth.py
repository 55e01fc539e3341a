"""Making a cell of a spawn message."""

from __future__ import annotations

from typing import Any

from monarch_slurm.actor.async_cell import AsyncCell
from monarch_slurm.actor.cell import Cell
from monarch_slurm.actor.messages import creator_from_fields, ref_from_fields
from monarch_slurm.actor.runtime import Runtime
from monarch_slurm.actor.sync_cell import SyncCell
from monarch_slurm.wire import Address, Message, loads


def make_cell(runtime: Runtime, message: Message) -> Cell:
    """Return the cell that a spawn message asks for. What cannot be unpickled fails the actor, with the reason."""
    fields = message.fields
    ref = ref_from_fields(fields["ref"])
    home = runtime.home
    base_rank = home[2] if home is not None and home[0].mesh == ref.layout.mesh else ref.shape.ranks()[0]
    creator = creator_from_fields(fields["creator"], Address(*fields["owner"]))
    ready = tuple(fields["ready"]) if fields["ready"] is not None else None

    def build() -> Any:
        try:
            actor_class, args, kwargs = loads(message.body)
        except ImportError as error:
            raise ImportError(
                f"host {runtime.host_name} cannot import what actor {ref.name!r} needs ({error}): install it there, "
                "or make the folder that holds it importable on every host"
            ) from error
        return actor_class(*args, **kwargs)

    kind = AsyncCell if fields["asynchronous"] else SyncCell
    return kind(runtime, ref, base_rank, creator, build, ready)
