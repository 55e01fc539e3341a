"""The controller's own business: which hosts it has, how often things may restart, what happened.

- `hosts`: becoming the controller of a job folder, waiting for hosts
- `spares`: other hosts in the places of lost ones
- `journal`: events on disk
- `census`: who is there and does what
"""

from monarch_slurm.actor.budget import RestartBudget, RestartLimit
from monarch_slurm.controller.census import census
from monarch_slurm.controller.hosts import (
    ANSWERS,
    FolderError,
    HostsMissingError,
    gather_hosts,
    host_addresses,
    make_job_folder,
    publish,
    withdraw,
)
from monarch_slurm.controller.journal import Journal, read_journal
from monarch_slurm.controller.spares import keep_whole

__all__ = [
    "ANSWERS",
    "FolderError",
    "HostsMissingError",
    "Journal",
    "RestartBudget",
    "RestartLimit",
    "census",
    "gather_hosts",
    "host_addresses",
    "keep_whole",
    "make_job_folder",
    "publish",
    "read_journal",
    "withdraw",
]
