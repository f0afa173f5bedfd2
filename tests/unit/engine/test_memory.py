"""Working memory in a worker: every run starts from the memory of the last checkpoint."""

from __future__ import annotations

import pytest

from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Ok

from .mesh import Mesh
from .puppet import Puppet

asked = Peer("peer", int, int)


class Surviving(InProcessWorkingMemory):
    """Working memory that outlives replicas, as Redis does."""

    @property
    def survives(self) -> bool:
        return True


@pytest.fixture(params=["local", "surviving"])
def l1(request: pytest.FixtureRequest, mesh: Mesh) -> InProcessWorkingMemory | None:
    return Surviving(mesh.clock) if request.param == "surviving" else None


async def test_what_was_counted_before_a_pause_is_counted_once(
    mesh: Mesh, boss: Puppet, l1: InProcessWorkingMemory | None
) -> None:
    peer = await mesh.puppet("peer")

    @agent("agent")
    async def counting(ctx: TaskExecutionContext, rounds: int) -> list[int]:
        seen = []
        for number in range(rounds):
            seen.append(await ctx.memory.incr("count"))
            await ctx.call(asked(number))
        return [*seen, await ctx.memory.incr("count", 0)]

    await mesh.replica(counting, l1=l1)
    task_id = await boss.ask("agent", 3)
    for number in range(3):
        await peer.respond(await peer.request_number(number + 1), 7)
    assert await boss.reply(task_id) == Ok([1, 2, 3, 3])
