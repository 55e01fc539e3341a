from __future__ import annotations

import json
import stat
import threading
from pathlib import Path

from monarch_slurm.controller import Journal, read_journal


def test_events_are_there_as_soon_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write({"event": 1, "path": path})
    assert read_journal(path) == [{"event": 1, "path": str(path)}]
    journal.write({"event": 2}, sync=True)
    journal.close()
    again = Journal(path)
    again.write({"event": 3})
    again.close()
    assert [event["event"] for event in read_journal(path)] == [1, 2, 3]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_unfinished_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(json.dumps({"event": 1}) + "\n" + '{"event": ')
    assert read_journal(path) == [{"event": 1}]


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    text = "x" * 20_000

    def write(number: int) -> None:
        for _ in range(50):
            journal.write({"number": number, "text": text})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    events = read_journal(journal.path)
    assert len(events) == 200
    assert all(event["text"] == text for event in events)
