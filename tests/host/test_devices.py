"""A host deals its GPUs out to procs, by variables alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from trees import mi300x_node

from monarch_slurm.errors import ConfigError
from monarch_slurm.host.devices import deal_out, settle_visibility


@pytest.fixture(autouse=True)
def rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_SLURM_GPU_PLATFORM", "rocm")


def test_procs_get_their_own_gpus(tmp_path: Path) -> None:
    root = mi300x_node(tmp_path)
    env = {"ROCR_VISIBLE_DEVICES": "2,3,6,7"}
    first, second = deal_out([[0, 1], [2, 3]], env, root)
    assert first[0] == {"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert second[0] == {"HIP_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}
    with pytest.raises(ConfigError, match="GPU 4 was asked for, but 4 can be seen here"):
        deal_out([[4]], env, root)


def test_procs_that_ask_for_none_keep_what_the_host_sees(tmp_path: Path) -> None:
    assert deal_out([[], []], {}, mi300x_node(tmp_path)) == [({}, ()), ({}, ())]


def test_contradicting_variables_are_mended_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    env = {"ROCR_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "4,5", "OTHER": "x"}
    with caplog.at_level(logging.WARNING, "monarch_slurm"):
        settle_visibility("n1", env, mi300x_node(tmp_path))
    assert env == {
        "ROCR_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1", "OTHER": "x",
    }  # fmt: skip
    assert "host n1: CUDA_VISIBLE_DEVICES=4,5 names devices" in caplog.text
