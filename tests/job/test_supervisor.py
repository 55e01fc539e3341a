from __future__ import annotations

import signal

from monarch_slurm.job.supervisor import describe_code


def test_a_return_code_is_described_whatever_signal_it_is() -> None:
    assert describe_code(3) == "exit code 3"
    assert describe_code(-int(signal.SIGRTMIN) - 7) == "killed by SIGRTMIN+7"
    assert describe_code(-9) == "killed by SIGKILL"
