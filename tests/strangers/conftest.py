"""Programs that strangers attack, each started once for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support import wait_until
from victims import Training


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """A run that trains, on this machine; it still does when all tests are over, and nothing ever failed in it."""
    if os.getuid() != 0:
        pytest.skip("becomes another user, which takes root")
    run = Training(tmp_path_factory.mktemp("training"))
    try:
        wait_until(lambda: run.process.poll() is not None or len(run.syncs()) >= 2, "the run to train", 300)
        assert run.process.poll() is None, run.log.read_text()
        yield run
    finally:
        run.close()
