"""At home in `monarch_slurm.actor.endpoint`."""

from monarch_slurm.actor.endpoint import Endpoint, EndpointProperty, NotAnEndpoint, endpoint

__all__ = ["Endpoint", "EndpointProperty", "NotAnEndpoint", "endpoint"]
