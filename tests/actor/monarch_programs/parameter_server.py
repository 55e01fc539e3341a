import struct

from monarch.actor import Accumulator, Actor, context, endpoint, this_host, this_proc
from monarch.rdma import RDMABuffer


class ParameterServer(Actor):
    def __init__(self, size: int) -> None:
        self.weights = bytearray(struct.pack(f"{size}d", *[0.0] * size))
        self.size = size

    @endpoint
    def weights_buffer(self) -> RDMABuffer:
        return RDMABuffer(memoryview(self.weights))

    @endpoint
    def apply(self, gradient: list[float], rate: float) -> None:
        values = struct.unpack(f"{self.size}d", self.weights)
        new = [value - rate * slope for value, slope in zip(values, gradient, strict=True)]
        self.weights[:] = struct.pack(f"{self.size}d", *new)


class Worker(Actor):
    def __init__(self, target: list[float], buffer: RDMABuffer) -> None:
        self.target = target
        self.buffer = buffer
        self.local = bytearray(8 * len(target))
        self.logger.debug("made on %s", context().actor_instance.rank)

    @endpoint
    def gradient(self) -> list[float]:
        self.buffer.read_into(memoryview(self.local)).get()
        weights = struct.unpack(f"{len(self.target)}d", self.local)
        return [value - wanted for value, wanted in zip(weights, self.target, strict=True)]


def add(total: list[float], more: list[float]) -> list[float]:
    return [a + b for a, b in zip(total, more, strict=True)]


def main() -> None:
    target = [1.0, -2.0, 3.0]
    server = this_proc().spawn("server", ParameterServer, len(target))
    buffer = server.weights_buffer.call_one().get()
    print("bytes", buffer.size())
    workers = this_host().spawn_procs(per_host={"gpus": 3}).spawn("worker", Worker, target, buffer)
    summed = Accumulator(workers.gradient, [0.0] * 3, add)
    for _ in range(30):
        gradient = summed.accumulate().get()
        server.apply.call_one(gradient, 0.2).get()
    final = workers.slice(gpus=0).gradient.call_one().get()
    print("far off", max(abs(one) for one in final) > 1e-6)


if __name__ == "__main__":
    main()
