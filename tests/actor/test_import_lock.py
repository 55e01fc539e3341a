"""Actors of one process import at once what is one large package, first by any part of it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import DEADLINE, REPOSITORY, Program

from monarch_slurm.actor import Actor, ProcMesh, endpoint

PACKAGE = {
    "knot/__init__.py": "import time\nfrom knot import left, right\nPARTS = left.NAME + right.NAME\n",
    "knot/left.py": "import time\ntime.sleep(0.05)\nimport knot.right\ntime.sleep(0.05)\nNAME = 'left'\n",
    "knot/right.py": "import time\ntime.sleep(0.05)\nimport knot.left\ntime.sleep(0.05)\nNAME = 'right'\n",
}
"""As torch does: whoever imports a part imports the whole, and the parts import each other."""

ACTORS = """
    import importlib
    from monarch_slurm.actor import Actor, endpoint, this_host

    class Argument:
        def __init__(self, module):
            self.module = module

        def __reduce__(self):
            return load, (self.module,)

    def load(module):
        return (importlib.import_module(module).NAME, importlib.import_module("knot").PARTS)

    class Importer(Actor):
        def __init__(self, module=None):
            self.found = load(module) if isinstance(module, str) else module

        @endpoint
        def get(self, argument=None):
            return argument or self.found

    if __name__ == "__main__":
        procs = this_host().spawn_procs()
        modules = ["knot.left", "knot.right"] * 3
        {how}
        print("found", sorted(set(got)), flush=True)
"""

WAYS = {
    "in __init__": """
        meshes = [procs.spawn(f"a{i}", Importer, name) for i, name in enumerate(modules)]
        got = [mesh.get.call_one().get() for mesh in meshes]""",
    "in the unpickling of a constructor's arguments": """
        meshes = [procs.spawn(f"a{i}", Importer, Argument(name)) for i, name in enumerate(modules)]
        got = [mesh.get.call_one().get() for mesh in meshes]""",
    "in the unpickling of a call's arguments": """
        meshes = [procs.spawn(f"a{i}", Importer) for i in range(len(modules))]
        futures = [mesh.get.call_one(Argument(name)) for mesh, name in zip(meshes, modules)]
        got = [future.get() for future in futures]""",
}


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_a_package_whose_parts_are_imported_at_once(tmp_path: Path, how: str) -> None:
    (tmp_path / "knot").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / name).write_text(text)
    program = Program(tmp_path, ACTORS.replace("{how}", how), env={"PYTHONPATH": f"{REPOSITORY}:{tmp_path}"})
    try:
        assert program.wait() == 0, program.errors()
        assert "found [('left', 'leftright'), ('right', 'leftright')]" in program.output()
    finally:
        program.close()


class Waiting(Actor):
    """Waits in `__init__` for an actor of its process that imports."""

    def __init__(self, other: Any, name: str) -> None:
        import mailbox  # noqa: F401 - one that nothing else has imported

        self.answer = other.load.call_one(name).get()

    @endpoint
    def get(self) -> str:
        return str(self.answer)


class Importing(Actor):
    @endpoint
    def load(self, name: str) -> str:
        return __import__(name).__name__


def test_an_init_may_wait_for_an_actor_that_imports(spawn: Callable[..., ProcMesh]) -> None:
    procs = spawn()
    importing: Any = procs.spawn("importing", Importing)
    names = ["wave", "plistlib"]
    waiting: list[Any] = [procs.spawn(f"waiting-{name}", Waiting, importing, name) for name in names]
    assert [actor.get.call_one().get(DEADLINE) for actor in waiting] == names


def run(text: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    path = ":".join(map(str, [REPOSITORY, *paths]))
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def test_a_module_that_waits_for_the_import_of_another_thread_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "import threading\nthread = threading.Thread(target=__import__, args=['wave'])\nthread.start()\nthread.join()\n"
    )
    ended = run(
        """
        from monarch_slurm.actor import import_lock
        import_lock.STALLED_SECONDS = 0.5
        import_lock.install()
        import waits
        print("through")
        """,
        tmp_path,
    )
    assert ended.stdout == "through\n", ended.stderr
    assert "the import of wave goes on beside it" in ended.stderr


def test_a_forked_process_can_import_though_another_thread_was_importing(tmp_path: Path) -> None:
    (tmp_path / "takes_long.py").write_text("import held\nheld.begun.set()\nheld.over.wait()\n")
    (tmp_path / "held.py").write_text("import threading\nbegun, over = threading.Event(), threading.Event()\n")
    ended = run(
        """
        import os, threading
        from monarch_slurm.actor import import_lock
        import_lock.install()
        import held
        thread = threading.Thread(target=lambda: __import__("takes_long"))
        thread.start()
        held.begun.wait()
        if os.fork() == 0:
            import wave
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        held.over.set()
        """,
        tmp_path,
    )
    assert ended.stdout == "7\n", ended.stderr


def test_a_traceback_of_an_import_has_no_frame_of_the_lock(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    ended = run(
        """
        from monarch_slurm.actor import import_lock
        import_lock.install()
        import broken
        """,
        tmp_path,
    )
    assert "import nothing_of_this_name" in ended.stderr
    assert "No module named 'nothing_of_this_name'" in ended.stderr
    assert "import_lock.py" not in ended.stderr
    assert "importlib" not in ended.stderr
