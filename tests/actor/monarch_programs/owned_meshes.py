import os
import signal

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch._src.actor.actor_mesh import ActorMesh
from monarch.actor import Actor, MeshFailure, ValueMesh, current_rank, endpoint, get_or_spawn_controller, this_host


class Registry(Actor):
    def __init__(self) -> None:
        self.names: dict[str, int] = {}

    @endpoint
    def register(self, name: str) -> int:
        self.names[name] = self.names.get(name, 0) + 1
        return self.names[name]


class Trainer(Actor):
    @endpoint
    def step(self, die: bool = False) -> int:
        if die:
            os.kill(os.getpid(), signal.SIGKILL)
        return current_rank().rank


class Replica(Actor):
    """Owns trainers, and replaces them when they die."""

    def __init__(self) -> None:
        self.restarts = 0
        self._spawn()

    def _spawn(self) -> None:
        self.procs = this_host().spawn_procs(per_host={"gpus": 2})
        self.trainers: ActorMesh = self.procs.spawn("trainer", Trainer)

    @endpoint
    def train(self, die: bool) -> str:
        registry = get_or_spawn_controller("registry", Registry).get()
        registry.register.call_one("replica").get()
        try:
            values: ValueMesh = self.trainers.step.call(die).get()
        except SupervisionError as error:
            return f"failed: {'Killed(sig=9)' in str(error)}"
        return f"steps: {values.values()}"

    @endpoint
    def restarted(self) -> int:
        return self.restarts

    def __supervise__(self, failure: MeshFailure) -> bool:
        if "trainer" in failure.mesh_name and self.restarts == 0:
            self.restarts += 1
            self._spawn()
        return True


def ignore(failure: MeshFailure) -> None:
    print("unexpected", failure)


def main() -> None:
    monarch.actor.unhandled_fault_hook = ignore
    replicas = this_host().spawn_procs(per_host={"replicas": 2}).spawn("replica", Replica)
    print(replicas.train.call(False).get().values())
    print(replicas.slice(replicas=1).train.call_one(True).get())
    while replicas.slice(replicas=1).restarted.call_one().get() == 0:
        pass
    print(replicas.train.call(False).get().values())
    print(replicas.restarted.call().get().values())
    registry = get_or_spawn_controller("registry", Registry).get()
    print("registered", registry.register.call_one("replica").get())


if __name__ == "__main__":
    main()
