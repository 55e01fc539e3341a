from __future__ import annotations

import os
import signal

import pytest

from monarch_slurm.host import HostDown, ProcDown
from monarch_slurm.host.exits import describe_exit, explain_exit, signal_name


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        (os.CLD_EXITED, 0, "Exited(code=0)"),
        (os.CLD_EXITED, 7, "Exited(code=7)"),
        (os.CLD_KILLED, signal.SIGKILL, "Killed(sig=9)"),
        (os.CLD_DUMPED, signal.SIGSEGV, "Killed(sig=11, core dumped)"),
    ],
)
def test_how_it_ended(code: int, status: int, text: str) -> None:
    assert describe_exit(code, status) == text


def test_fatal_signals_are_explained() -> None:
    assert "want of memory" in explain_exit("Killed(sig=9)")
    assert "segmentation fault" in explain_exit("Killed(sig=11, core dumped)")
    assert "/dev/shm" in explain_exit("Killed(sig=7)")
    assert explain_exit("Killed(sig=15)") == ""
    assert explain_exit("Exited(code=1)") == ""


def test_reports_name_everything() -> None:
    down = ProcDown("n1#a", "n1", "w-1.3", "w-1", 3, 99, "Killed(sig=11)", 1.0, ["one", "two"])
    assert down.describe() == (
        "the process this actor was running on failed: Killed(sig=11) (host n1, proc w-1.3, rank 3, pid 99); "
        "segmentation fault in native code\nlast lines of its stderr:\n  one\n  two"
    )
    assert ProcDown(**down.to_fields()) == down
    assert down.address == ("n1#a", "w-1.3")
    lost = HostDown("n1#a", "n1", "cut off", 1.0)
    assert lost.describe() == "the host this actor was running on failed: n1: cut off"
    assert HostDown(**lost.to_fields()) == lost


def test_every_signal_has_a_name() -> None:
    assert signal_name(9) == "SIGKILL"
    assert signal_name(signal.SIGRTMIN + 7) == "SIGRTMIN+7"
    assert all(signal_name(number) for number in range(1, 65))
    assert signal_name(200) == "signal 200"
