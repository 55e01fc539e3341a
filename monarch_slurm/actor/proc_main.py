"""What a proc runs: the I/O loop on the main thread, actors on threads of their own."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from collections import deque
from pathlib import Path

from monarch_slurm.actor import driving, import_lock
from monarch_slurm.actor.birth import make_cell
from monarch_slurm.actor.code_sync.receiver import set_agent_folder
from monarch_slurm.actor.context import set_client_boot, set_proc_runtime, set_program
from monarch_slurm.actor.debugger.hook import Debugging, call_ended
from monarch_slurm.actor.direct import DirectLinks
from monarch_slurm.actor.direct_link import kill_message
from monarch_slurm.actor.errors import ActorError
from monarch_slurm.actor.forks import not_in_forks
from monarch_slurm.actor.layout import ProcLayout
from monarch_slurm.actor.log_prefix import prefix_log_records
from monarch_slurm.actor.ndslice import Slice
from monarch_slurm.actor.proc_mesh import run_bootstrap
from monarch_slurm.actor.replies import EXCEPTION, VALUE
from monarch_slurm.actor.runtime import Runtime
from monarch_slurm.actor.shape import Shape
from monarch_slurm.config import clear_runtime_config, configure
from monarch_slurm.host.exits import FailureKind
from monarch_slurm.host.identity import SUPERVISED_VARIABLE, take_no_sigterm
from monarch_slurm.host.proc import ProcSpec
from monarch_slurm.host.stacks import register_stacks
from monarch_slurm.wire import AGENT, CONTROLLER, Address, Loop, Message, StreamLink, WireError, dumps

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.001


class _Proc:
    def __init__(self, spec: ProcSpec) -> None:
        self._spec = spec
        self._loop = Loop()
        address = Address(spec.host, spec.proc)
        self._link = StreamLink(
            self._loop,
            lambda _, message: self._take(message),
            self._broken,
            self._agent_gone,
            lambda _, message: not self._direct.blocks(message) and self._take_at_once(message),
        )
        self._link.connect(Path(spec.agent_socket), spec.proc)
        self._direct = DirectLinks(
            address,
            spec.incarnation,
            self._link,
            self._link.send,
            lambda host: host == spec.host,
            lambda message: self._runtime.cells.knows(message.fields.get("mesh", "")),
            self._take_at_once,
            self._take_in,
            self._peer_broken,
        )
        send = not_in_forks(self._direct.send)
        self._runtime = Runtime(address, spec.host_name, send, make_cell, spec.incarnation)
        self._runtime.local_host = spec.host
        set_proc_runtime(self._runtime)
        set_agent_folder(Path(spec.agent_socket).parent)
        self._runtime.cells.on_failed = self._fail
        self._exit_code = 0
        self._starting = False
        """Until the bootstrap is through; for good if it has failed."""
        self._held: deque[Message] = deque()
        self._debugging = Debugging(self._runtime, self._loop.run_until)
        self._debugging.install()
        driving.set_link(self._link)

    def run(self) -> int:
        self._link.send(Message("hello", Address(self._spec.host, AGENT), self._runtime.address))
        self._loop.run()
        # No answer can come any more: threads of native code that ask for one late must not keep the process.
        self._runtime.replies.end(lambda process, ref: "this process is ending")
        self._link.close(linger_ms=1000)  # what actors said last may wait for the agent to read
        return self._exit_code

    def _take(self, message: Message) -> None:
        if not self._direct.take(message):
            self._take_in(message)

    def _take_at_once(self, message: Message) -> bool:
        return not self._starting and not self._held and self._runtime.handle_at_once(message)

    def _take_in(self, message: Message) -> None:
        if message.kind == "debug_input":
            self._debugging.feed(message)
            return
        if message.kind == "exit":
            self._debugging.release()
        if self._starting and message.kind != "ping":
            self._held.append(message)
        else:
            self._handle(message)

    def _handle(self, message: Message) -> None:
        if self._runtime.handle(message):
            return
        if message.kind == "start":
            # Aside of the reading, which goes on should the debugger stop the user's function.
            self._starting = True
            self._loop.call_soon(lambda: self._start(message))
        elif message.kind == "exit":
            self._exit(message.fields["timeout"])
        elif message.kind == "log_level":
            logging.getLogger().setLevel(message.fields["level"])
        elif message.kind == "ping":
            self._link.send(Message("pong", message.src, self._runtime.address))
        elif message.kind == "watch":
            return  # on its way it has told all who have to know that they are to tell of this process's end
        else:
            logger.error("unknown message %r from %s", message.kind, message.src)

    def _start(self, message: Message) -> None:
        fields = message.fields
        set_program(fields["program"])
        self._runtime.places.update(fields["places"])
        labels, sizes = fields["shape"]
        rank = fields["rank"]
        self._runtime.python = fields["python"]
        self._runtime.home = ProcLayout.from_fields(fields["layout"]), Shape(labels, Slice.new_row_major(sizes)), rank
        try:
            run_bootstrap(message.body)
            call_ended()
        except Exception as error:  # a user's function; its owner is told, and the proc is of no use
            call_ended(error)
            failure = ActorError(error, f"bootstrap of proc {self._spec.proc} on host {self._spec.host_name} failed.")
            self._runtime.post(tuple(fields["ready"]), rank, EXCEPTION, dumps(failure))
            print(failure, file=sys.stderr)
            self._exit_code = 1
            self._loop.stop()
            return
        self._runtime.post(tuple(fields["ready"]), rank, VALUE, dumps(True))
        self._starting = False
        while self._held:
            self._handle(self._held.popleft())

    def _exit(self, timeout: float) -> None:
        """Stop all actors, then leave. The agent kills this process if that takes longer than ``timeout`` seconds."""
        cells = self._runtime.cells.stop("the process is being stopped", timeout)

        def look() -> None:
            if all(cell.ended.is_set() for cell in cells):
                self._loop.stop()
            else:
                self._loop.call_later(_LOOK_SECONDS, look)

        look()

    def _fail(self, kind: FailureKind, event: str, traceback: str | None) -> None:
        """End at once, for an actor has failed and a restart policy makes everything here anew."""
        agent = Address(self._spec.host, AGENT)
        fields = {"kind": kind.value, "event": event, "traceback": traceback or ""}
        self._link.send(Message("failing", agent, self._runtime.address, fields))
        self._exit_code = 1
        self._loop.stop()

    def _broken(self, peer: str, error: WireError) -> None:
        logger.critical("%s on the link from the agent: ending", error)
        self._exit_code = 1
        self._loop.stop()

    def _peer_broken(self, peer: Address, error: WireError) -> None:
        if peer == CONTROLLER:
            self._broken("", error)
            return
        logger.error("%s on the direct link from %s: ending it", error, peer)
        self._link.send(kill_message(peer, self._runtime.address))

    def _agent_gone(self, peer: str) -> None:
        self._exit_code = 1
        self._loop.stop()


def main(spec: ProcSpec) -> int:
    """Run the proc ``spec`` and return its exit code."""
    # The thread that got a fatal signal leaves its stack on stderr, whose end the failure report quotes.
    faulthandler.enable(all_threads=False)
    register_stacks()
    import_lock.install()
    clear_runtime_config()
    configure(**spec.settings)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    prefix_log_records()
    if not take_no_sigterm():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.pop(SUPERVISED_VARIABLE, None)  # agents that this proc starts are its own to end
    set_client_boot(None)
    return _Proc(spec).run()
