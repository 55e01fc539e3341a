"""Switches of the actor layer, to be set by assignment in each process: ``monarch_slurm.actor.config.NAME = value``."""

from __future__ import annotations

prefix_python_logs_with_actor: bool = True
"""Whether log records of actors begin with ``[actor=<root>.<module.Class name{...}>]``."""
