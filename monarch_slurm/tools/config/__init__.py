"""What to submit to a scheduler, as Monarch's tools describe it."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass, field
from typing import Any

from monarch_slurm.actor.code_sync import Workspace

NOT_SET = "__NOT_SET__"


def _empty_appdef() -> Any:
    try:
        return importlib.import_module("torchx.specs").AppDef(name=NOT_SET)
    except ImportError:
        return None


@dataclass
class Config:
    """A job for a scheduler. `submit` of a Slurm job is `monarch_slurm.job.spmd.serve`.

    Attributes:
        scheduler: name of the scheduler, such as ``"slurm"``.
        scheduler_args: its arguments.
        workspace: folders that go along. (None and a text, which were allowed once, are taken with a FutureWarning.)
        dryrun: only show what would be submitted.
        appdef: an AppDef of torchx; None where torchx is not installed.
    """

    scheduler: str = NOT_SET
    scheduler_args: dict[str, Any] = field(default_factory=dict)
    workspace: Workspace = field(default_factory=Workspace.null)
    dryrun: bool = False
    appdef: Any = field(default_factory=_empty_appdef)

    def __post_init__(self) -> None:
        given: object = self.workspace
        if not given:
            warnings.warn("workspace=None is deprecated: use Workspace(env=None)", FutureWarning, stacklevel=3)
            self.workspace = Workspace.null()
        elif isinstance(given, str):
            warnings.warn(f"a text is deprecated: use Workspace(dirs=[{given!r}])", FutureWarning, stacklevel=3)
            self.workspace = Workspace(dirs={given: ""})
