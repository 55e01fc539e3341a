"""``python -m monarch_slurm.host``: run a host agent."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.host.start import serve, serve_from_pipe
from monarch_slurm.inherited import settle_inheritance
from monarch_slurm.wire.system_calls import check_system_calls


def main() -> int:
    """Run the agent that the command line describes; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m monarch_slurm.host", description="Run a host agent.")
    parser.add_argument("--fd", type=int, help="pipe that the controller on this machine writes its invitation to")
    parser.add_argument("--report-fd", type=int, help="pipe on which to say why the agent cannot start")
    parser.add_argument("--folder", type=Path, help="job folder with the controller's invitation")
    parser.add_argument("--name", help="name of this host")
    parser.add_argument("--address", help="IP address that procs of this host bind and advertise")
    parser.add_argument("--apart", action="store_true", help="the controller runs on another machine")
    options = parser.parse_args()
    if options.fd is None and (options.folder is None or options.name is None):
        parser.error("give --folder and --name, or --fd")
    try:
        settle_inheritance()
        check_system_calls()
        if options.fd is not None:
            return serve_from_pipe(options.fd, options.report_fd)
        return serve(options.folder, name=options.name, address=options.address, apart=options.apart)
    except MonarchSlurmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
