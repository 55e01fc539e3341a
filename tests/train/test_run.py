"""Whole runs on this machine: real trainers, real kills."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import wait_until
from terminal import Terminal

from monarch_slurm.train.config import TrainConfig
from monarch_slurm.train.fault_tolerance import start_lighthouse

pytestmark = [pytest.mark.slow, pytest.mark.train]

TINY = ["--model", "tiny", "--seq-len", "64", "--batch-size", "4"]


PATIENT = ["--step-deadline", "60", "--sync-deadline", "120"]
"""Deadlines that a loaded machine keeps: nothing is to fail but what a test kills."""


def start(out: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "monarch_slurm", "train", "--local", *TINY, "--out", str(out), *options]
    env = {**os.environ, **variables}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def report_in(out: Path) -> dict[str, Any]:
    (folder,) = [path for path in out.iterdir() if path.is_dir()]
    assert (folder / "report.html").read_text().startswith("<!")
    return json.loads((folder / "report.json").read_text())  # type: ignore[no-any-return]


def left_behind(out: Path) -> list[str]:
    """Processes whose files are in the run's folder, or whose command line names it."""
    found = []
    for process in psutil.process_iter(["cmdline", "name"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(out) in line or ((process.info["name"] or "").startswith("ms-") and _holds(process, out)):
            found.append(f"{process.pid} {process.info['name']} {line}")
    return found


def _holds(process: psutil.Process, out: Path) -> bool:
    try:
        return str(out) in process.cwd() or any(str(out) in file.path for file in process.open_files())
    except psutil.Error:
        return False


def failures_of(report: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [failure for failure in report["failures"] if failure["type"] == kind]


def test_every_kind_of_failure_is_survived(tmp_path: Path) -> None:
    options = [
        "--replicas",
        "3",
        "--tokens",
        "560000",
        "--fail-every",
        "5",
        "--step-deadline",
        "2",
        "--reference",
        "none",
    ]
    process = start(tmp_path, *options)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    report = report_in(tmp_path)
    assert report["summary"]["ok"], report["summary"]
    assert report["summary"]["job_restarts"] == 0
    exits = {
        "kill": "Killed(sig=9)",
        "segfault": "Killed(sig=11",
        "exception": "Raised(exception)",
        "hang": "Hung(killed)",
    }
    for kind, exit_text in exits.items():
        found = failures_of(report, kind)
        assert found, f"no {kind} was injected: {output}"
        seen = [failure for failure in found if failure["exit"] is not None]  # not one in the last moment of the run
        assert seen, f"no {kind} was seen: {found}"
        for failure in seen:
            assert failure["exit"].startswith(exit_text)
        recovered = [failure for failure in found if failure["outcome"] == "recovered"]
        assert recovered, f"no {kind} recovered: {found}"
        for failure in recovered:
            assert failure["state_equal"] is True
            stages = [failure["seconds"][stage] for stage in ("detected", "respawned", "joined", "first_commit")]
            assert stages == sorted(stages)
    assert "InjectedFailureError" in failures_of(report, "exception")[0]["traceback"]
    assert any("Segmentation fault" in line for line in failures_of(report, "segfault")[0]["stderr_tail"])
    assert report["summary"]["final_states_equal"] is True
    assert left_behind(tmp_path) == []


def test_a_replica_that_fails_too_often_escalates_and_the_others_finish(tmp_path: Path) -> None:
    options = [
        "--replicas",
        "3",
        "--tokens",
        "300000",
        "--fail-every",
        "2",
        "--failures",
        "kill",
        "--reference",
        "none",
    ]
    process = start(tmp_path, *options, "--max-restarts", "0", "--max-host-restarts", "1")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    report = report_in(tmp_path)
    levels = [event["level"] for event in report["events"] if event["kind"] == "escalated"]
    assert levels[0] == "hosts"
    assert "job" in levels
    assert report["summary"]["replicas_lost"] == 1
    assert report["summary"]["ok"] is True


def test_a_run_that_nobody_can_finish_says_so(tmp_path: Path) -> None:
    data = tmp_path / "text"
    data.write_text("to be or not to be, " * 4000)
    out = tmp_path / "runs"
    # A learning rate that no model survives: every replica diverges, and starting again would not help.
    process = start(out, "--replicas", "2", "--data", str(data), "--lr", "1e30", "--tokens", "10000000")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert "Traceback" not in output.splitlines()[-1]
    assert "error: " in output
    assert "NonFiniteLossError" in output
    assert report_in(out)["summary"]["ok"] is False


def wait_for_syncs(out: Path, process: subprocess.Popen[str], count: int = 1) -> None:
    journals: list[Path] = []
    deadline = time.monotonic() + 300
    while not (journals and journals[0].read_text().count('"sync"') >= count):
        assert time.monotonic() < deadline
        assert process.poll() is None
        journals = list(out.glob("*/journal.jsonl"))
        time.sleep(0.05)


def saved_steps(folder: Path) -> list[int]:
    """The steps that the run in ``folder`` could go on from, the newest first."""
    path = folder / "state.json"
    return [state["step"] for state in json.loads(path.read_text())["states"]] if path.exists() else []


def test_a_run_whose_controller_is_killed_goes_on_from_its_newest_whole_state(tmp_path: Path) -> None:
    options = ["--replicas", "2", "--sync-every", "5", "--save-every", "2"]
    process = start(tmp_path, *options, "--tokens", "100000000")
    wait_for_syncs(tmp_path, process)
    (folder,) = tmp_path.iterdir()
    deadline = time.monotonic() + 120
    while len(saved_steps(folder)) < 2 or saved_steps(folder)[1] == 2:  # so that older ones have been removed, too
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.communicate()
    while left_behind(tmp_path):
        assert time.monotonic() < deadline, left_behind(tmp_path)
        time.sleep(0.1)
    newest, older = saved_steps(folder)
    assert newest % 2 == older % 2 == 0
    assert newest > older
    (damaged,) = (folder / "state" / f"step-{newest}").glob("*/rank-0.state")
    damaged.write_bytes(damaged.read_bytes()[:-1])

    tokens = str((older + 6) * 2 * 5 * 4 * 64)  # of six further syncs
    process = start(tmp_path, "--resume", str(folder), "--tokens", tokens)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert f"going on with run {folder.name} from sync {older}" in output
    report = report_in(tmp_path)
    assert (report["summary"]["ok"], report["summary"]["final_states_equal"]) == (True, True)
    assert [start["step"] for start in report["starts"]] == [0, older]
    assert saved_steps(folder)[0] > older
    assert not left_behind(tmp_path)


def test_a_run_that_is_asked_to_end_saves_and_goes_on(tmp_path: Path) -> None:
    # Deadlines that a loaded machine keeps: nothing is to fail here.
    options = ["--replicas", "2", "--procs-per-replica", "2", "--step-deadline", "60", "--sync-deadline", "120"]
    process = start(tmp_path, *options, "--tokens", "100000000")
    wait_for_syncs(tmp_path, process, 8)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    (folder,) = tmp_path.iterdir()
    step = saved_steps(folder)[0]
    assert f"saved at sync {step}; to continue: the same command with --resume {folder}" in output
    assert report_in(tmp_path)["summary"]["ok"] is False

    tokens = str((step + 4) * 2 * 20 * 4 * 64)  # of four further syncs
    command = [sys.executable, "-m", "monarch_slurm", "train", "--local", "--resume", str(folder), "--tokens", tokens]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert f"going on with run {folder.name} from sync {step}" in output
    assert f"from now on with --tokens {tokens} (it was 100000000)" in output
    report = report_in(tmp_path)
    summary = report["summary"]
    assert (report["config"]["tokens"], report["config"]["model"]) == (int(tokens), "tiny")
    assert (summary["ok"], summary["tokens"], summary["job_restarts"]) == (True, int(tokens), 1)
    assert (summary["failures"], summary["replica_restarts"], summary["final_states_equal"]) == (0, 0, True)
    assert [(start["step"], start["saved_step"]) for start in report["starts"]] == [(0, step), (step, None)]
    commits = [e["step"] for e in report["events"] if e["kind"] == "sync" and (e["replica"], e["rank"]) == (0, 0)]
    assert commits[-1] == len(set(commits))  # none twice but those after the save, none left out
    assert not left_behind(tmp_path)


def test_a_save_that_fails_on_one_rank_leaves_nothing_and_older_states_stay(tmp_path: Path) -> None:
    options = [
        "--replicas",
        "2",
        "--procs-per-replica",
        "2",
        "--sync-every",
        "2",
        "--seq-len",
        "32",
        "--save-every",
        "1",
    ]
    process = start(tmp_path, *options, "--tokens", "100000000", "--step-deadline", "60", "--sync-deadline", "120")
    wait_for_syncs(tmp_path, process)
    (folder,) = tmp_path.iterdir()
    wait_until(lambda: len(saved_steps(folder)) == 2, "two saved states")
    first = saved_steps(folder)[0] + 20
    for step in range(first, first + 400):  # rank 1 of either replica cannot write its file, as on a full disk
        for replica in (0, 1):
            (folder / "state" / f"step-{step}" / f"replica-{replica}" / "rank-1.state" / "x").mkdir(parents=True)

    def failed() -> set[int]:
        lines = (folder / "journal.jsonl").read_text().split("\n")[:-1]
        return {e["step"] for e in map(json.loads, lines) if e["kind"] == "saved" and "error" in e}

    wait_until(lambda: len(failed()) >= 3, "saves that fail")
    newest = saved_steps(folder)
    wait_until(
        lambda: not list(folder.glob(f"state/step-{min(failed())}/replica-*/rank-0.state")),
        "the file of the rank that could save to be removed",
    )
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert saved_steps(folder) == newest
    assert sorted(path.name for path in (folder / "state").iterdir()) == sorted(f"step-{step}" for step in newest)
    assert f"saved at sync {newest[0]}" in output
    assert "could not save: cannot save the state in" in output


def proc_named(process: subprocess.Popen[str], name: str) -> psutil.Process | None:
    """The proc of the run that is called so."""
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if f"monarch_slurm proc {name}-" in " ".join(child.cmdline()):
                return child
    return None


def journal(out: Path) -> list[dict[str, Any]]:
    (path,) = out.glob("*/journal.jsonl")
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def test_a_killed_supervisor_is_started_again_and_its_replica_comes_back(tmp_path: Path) -> None:
    process = start(tmp_path, "--replicas", "3", "--sync-every", "5", *PATIENT, "--tokens", "100000000")
    wait_for_syncs(tmp_path, process, 3)
    supervisor = proc_named(process, "replica1")
    assert supervisor is not None
    supervisor.kill()

    def came_back() -> bool:
        found = [e for e in journal(tmp_path) if e.get("replica") == 1]
        again = [e["generation"] for e in found if e["kind"] == "respawn"]
        return bool(again) and any(e["kind"] == "sync" and e["committed"] and e["generation"] > again[0] for e in found)

    wait_until(came_back, "replica 1 to commit again", 240)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    report = report_in(tmp_path)
    (failure,) = report["failures"]
    assert (failure["replica"], failure["outcome"], failure["exit"]) == (1, "recovered", "Killed(sig=9)")
    assert "its supervisor failed" in failure["cause"]
    assert not left_behind(tmp_path)


def speaks_grpc(address: tuple[str, int], timeout: float) -> bool:
    """Whether a listener answers the beginning of HTTP/2 with its own settings, as every server of gRPC does."""
    with socket.create_connection(address, timeout=timeout) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError, TimeoutError):
            return connection.recv(64)[3:9] == b"\x04" + bytes(5)
    return False


def test_no_server_of_torchft_and_no_tcp_store_listens_in_a_run(tmp_path: Path) -> None:
    server, url = start_lighthouse("127.0.0.1", TrainConfig())
    assert speaks_grpc(("127.0.0.1", int(url.rpartition(":")[2])), 60.0)
    server.shutdown()
    options = ["--replicas", "2", "--procs-per-replica", "2", "--sync-every", "5", *PATIENT]
    process = start(tmp_path, *options, "--tokens", "100000000")
    wait_for_syncs(tmp_path, process, 4)
    listeners: dict[str, list[tuple[str, int]]] = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        found = [c.laddr for c in child.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        listeners[child.name()] = [(address.ip, address.port) for address in found]
    trainers = {name: found for name, found in listeners.items() if "trainer" in name}
    assert len(trainers) == 4, listeners
    assert not [name for name, found in listeners.items() if found and name not in trainers], listeners
    for name, found in trainers.items():
        # The state transfer, and Gloo for the other replica and for the other rank of this one.
        assert 1 <= len(found) <= 3, (name, found)
        assert {address for address, _ in found} == {"127.0.0.1"}
        for address in found:
            assert not speaks_grpc(address, 2.0), (name, address)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert not left_behind(tmp_path)


def test_a_run_goes_on_when_who_forms_its_quorums_is_killed_and_a_replica_with_it(tmp_path: Path) -> None:
    process = start(tmp_path, "--replicas", "3", "--sync-every", "5", *PATIENT, "--tokens", "100000000")
    wait_for_syncs(tmp_path, process, 3)
    for name in ("quorum", "quorum", "trainer1"):  # between two quorums or in the middle of one, as it comes
        wait_until(lambda: proc_named(process, "trainer2"), "the trainer to be started again")
        victims = [proc_named(process, name)] + [proc_named(process, "trainer2")] * (name == "quorum")
        for victim in victims:
            assert victim is not None
            victim.kill()
        killed = time.time()

        def recovered(killed: float = killed) -> bool:
            found = [e for e in journal(tmp_path) if e["kind"] == "sync" and e["committed"] and e["t"] > killed]
            return {e["replica"] for e in found if e["participants"] == 3} == {0, 1, 2}

        wait_until(recovered, "all replicas to commit again", 240)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert "another process forms the quorums" in output
    found = journal(tmp_path)
    assert [e["epoch"] for e in found if e["kind"] == "quorum_service"] == [0, 1, 2]
    assert not [e for e in found if e["kind"] in ("replica_lost", "quorum_refused")]
    ids = [e["quorum_id"] for e in found if e["kind"] == "quorum" and e["replica"] == 0]
    assert ids == sorted(ids)
    assert all(failure["state_equal"] is not False for failure in report_in(tmp_path)["failures"])
    assert not left_behind(tmp_path)


def test_a_run_that_loses_torchfts_lighthouse_saves_and_tells_how_to_continue(tmp_path: Path) -> None:
    options = ["--replicas", "2", "--sync-every", "5", *PATIENT, "--lighthouse", "torchft"]
    process = start(tmp_path, *options, "--tokens", "100000000")
    wait_for_syncs(tmp_path, process, 3)
    lighthouse = proc_named(process, "lighthouse")
    assert lighthouse is not None
    lighthouse.kill()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert "Traceback" not in output
    (folder,) = tmp_path.iterdir()
    step = saved_steps(folder)[0]
    committed = max(e["step"] for e in journal(tmp_path) if e["kind"] == "sync" and e["committed"])
    assert step == committed
    assert f"saved at sync {step}; to continue: the same command with --resume {folder}" in output
    tokens = str((step + 2) * 2 * 5 * 4 * 64)  # of two further syncs
    process = start(tmp_path, "--resume", str(folder), "--tokens", tokens)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert [start["step"] for start in report_in(tmp_path)["starts"]] == [0, step]


def test_an_error_that_every_start_meets_again_ends_the_run_after_three(tmp_path: Path) -> None:
    # Gloo finds no such interface, in every trainer.
    options = ["--replicas", "2", "--procs-per-replica", "2", *PATIENT]
    process = start(tmp_path, *options, "--tokens", "100000", GLOO_SOCKET_IFNAME="no-such-if")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert "the same error came 3 times before the end of the first step" in output.splitlines()[-1]
    assert "no-such-if" in output.splitlines()[-1]
    found = journal(tmp_path)
    starts = [sum(e["kind"] == "detected" and e["replica"] == replica for e in found) for replica in (0, 1)]
    assert max(starts) == 3
    assert not any(e["kind"] == "escalated" for e in found)


def test_an_interrupted_run_leaves_a_report_and_no_process(tmp_path: Path) -> None:
    process = start(tmp_path, "--replicas", "2", "--tokens", "100000000")
    wait_for_syncs(tmp_path, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    report = report_in(tmp_path)
    assert report["summary"]["ok"] is False
    assert report["summary"]["reason"] == "interrupted"
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("stage", ["run folder: ", "starting"])
def test_ctrl_c_pressed_thrice_in_a_start_ends_it_cleanly(tmp_path: Path, stage: str) -> None:
    terminal = Terminal(
        sys.executable,
        "-m",
        "monarch_slurm",
        "train",
        "--local",
        *TINY,
        "--tokens",
        "100000000",
        "--out",
        str(tmp_path),
    )
    terminal.expect(stage)
    code = terminal.interrupt_impatiently(120)
    assert code == 130, terminal.text
    said = terminal.text.replace("^C", "").splitlines()
    assert said.count("interrupted") == 1, terminal.text
    for words in ("Traceback", "is lost", "has not ended"):
        assert words not in terminal.text
    wait_until(lambda: not left_behind(tmp_path), "the end of all processes of the run")


def test_two_ranks_per_replica_lose_one_and_come_back(tmp_path: Path) -> None:
    options = ["--replicas", "3", "--procs-per-replica", "2", "--tokens", "350000", "--reference", "none"]
    process = start(tmp_path, *options, "--fail-every", "6", "--failures", "kill")
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    report = report_in(tmp_path)
    recovered = [failure for failure in report["failures"] if failure["outcome"] == "recovered"]
    # One that is killed again at once may not have told what it got.
    compared = [failure["state_equal"] for failure in recovered if failure["state_equal"] is not None]
    assert compared, report["failures"]
    assert all(compared), report["failures"]
