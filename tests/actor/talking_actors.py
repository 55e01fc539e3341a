"""Actors that print."""

from __future__ import annotations

import logging
import os
import signal
import sys

from monarch_slurm.actor import Actor, current_rank, endpoint


class Talker(Actor):
    @endpoint
    def say(self, text: str) -> None:
        print("out", text, current_rank().rank)
        print("err", text, file=sys.stderr)
        logging.getLogger("talker").info("record %s", text)

    @endpoint
    def flood(self, lines: int, length: int) -> None:
        text = "x" * (length - 1)
        for _ in range(lines):
            print(text)
        sys.stdout.flush()

    @endpoint
    def vanish(self) -> None:
        print("last words", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)
