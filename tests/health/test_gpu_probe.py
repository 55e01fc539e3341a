"""The probe of GPUs: who answers, who hangs, and what a broken driver says. Programs stand for torch on such nodes."""

from __future__ import annotations

from monarch_slurm.health import probe_gpus

SEES = "print('seen', 2, flush=True); print('answered', 0, flush=True); "


def test_all_answer() -> None:
    assert probe_gpus(30, SEES + "print('answered', 1)") == {"seen": 2, "answered": ["0", "1"], "error": ""}


def test_one_hangs() -> None:
    found = probe_gpus(4, SEES + "import threading; threading.Event().wait()")
    assert found == {"seen": 2, "answered": ["0"], "error": ""}


def test_one_fails() -> None:
    assert probe_gpus(30, SEES + "raise SystemExit('HIP error: invalid device')")["answered"] == ["0"]


def test_the_driver_fails() -> None:
    found = probe_gpus(30, "raise RuntimeError('No HIP GPUs are available')")
    assert found["seen"] == 0
    assert found["error"] == "RuntimeError: No HIP GPUs are available"


def test_the_driver_hangs() -> None:
    found = probe_gpus(1, "import threading; threading.Event().wait()")
    assert "did not say how many GPUs" in found["error"]


def test_torch_itself_without_gpus() -> None:
    found = probe_gpus(60)
    assert found["error"] == ""
    assert len(found["answered"]) == found["seen"]
