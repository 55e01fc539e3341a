"""Whether a person types what this process runs."""

from __future__ import annotations

import sys


def is_at_prompt() -> bool:
    """Return whether this process runs what a person types: in Python, IPython or the kernel of a notebook."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or (get_ipython is not None and get_ipython() is not None)
