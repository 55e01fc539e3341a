"""Lines that procs print, on their way to the client of those procs whose lines it has asked for.

Lines travel in batches. The client acknowledges what it has printed; while more than a limit is on the way, further
lines are left out and counted, so that neither a proc ever waits for a client that does not read, nor memory fills.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from monarch_slurm.host.proc import ProcSpec
from monarch_slurm.wire import CONTROLLER, Address, Loop, Message, Timer, pack

BATCH_SECONDS = 0.05
BATCH_BYTES = 256 * 1024
MAX_BYTES_ON_THE_WAY = 8 * 2**20


@dataclass(frozen=True)
class _Option:
    stream: bool
    window: float | None
    level: int | None


class LogStreams:
    """The streams of one host's procs.

    Args:
        agent: who sends.
        host_name: the name of this host that people know.
        send: sends a message to a proc here or to the client.
        read: reads the lines that procs have written but nobody has read yet.
        is_clients_output: whether the agent prints where the client prints, so that one of them suffices.
    """

    def __init__(
        self,
        loop: Loop,
        agent: Address,
        host_name: str,
        send: Callable[[Message], None],
        read: Callable[[], None],
        is_clients_output: bool,
    ) -> None:
        self._loop = loop
        self._agent = agent
        self._host_name = host_name
        self._send = send
        self._read = read
        self._is_clients_output = is_clients_output
        self._options: dict[str, _Option] = {}
        self._lines: list[tuple[str, int, int, str]] = []
        self._windows: dict[str, float | None] = {}
        self._bytes = 0
        self._on_the_way = 0
        self._left_out = 0
        self._due: Timer | None = None

    def set_option(self, message: Message) -> None:
        """Stream the lines of procs from now on, or no longer, and set the level of their root loggers."""
        self._read()  # what was written before this belongs to the old option
        self.flush()
        fields = message.fields
        for rank in fields["ranks"]:
            name = f"{fields['mesh']}.{rank}"
            self._options[name] = _Option(fields["stream"], fields["window"], fields["level"])
            for greeting in self.greetings(name):
                self._send(greeting)
        self._answer(message)

    def flush_now(self, message: Message) -> None:
        """Send what there is, then answer."""
        self._read()
        self.flush()
        self._answer(message)

    def greetings(self, name: str) -> list[Message]:
        """Return what a proc of this name is to be told at its start."""
        option = self._options.get(name)
        if option is None or option.level is None:
            return []
        return [Message("log_level", Address(self._agent.host, name), self._agent, {"level": option.level})]

    def take(self, spec: ProcSpec, stream: int, line: str) -> bool:
        """Take a line of a proc; return whether it need not be printed here."""
        option = self._options.get(spec.proc)
        if option is None or not option.stream:
            return False
        if self._on_the_way + self._bytes > MAX_BYTES_ON_THE_WAY:
            self._left_out += 1
            return self._is_clients_output
        self._windows[spec.mesh] = option.window
        self._lines.append((spec.mesh, spec.rank, stream, line))
        self._bytes += len(line)
        if self._bytes > BATCH_BYTES:
            self.flush()
        elif self._due is None:
            self._due = self._loop.call_later(BATCH_SECONDS, self.flush)
        return self._is_clients_output

    def flush(self) -> None:
        """Send what waits."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if not self._lines and not self._left_out:
            return
        fields: dict[str, Any] = {
            "host": self._host_name,
            "windows": self._windows,
            "bytes": self._bytes,
            "left_out": self._left_out,
        }
        self._on_the_way += self._bytes
        self._send(Message("log", CONTROLLER, self._agent, fields, [pack(self._lines)]))
        self._lines = []
        self._windows = {}
        self._bytes = self._left_out = 0

    def acknowledged(self, message: Message) -> None:
        """The client has printed a batch. If lines were left out meanwhile, the next batch reports their number."""
        self._on_the_way -= message.fields["bytes"]
        if self._left_out and self._due is None:
            self._due = self._loop.call_later(BATCH_SECONDS, self.flush)

    def _answer(self, message: Message) -> None:
        fields = {name: message.fields[name] for name in ("port", "rank", "status")}
        self._send(Message("port", message.src, self._agent, fields))
