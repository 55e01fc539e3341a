"""The store over the job's messages does what torch's TCPStore does, and ends with its actor."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from support import DEADLINE, wait_until

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed import DistStoreError, PrefixStore, QueueEmptyError, TCPStore  # noqa: E402

from monarch_slurm.actor import Actor, MeshFailure, ProcMesh, context, endpoint, this_host  # noqa: E402
from monarch_slurm.collectives import StoreActor  # noqa: E402
from monarch_slurm.collectives.job_store import JobStore  # noqa: E402
from monarch_slurm.collectives.store_actor import KeyTable  # noqa: E402

SHORT = timedelta(milliseconds=300)
KINDS = ["tcp", "job", "prefixed tcp", "prefixed job"]


class Rank(Actor):
    """What a rank of a process group does."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def total(self, store: Any, rank: int, size: int) -> float:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=DEADLINE))
        value = torch.tensor([float(rank + 1)])
        dist.all_reduce(value)
        dist.destroy_process_group()
        return float(value)

    @endpoint
    def get(self, store: Any, key: str) -> bytes:
        return bytes(store.get(key))

    @endpoint
    def use_all(self, store: Any, timeout: timedelta) -> None:
        """Do what the tests above do, in this process."""
        store.set_timeout(timeout)
        for test in (
            test_values,
            test_several_values_at_once,
            test_compare_set,
            test_what_does_not_come_is_told_with_its_keys,
            test_queues,
            test_many_threads,
        ):
            test(store)
            store.set_timeout(timeout)
            store.delete_prefix("")

    @endpoint
    def listeners(self) -> list[str]:
        """Addresses and ports of the TCP sockets of this process that listen."""
        return listeners_of("self")


def listeners_of(pid: int | str) -> list[str]:
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            inodes.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as file:
            rows = [line.split() for line in file.readlines()[1:]]
        found += [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    return found


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    mesh = this_host().spawn_procs({"rank": 4})
    yield mesh
    mesh.stop().get(DEADLINE)


def spawn_store(procs: ProcMesh, rank: int = 0) -> StoreActor:
    actor = procs.slice(rank=rank).spawn("store", StoreActor)
    assert actor.ask.call_one("num_keys").get(DEADLINE) == 0, "it is there: short timeouts begin now"
    return actor


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, procs: ProcMesh) -> Any:
    made: Any
    if request.param.endswith("tcp"):
        made = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SHORT)
    else:
        made = JobStore(spawn_store(procs), SHORT)
    return PrefixStore("before", made) if request.param.startswith("prefixed") else made


def test_values(store: Any) -> None:
    assert store.num_keys() == 0
    assert not store.check(["k"])
    store.set("k", "v")
    assert store.get("k") == b"v"
    store.set("k", bytes(range(256)))
    assert store.get("k") == bytes(range(256))
    store.set("é", "ü")
    assert store.get("é") == "ü".encode()
    store.set("", b"")
    assert store.get("") == b""
    assert store.check(["k", "é"])
    assert not store.check(["k", "none"])
    assert store.check([])
    assert store.num_keys() == 3
    assert store.delete_key("k")
    assert not store.delete_key("k")
    assert store.num_keys() == 2


def test_several_values_at_once(store: Any) -> None:
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.multi_get(["b", "a"]) == [b"2", b"1"]
    assert store.multi_get([]) == []
    with pytest.raises(DistStoreError, match="must be of same size"):
        store.multi_set(["a"], ["1", "2"])
    store.append("a", "x")
    store.append("new", "y")
    assert store.multi_get(["a", "new"]) == [b"1x", b"y"]
    assert store.has_extended_api()


def test_counters(store: Any) -> None:
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    assert store.add("big", 2**62) == 2**62
    assert store.add("big", 2**62) == -(2**63)
    with pytest.raises(TypeError):
        PrefixStore("", store).add("n", "1")


def test_compare_set(store: Any) -> None:
    assert store.compare_set("c", "", "x") == b"x"
    assert store.compare_set("none", "y", "x") == b"y"
    assert not store.check(["none"])
    assert store.compare_set("c", "x", "z") == b"z"
    assert store.compare_set("c", "q", "w") == b"z"
    assert store.compare_set("empty", "", "") == b""
    assert store.check(["empty"])


def test_what_does_not_come_is_told_with_its_keys(store: Any) -> None:
    prefix = "before/" if isinstance(store, PrefixStore) else ""
    missing = f"keys: /{prefix}a, /{prefix}b"
    for ask, text in (
        (lambda: store.get("no"), f"^wait timeout after 300ms, keys: /{prefix}no"),
        (lambda: store.wait(["a", "b"]), f"^wait timeout after 300ms, {missing}"),
        (lambda: store.wait(["a", "b"], timedelta(milliseconds=50)), f"^wait timeout after 50ms, {missing}"),
        (lambda: store.wait(["a", "b"], timedelta(0)), f"^wait timeout after 0ms, {missing}"),
        (lambda: store.multi_get(["a", "b"]), f"^wait timeout after 300ms, {missing}"),
    ):
        with pytest.raises(DistStoreError, match=text):
            ask()
    store.wait([])
    store.set("a", "1")
    with pytest.raises(DistStoreError, match="wait timeout"):
        store.wait(["a", "b"])
    store.set("b", "2")
    store.wait(["a", "b"])


def test_the_timeout_can_be_changed(store: Any) -> None:
    assert store.timeout == SHORT
    store.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(DistStoreError, match="after 20ms"):
        store.get("no")


def test_a_clone_has_the_keys(store: Any) -> None:
    clone = store.clone()
    clone.set("k", "v")
    assert store.get("k") == b"v"
    if not isinstance(store, PrefixStore):
        assert clone.timeout == SHORT


def test_barriers(store: Any) -> None:
    store.barrier("alone", 1)
    with pytest.raises(DistStoreError, match="timeout after"):
        store.barrier("two", 2, SHORT)
    store.set_timeout(timedelta(seconds=DEADLINE))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: store.clone().barrier("both", 2, timedelta(seconds=DEADLINE)), range(2)))


@pytest.mark.parametrize("store", ["tcp", "job"], indirect=True)
def test_queues(store: Any) -> None:
    assert store.queue_len("q") == 0
    with pytest.raises(QueueEmptyError):
        store.queue_pop("q", False)
    with pytest.raises(DistStoreError, match="wait timeout after 300ms, keys: /q"):
        store.queue_pop("q")
    store.queue_push("q", "1")
    store.queue_push("q", "2")
    assert store.queue_len("q") == 2
    assert store.check(["q"])
    store.wait(["q"])
    assert store.num_keys() == 0
    store.set("k", "v")
    assert store.list_keys() == ["k"]
    assert [store.queue_pop("q"), store.queue_pop("q", False)] == [b"1", b"2"]
    assert not store.check(["q"])
    store.set_timeout(timedelta(seconds=DEADLINE))
    with ThreadPoolExecutor(1) as pool:
        popped = pool.submit(store.clone().queue_pop, "q")
        store.queue_push("q", "3")
        assert popped.result(DEADLINE) == b"3"


def test_many_threads(store: Any) -> None:
    store.set_timeout(timedelta(seconds=DEADLINE))
    clones = [store.clone() for _ in range(4)]

    def work(number: int) -> list[int]:
        mine = clones[number]
        totals = [mine.add("n", 1) for _ in range(20)]
        mine.append("text", str(number))
        mine.set(f"done{number}", "1")
        mine.wait([f"done{other}" for other in range(4)])
        return totals

    with ThreadPoolExecutor(4) as pool:
        totals = [total for found in pool.map(work, range(4)) for total in found]
    assert sorted(totals) == list(range(1, 81))
    assert sorted(store.get("text").decode()) == list("0123")


def test_a_wait_ends_with_the_last_of_its_keys(store: Any) -> None:
    store.set_timeout(timedelta(seconds=DEADLINE))
    with ThreadPoolExecutor(3) as pool:
        waiters = [pool.submit(store.clone().multi_get, ["x", "y"]) for _ in range(3)]
        store.set("x", "1")
        assert not any(waiter.done() for waiter in waiters)
        store.set("y", "2")
        assert [waiter.result(DEADLINE) for waiter in waiters] == [[b"1", b"2"]] * 3


# ---- what TCPStore has not


def test_prefixes_are_deleted_and_bad_arguments_refused(procs: ProcMesh) -> None:
    store = JobStore(spawn_store(procs), SHORT)
    inner = PrefixStore("a", store)
    inner.set("1", "v")
    inner.set("2", "v")
    store.set("b", "v")
    assert store.delete_prefix("a/") == 2
    assert store.list_keys() == ["b"]
    with pytest.raises(DistStoreError, match="cannot add to key /b: its value is no integer"):
        store.add("b", 1)
    assert store.get("b") == b"v"
    for wrong in (lambda: store.set(5, "v"), lambda: store.set("k", 5), lambda: store.get(None)):  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError, match="a store has one actor"):
        JobStore(procs.spawn("stores", StoreActor))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_process_of_the_actor_needs_no_messages(procs: ProcMesh, rank: int) -> None:
    stores = procs.spawn("stores", StoreActor)
    assert len(stores.ask.call("num_keys").get(DEADLINE)) == 4
    # The first of a mesh of such actors, each in a process of its own, from its process and from another.
    store = JobStore(stores.slice(rank=0), SHORT)
    procs.slice(rank=rank).spawn("ranks", Rank).use_all.call_one(store, SHORT).get(DEADLINE)
    stores.stop().get(DEADLINE)
    with pytest.raises(DistStoreError, match="is gone"):
        store.get("k")


def test_threads_of_the_actors_process_are_told_of_its_end() -> None:
    instance = context().actor_instance
    actor = instance.proc.spawn("store", StoreActor)
    actor.ask.call_one("num_keys").get(DEADLINE)
    store = JobStore(actor)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "never")
        wait_until(lambda: store._ask("waits") == 1, "the wait is there")
        actor.stop().get(DEADLINE)
        with pytest.raises(DistStoreError, match="is gone: its actor has ended"):
            waiting.result(DEADLINE)
    with pytest.raises(DistStoreError, match="is gone"):
        store.set("k", "v")


def test_a_store_can_be_sent(procs: ProcMesh) -> None:
    store = JobStore(spawn_store(procs), SHORT)
    copy = pickle.loads(pickle.dumps(store))
    assert copy.timeout == SHORT
    late = procs.slice(rank=1).spawn("ranks", Rank).get.call_one(JobStore(store._actor), "k")
    copy.set("k", b"\0v")
    assert late.get(DEADLINE) == b"\0v"


def test_waits_that_nobody_waits_for_are_forgotten() -> None:
    table, seen = KeyTable(), []
    now = time.monotonic()
    table.when_there(["a", "b"], now - 1, lambda: seen.append("early"))
    assert table.waits() == 1, "it is out of time when the next one comes"
    table.when_there(["a"], now + 100, lambda: seen.append("late"))
    assert table.waits() == 1
    table.set_values({"a": b"", "b": b""})
    assert (seen, table.waits()) == (["late"], 0)
    table.when_there(["p/1", "q"], now + 100, lambda: seen.append("deleted"))
    assert table.delete_prefix("p/") == 0
    assert table.waits() == 0


def test_a_key_that_was_deleted_is_waited_for_again() -> None:
    table, seen = KeyTable(), []
    table.when_there(["a", "b"], time.monotonic() + 100, lambda: seen.append(table.values(["a", "b"])))
    table.set_values({"a": b"1"})
    table.delete_key("a")
    table.set_values({"b": b"2"})
    assert seen == []
    table.set_values({"a": b"3"})
    assert seen == [[b"3", b"2"]]
    assert table.waits() == 0


@pytest.mark.parametrize("size", [2, 4])
def test_gloo_groups_meet_there_and_nothing_of_it_listens(procs: ProcMesh, size: int) -> None:
    ranks = procs.spawn("ranks", Rank)
    store = JobStore(spawn_store(procs))
    totals = [ranks.slice(rank=rank).total.call_one(store, rank, size) for rank in range(size)]
    assert [total.get(DEADLINE) for total in totals] == [size * (size + 1) / 2] * size
    wait_until(lambda: not any(found for _, found in ranks.listeners.call().get(DEADLINE).items()), "no listener")


@pytest.fixture
def unhandled(monkeypatch: pytest.MonkeyPatch) -> None:
    import monarch_slurm.actor as public

    def go_on(failure: MeshFailure) -> None:
        return None

    monkeypatch.setattr(public, "unhandled_fault_hook", go_on)


@pytest.mark.usefixtures("unhandled")
def test_operations_end_at_once_with_the_process_of_the_store() -> None:
    mesh = this_host().spawn_procs({"rank": 1})
    store = JobStore(spawn_store(mesh))
    pid = mesh.spawn("ranks", Rank).pid.call_one().get(DEADLINE)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "never")
        wait_until(lambda: store._ask("waits") == 1, "the wait is there")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DistStoreError, match=r"is gone: .*SIGKILL|Killed"):
            waiting.result(DEADLINE)
    operations: list[Callable[[], Any]] = [
        lambda: store.get("k"),
        lambda: store.set("k", "v"),
        lambda: PrefixStore("p", store).add("n", 1),
    ]
    for operation in operations:
        with pytest.raises(DistStoreError, match="is gone"):
            operation()
    mesh.stop().get(DEADLINE)


LATE = """
import sys, threading
from monarch_slurm.actor import this_host, shutdown_context
from monarch_slurm.collectives import StoreActor
from monarch_slurm.collectives.job_store import JobStore
from torch.distributed import PrefixStore

store = PrefixStore("p", JobStore(this_host().spawn_procs().spawn("store", StoreActor)))
store.set("k", "v")
waiting = threading.Thread(target=lambda: store.get("never"), daemon=sys.argv[1] == "daemon")
threading.excepthook = lambda args: print("waiter:", args.exc_type.__name__, flush=True)
waiting.start()
if sys.argv[1] == "shutdown":
    shutdown_context().get()
    waiting.join()
    try:
        store.get("k")
    except RuntimeError as error:
        print("late:", type(error).__name__, flush=True)
print("through", flush=True)
"""


@pytest.mark.parametrize(
    ("how", "expected"), [("shutdown", ["waiter: DistStoreError", "late: RuntimeError", "through"]), ("daemon", None)]
)
def test_a_program_that_ends_does_not_wait_for_the_store(how: str, expected: list[str] | None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE, how], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines == expected if expected is not None else "through" in lines
