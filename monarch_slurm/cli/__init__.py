"""The ``monarch-slurm`` command. It parses and prints; what it does is done in the layers below."""

from monarch_slurm.cli.main import main

__all__ = ["main"]
