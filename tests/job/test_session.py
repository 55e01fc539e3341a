from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_slurm.job import HostsTakenError, session

FakeSlurm = Callable[..., Path]


def test_steps_that_do_not_end_are_cancelled_and_given_up(
    fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm(squeue="echo '12.3|session-77'; echo '12.4|other'", scancel='echo "$@" >>cancelled')
    for name, seconds in (("ENDING_SECONDS", 0.5), ("CANCEL_SECONDS", 0.5), ("TELL_SECONDS", 0.0)):
        monkeypatch.setattr(session, name, seconds)
    with pytest.raises(HostsTakenError, match=r"have not ended 0\.5 s after they were cancelled: 12\.3;"):
        session._clear_steps("12")
    assert Path("cancelled").read_text() == "12.3\n"
    said = capsys.readouterr().err
    assert "waiting for the end of an earlier session's steps: 12.3\n" in said
    assert "cancelling steps that an earlier session left: 12.3\n" in said
