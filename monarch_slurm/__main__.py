"""``python -m monarch_slurm`` is the ``monarch-slurm`` command."""

from monarch_slurm.cli import main

if __name__ == "__main__":
    main()
