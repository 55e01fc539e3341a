"""Python's debugger on a thread of a rank, with the person elsewhere."""

from __future__ import annotations

import bdb
import code
import contextlib
import pdb
import sys
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from monarch_slurm.actor.debugger.hook import DebugSession

_RUNTIME = "monarch_slurm.actor"


class RankPdb(pdb.Pdb):
    """One call under the debugger, from its first ``breakpoint()`` to its end.

    Frames of the runtime are not stopped in, and those around the call are not shown.
    """

    def __init__(self, session: DebugSession) -> None:
        files: Any = session
        super().__init__(stdin=files, stdout=files, nosigint=True, skip=[f"{_RUNTIME}.*"])
        self._session = session

    def stop_at(self, frame: FrameType) -> None:
        """Stop on the next line of ``frame``."""
        bottom = frame
        while bottom.f_back is not None and not _is_runtime(bottom.f_back):
            bottom = bottom.f_back
        self.set_trace(frame)
        self.botframe = bottom  # where the stack that is shown begins

    def finish(self, error: BaseException | None) -> None:
        """The call is over; if it has failed, stop once more where it did."""
        sys.settrace(None)
        traceback = None if error is None else error.__traceback__
        while traceback is not None and _is_runtime(traceback.tb_frame):
            traceback = traceback.tb_next
        if isinstance(error, Exception) and not isinstance(error, bdb.BdbQuit) and traceback is not None:
            self.reset()
            self.message(f"the call has failed: {type(error).__name__}: {error}\nthis is where it was raised:")
            self.interaction(None, traceback)
        self.clear_all_breaks()
        self._session.resumed(over=True)
        self._session.close()

    def interaction(self, frame: FrameType | None, traceback: TracebackType | None) -> None:
        """Let the person look, until a command lets the thread go on."""
        where, files = frame, set()
        for each in _frames(frame, traceback):
            files.add(each.f_code.co_filename)
            where = each if frame is None else frame
        assert where is not None
        self._session.stopped(where, files)
        super().interaction(frame, traceback)
        self._session.resumed(over=sys.gettrace() is None)

    def do_clear(self, arg: str) -> bool | None:
        """Clear all breakpoints without asking, or those that are named."""
        if not arg:
            self.clear_all_breaks()
            self.message("all breakpoints are cleared")
            return None
        return super().do_clear(arg)

    do_cl = do_clear

    def do_interact(self, arg: str) -> None:
        """Run an interpreter in the frame, until ``exit()``."""
        assert self.curframe is not None
        # Before Python 3.13 it is the copy of the names that holds what was changed here.
        names = getattr(self, "curframe_locals", None) or self.curframe.f_locals
        console = _Interpreter({**self.curframe.f_globals, **names}, self._session)
        with contextlib.suppress(SystemExit):
            console.interact("exit() returns to pdb", "")

    def do_run(self, arg: str) -> None:
        """Refuse: a rank is started again by its program."""
        self.error("a rank cannot be started again from here")

    do_restart = do_run


class _Interpreter(code.InteractiveConsole):
    def __init__(self, names: dict[str, Any], session: DebugSession) -> None:
        super().__init__(names)
        self._session = session

    def raw_input(self, prompt: str = "") -> str:
        self._session.write(prompt)
        line = self._session.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def write(self, data: str) -> None:
        self._session.write(data)

    def runcode(self, code: Any) -> None:
        with contextlib.redirect_stdout(self._session):
            super().runcode(code)


def _frames(frame: FrameType | None, traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next
    while frame is not None and not _is_runtime(frame):
        yield frame
        frame = frame.f_back


def _is_runtime(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(f"{_RUNTIME}.")
