"""``python -m monarch_slurm.health [SECONDS]``: print the facts of this host, for another host to read."""

from __future__ import annotations

import sys

from monarch_slurm.health.hosts import ask_here
from monarch_slurm.health.pieces import lines_of


def main() -> None:
    """Print the facts."""
    print("started", flush=True)
    for line in lines_of(ask_here(float(sys.argv[1]) if len(sys.argv) > 1 else None)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
