"""At home in `monarch_slurm.transport`."""

from monarch_slurm.transport import BindSpec, ChannelAddr, ChannelTransport

__all__ = ["BindSpec", "ChannelAddr", "ChannelTransport"]
