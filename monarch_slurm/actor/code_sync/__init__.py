"""Code of the program's machine on its hosts: `HostMesh.sync_workspace`.

- `workspace`: which folders; `tree`: what is in them
- `receiver`: one host's end, which trusts no path that it is given; `reloading`: modules that have changed
- `sync`: the program's end
"""

from monarch_slurm.actor.code_sync.sync import SyncResult
from monarch_slurm.actor.code_sync.tree import WorkspaceError
from monarch_slurm.actor.code_sync.workspace import ACTIVE_CONDA_ENV, DEFAULT_EXCLUDE, CondaEnvironment, Workspace

__all__ = ["ACTIVE_CONDA_ENV", "DEFAULT_EXCLUDE", "CondaEnvironment", "SyncResult", "Workspace", "WorkspaceError"]
