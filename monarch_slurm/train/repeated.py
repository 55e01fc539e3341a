"""Distinguishes an error that every start meets again from bad luck. Pure: failures in, a verdict out."""

from __future__ import annotations

import re
from collections import Counter

REPEATS = 3
"""The same error at the same step so often is no bad luck."""

_NUMBER = re.compile(r"0x[0-9a-f]+|[0-9]+", re.IGNORECASE)


class RepeatedErrors:
    """Counts the failures of one replica that look alike and come at the same step, without any commit in between.

    Errors are alike if their texts are but for numbers: addresses, ports and process ids differ from start to start.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()

    def count(self, error: str, step: int, progressed: bool) -> int:
        """Take in a failure; return how often this error has come at this step.

        Args:
            error: what happened, one line.
            step: inner steps that the trainers had done.
            progressed: whether they had committed a sync since their start. Failures before count no more then.
        """
        if progressed:
            self._counts.clear()
        alike = _NUMBER.sub("#", error), step
        self._counts[alike] += 1
        return self._counts[alike]
