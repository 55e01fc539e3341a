"""At home in `monarch_slurm.actor`."""

from monarch_slurm.actor import UndeliverableMessageEnvelope

__all__ = ["UndeliverableMessageEnvelope"]
