"""What becomes of the lines that procs print: `ProcMesh.logging_option` asks the agents here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from monarch_slurm.actor.context import context
from monarch_slurm.actor.future import Future
from monarch_slurm.actor.layout import ProcLayout
from monarch_slurm.actor.log_printer import flush_after_each_cell
from monarch_slurm.actor.replies import CountDown, Source
from monarch_slurm.actor.runtime import Runtime
from monarch_slurm.wire import AGENT, CONTROLLER, Address, Message

MAX_LEVEL = 255


def check_logging(stream: bool, window: int | None, level: int) -> None:
    """Check the arguments of `ProcMesh.logging_option`.

    Raises:
        ValueError: there is no such level, or the window has no length.
        RuntimeError: a window without a stream.
    """
    if not 0 <= level <= MAX_LEVEL:
        raise ValueError(f"Invalid logging level: {level}; 0 to {MAX_LEVEL} expected")
    if window is not None:
        if not stream:
            raise RuntimeError("cannot set aggregate window without streaming to client")
        if window < 0:
            raise ValueError(f"invalid aggregate_window_sec {window}: seconds, 0 or more, expected")


def set_logging(
    layout: ProcLayout, base_ranks: Iterable[int], stream: bool, window: int | None, level: int | None
) -> Future[None]:
    """Tell the agents of procs what to do with their lines; resolves when all that was said before has come."""
    runtime = context().actor_instance.runtime
    by_host = layout.by_host(base_ranks)
    by_host.pop(CONTROLLER.host, None)  # the client's own process prints for itself
    option = {"stream": stream, "window": window, "level": level}
    runtime.keeper.note_logging(layout.mesh, list(base_ranks), option)
    if stream:
        _streaming_hosts.update(by_host)
        flush_after_each_cell(_flush)
    return _ask_agents(
        runtime,
        {
            host: Message(
                "logging",
                Address(host, AGENT),
                runtime.address,
                {"mesh": layout.mesh, "ranks": ranks, **option},
            )
            for host, ranks in by_host.items()
        },
    )


def flush_agents(runtime: Runtime, hosts: Iterable[str]) -> Future[None]:
    """Have agents send the lines that they keep; resolves when they have come."""
    return _ask_agents(runtime, {host: Message("log_flush", Address(host, AGENT), runtime.address) for host in hosts})


_streaming_hosts: set[str] = set()


def _flush(*_: object) -> None:
    """After a cell of a notebook."""
    runtime = context().actor_instance.runtime
    with contextlib.suppress(TimeoutError):
        flush_agents(runtime, _streaming_hosts).get(_CELL_SECONDS)
    runtime.print_logs()


_CELL_SECONDS = 1.0


def _ask_agents(runtime: Runtime, messages: dict[str, Message]) -> Future[None]:
    answered: Future[None] = Future._pending()
    one_more = CountDown(len(messages), lambda: answered._resolve(lambda: None))
    agents: dict[int, Source] = {index: (message.dst, None) for index, message in enumerate(messages.values())}
    # A host that is gone has nothing to say any more.
    number = runtime.replies.expect(agents, one_more, one_more)
    for index, message in enumerate(messages.values()):
        message.fields |= {"port": number, "rank": index, "status": "value"}
        runtime.send(message)
    return answered
