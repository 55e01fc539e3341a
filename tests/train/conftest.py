"""What the tests of training share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from trainers import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """The process that trainers are forked from; made once, since it costs seconds."""
    made = Zygote()
    yield made
    made.close()
