import asyncio

from monarch.actor import (
    Actor,
    Channel,
    Port,
    ProcMesh,
    as_endpoint,
    concurrent_endpoint,
    current_rank,
    endpoint,
    this_host,
)
from monarch.config import configured


class Stage(Actor):
    """Adds its number to what comes, and passes it on; several items are under way at once."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.most = 0
        self.inside = 0

    @concurrent_endpoint
    async def work(self, item: list[int], rest: list["Stage"]) -> list[int]:
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(0.02 if len(item) == 0 else 0)
        self.inside -= 1
        item = [*item, self.number]
        return await rest[0].work.call_one(item, rest[1:]) if rest else item

    @endpoint
    async def overlapped(self) -> bool:
        return self.most > 1

    @endpoint
    async def emit(self, port: Port[str], count: int) -> None:
        for number in range(count):
            port.send(f"{self.number}:{number}")

    def plain(self) -> str:
        return f"plain on {current_rank().rank}"


async def main() -> None:
    procs: ProcMesh = this_host().spawn_procs(per_host={"stages": 3})
    stages = [procs.slice(stages=i).spawn(f"stage{i}", Stage, i) for i in range(3)]
    results = await asyncio.gather(*[stages[0].work.call_one([], stages[1:]) for _ in range(5)])
    print(results)
    print("overlapped", await stages[0].overlapped.call_one())
    port, receiver = Channel[str].open()
    stages[2].emit.broadcast(port, 3)
    print([await receiver.recv() for _ in range(3)])
    print(await as_endpoint(stages[1].plain).call_one())
    both = procs.slice(stages=slice(0, 2)).spawn("both", Stage, 9)
    seen = set()
    for future in both.overlapped.stream():
        seen.add(await future)
    print(seen, both.extent, str(both.slice(stages=1).extent))
    with configured(stop_actor_timeout="5s") as settings:
        print(settings["stop_actor_timeout"])
        await both.stop()
    await procs.stop()


if __name__ == "__main__":
    asyncio.run(main())
