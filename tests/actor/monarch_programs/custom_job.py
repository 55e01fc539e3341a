import os
import shutil
import subprocess
import sys
import tempfile

from monarch.actor import Actor, HostMesh, attach_to_workers, endpoint
from monarch.job import JobState, JobTrait, exec_command

WORKER = """
import sys
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""


class ChildrenJob(JobTrait):
    """A job of a user's own kind: its hosts are children that listen on sockets in a folder."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.folder = tempfile.mkdtemp()
        self.workers: dict[str, list[subprocess.Popen]] = {}

    def _create(self, client_script: str | None) -> None:
        for name, size in self.sizes.items():
            addresses = [self._address(name, number) for number in range(size)]
            self.workers[name] = [subprocess.Popen([sys.executable, "-c", WORKER, url]) for url in addresses]

    def _address(self, name: str, number: int) -> str:
        return f"ipc://{self.folder}/{name}{number}"

    def _state(self) -> JobState:
        return JobState({name: self._attach(name, size) for name, size in self.sizes.items()})

    def _attach(self, name: str, size: int) -> HostMesh:
        workers = [self._address(name, number) for number in range(size)]
        return attach_to_workers(name=name, ca="trust_all_connections", workers=workers)

    def can_run(self, spec: JobTrait) -> bool:
        return False

    def _kill(self) -> None:
        for workers in self.workers.values():
            for worker in workers:
                worker.terminate()
                worker.wait()
        shutil.rmtree(self.folder)


class Greeter(Actor):
    @endpoint
    def parent(self) -> bool:
        return os.getppid() > 1


def main() -> None:
    job = ChildrenJob({"trainers": 2, "loaders": 1})
    state = job.state(cached_path=None)
    state.trainers.initialized.get()
    greeters = state.trainers.spawn_procs(per_host={"gpus": 2}).spawn("greeter", Greeter)
    print(greeters.extent, greeters.parent.call().get().values())
    print("code", exec_command(state.loaders, "exit 3").get())
    try:
        state.nothing  # noqa: B018
    except AttributeError:
        print("no such hosts")
    state.loaders.shutdown().get()
    print("loader", job.workers["loaders"][0].wait())
    state.trainers.stop().get()
    print("trainers", [worker.poll() for worker in job.workers["trainers"]])
    job.kill()


if __name__ == "__main__":
    main()
