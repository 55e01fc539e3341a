"""``python -m monarch_slurm`` is the ``monarch-slurm`` command."""

import os
import sys

if __name__ == "__main__" and sys.path and sys.path[0] == os.getcwd():
    del sys.path[0]  # it is of -m; nothing in the current folder is to be imported in place of a package

from monarch_slurm.cli import main

if __name__ == "__main__":
    main()
