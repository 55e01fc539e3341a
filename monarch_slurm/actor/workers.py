"""Workers: processes that wait for programs on their own, and programs that attach to them to have hosts."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

from monarch_slurm.actor.client import Client, client, has_client
from monarch_slurm.actor.future import Future
from monarch_slurm.actor.host_mesh import HostMesh
from monarch_slurm.actor.hosts_handle import HostsHandle
from monarch_slurm.actor.ndslice import Slice
from monarch_slurm.actor.replies import CountDown
from monarch_slurm.actor.shape import Shape
from monarch_slurm.config import get_runtime_config, settings
from monarch_slurm.host.attaching import AttachError, Candidate, attach_all
from monarch_slurm.host.gateway import Gateway
from monarch_slurm.host.identity import LOOPBACK, address_towards, new_host_id
from monarch_slurm.host.worker import Worker
from monarch_slurm.host.worker_address import WorkerAddress, WorkerAddressError, resolve, split_tcp
from monarch_slurm.transport import BindSpec
from monarch_slurm.wire import BindError, Invitation, JobKeys
from monarch_slurm.wire.shared_key import ALLOW_VARIABLE, Key, NoKeyError, choose_secret, derive_keys
from monarch_slurm.wire.task_limits import start_thread

logger = logging.getLogger(__name__)

Workers = Sequence[str | Future[str]]


def run_worker_loop_forever(*, private_key: Key | None = None, ca: Key | None = None, address: str) -> None:
    """Be a host for programs that attach, one after the other. Ends the process when one of them shuts its hosts down.

    When a program ends, however that is, its procs here end, and the next one may attach.

    Args:
        private_key: the key that programs must have, too: 32 random bytes or more, or the path of a file with them that
            only its owner can read (mode 0600; `make_worker_key` makes one). None takes the file that the environment
            variable ``MONARCH_SLURM_WORKER_KEY`` names.
        ca: the key again, or None. ``"trust_all_connections"`` does without a key where the environment variable
            ``MONARCH_SLURM_ALLOW_UNAUTHENTICATED`` is 1 and the address is one of this machine alone.
        address: ``tcp://host:port``; ``tcp://dialled:port@tcp://bound:port`` where both differ; ``tcp://host:fd3`` for
            a bound TCP socket that this process has inherited, whether it listens yet or not; ``ipc://path``;
            ``inproc://name``. Before all of them, ``<id>@`` gives the worker a name that programs can insist on.

    Raises:
        NoKeyError: there is no key.
        KeyFileError: others could have read the key file.
        WorkerAddressError: the address is none.
        BindError: it cannot be listened at.
    """
    _worker(private_key, ca, address).serve()
    sys.exit(0)


def run_worker_loop_until_shutdown(*, private_key: Key | None = None, ca: Key | None = None, address: str) -> None:
    """Like `run_worker_loop_forever`, but return when a program has shut its hosts down."""
    _worker(private_key, ca, address).serve()


def start_worker_loop_forever(*, private_key: Key | None = None, ca: Key | None = None, address: str) -> Future[None]:
    """Like `run_worker_loop_forever` on a thread of its own: the worker listens when this returns, and this process
    ends, with status 0 and after its ``atexit`` functions, when another program shuts its hosts down.

    The future raises `BindError` if the address cannot be listened at, for example because it is occupied. It resolves
    only when this very process has shut down its own worker, and then goes on. Dropping it ends nothing.
    """
    ended: Future[None] = Future._pending()
    ended._what = f"the end of the worker {address}"
    try:
        worker = _worker(private_key, ca, address)
    except BindError as error:
        logger.error("%s", error)  # noqa: TRY400 - the text says it all, and the future may have been dropped
        ended._fail(error)
        return ended

    def serve() -> None:
        try:
            worker.serve()
        except BaseException as error:  # whoever waits for the future gets it
            ended._fail(error)
            raise
        if worker.served_this_process:
            ended._resolve(lambda: None)
        else:
            _end_process()

    start_thread(threading.Thread(target=serve, name="monarch-worker", daemon=True))
    return ended


def attach_to_workers(
    *, private_key: Key | None = None, ca: Key | None = None, workers: Workers, name: str | None = None
) -> HostMesh:
    """Return workers as hosts, with dimension ``hosts`` and in their order, without waiting for them.

    Procs can be spawned on them at once. ``initialized`` tells when all are there; it raises `AttachError` if one is
    not within the setting ``mesh_attach_config_timeout`` (seconds), has another key, or serves another program all that
    time. What `monarch_slurm.config.configure` has set here holds for their agents, too. A worker that this program has
    attached to before is the same host again.

    Args:
        private_key: see `run_worker_loop_forever`, as for ``ca``.
        workers: their addresses, or futures of them; ``<id>@`` insists on the worker of that name.
        name: what is said before the names of hosts whose addresses are not known yet.

    Raises:
        NoKeyError: there is no key.
        KeyFileError: others could have read the key file.
        WorkerAddressError: a text is no address of a worker.
        ValueError: there are no workers, or one is named twice.
    """
    secret, known = choose_secret(private_key, ca)
    addresses = [_to_dial(worker) if isinstance(worker, str) else worker for worker in workers]
    _check_workers(addresses, known)
    here = client()
    handle = HostsHandle(release=_attachments.release)
    found = _attachments.take(here, addresses, name or "worker", handle)
    new = [one for one in found if one.is_new]
    for one in new:
        one.is_new = False
        here.hub.expect(one.candidate.host)
    if new:
        attaching = _Attaching(here, derive_keys(secret), known, new)
        start_thread(threading.Thread(target=attaching.run, name="monarch-attach", daemon=True))
    hosts = tuple(one.candidate.host for one in found)
    shape = Shape(["hosts"], Slice.new_row_major([len(hosts)]))
    return HostMesh(hosts, shape, owned=True, ready=_all_ready(found), handle=handle)


def attach(addr: str, *, private_key: Key | None = None, ca: Key | None = None) -> None:
    """Reach all workers through the one at ``addr``, for a program outside of their network: it dials that worker
    only, and is dialled by none. Before the first use of hosts or procs; again with the same address, it does nothing.

    Args:
        private_key: see `run_worker_loop_forever`, as for ``ca``.

    Raises:
        RuntimeError: this program has hosts already, or is attached through another worker.
        AttachError: the worker cannot be had.
    """
    global _gateway, _gateway_address
    with _gateway_lock:
        if _gateway_address == addr:
            return
        if _gateway_address:
            raise RuntimeError(f"client is already attached through {_gateway_address}")
        if has_client():
            raise RuntimeError(
                "client was initialized without a remote attachment; call attach(addr) before the first "
                "context()/this_host()/this_proc()"
            )
        secret, known = choose_secret(private_key, ca)
        address = _to_dial(addr)
        if known:
            _check_local(address)
        timeout = settings().mesh_attach_config_timeout
        _gateway = Gateway(derive_keys(secret), address, _attachments.program, _own_hub, timeout)
        _gateway_address = addr


def _end_process() -> None:
    """End this process in an orderly way from a thread that is not the main one, whatever that does."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # there is none, or it is closed
            stream.flush()
    os._exit(0)


def attached_to() -> str | None:
    """Return the address of the worker that this program was told to `attach` to, if any."""
    return _gateway_address or None


def _own_hub() -> tuple[str, int]:
    host, port = split_tcp(client().hub.invitation(LOOPBACK).address)
    return host, int(port)


_gateway: Gateway | None = None
_gateway_address = ""
_gateway_lock = threading.Lock()


def _worker(private_key: Key | None, ca: Key | None, address: str) -> Worker:
    secret, known = choose_secret(private_key, ca)
    parsed = WorkerAddress.parse(address)
    if known:
        _check_local(parsed)
    return Worker(derive_keys(secret), parsed)


def _to_dial(text: str) -> WorkerAddress:
    address = WorkerAddress.parse(text)
    if address.dial.startswith("tcp:") and not split_tcp(address.dial)[1].isdecimal():
        raise WorkerAddressError(f"worker address {text!r}: a descriptor cannot be dialled; name the port")
    return address


def _check_workers(addresses: Sequence[WorkerAddress | Future[str]], known: bool) -> None:
    if not addresses:
        raise ValueError("attach_to_workers needs at least one worker")
    parsed = [address for address in addresses if isinstance(address, WorkerAddress)]
    ((dial, number),) = Counter(address.dial for address in parsed).most_common(1) or [("", 0)]
    if number > 1:
        raise ValueError(f"the worker {dial} is named {number} times")
    if known:
        for address in parsed:
            _check_local(address)


def _check_local(address: WorkerAddress) -> None:
    if not address.is_local:
        raise NoKeyError(
            f"{ALLOW_VARIABLE} holds for addresses of this machine alone, and {address} is none: use a private_key"
        )


class _Attachment:
    """A worker that this program attaches to, or has."""

    def __init__(self, candidate: Candidate, worker: WorkerAddress | Future[str]) -> None:
        self.candidate = candidate
        self.worker = worker
        self.is_new = True
        self.users: weakref.WeakSet[HostsHandle] = weakref.WeakSet()
        """Handles of the meshes that it is part of and that are still used, by procs or by the program."""
        self.ready: Future[bool] = Future._pending()
        self.ready._what = f"attaching to {candidate.name}: {candidate.why}"


class _Attachments:
    """The workers of this program: by host, and by the URL that it dials if that was known from the start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_host: dict[str, _Attachment] = {}
        self._by_url: dict[str, _Attachment] = {}
        self.program = os.urandom(8).hex()

    def take(
        self, here: Client, workers: Sequence[WorkerAddress | Future[str]], name: str, user: HostsHandle
    ) -> list[_Attachment]:
        """Return the attachments of these workers, new ones for those that this program does not have."""
        often = Counter(worker.host for worker in workers if isinstance(worker, WorkerAddress))
        taken = []
        with self._lock:
            for number, worker in enumerate(workers):
                if isinstance(worker, WorkerAddress):
                    one = self._by_url.get(worker.dial)
                    if one is None or here.hub.has_ended(one.candidate.host):
                        label = worker.host if often[worker.host] == 1 else worker.dial.partition("//")[2]
                        one = self._by_url[worker.dial] = _new(label, worker)
                else:
                    one = _new(f"{name}-{number}", worker)
                self._by_host[one.candidate.host] = one
                one.users.add(user)
                taken.append(one)
        return taken

    def release(self, user: HostsHandle, shut_down: bool) -> list[str]:
        """Return the hosts of ``user`` that no other mesh of this program uses, and forget them.

        Args:
            shut_down: all its hosts end, whoever uses them.
        """
        free = []
        with self._lock:
            for host, one in self._by_host.items():
                if user in one.users:
                    one.users.discard(user)
                    if shut_down or not one.users:
                        free.append(host)
            self._forget(free)
        return free

    def drop(self, host: str) -> None:
        """Forget a host that cannot be had."""
        with self._lock:
            self._forget([host])

    def _forget(self, hosts: Sequence[str]) -> None:
        for host in hosts:
            self._by_host.pop(host, None)
        self._by_url = {url: one for url, one in self._by_url.items() if one.candidate.host not in hosts}


_attachments = _Attachments()
_UNKNOWN = WorkerAddress("", "", "")


def _new(label: str, worker: WorkerAddress | Future[str]) -> _Attachment:
    name = label.replace("#", "_")
    address = worker if isinstance(worker, WorkerAddress) else _UNKNOWN
    return _Attachment(Candidate(address, new_host_id(name), name), worker)


def _all_ready(attachments: Sequence[_Attachment]) -> Future[bool]:
    ready: Future[bool] = Future._pending()
    one_there = CountDown(len(attachments), lambda: ready._resolve(lambda: True))
    ready._what = lambda: f"attaching to workers: {one_there.left} of {len(attachments)} are not there"

    def look(one: _Attachment) -> None:
        error = one.ready.exception()
        if error is not None:
            ready._fail(error)
        one_there()

    for one in attachments:
        one.ready._on_done(lambda one=one: look(one))  # type: ignore[misc]
    return ready


class _Attaching:
    """Attaches to some workers, on a thread of its own."""

    def __init__(self, here: Client, keys: JobKeys, known: bool, attachments: Sequence[_Attachment]) -> None:
        self._client = here
        self._keys = keys
        self._known = known
        self._by_host = {one.candidate.host: one for one in attachments}
        self._lock = threading.Lock()

    def run(self) -> None:
        timeout = settings().mesh_attach_config_timeout
        chosen = get_runtime_config()
        attach_all(
            [one.candidate for one in self._by_host.values() if self._find_address(one, timeout)],
            self._keys,
            self._invite,
            {name: value for name, value in asdict(settings()).items() if name in chosen},
            _attachments.program,
            self._fail,
            timeout,
            lambda host: host in self._client.hub.hosts,
            str if _gateway is None else _gateway.reach,
        )
        self._wait_for_agents()

    def _find_address(self, one: _Attachment, timeout: float) -> bool:
        if isinstance(one.worker, WorkerAddress):
            return True
        try:
            one.candidate.address = _to_dial(one.worker.get(timeout))
            if self._known:
                _check_local(one.candidate.address)
        except Exception as error:  # whatever the future raises is why there is no address
            self._fail(one.candidate, f"its address did not come: {error!r}")
            return False
        return True

    def _invite(self, address: WorkerAddress) -> Invitation:
        if _gateway is not None and address.dial.startswith("tcp:"):
            with self._lock:
                here = self._client.hub.invitation(LOOPBACK)
                return replace(here, address=_gateway.relay, near="", controller_host="", controller_pid=0)
        wanted, port = BindSpec.of(settings().default_transport), 0
        if wanted.host:
            ip, port = resolve(wanted.host), int(split_tcp(wanted.address)[1])
        elif address.dial.startswith("tcp:"):
            host, worker_port = split_tcp(address.dial)
            there = resolve(host)
            ip = address_towards(f"tcp://[{there}]:{worker_port}" if ":" in there else f"tcp://{there}:{worker_port}")
        else:
            ip = LOOPBACK
        with self._lock:
            return self._client.hub.invitation(ip, port)

    def _wait_for_agents(self) -> None:
        here = self._client
        limit = settings().host_spawn_ready_timeout
        for host, one in self._by_host.items():
            with here.hosts_changed:
                here.hosts_changed.wait_for(lambda host=host, one=one: one.ready._done or host in here.records, limit)  # type: ignore[misc]
            if host in here.records:
                one.ready._resolve(lambda: True)
            elif not one.ready._done:
                self._fail(
                    one.candidate,
                    f"it has accepted, but did not join within {limit:g} s (setting host_spawn_ready_timeout). It must "
                    f"be able to dial this program on {socket.gethostname()}; enable_transport('tcp://host:port') "
                    "names an address that it can",
                )

    def _fail(self, candidate: Candidate, why: str) -> None:
        cause = f"cannot attach to the worker {candidate.address if candidate.address.dial else candidate.name}: {why}"
        _attachments.drop(candidate.host)
        self._client.give_up(candidate.host, candidate.name, cause)
        self._by_host[candidate.host].ready._fail(AttachError(cause))
