"""Working memory in a worker: every run starts from the memory of the last checkpoint."""

from __future__ import annotations

import pytest

from fake_peer import FakePeer
from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Ok

from .mesh import Mesh

int_peer = Peer("peer", int, int)


class DurableMemory(InProcessWorkingMemory):
    """Working memory that outlives replicas, as Redis does."""

    @property
    def durable(self) -> bool:
        return True


@pytest.fixture(params=["local", "surviving"])
def l1(request: pytest.FixtureRequest, mesh: Mesh) -> InProcessWorkingMemory | None:
    return DurableMemory(mesh.clock) if request.param == "surviving" else None


async def test_memory_writes_before_a_pause_are_applied_once(
    mesh: Mesh, client: FakePeer, l1: InProcessWorkingMemory | None
) -> None:
    peer = await mesh.fake_peer("peer")

    @agent("agent")
    async def count_rounds(ctx: TaskExecutionContext, rounds: int) -> list[int]:
        seen = []
        for number in range(rounds):
            seen.append(await ctx.memory.incr("count"))
            await int_peer(number)
        return [*seen, await ctx.memory.incr("count", 0)]

    await mesh.replica(count_rounds, l1=l1)
    task_id = await client.ask("agent", 3)
    for number in range(3):
        await peer.respond(await peer.wait_for_request(number + 1), 7)
    assert await client.reply(task_id) == Ok([1, 2, 3, 3])
