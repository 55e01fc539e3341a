"""The controller's end: one connection per host agent, who is there, who has died, messages passed on between hosts."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import zmq

from monarch_slurm.config import settings
from monarch_slurm.host.caster import Caster
from monarch_slurm.host.contacts import Contacts
from monarch_slurm.host.exits import SILENT, UNRESPONSIVE, HostDown
from monarch_slurm.host.identity import LOOPBACK, pid_space
from monarch_slurm.host.incoming import Incoming
from monarch_slurm.host.places import Places
from monarch_slurm.host.shares import FOR_OTHERS, for_one_host
from monarch_slurm.wire import (
    AGENT,
    CONTROLLER,
    Address,
    Gatekeeper,
    Invitation,
    JobKeys,
    Liveness,
    Loop,
    Message,
    StreamLink,
    UnknownPeerError,
    WireError,
)
from monarch_slurm.wire.agent_links import AgentLinks
from monarch_slurm.wire.arriving import late_frames
from monarch_slurm.wire.sockets import bind_tcp, make_router
from monarch_slurm.wire.stream_link import large_parts_in_files
from monarch_slurm.wire.task_limits import zmq_context

logger = logging.getLogger(__name__)

_NOT_OURS = "this program never had that host: the reference belongs to another program, or to an earlier run"

_AGENT_SETTINGS = (
    "heartbeat_interval",
    "missed_heartbeats",
    "mesh_orphan_timeout",
    "process_exit_timeout",
    "stderr_tail_lines",
)
"""Settings of the controller that its agents go by."""


@dataclass(frozen=True)
class HostInfo:
    """A host whose agent has joined: its id, the name people know, and what the agent says of itself."""

    host: str
    name: str
    hostname: str
    pid: int
    address: str


class Hub:
    """Listens for agents and routes between them.

    Args:
        loop: the controller's I/O loop.
        keys: the job's keys.
        on_message: called on the loop's thread with every message for the controller process itself.
        on_joined: called with each host whose agent has joined.
        on_host_down: called once for each host that has ended or is given up.
        on_quick: called before ``on_message`` for some messages of agents of this machine, on the thread that reads;
            true: it has taken the message.

    Attributes:
        places: which hosts have taken the place of others; what is sent to one of those goes to its stand-in.
        guests: processes of other programs that have joined to call actors of this one. They are sent news as hosts
            are, and have no procs.
        find_stand_in: asked before anybody is told of a host's end: the id of the host that takes its place, and what
            people know it as.
        on_passed: called with what a host has sent to others, after it was passed on.
    """

    def __init__(
        self,
        loop: Loop,
        keys: JobKeys,
        on_message: Callable[[Message], None],
        on_joined: Callable[[HostInfo], None],
        on_host_down: Callable[[HostDown], None],
        on_quick: Callable[[Message], bool] = lambda message: False,
    ) -> None:
        self._loop = loop
        self._keys = keys
        self._on_message = on_message
        self._on_joined = on_joined
        self._on_host_down = on_host_down
        self.places = Places()
        self.find_stand_in: Callable[[HostDown], tuple[str, str] | None] = lambda down: None
        self.on_passed: Callable[[Message], None] = lambda message: None
        self.hosts: dict[str, HostInfo] = {}
        self.guests: dict[str, HostInfo] = {}
        self._endpoints: dict[str, str] = {}
        self._expected: dict[str, list[Message]] = {}
        self._watched: set[str] = set()
        self._lock = threading.RLock()
        self._gone: dict[str, HostDown] = {}
        self._ending = False
        current = settings()
        self._interval = current.heartbeat_interval
        self._network_limit = current.heartbeat_interval * current.missed_heartbeats
        self._liveness = Liveness(self._network_limit, current.unresponsive_agent_timeout)
        self._relayed: set[str] = set()
        """Hosts whose connection ends at a process in between: what this kernel knows of it tells nothing of them."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq_context()
        router = make_router(self._context)
        self._gatekeeper = Gatekeeper(self._context, router, keys, "the controller's port")
        loop.call_soon(lambda: self._gatekeeper.attach(loop))
        self._link = AgentLinks(
            loop, router, self._from_agent, self._agent_fault, self._agent_closed, self._quickly_from_agent,
            self._endpoints.values)  # fmt: skip
        self._contacts = Contacts()
        self._incoming = Incoming(loop, self._in_order, on_quick)
        self._caster = Caster(current.max_cast_fanout, current.missed_heartbeats, self._link.send)
        loop.call_soon(self._beat)

    @property
    def near(self) -> StreamLink:
        """The connections with agents of this machine."""
        return self._link.near

    @property
    def addresses(self) -> list[str]:
        """IP addresses of this machine where agents of other hosts were told to join."""
        return list(self._endpoints)

    def invitation(self, ip: str, port: int = 0) -> Invitation:
        """Listen on ``port`` of ``ip`` and return what an agent needs to join there. It holds a secret.

        Args:
            port: 0 for an ephemeral one. It is that of the first call for ``ip``.

        Raises:
            BindError: the address is not one of this machine, or the port is taken.
            SocketPathError: there is no folder for a Unix socket.
        """
        with self._lock:
            if ip not in self._endpoints:
                self._endpoints[ip] = self._link.with_socket(lambda socket: bind_tcp(socket, ip, self._keys, port))
        keys = self._keys
        invitation = Invitation(
            self._endpoints[ip],
            keys.server_public,
            keys.agent_public,
            keys.agent_secret,
            pid_space(),
            os.getpid(),
            self._link.near_path(),
        )
        self._link.publish(invitation)
        return invitation

    def admit_guests(self) -> None:
        """Have processes of other programs on this machine find this one. For any thread."""
        with self._lock:
            if not self._endpoints:
                self.invitation(LOOPBACK)

    def send(self, message: Message) -> None:
        """Send ``message`` to its host. For any thread. News of the host's end comes back if it is gone.

        A host whose connection has broken is given up: what was on the way is lost, and nobody knows what it was.
        """
        if message.dst.host == CONTROLLER.host:
            if message.kind == "publish":
                self._publish(Message(message.fields["kind"], CONTROLLER, CONTROLLER, message.fields["fields"]))
            elif message.kind == "casts":
                self._cast(message)
            else:
                self._loop.call_soon(lambda: self._on_message(message))
            return
        self._prepare(message, [message.dst.host])
        with self._lock:
            self._redirect(message)
            self._contacts.note(message)
            waiting = self._expected.get(message.dst.host)
            if waiting is not None:
                waiting.append(message)
                return
            if message.dst.host not in self._gone:  # what is given up may still have a connection
                try:
                    self._caster.direct(message, message.dst.host)
                    return
                except UnknownPeerError:
                    pass
        self._loop.call_soon(lambda: self._undeliverable(message))

    def _prepare(self, message: Message, hosts: Iterable[str]) -> None:
        """Copy what is large before the lock is taken: the loop's thread waits for that lock, too.

        What has not all come yet is copied when it has: it comes on the loop's thread, which must not wait for it here.
        """
        if not message.body or late_frames(message.body):
            return
        if any(self._link.near.knows(host) or host not in self.hosts for host in hosts):
            large_parts_in_files(message)

    def _redirect(self, message: Message) -> None:
        host = self.places.now(message.dst.host)
        if host != message.dst.host:
            message.dst, message.encoded = Address(host, message.dst.proc), None

    def move(self, old: str, new: str) -> None:
        """Have the host ``new`` take the place of ``old``, which is lost or never came. On the loop's thread."""
        with self._lock:
            self.places.move(old, new)
            self._publish(Message("host_moved", CONTROLLER, CONTROLLER, {"old": old, "new": new}))
            for message in self._expected.pop(old, []):
                self._redirect(message)
                self._send_quietly(message)

    def expect(self, host: str, watched: bool = False) -> None:
        """Keep what is sent to ``host`` until its agent joins.

        Args:
            watched: the end of its process is told by `give_up`, which says more than that a connection is gone.
        """
        with self._lock:
            self._expected[host] = []
            if watched:
                self._watched.add(host)

    def has_ended(self, host: str) -> bool:
        """Return whether the agent of ``host`` has ended, or was given up."""
        return host in self._gone

    def give_up(self, host: str, name: str, cause: str) -> None:
        """Declare a host dead, whether its agent ever joined or not. On the loop's thread."""
        with self._lock:
            never_came = self._expected.pop(host, None) is not None
        if never_came:
            self.hosts[host] = HostInfo(host, name, "", 0, "")
        self._host_down(host, cause)

    def shutdown(self, timeout: float) -> None:
        """Tell all agents to end with their procs, which may take ``timeout`` seconds."""
        self._ending = True
        with self._lock:
            hosts = [*self.hosts, *self._expected, *self.guests]
        for host in hosts:
            self.send(Message("shutdown", Address(host, AGENT), CONTROLLER, {"timeout": timeout, "release": True}))

    def close(self) -> None:
        """Close the sockets. When the loop does not run any more."""
        self._gatekeeper.close()
        self._link.close()
        self._context.destroy(linger=200)

    def _send_quietly(self, message: Message) -> None:
        try:
            with self._lock:
                self._caster.direct(message, message.dst.host)
        except UnknownPeerError:
            return  # its end is told by `_beat`

    def _cast(self, message: Message) -> None:
        """Send one message to the procs of many hosts. For any thread; keeps the order of one thread."""
        self._prepare(message, [host for host, _ in message.fields["targets"]])
        with self._lock:
            self._contacts.note_cast(message, [host for host, _ in message.fields["targets"]])
            absent, unreachable = self._caster.cast(message)
            fields = {name: value for name, value in message.fields.items() if name not in ("targets", "key")}
            cast = replace(message, fields=fields, encoded=None)
            for host, ranks in absent:
                self.send(for_one_host(cast, Address(host, AGENT), list(ranks)))
        for host in unreachable:
            lost = Message("cast", Address(host, AGENT), message.src)
            self._loop.call_soon(partial(self._undeliverable, lost))

    def _undeliverable(self, message: Message) -> None:
        host = message.dst.host
        self._host_down(host, "the connection to its agent is gone")  # if it is not known to have ended
        down = self._gone.get(host)
        if down is None:
            down = HostDown(host, host.partition("#")[0], _NOT_OURS, time.time())
        notice = Message("host_down", message.src, CONTROLLER, down.to_fields())
        if message.src.host == CONTROLLER.host:
            self._on_message(notice)
        elif message.kind not in ("host_down", "proc_down"):
            self._send_quietly(notice)

    def _peers(self) -> list[str]:
        return [*self.hosts, *self.guests]

    def _publish(self, message: Message) -> None:
        """Tell everybody: all agents, and this process. For any thread; nothing that it sends later is there before."""
        for peer in self._peers():
            self._send_quietly(Message(message.kind, Address(peer, AGENT), CONTROLLER, message.fields))
        self._loop.call_soon(lambda: self._on_message(message))

    # ---- agents

    def _from_agent(self, peer: str, message: Message) -> None:
        if peer in self._gone:
            cause = self._gone[peer].cause
            self._send_quietly(Message("fenced", Address(peer, AGENT), CONTROLLER, {"cause": cause}))
            return
        if message.src.host != peer:
            logger.error("host %s spoke as %s; dropped", peer, message.src)
            return
        if not self._link.near.knows(peer):  # of one on this machine the kernel tells when it has ended
            self._liveness.heard(peer, self._loop.awake)
        if message.kind == "heartbeat":
            if message.fields:
                with self._lock:
                    self._caster.heard(peer, message.fields["casts"])
        elif message.kind.startswith("tree_"):
            with self._lock:
                self._caster.take(message)
        elif message.kind == "fold":
            self._incoming.folded(message)
        elif message.kind == "hello":
            self._joined(peer, message)
        elif message.dst.host != CONTROLLER.host or message.kind in FOR_OTHERS:
            self.send(message)
            self.on_passed(message)
        else:
            self._incoming.direct(peer, message)

    def _in_order(self, message: Message) -> None:
        """Take a message for the controller when it is its turn among those of its host."""
        if message.kind == "bye":
            self._left(message.src.host)
            return
        if message.kind == "proc_down":
            with self._lock:
                told = self._contacts.of_proc(message.fields, self._peers())
            self._tell_agents(message, told - {message.src.host})
        self._on_message(message)

    def _quickly_from_agent(self, peer: str, message: Message) -> bool:
        if peer in self._gone or message.dst != CONTROLLER or message.src.host != peer:
            return False
        return self._incoming.take_quickly(peer, message)

    def _agent_fault(self, peer: str, error: WireError) -> None:
        if peer in self.hosts or peer in self.guests:
            self._host_down(peer, f"the connection to its agent broke: {error}")

    def _agent_closed(self, peer: str) -> None:
        if peer not in self._watched:
            self._host_down(peer, "the connection to its agent is gone")

    def _joined(self, peer: str, message: Message) -> None:
        fields = message.fields
        info = HostInfo(peer, fields["name"], fields["hostname"], fields["pid"], fields["address"])
        if fields.get("endpoint") not in self._endpoints.values():
            self._relayed.add(peer)
        guest = fields.get("guest", False)
        with self._lock:
            welcomed = {"settings": _agent_settings(), "places": self.places.table()}
            welcome = Message("welcome", Address(peer, AGENT), CONTROLLER, welcomed)
            (self.guests if guest else self.hosts)[peer] = info
            self._incoming.join(peer)
            for waiting in [welcome, *self._expected.pop(peer, [])]:
                self._send_quietly(waiting)
            if not guest:
                self._caster.join(peer)
        if not guest:
            self._on_joined(info)

    def _left(self, peer: str) -> None:
        info = self._forget(peer)
        self._link.forget(peer)
        if info is not None:
            self._tell_host_down(HostDown(peer, info.name, "its agent ended", time.time()))

    def _forget(self, peer: str) -> HostInfo | None:
        with self._lock:
            info = self.hosts.pop(peer, None) or self.guests.pop(peer, None)
            self._liveness.forget(peer)
            self._relayed.discard(peer)
            self._incoming.leave(peer)
            self._caster.leave(peer)
        return info

    def _beat(self) -> None:
        self._judge(self._loop.awake)
        with self._lock:
            self._caster.beat()
        for peer in self._peers():
            folds = self._incoming.folds(peer)
            acknowledged = {"folds": folds} if folds else {}
            try:
                self._link.send(Message("heartbeat", Address(peer, AGENT), CONTROLLER, acknowledged), peer)
            except UnknownPeerError:  # its process has died, and its kernel said so
                self._agent_closed(peer)
        self._loop.call_later(self._interval, self._beat)

    def _judge(self, now: float) -> None:
        """Give up the hosts on other machines that are lost. What they have sent was read before."""
        for peer in self._liveness.silent(now, self._interval):
            silence = None if peer in self._relayed else self._link.machine_silence(peer)
            if silence is not None:
                self._liveness.answered(peer, now - silence)
        self._liveness.peer_limit = limit = settings().unresponsive_agent_timeout
        for peer, machine_answers in self._liveness.lost(now):
            if machine_answers:
                cause = f"{UNRESPONSIVE} for {limit:g} s (setting unresponsive_agent_timeout), but its machine answers"
                self._host_down(peer, cause)
            else:
                self._host_down(peer, f"{SILENT} for {self._network_limit:g} s", silent=True)

    def _host_down(self, peer: str, cause: str, silent: bool = False) -> None:
        ordinary = self._ending or peer in self.guests
        info = self._forget(peer)
        if info is None:
            return
        logger.log(logging.DEBUG if ordinary else logging.ERROR, "host %s is lost: %s", info.name, cause)
        self._send_quietly(Message("fenced", Address(peer, AGENT), CONTROLLER, {"cause": cause}))
        self._tell_host_down(HostDown(peer, info.name, cause, time.time(), silent=silent))

    def _tell_host_down(self, down: HostDown) -> None:
        stand_in = self.find_stand_in(down)
        if stand_in is not None:
            host, name = stand_in
            down = replace(down, stand_in=host, replaced_by=name)
            logger.warning("host %s: %s takes its place", down.host_name, name)
            with self._lock:
                self.places.move(down.host, host)
        self._gone[down.host] = down
        with self._lock:
            peers = self._peers()
            told = set(peers) if down.stand_in else self._contacts.of_host(down.host, peers)
        self._tell_agents(Message("host_down", Address("", AGENT), CONTROLLER, down.to_fields()), told)
        self._on_host_down(down)

    def _tell_agents(self, message: Message, hosts: Iterable[str]) -> None:
        for host in hosts:
            self._send_quietly(Message(message.kind, Address(host, AGENT), message.src, message.fields))


def _agent_settings() -> dict[str, object]:
    current = settings()
    return {name: getattr(current, name) for name in _AGENT_SETTINGS}
