"""The client's own machine as a host: its agent starts with the first procs that are asked for, and anew if it dies."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable

from monarch_slurm.config import settings
from monarch_slurm.host import AgentProcess, HostInfo, Hub, start_local_agent
from monarch_slurm.host.identity import LOOPBACK, new_host_id
from monarch_slurm.wire import Loop, Timer, sweep_runtime_dirs

logger = logging.getLogger(__name__)


class LocalHost:
    """The agent of this machine.

    Args:
        loop: the client's loop.
        hub: the client's hub.
        on_new_id: called with the id that procs are asked of from now on: at first, and after the agent has died.
    """

    def __init__(self, loop: Loop, hub: Hub, on_new_id: Callable[[str], None]) -> None:
        self._loop = loop
        self._hub = hub
        self._on_new_id = on_new_id
        self._lock = threading.Lock()
        self._process: AgentProcess | None = None
        self._agent_pid = 0
        self._patience: Timer | None = None
        self._closed = False
        self._ended = threading.Event()
        self.name = socket.gethostname()
        self.id = ""
        self._new_id()

    def _new_id(self) -> None:
        self.id = new_host_id(self.name)
        self._hub.expect(self.id, watched=True)
        self._on_new_id(self.id)

    def ensure(self, host: str) -> None:
        """Start the agent of ``host``, unless it runs or is another's. Does not wait for it. For any thread."""
        if host != self.id or self._process is not None:
            return
        with self._lock:
            if host != self.id or self._process is not None or self._closed:
                return
            self._ended.clear()
            self._process = start_local_agent(self._hub.invitation(LOOPBACK), self.id, self.name)
            process = self._process
        self._loop.call_soon(lambda: self._watch(process))

    def joined(self, info: HostInfo) -> None:
        """Note that an agent has joined; it may be this one. On the loop's thread."""
        if info.host == self.id:
            self._agent_pid = info.pid
            if self._patience is not None:
                self._patience.cancel()

    def _watch(self, process: AgentProcess) -> None:
        self._loop.watch_process(process.pid, lambda: self._agent_ended(process.why_ended()))
        if not self._agent_pid:
            self._patience = self._loop.call_at_deadline(settings().host_spawn_ready_timeout, self._too_slow)

    def _too_slow(self) -> None:
        cause = (
            f"its agent (pid {self._process.pid if self._process else 0}) did not join within "
            f"{settings().host_spawn_ready_timeout:g} s (setting host_spawn_ready_timeout); its output may tell why"
        )
        self._hub.give_up(self.id, self.name, cause)
        self._kill()

    def _agent_ended(self, why: str) -> None:
        with self._lock:
            host = self.id
            self._process = None
            self._agent_pid = 0
            if self._patience is not None:
                self._patience.cancel()
            if not self._closed:
                self._new_id()
        self._hub.give_up(host, self.name, why)
        self._ended.set()

    def _kill(self) -> None:
        """Kill the agent; its guardian clears up after it, and is killed only if there is no agent yet."""
        with self._lock:
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):  # it ends, and its guardian is about to
                    os.kill(self._agent_pid or self._process.pid, signal.SIGKILL)

    def close(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the agent, which was told to end; then kill it.

        One that still starts hears of its end only when it joins: it has nothing to lose, and a little longer to end.
        """
        with self._lock:
            self._closed = True
            process, starts = self._process, not self._agent_pid
        if process is None or self._ended.wait(timeout):
            return
        if starts:
            process.terminate()  # its guardian passes this on, and outlives it
            if self._ended.wait(timeout + _KILL_SECONDS):
                sweep_runtime_dirs()
                return
        level = logging.INFO if starts else logging.WARNING
        logger.log(level, "the agent of this machine has not ended within %g s: killing it", timeout)
        self._kill()
        self._ended.wait(_KILL_SECONDS)
        sweep_runtime_dirs()


_KILL_SECONDS = 2.0
