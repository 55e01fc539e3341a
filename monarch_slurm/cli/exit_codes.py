"""The exit codes of ``monarch-slurm``."""

from __future__ import annotations

from monarch_slurm.errors import ConfigError, MonarchSlurmError

FAILED = 1
"""What was asked for has failed."""

WRONG_USE = 2
"""The command line must be another: click's code, too."""

UNFIT = 3
"""``doctor``: a check says ``bad``."""

INTERRUPTED = 130
PIPE_CLOSED = 141

IN_WORDS = """\
\b
Exit codes:
    0  success
    1  what was asked for has failed
    2  wrong command line: an option, value or file that cannot be
    3  doctor: something must be mended
   75  train: ended early, the state is saved
  130  interrupted
Others are of the program that exec, submit --follow or train runs.
"""


def code_of(error: MonarchSlurmError) -> int:
    """Return the exit code for ``error``."""
    return WRONG_USE if isinstance(error, ConfigError) else FAILED
