"""Whether hosts are fit to work, and what of this package works there.

- `facts`: what a host says of itself; `gpu_probe`: whether its GPUs compute
- `findings`: what that means, and how hosts differ
- `features`: what of the package works on a host
- `pieces`: facts as lines of a job step's output
- `hosts`: all hosts of a mesh at once
"""

from monarch_slurm.health.facts import Facts, collect
from monarch_slurm.health.features import Feature, features
from monarch_slurm.health.findings import ABSENT, BAD, LEVELS, OK, WARN, Finding, judge_answers, judge_host, worst
from monarch_slurm.health.gpu_probe import probe_gpus
from monarch_slurm.health.hosts import CHECK_SECONDS, ask_here, check_hosts
from monarch_slurm.health.pieces import Pieces, lines_of

__all__ = [
    "ABSENT",
    "BAD",
    "CHECK_SECONDS",
    "LEVELS",
    "OK",
    "WARN",
    "Facts",
    "Feature",
    "Finding",
    "Pieces",
    "ask_here",
    "check_hosts",
    "collect",
    "features",
    "judge_answers",
    "judge_host",
    "lines_of",
    "probe_gpus",
    "worst",
]
