"""Whole programs, and what is left when they end, are interrupted or killed: nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support import Program, is_alive, socket_folders, wait_gone, wait_until

START = """
    import os, signal, subprocess, sys, threading, time
    from monarch_slurm.actor import *

    class Worker(Actor):
        @endpoint
        def pid(self):
            return os.getpid()

        @endpoint
        def children(self):
            sleep = ["sleep", "1000"]
            return [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]

        @endpoint
        def work(self):
            time.sleep(1000)

        @endpoint
        def die(self):
            print("last words", file=sys.stderr, flush=True)
            os._exit(7)

    if __name__ == "__main__":
        procs = this_host().spawn_procs({"n": 2}, name="workers")
        workers = procs.spawn("worker", Worker)
        print("pids", *workers.pid.call().get(30).values())
"""


@pytest.fixture(autouse=True)
def _no_socket_folder_is_left() -> Iterator[None]:
    before = socket_folders()
    yield
    wait_until(lambda: socket_folders() <= before, "the end of all socket folders")


def pids(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def agent_of(running: Program) -> int:
    """The agent's pid: the parent of the procs."""
    (proc, *_) = pids(running.expect("pids"))
    return psutil.Process(proc).ppid()


def test_a_program_that_ends_leaves_nothing(program: Callable[..., Program]) -> None:
    running = program(
        START + '        print("children", *workers.slice(n=0).children.call_one().get(30))\n        input\n'
    )
    running.family.update(pids(running.expect("pids")))
    assert running.wait() == 0
    children = [line for line in running.output().splitlines() if line.startswith("children")]
    running.family.update(pids(children[0].removeprefix("children")))
    running.check_gone()
    assert running.errors() == ""


@pytest.mark.parametrize("impatient", [False, True], ids=["patient", "impatient"])
def test_a_program_that_spawns_and_ends_at_once(program: Callable[..., Program], impatient: bool) -> None:
    running = program(f"""
        import monarch_slurm.actor.client
        from monarch_slurm.actor import this_host
        if __name__ == "__main__":
            if {impatient}:  # its agent still starts then, as on a machine with much else to do
                monarch_slurm.actor.client._EXIT_SECONDS = monarch_slurm.actor.client._AGENT_SECONDS = 0.01
            this_host().spawn_procs({{"n": 2}})
    """)
    assert running.wait() == 0
    assert running.errors() == ""


def test_a_program_that_only_asks_for_its_context(program: Callable[..., Program]) -> None:
    running = program("""
        from monarch_slurm.actor import context, shutdown_context
        if __name__ == "__main__":
            print(context().actor_instance)
            shutdown_context().get(10)
            shutdown_context().get(10)
            try:
                context()
            except RuntimeError as error:
                print(error)
    """)
    assert running.wait() == 0
    assert "cannot be started again" in running.output()


def test_cleanups_run_at_the_end_of_a_program(program: Callable[..., Program]) -> None:
    running = program("""
        from monarch_slurm.actor import Actor, endpoint, this_host
        class Cleaner(Actor):
            @endpoint
            def get(self): return 1
            def __cleanup__(self, error): print("cleaned", error, flush=True)
        if __name__ == "__main__":
            this_host().spawn_procs({"n": 2}).spawn("c", Cleaner).get.call().get(30)
    """)
    assert running.wait() == 0
    assert running.output().count("cleaned None") == 2


def test_a_busy_proc_delays_the_end_by_its_limit_only(program: Callable[..., Program]) -> None:
    running = program(START + '        workers.work.broadcast()\n        print("end")\n')
    running.expect("pids")
    assert running.wait(10) == 0
    running.check_gone()


def test_an_unhandled_failure_ends_the_program(program: Callable[..., Program]) -> None:
    running = program(START + "        workers.slice(n=1).die.broadcast()\n        threading.Event().wait()\n")
    running.family.update(pids(running.expect("pids")))
    assert running.wait() == 1
    errors = running.errors()
    assert "Unhandled monarch error on the root actor" in errors
    assert "Exited(code=7)" in errors
    assert "last words" in errors.partition("last lines of its stderr:")[2]
    assert "KeyboardInterrupt" not in errors
    assert "Traceback" not in errors
    running.check_gone()


def test_the_hook_decides(program: Callable[..., Program]) -> None:
    running = program(
        START
        + """
        import monarch_slurm.actor as public
        seen = threading.Event()
        def hook(failure):
            print("hook", failure.exit)
            seen.set()
        public.unhandled_fault_hook = hook
        workers.slice(n=1).die.broadcast()
        seen.wait(30)
        print("goes on", workers.slice(n=0).pid.call_one().get(30))
        def strict(failure):
            sys.exit(42)
        public.unhandled_fault_hook = strict
        workers.slice(n=0).die.broadcast()
        threading.Event().wait()
"""
    )
    assert running.wait() == 42
    assert "hook Exited(code=7)" in running.output()
    assert "goes on" in running.output()


def test_a_failure_that_the_caller_caught_and_the_hook_dropped_ends_nothing(program: Callable[..., Program]) -> None:
    running = program(
        START
        + """
        import monarch_slurm.actor as public
        public.unhandled_fault_hook = lambda failure: None
        for _ in range(3):
            try:
                workers.slice(n=1).die.call_one().get(30)
            except SupervisionError as error:
                print("caught")
        print("end")
"""
    )
    assert running.wait() == 0
    assert running.output().count("caught") == 3


def test_ctrl_c_leaves_nothing(program: Callable[..., Program]) -> None:
    running = program(START + "        workers.work.call().get()\n")
    running.family.update(pids(running.expect("pids")))
    running.note_family()
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.wait() in (1, -signal.SIGINT, 130)
    assert running.errors().count("KeyboardInterrupt") == 1
    running.check_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_a_program_that_is_killed_leaves_nothing(program: Callable[..., Program], number: int) -> None:
    running = program(
        START
        + """
        nested = workers.slice(n=0).children.call_one().get(30)
        print("children", *nested)
        threading.Event().wait()
"""
    )
    family = pids(running.expect("pids")) + pids(running.expect("children"))
    running.signal(number)
    running.family.update(family)
    assert len(running.family) >= 7  # guardian, agent, zygote, two procs, two sleepers
    assert running.wait() == -number
    running.check_gone()


def test_an_agent_that_is_killed_takes_its_procs_along_and_is_replaced(program: Callable[..., Program]) -> None:
    running = program(
        START
        + """
        import monarch_slurm.actor as public
        failures = []
        public.unhandled_fault_hook = failures.append
        print("children", *workers.slice(n=0).children.call_one().get(30))
        pending = workers.work.call()
        print("lost:", str(pending.exception(30)).replace("\\n", " "))
        again = this_host().spawn_procs({"n": 2}).spawn("again", Worker)
        print("again", *again.pid.call().get(30).values())
        print("host", failures[0].host)
        print("told", len(failures), failures[0].report().splitlines()[0])
"""
    )
    agent = agent_of(running)
    old = [*pids(running.expect("pids")), *pids(running.expect("children")), agent]
    os.kill(agent, signal.SIGKILL)
    lost = running.expect("lost:")
    assert "its agent ended with status 137" in lost
    wait_gone(*old)
    new = pids(running.expect("again"))
    assert not set(new) & set(old)
    assert running.wait() == 0
    assert "told 1 " in running.output()
    running.check_gone()


def test_a_zygote_that_is_killed_is_replaced_and_its_procs_live_on(program: Callable[..., Program]) -> None:
    running = program(
        START
        + """
        while not os.path.exists("go"):
            time.sleep(0.01)
        again = this_host().spawn_procs({"n": 2}).spawn("again", Worker)
        print("again", *again.pid.call().get(30).values())
        print("still", *workers.pid.call().get(30).values())
"""
    )
    agent = agent_of(running)
    first = pids(running.expect("pids"))
    (zygote,) = [child.pid for child in psutil.Process(agent).children() if child.pid not in first]
    os.kill(zygote, signal.SIGKILL)
    wait_gone(zygote)
    (Path(running.stdout).parent / "go").touch()
    assert pids(running.expect("still")) == first
    assert running.wait() == 0
    running.check_gone()


def test_a_guardian_that_is_killed_takes_the_agent_along(program: Callable[..., Program]) -> None:
    running = program(START + "        threading.Event().wait()\n")
    agent = agent_of(running)
    guardian = psutil.Process(agent).ppid()
    running.family.update([agent, guardian, *pids(running.expect("pids"))])
    os.kill(guardian, signal.SIGKILL)
    assert running.wait() == 1
    assert "its agent ended with status -9" in running.errors()
    running.check_gone()
    # Nobody could remove the agent's folder for sockets; the next process that makes one does.
    other = program(START)
    assert other.wait() == 0


def test_preloads_that_fail_or_start_threads_only_warn(program: Callable[..., Program], tmp_path: Path) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "broken.py").write_text("raise RuntimeError('broken on purpose')")
    (folder / "threaded.py").write_text("import threading\nthreading.Thread(target=threading.Event().wait).start()")
    (folder / "fatal.py").write_text("import os\nos._exit(9)")
    (folder / "inner.py").write_text("\nimport no_such_module")
    themselves = "; procs will import it themselves\n"
    for module, warning in (
        (
            "no_such_module",
            f"could not preload no_such_module: ModuleNotFoundError: No module named 'no_such_module'{themselves}",
        ),
        ("broken", f"could not preload broken: RuntimeError: broken on purpose ({folder}/broken.py:1)"),
        ("inner", f"No module named 'no_such_module' ({folder}/inner.py:2){themselves}"),
        (
            "os:nothing",
            f"could not preload os:nothing: AttributeError: module 'os' has no attribute 'nothing'{themselves}",
        ),
        ("threaded", "started threads (2 in all)"),
        ("fatal", "going on without"),
    ):
        environment = {"MONARCH_SLURM_PRELOAD": module, "PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}"}
        running = program(START, env=environment)
        assert running.wait() == 0, module
        assert warning in running.errors()
        assert "Traceback" not in running.errors()


def test_a_zygote_that_is_replaced_holds_nobody_up(program: Callable[..., Program], tmp_path: Path) -> None:
    (tmp_path / "lasting.py").write_text("import atexit, threading\natexit.register(threading.Event().wait)")
    environment = {"MONARCH_SLURM_PRELOAD": "lasting", "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    again = """
        this_host()._renew()
        print("again", this_host().spawn_procs().spawn("again", Worker).pid.call_one().get(30))
"""
    running = program(START + again, env=environment)
    assert running.wait() == 0
    assert "again" in running.output()
    assert running.errors() == ""


def test_a_preload_that_hangs_is_given_up(program: Callable[..., Program], tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text("import threading\nthreading.Event().wait()")
    environment = {
        "MONARCH_SLURM_PRELOAD": "hanging",
        "MONARCH_SLURM_PRELOAD_TIMEOUT": "4",
        "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}",
    }
    running = program(START, env=environment)
    assert running.wait() == 0
    assert "has not been ready within 4 s" in running.errors()


def test_a_proc_that_never_reports(program: Callable[..., Program]) -> None:
    running = program(
        """
        import monarch_slurm.actor as public
        from monarch_slurm.actor import this_host
        if __name__ == "__main__":
            public.unhandled_fault_hook = lambda failure: print("hook", failure.exit)
            procs = this_host().spawn_procs()
            print("error", str(procs.initialized.exception(30)).replace("\\n", " "))
        """,
        env={"MONARCH_SLURM_PROC_START_TIMEOUT": "0.000001"},
    )
    assert running.wait() == 0
    assert "NotReported(no word from it within" in running.output()


@pytest.mark.parametrize("folder", ["/tmp/" + "x" * 200, "/proc"])
def test_a_folder_that_cannot_be_used_is_told_once(program: Callable[..., Program], folder: str) -> None:
    running = program(START, env={"MONARCH_SLURM_RUNTIME_DIR": folder})
    assert running.wait() == 1
    assert running.errors().count(f"cannot make a folder for sockets in {folder}") == 1
    assert "Unhandled monarch error" not in running.errors()


def test_an_agent_that_does_not_come(program: Callable[..., Program]) -> None:
    running = program(START, env={"MONARCH_SLURM_HOST_SPAWN_READY_TIMEOUT": "1us"})
    assert running.wait() == 1
    assert "did not join within 1e-06 s (setting host_spawn_ready_timeout)" in running.errors()
    assert "Unhandled monarch error" in running.errors()
    running.check_gone()


def test_a_socket_path_that_is_too_long(program: Callable[..., Program], tmp_path: Path) -> None:
    folder = tmp_path / ("y" * 100)
    folder.mkdir()
    running = program(START, env={"MONARCH_SLURM_RUNTIME_DIR": str(folder)})
    assert running.wait() == 1
    assert "and Unix sockets allow 107" in running.errors()
    assert list(folder.iterdir()) == []


def test_a_forked_child_cannot_use_the_client(program: Callable[..., Program]) -> None:
    running = program(
        START
        + """
        pid = os.fork()
        if pid == 0:
            try:
                context()
            except RuntimeError as error:
                print("child:", error, flush=True)
            sys.exit(0)
        os.waitpid(pid, 0)
        print("parent", workers.pid.call().get(30).values())
"""
    )
    assert running.wait() == 0
    assert "child: this process was forked from a client" in running.output()
    assert "parent" in running.output()


def test_a_proc_has_no_client_of_its_own(program: Callable[..., Program]) -> None:
    running = program("""
        from monarch_slurm.actor import Actor, endpoint, this_host
        class Greedy(Actor):
            @endpoint
            def publish(self):
                from pathlib import Path
                from monarch_slurm.controller import publish
                publish(Path("."), address="127.0.0.1")
        if __name__ == "__main__":
            print(this_host().spawn_procs().spawn("g", Greedy).publish.call_one().exception(30))
    """)
    assert running.wait() == 0
    assert "only the program itself has hosts of its own" in running.output()


def test_is_alive_knows_zombies() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    wait_until(lambda: not is_alive(pid))
    os.waitpid(pid, 0)
