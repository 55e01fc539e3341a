"""A session in a notebook: a real kernel runs cells that call, await, print, fail, are interrupted, and begin again."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from support import DEADLINE, REPOSITORY, is_alive, wait_gone, wait_until

pytestmark = pytest.mark.slow

DEFINE = """
import asyncio, os, signal, time
from monarch_slurm.actor import Actor, endpoint, this_host
from monarch_slurm.config import configure

configure(enable_log_forwarding=True)

class Worker(Actor):
    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def say(self, text):
        print(text)
        return text

    @endpoint
    def block(self, path):
        open(path, "w").close()
        time.sleep(1000)

    @endpoint
    def fail(self):
        raise ValueError("on purpose")

    @endpoint
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

def spawn(count=2):
    global workers
    workers = this_host().spawn_procs({"gpus": count}).spawn("worker", Worker)
    return workers.pid.call().get().values()
"""


class Notebook:
    """The cells of one notebook, run in turn; each `run` returns what the cell shows."""

    def __init__(self, folder: Path) -> None:
        self._notebook = nbformat.v4.new_notebook()
        self._client = NotebookClient(
            self._notebook, timeout=int(DEADLINE), allow_errors=True, resources={"metadata": {"path": str(folder)}}
        )
        self._kernel: Any = None
        self.start()

    def start(self) -> None:
        self._kernel = self._client.setup_kernel()
        self._kernel.__enter__()
        self.pid = int(self.run("import os; os.getpid()").result)

    def close(self) -> None:
        self._kernel.__exit__(None, None, None)

    def kill(self) -> None:
        """As "restart the kernel" does in the end."""
        os.kill(self.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(self.pid), "the end of the kernel")

    def interrupt(self) -> None:
        """As the button does."""
        os.killpg(os.getpgid(self.pid), signal.SIGINT)

    def run(self, source: str) -> Shown:
        self._notebook.cells.append(nbformat.v4.new_code_cell(source))
        cell = self._client.execute_cell(self._notebook.cells[-1], len(self._notebook.cells) - 1)
        return Shown(cell.outputs)

    def last(self) -> Shown:
        """What the last cell shows by now."""
        return Shown(self._notebook.cells[-1].outputs)


class Shown:
    """What a cell shows."""

    def __init__(self, outputs: list[Any]) -> None:
        self.stdout = "".join(output.text for output in outputs if output.get("name") == "stdout")
        self.stderr = "".join(output.text for output in outputs if output.get("name") == "stderr")
        errors = [output for output in outputs if output.output_type == "error"]
        self.error = errors[0].ename if errors else ""
        self.traceback = "\n".join(errors[0].traceback) if errors else ""
        results = [output for output in outputs if output.output_type == "execute_result"]
        self.result = results[0].data["text/plain"] if results else ""

    @property
    def is_quiet(self) -> bool:
        return not self.stderr and not self.error


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("JUPYTER_PATH", str(Path(sys.prefix) / "share" / "jupyter"))
    opened = Notebook(tmp_path)
    yield opened
    opened.close()


def test_a_session_in_a_notebook(notebook: Notebook, tmp_path: Path) -> None:
    run = notebook.run
    assert run(DEFINE).is_quiet
    spawned = run("spawn()")
    assert spawned.is_quiet, spawned.stderr
    pids = eval(spawned.result)

    # Cells that wait, in either way, with and without IPython's own await.
    said = run("workers.say.call('said').get().values()")
    assert said.is_quiet
    assert said.result == "['said', 'said']"
    assert said.stdout.count("said\n") == 2
    assert run("(await workers.say.call('again')).values()").result == "['again', 'again']"
    both = run(
        "one, other = workers.slice(gpus=0).pid.call_one(), workers.slice(gpus=1).pid.call_one()\n"
        "[*await asyncio.gather(one.as_asyncio(), other.as_asyncio()), one.get()]"
    )
    assert both.is_quiet
    assert eval(both.result) == [*pids, pids[0]]
    assert run("%autoawait off").is_quiet
    assert run("workers.pid.call().get().values()").is_quiet
    assert run("%autoawait asyncio").is_quiet

    # An endpoint that raises: the cell has its error, without this package's inner frames.
    failed = run("workers.slice(gpus=1).fail.call_one().get()")
    assert failed.error == "ActorError"
    assert "on purpose" in failed.traceback
    assert failed.traceback.count("future.py") <= 1, "IPython shows the innermost frame, whatever it is"
    assert not failed.stderr

    # A cell that is interrupted; what it called goes on, and so does the session.
    started = tmp_path / "started"
    thread = threading.Thread(target=_interrupt_when, args=[notebook, started.exists])
    thread.start()
    interrupted = run(f"workers.slice(gpus=1).block.call_one({str(started)!r}).get()")
    thread.join()
    assert interrupted.error == "KeyboardInterrupt"
    assert interrupted.traceback.count("driving.py") <= 1
    assert run("workers.slice(gpus=0).pid.call_one().get()").result == str(pids[0])

    # A rank dies under a call: the cell has the error of that call, and the failure is printed once.
    died = run("workers.slice(gpus=0).die.call_one().get()")
    assert died.error == "SupervisionError", died.traceback
    assert "Killed(sig=9)" in died.traceback
    assert died.traceback.count("future.py") <= 1
    told = died.stderr + run("time.sleep(0.2)").stderr
    assert told.count("nobody handled this failure:") == 1
    assert run("workers.slice(gpus=0).pid.call_one().get()").error == "SupervisionError"

    # A failure that nobody waits for is printed, too, and the next ones after it.
    assert run("spawn()").is_quiet
    for _ in range(2):
        shown = run("workers.slice(gpus=1).fail.broadcast()\nspawn(1)\ntime.sleep(0.5)").stderr
        shown += run("time.sleep(0.5)").stderr
        assert "nobody handled this failure:" in shown
        assert "on purpose" in shown
        assert run("spawn()").is_quiet

    # Restarting the kernel ends all that it had; the same cells run again.
    family = psutil.Process(notebook.pid).children(recursive=True)
    assert len(family) > 3
    notebook.kill()
    for process in family:
        wait_until(lambda process=process: not process.is_running(), f"the end of {process}")
    notebook.close()
    notebook.start()
    assert notebook.run(DEFINE).is_quiet
    assert notebook.run("spawn()").is_quiet


def test_an_orderly_end_of_a_kernel_ends_its_procs(notebook: Notebook) -> None:
    notebook.run(DEFINE)
    pids = eval(notebook.run("spawn()").result)
    notebook.close()
    wait_gone(*pids)
    notebook.start()


def _interrupt_when(notebook: Notebook, condition: Callable[[], bool]) -> None:
    wait_until(condition, "the cell")
    notebook.interrupt()
