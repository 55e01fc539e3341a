from __future__ import annotations

import io
from pathlib import Path

import pytest

from monarch_slurm.job import JobNotFoundError, JobStatus, SlurmUnreachableError
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.head_news import HeadNews
from monarch_slurm.job.logs import LogView, copy_logs, follow_logs

HOST = "agent says\n[n1 w-1f 0] zero\n[n1 w-1f 1] one\n[n1 other-22 1] another\n[n1 w-1f 10] ten\n"


def shown(path: Path, **options: object) -> str:
    out = io.StringIO()
    copy_logs(LogView([path], out, **options))  # type: ignore[arg-type]
    return out.getvalue()


def test_ranks_and_last_lines_can_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "n1.log"
    path.write_text(HOST + "[n1 w-1f 1] cut")
    assert shown(path) == HOST + "[n1 w-1f 1] cut"
    assert shown(path, ranks=[1]) == "[n1 w-1f 1] one\n[n1 other-22 1] another\n[n1 w-1f 1] cut\n"
    assert shown(path, ranks=[1, 10], mesh="w") == "[n1 w-1f 1] one\n[n1 w-1f 10] ten\n[n1 w-1f 1] cut\n"
    assert shown(path, last=1) == "[n1 w-1f 1] cut\n"
    assert shown(path, last=0) == ""
    assert shown(path, ranks=[0, 1], last=2, mesh="w-1f") == "[n1 w-1f 1] one\n[n1 w-1f 1] cut\n"
    assert shown(tmp_path / "none.log") == ""


def test_files_of_procs_are_read_as_if_they_were_in_the_log_of_their_host(tmp_path: Path) -> None:
    path, files = tmp_path / "n1.log", tmp_path / "files"
    path.write_text("agent says\n")
    files.mkdir()
    (files / "n1.w-1f.0.log").write_text("zero\nlast")
    (files / "n1.w-1f.10.log").write_text("ten\n")
    (files / "n2.a.b.other-22.0.log").write_text("elsewhere\n")
    (files / "notes.log").write_text("not of a proc\n")
    first = "[n1 w-1f 0] zero\n[n1 w-1f 0] last\n"
    other = "[n2.a.b other-22 0] elsewhere\n"
    assert shown(path, ranks=[0], proc_logs=files) == first + other
    assert shown(path, ranks=[0], mesh="w", proc_logs=files) == first
    assert shown(path, proc_logs=files, hosts=["n1"]) == "agent says\n" + first + "[n1 w-1f 10] ten\n"
    assert shown(path, ranks=[0], proc_logs=files, last=1) == other
    out = io.StringIO()
    view = LogView([path], out, ranks=[7], proc_logs=files)
    view.copy()
    assert out.getvalue() == ""
    (files / "n1.late-3.7.log").write_text("came later\n")
    assert view.copy()
    assert out.getvalue() == "[n1 late-3 7] came later\n"


def test_a_job_is_followed_from_the_queue_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "controller.log"
    answers: list[JobStatus | Exception] = [
        JobStatus("12", "PENDING", "Priority"),
        JobStatus("12", "PENDING", "Priority"),
        SlurmUnreachableError("squeue did not answer"),
        JobNotFoundError("unknown"),
        JobStatus("12", "RUNNING"),
        JobStatus("12", "COMPLETING"),
        JobStatus("12", "COMPLETED"),
    ]
    now, count = [0.0], len(answers)
    notices: list[str] = []
    out = io.StringIO()

    def ask(job: str) -> JobStatus:
        with path.open("a") as file:
            file.write(f"line {count - len(answers)}\n")
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def sleep(seconds: float) -> None:
        now[0] += seconds

    follow_logs("12", LogView([path], out), notice=notices.append, ask=ask, clock=lambda: now[0], sleep=sleep)
    assert out.getvalue() == "".join(f"line {number}\n" for number in range(count))
    assert notices == ["job 12 is PENDING (Priority)", "squeue did not answer; trying again"]


def test_a_job_that_slurm_has_forgotten_is_not_followed_for_ever(tmp_path: Path) -> None:
    now = [0.0]

    def ask(job: str) -> JobStatus:
        raise JobNotFoundError("unknown")

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(JobNotFoundError):
        follow_logs("12", LogView([tmp_path / "x"], io.StringIO()), ask=ask, clock=lambda: now[0], sleep=sleep)
    assert now[0] > 30


def test_whoever_reads_along_hears_of_the_head_from_then_on(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    warning = "2030-01-01 00:00:00,000 WARNING monarch_slurm.job.steps: host {} waits: 2 GPUs\n"
    folder.batch_log.write_text(warning.format("n1"))
    news = HeadNews(folder, lambda: 0.0, from_now=True)
    notices: list[str] = []
    ends = iter([False, True])

    def sleep(seconds: float) -> None:
        with folder.batch_log.open("a") as file:
            file.write(warning.format("n2"))

    view = LogView([tmp_path / "x"], io.StringIO())
    running = JobStatus("12", "RUNNING")
    follow_logs("12", view, lambda: next(ends), news, notices.append, lambda job: running, lambda: 0.0, sleep)
    assert notices == ["job 12: host n2 waits: 2 GPUs"]
