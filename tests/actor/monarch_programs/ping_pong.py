import asyncio

from monarch.actor import Actor, current_rank, current_size, endpoint, this_host


class Player(Actor):
    def __init__(self, name: str) -> None:
        self.name = name
        self.heard: list[str] = []
        self.other = None

    @endpoint
    async def meet(self, other) -> None:
        self.other = other

    @endpoint
    async def serve(self, rounds: int) -> int:
        rank = current_rank()
        opponent = self.other.slice(**rank)
        total = 0
        for number in range(rounds):
            total += await opponent.hit.call_one(self.name, number)
        return total

    @endpoint
    async def hit(self, name: str, number: int) -> int:
        self.heard.append(f"{name}{number}")
        return number

    @endpoint
    async def report(self) -> tuple[list[str], dict[str, int]]:
        return self.heard, current_size()


async def main() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    ping, pong = procs.spawn("ping", Player, "ping"), procs.spawn("pong", Player, "pong")
    await asyncio.gather(ping.meet.call(pong), pong.meet.call(ping))
    totals = await ping.serve.call(4)
    for point, total in totals:
        print("served", point.rank, total)
    for_rank_one = await pong.slice(gpus=1).report.call_one()
    print(for_rank_one)
    await procs.stop()


if __name__ == "__main__":
    asyncio.run(main())
