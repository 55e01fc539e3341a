"""The bindings of RCCL and NCCL, aborts and background errors, on a fake library whose ranks are threads."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_libraries import compile_fake
from support import wait_until

torch = pytest.importorskip("torch")

from monarch_slurm.collectives import CollectiveError, PeerLostError  # noqa: E402
from monarch_slurm.collectives.background import BackgroundErrors  # noqa: E402
from monarch_slurm.collectives.ccl import CclTransport  # noqa: E402
from monarch_slurm.collectives.peers import enroll, lose  # noqa: E402
from monarch_slurm.errors import MonarchSlurmError  # noqa: E402
from monarch_slurm.native_build import load_native  # noqa: E402

FLOAT, BYTE, NO_TYPE, SUM, MAX = 7, 1, 99, 0, 2


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_fake("fake_ccl", "cuda", tmp_path_factory.mktemp("fake"))


@pytest.fixture
def fake(library: Path) -> Iterator[Any]:
    handle = ctypes.CDLL(str(library))
    handle.fake_ccl_set_background_error(0)
    yield handle
    handle.fake_ccl_set_background_error(0)


def on_ranks(library: Path, size: int, body: Callable[[Any], Any]) -> list[Any]:
    native = load_native("_native", platform="cuda")
    ccl = native.Ccl([str(library)])
    token = ccl.unique_id()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: body(native.Comm.init(ccl, token, size, rank)), range(size)))


def _every_operation(comm: Any) -> list[list[float]]:
    mine = torch.tensor([1.0, 2.0]) * (comm.rank + 1)
    at, out = mine.data_ptr(), torch.zeros(6)
    results = []

    def keep(tensor: torch.Tensor) -> None:
        results.append(tensor.tolist())
        out.zero_()

    comm.all_reduce(at, out.data_ptr(), 2, FLOAT, SUM, 0)
    keep(out[:2])
    comm.reduce(at, out.data_ptr(), 2, FLOAT, MAX, 1, 0)
    keep(out[:2])
    comm.all_gather(at, out.data_ptr(), 2, FLOAT, 0)
    keep(out)
    six = torch.arange(6.0) * (comm.rank + 1)
    comm.reduce_scatter(six.data_ptr(), out.data_ptr(), 2, FLOAT, SUM, 0)
    keep(out[:2])
    comm.broadcast(at, out.data_ptr(), 8, BYTE, 2, 0)
    keep(mine if comm.rank == 2 else out[:2])
    comm.group_start()
    comm.send(at, 2, FLOAT, (comm.rank + 1) % 3, 0)
    comm.recv(out.data_ptr(), 2, FLOAT, (comm.rank + 2) % 3, 0)
    comm.group_end()
    keep(out[:2])
    part = comm.split(comm.rank % 2, -comm.rank, 2 - comm.rank % 2, (2 - comm.rank) // 2)
    part.all_reduce(at, out.data_ptr(), 1, FLOAT, SUM, 0)
    keep(out[:1])
    part.destroy()
    with pytest.raises(MonarchSlurmError, match="was closed"):
        part.all_reduce(at, at, 1, FLOAT, SUM, 0)
    assert comm.split(-1, 0, 0, 0) is None
    return results


def test_every_operation(library: Path) -> None:
    first, second, third = on_ranks(library, 3, _every_operation)
    gathered = [1.0, 2.0, 2.0, 4.0, 3.0, 6.0]
    assert first == [[6.0, 12.0], [0.0, 0.0], gathered, [0.0, 6.0], [3.0, 6.0], [3.0, 6.0], [4.0]]
    assert second == [[6.0, 12.0], [3.0, 6.0], gathered, [12.0, 18.0], [3.0, 6.0], [1.0, 2.0], [2.0]]
    assert third == [[6.0, 12.0], [0.0, 0.0], gathered, [24.0, 30.0], [3.0, 6.0], [2.0, 4.0], [4.0]]


def test_errors_have_the_call_and_the_librarys_own_text(library: Path) -> None:
    comm = on_ranks(library, 1, lambda comm: comm)[0]
    with pytest.raises(MonarchSlurmError, match=r"NCCL: AllReduce failed: error 4 \(invalid argument\): from the fake"):
        comm.all_reduce(0, 0, 0, NO_TYPE, SUM, 0)


def test_an_abort_ends_what_waits(library: Path) -> None:
    kept = []

    def body(comm: Any) -> str:
        kept.append(comm)
        if comm.rank == 1:
            return "never calls"
        waits = threading.Thread(target=lambda: comm.abort("rank 1 hangs"))
        tensor = torch.ones(1)
        waits.start()
        with pytest.raises(MonarchSlurmError, match="rank 1 hangs"):
            comm.all_reduce(tensor.data_ptr(), tensor.data_ptr(), 1, FLOAT, SUM, 0)
        waits.join()
        return str(comm.async_error())

    assert on_ranks(library, 2, body) == ["rank 1 hangs", "never calls"]


def test_a_communicator_that_is_destroyed_in_the_middle_of_a_call_is_aborted(library: Path, fake: Any) -> None:
    kept = []  # one that is dropped is aborted

    def body(comm: Any) -> str:
        kept.append(comm)
        if comm.rank == 1:
            return "never calls"
        tensor, errors = torch.ones(1), []

        def call() -> None:
            try:
                comm.all_reduce(tensor.data_ptr(), tensor.data_ptr(), 1, FLOAT, SUM, 0)
            except MonarchSlurmError as error:
                errors.append(str(error))

        calling = threading.Thread(target=call)
        calling.start()
        wait_until(fake.fake_ccl_waiting, "the call to wait for the other rank")
        comm.destroy()
        calling.join()
        return str(errors[0])

    assert on_ranks(library, 2, body) == ["the communicator was closed", "never calls"]


def transport(library: Path) -> CclTransport:
    return CclTransport(on_ranks(library, 1, lambda comm: comm)[0], torch.device("cuda", 0))


def test_a_background_error_aborts(library: Path, fake: Any) -> None:
    watch, ours = BackgroundErrors(0.001, 0.0), transport(library)
    watch.watch(ours)
    fake.fake_ccl_set_background_error(6)
    failure = wait_until(ours.failure)
    assert isinstance(failure, PeerLostError)
    assert failure.rank is None
    assert "reports error 6 (unhandled error)" in str(failure)
    wait_until(lambda: not watch._running, "the end of the thread that has nothing to watch")


def test_the_control_plane_names_the_rank_of_a_background_error(library: Path, fake: Any) -> None:
    watch, ours = BackgroundErrors(0.001, 600.0), transport(library)
    watch.watch(ours)
    member = enroll(None, ["here", "there"], lambda reason, rank: ours.abort(PeerLostError(reason, rank)))
    fake.fake_ccl_set_background_error(6)
    wait_until(lambda: watch._watched.get(ours), "the error to be seen")
    assert ours.failure() is None
    lose("there", "killed by signal 9")
    failure = ours.failure()
    assert isinstance(failure, PeerLostError)
    assert (failure.rank, failure.reason) == (1, "killed by signal 9")
    with pytest.raises(CollectiveError, match="rank 1 of the communicator is lost"):
        ours.send(torch.ones(1), 0)
    member.end()
    lose("there", "again")


def test_closing(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, lost = transport(library), PeerLostError("killed", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: ours.abort(lost))  # there is no GPU here to wait for
    with pytest.raises(PeerLostError, match="rank 1"):
        ours.close(CollectiveError("closed"))
    ours.close(CollectiveError("closed"))  # after an abort there is nothing to wait for
    assert ours.failure() is lost


def test_what_nobody_holds_is_not_kept_by_the_watch(library: Path) -> None:
    watch, ours = BackgroundErrors(0.001, 0.0), transport(library)
    watch.watch(ours)
    del ours
    wait_until(lambda: not watch._running)
