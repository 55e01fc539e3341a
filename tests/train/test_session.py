"""What a start of a run makes before anything trains."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from monarch_slurm.controller import FolderError
from monarch_slurm.train.session import make_run_folder


def test_runs_that_start_in_one_second_have_a_folder_each(tmp_path: Path) -> None:
    threads, rounds = 16, 16
    together = threading.Barrier(threads)

    def make(_: int) -> Path:
        together.wait()
        return make_run_folder(tmp_path / "runs")

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            folders = list(pool.map(make, range(threads * rounds)))
    finally:
        sys.setswitchinterval(before)
    assert len(set(folders)) == threads * rounds
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


def test_a_run_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file in the way")
    with pytest.raises(FolderError, match=f"{tmp_path}/runs"):
        make_run_folder(tmp_path / "runs")
