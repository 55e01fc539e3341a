"""What the batch script of a job runs: submitit's pickled call, if nobody else can have written it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from submitit.core.submission import process_job

from monarch_slurm.owned_files import FileRefusedError, check_folder


def main() -> None:
    """Run the call that `monarch_slurm.job.submission` has submitted."""
    parser = argparse.ArgumentParser(prog="monarch_slurm.job.submitted", description="Run the job in FOLDER.")
    parser.add_argument("folder", type=Path, help="folder of submitit's files")
    folder: Path = parser.parse_args().folder
    try:
        for each in (folder.parent, folder):
            check_folder(each, "to load the call that is pickled there", root=False)
    except (FileRefusedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    process_job(folder)


if __name__ == "__main__":
    main()
