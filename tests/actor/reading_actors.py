"""An actor that reads a module of a folder that is copied to hosts."""

from __future__ import annotations

import os

from monarch_slurm.actor import Actor, endpoint


class Reader(Actor):
    @endpoint
    def value(self) -> int:
        import sample_code

        value: int = sample_code.VALUE
        return value

    @endpoint
    def place(self) -> tuple[str, str]:
        import sample_code

        return str(sample_code.__file__), os.environ["WORKSPACE_DIR"]
