"""The controller's own business: which hosts it has, how often things may restart, what happened.

- `hosts`: becoming the controller of a job folder, waiting for hosts
- `restart`: limits of restarts
- `journal`: events on disk
"""

from monarch_slurm.controller.hosts import (
    FolderError,
    HostsMissingError,
    gather_hosts,
    host_addresses,
    make_job_folder,
    publish,
    withdraw,
)
from monarch_slurm.controller.journal import Journal, read_journal
from monarch_slurm.controller.restart import RestartBudget, RestartLimit

__all__ = [
    "FolderError",
    "HostsMissingError",
    "Journal",
    "RestartBudget",
    "RestartLimit",
    "gather_hosts",
    "host_addresses",
    "make_job_folder",
    "publish",
    "read_journal",
    "withdraw",
]
