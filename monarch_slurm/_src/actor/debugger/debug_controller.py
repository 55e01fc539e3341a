"""At home in `monarch_slurm.actor.debugger.controller`."""

from monarch_slurm.actor.debugger.controller import DebugController, debug_controller

__all__ = ["DebugController", "debug_controller"]
