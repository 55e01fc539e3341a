from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from support import DEADLINE, wait_until

from monarch_slurm.host.logs import LineReader, ProcLog
from monarch_slurm.host.output import MAX_WAITING_BYTES, Output


def test_lines_are_whole_whatever_the_pieces() -> None:
    read_end, write_end = os.pipe()
    lines: list[str] = []
    reader = LineReader(read_end, lines.append)
    for piece in (b"on", b"e\ntwo\r\nth", b"ree", b"\n\n", b"\xff\xc3", b"\xbc\nrest"):
        os.write(write_end, piece)
        assert reader.read()
    assert lines == ["one", "two", "three", "", "\ufffdü"]
    os.write(write_end, b" of it")
    os.close(write_end)
    reader.finish()
    assert lines[-1] == "rest of it"
    reader.finish()
    assert len(lines) == 6


def test_a_line_without_end_is_cut() -> None:
    read_end, write_end = os.pipe()
    lines: list[str] = []
    reader = LineReader(read_end, lines.append)
    for _ in range(3):
        os.write(write_end, b"x" * 30_000)
        reader.read()
    assert [len(line) for line in lines] == [90_000]
    os.close(write_end)
    assert not reader.read()
    reader.finish()


def test_the_tail_keeps_the_end_of_stderr_only(tmp_path: Path) -> None:
    output = Output()
    log = ProcLog(output, "[p]", tmp_path / "logs" / "p.log", tail_lines=2)
    for number in range(5):
        log.stderr(f"error {number}")
        log.stdout(f"out {number}")
    assert log.tail == ["error 3", "error 4"]
    log.close()
    log.close()
    output.flush(DEADLINE)
    text = (tmp_path / "logs" / "p.log").read_text()
    assert text.splitlines()[:3] == ["error 0", "out 0", "error 1"]
    assert (tmp_path / "logs" / "p.log").stat().st_mode & 0o777 == 0o600


def test_writing_never_waits_and_what_is_left_out_is_counted() -> None:
    output = Output()
    read_end, write_end = os.pipe()
    line = "x" * 100_000
    count = MAX_WAITING_BYTES // len(line) + 50
    for _ in range(count):
        output.write(write_end, line)
    data = bytearray()

    def read() -> None:
        while piece := os.read(read_end, 1 << 20):
            data.extend(piece)

    reading = threading.Thread(target=read)
    reading.start()
    output.flush(DEADLINE)
    output.write(write_end, "the end")
    output.close(write_end)
    reading.join(DEADLINE)
    os.close(read_end)
    lines = data.decode().splitlines()
    assert lines[-1] == "the end"
    left_out = sum(int(text[1:].split()[0]) for text in lines if "lines were left out here" in text)
    assert left_out > 0
    assert lines.count(line) + left_out == count


def test_each_file_hears_of_its_lost_lines_even_if_nothing_follows(tmp_path: Path) -> None:
    output = Output()
    read_end, write_end = os.pipe()
    quiet = output.open(tmp_path / "quiet")
    line = "x" * 100_000
    for _ in range(MAX_WAITING_BYTES // len(line) + 2):
        output.write(write_end, line)
    output.write(quiet, "lost")
    output.write(quiet, "lost, too")
    reading = threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(read_end, 1 << 20), b"")])
    reading.start()
    output.flush(DEADLINE)
    output.close(write_end)
    output.close(quiet)
    reading.join(DEADLINE)
    os.close(read_end)
    output.flush(DEADLINE)
    assert (tmp_path / "quiet").read_text() == "[2 lines were left out here: nobody read them in time]\n"


def test_a_reader_that_is_gone_costs_nobody_else_anything(tmp_path: Path) -> None:
    output = Output()
    read_end, write_end = os.pipe()
    os.close(read_end)
    file = output.open(tmp_path / "log")
    for number in range(10):
        output.write(write_end, "nobody reads this")
        output.write(file, f"line {number}")
    output.close(write_end)
    output.close(file)
    wait_until(lambda: (tmp_path / "log").read_text().splitlines() == [f"line {number}" for number in range(10)])
    with pytest.raises(OSError, match="Bad file descriptor"):
        wait_until(lambda: os.fstat(file) and False)
