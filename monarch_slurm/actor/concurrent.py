"""Where Monarch's programs find `concurrent_endpoint`, too."""

from monarch_slurm.actor.endpoint import concurrent_endpoint

__all__ = ["concurrent_endpoint"]
