"""The programs that README and the pages show are started, at their smallest size."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support import REPOSITORY

from monarch_slurm.wire.ports import listen_tcp

pytestmark = pytest.mark.slow

TIMEOUT = 180.0

ACTORS = """
from monarch_slurm.actor import Actor, current_rank, endpoint, this_host

class Trainer(Actor):
    @endpoint
    def step(self, lr: float) -> str:
        return f"step with {lr}"

    @endpoint
    def save(self, folder: str) -> None:
        return None

procs = this_host().spawn_procs(per_host={"gpus": 2})
trainers = procs.spawn("trainers", Trainer)
hosts = this_host()
"""

COUNTER = """
from monarch_slurm.actor import Actor, endpoint, this_host

class Counter(Actor):
    def __init__(self, start: int) -> None:
        self.value = start

    @endpoint
    def add(self, n: int) -> int:
        self.value += n
        return self.value
"""


@dataclass(frozen=True)
class Example:
    """How the program of a page is started.

    Attributes:
        page: its file, and ``number`` counts the programs there.
        before: lines that the page takes for granted.
        after: lines that use what the program has made.
        smaller: parts that are replaced, for a machine that is small and for places that exist here.
        is_async: it awaits, as in a notebook.
        expected: a part of what it prints.
        variables: environment variables.
        files: files beside it.
    """

    page: str
    number: int
    before: str = ""
    after: str = ""
    smaller: dict[str, str] = field(default_factory=dict)
    is_async: bool = False
    expected: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


TWO_GPUS = {'"gpus": 8': '"gpus": 2', '"gpus": 4': '"gpus": 2'}
RANKS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "PORT", "RANK": "0", "WORLD_SIZE": "1"}

EXAMPLES = [
    Example("README.md", 0, smaller=TWO_GPUS, expected="rank 1: one step with lr 0.01"),
    Example("actors.md", 0, after="print(counters.add.call(1).get())", smaller=TWO_GPUS, expected="11"),
    Example("actors.md", 1, after="print(monarch_slurm.actor.unhandled_fault_hook is note)", expected="True"),
    Example("actors.md", 2, COUNTER, "print(counters.add.call(2).get())", TWO_GPUS, expected="12"),
    Example("actors.md", 3, ACTORS, "print('called')", variables=RANKS, expected="called"),
    Example(
        "actors.md",
        5,
        after="print('code', code)",
        smaller={**TWO_GPUS, "/scratch": "/", "/tmp/check": "check", "nproc-per-node=8": "nproc-per-node=2"},
        expected="code 0",
        files={"check.py": "#!/bin/sh\necho checked", "train.py": "import os; print('rank', os.environ['RANK'])"},
    ),
    Example(
        "actors.md",
        6,
        "import os\nfrom monarch_slurm.actor import make_worker_key\nmake_worker_key('key')\n"
        "os.environ['MONARCH_SLURM_WORKER_KEY'] = os.path.abspath('key')",
        after="print('host names', hosts.host_names)",
        smaller={"29400": "PORT", "22222": "OTHER"},
        variables={**RANKS, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        expected="host names",
    ),
    Example(
        "debugging.md",
        0,
        ACTORS,
        "    print('copied')",
        {"~/project": "project"},
        is_async=True,
        expected="copied",
        files={"project/code.py": "x = 1"},
    ),
    Example("debugging.md", 1, ACTORS, "    print('set')", is_async=True, expected="set"),
    Example("native.md", 0, after="trainers.step.call().get(); print('stepped')", smaller=TWO_GPUS, expected="stepped"),
    Example(
        "native.md",
        1,
        "from monarch_slurm.actor import this_host\nprocs = this_host().spawn_procs({'hosts': 1, 'gpus': 2})",
        "store.set('key', b'value'); print(store.get('key'))",
        expected="b'value'",
    ),
    Example("rdma.md", 0, after="print(len(mine))", smaller={"range(300)": "range(4)"}, expected="4"),
    Example("slurm.md", 1, after="print(job.dry_run('true'))", expected="#SBATCH"),
    Example("slurm.md", 2, ACTORS + "train = lambda: print('trained')", expected="trained"),
]

ELSEWHERE = {
    ("actors.md", 4): "two programs; test_workers_that_are_attached_to below",
    ("gpus.md", 0): "needs GPUs; tests/hardware/test_gpus.py",
    ("salloc.md", 0): "needs an allocation; tests/slurm/test_page_programs.py",
    ("slurm.md", 0): "needs a cluster; tests/slurm/test_page_programs.py",
}
"""Programs that are not started by `test_a_program_of_a_page_runs`, and why."""


def programs(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def page_named(name: str) -> Path:
    return REPOSITORY / name if name == "README.md" else REPOSITORY / "site" / name


def free_port() -> str:
    with listen_tcp("127.0.0.1", 1) as server:
        return str(server.getsockname()[1])


def test_each_program_is_started_somewhere() -> None:
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "site").glob("*.md")]
    shown = {(page.name, number) for page in pages for number in range(len(programs(page)))}
    assert shown == {(example.page, example.number) for example in EXAMPLES} | ELSEWHERE.keys()


def start(folder: Path, program: str, variables: dict[str, str]) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(program)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=folder,
        env={**os.environ, "PATH": path, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.page}-{example.number}")
def test_a_program_of_a_page_runs(example: Example, tmp_path: Path) -> None:
    program = programs(page_named(example.page))[example.number]
    for part, replacement in example.smaller.items():
        assert part in program or example.smaller is TWO_GPUS or part in TWO_GPUS, f"{part} is not in the program"
        program = program.replace(part, replacement)
    if example.is_async:
        program = "import asyncio\nasync def main():\n" + textwrap.indent(program, "    ")
        program += example.after + "\nasyncio.run(main())\n"
    else:
        program += "\n" + example.after + "\n"
    port, other = free_port(), free_port()
    program = program.replace("PORT,", f"{port},").replace("OTHER)", f"{other})")
    for name, text in example.files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    variables = {name: value.replace("PORT", port) for name, value in example.variables.items()}
    process = start(tmp_path, example.before + "\n" + program, variables)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output
    assert example.expected in output


def test_workers_that_are_attached_to(tmp_path: Path) -> None:
    program = programs(page_named("actors.md"))[4]
    assert program.count("\n\n") == 2
    imports, worker, attach = program.split("\n\n")
    ports = [free_port(), free_port()]
    key = tmp_path / "worker.key"

    def local(text: str) -> str:
        text = text.replace("/home/me/.worker.key", str(key))
        for number, port in enumerate(ports, 1):
            text = text.replace(f"n{number}:22222", f"127.0.0.1:{port}")
        return text

    subprocess.run(
        [sys.executable, "-c", f"from monarch_slurm.actor import make_worker_key; make_worker_key({str(key)!r})"],
        check=True,
        timeout=TIMEOUT,
    )
    workers = []
    for number, port in enumerate(ports):
        folder = tmp_path / f"worker{number}"
        folder.mkdir()
        workers.append(start(folder, local(f"{imports}\n{worker}\n").replace(ports[0], port), {}))
    attached = tmp_path / "attach"
    attached.mkdir()
    program = f"{imports}\n{attach}\nprint('hosts', len(hosts.host_names))\nhosts.shutdown().get()\n"
    process = start(attached, local(program), {})
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output
    assert "hosts 2" in output
    for ended in workers:
        output, _ = ended.communicate(timeout=TIMEOUT)
        assert ended.returncode == 0, output
