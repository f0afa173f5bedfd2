"""Tasks that wait for a person use neither memory nor slots of their replica."""

from __future__ import annotations

import gc
from collections import Counter

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.ids import TaskId
from meshpoint.model.tasks import TaskState

from .mesh import Mesh, SqlMesh

_HELD_BY_THE_TEST = ("meshpoint.model", "meshpoint.adapters.inprocess", "meshpoint.testing")
"""Packages of messages and events, which the test keeps, and of the shared broker."""
SLOTS = 2
QUESTIONS = 200
"""Far more than a replica keeps of its last batch, such as the pause that it wrote last."""


@agent("agent")
async def asking(ctx: TaskExecutionContext, number: int) -> bool:
    """Asks a question that stays open."""
    return await ctx.wait_for("approval", bool, prompt="Buy it?")


def replica_objects() -> Counter[str]:
    gc.collect()
    return Counter(
        f"{module}.{type(each).__qualname__}"
        for each in gc.get_objects()
        if (module := str(type(each).__module__)).startswith("meshpoint.")
        and not module.startswith(_HELD_BY_THE_TEST)
    )


async def ask(mesh: Mesh, client: FakePeer, count: int) -> list[TaskId]:
    task_ids = [await client.ask("agent", number) for number in range(count)]
    await mesh.idle()
    return task_ids


async def test_open_questions_leave_nothing_in_the_replica(sqlite_url: str) -> None:
    mesh = SqlMesh(sqlite_url)
    try:
        client = await mesh.fake_peer("client")
        replica = await mesh.replica(asking, max_concurrency=SLOTS)
        await ask(mesh, client, 10)
        before = replica_objects()
        task_ids = await ask(mesh, client, QUESTIONS)
        more = replica_objects() - before
        assert {kind: count for kind, count in more.items() if count >= QUESTIONS // 10} == {}, (
            "a type of object grows with the open questions"
        )
        assert replica.worker.runtime.slots.free == SLOTS
        assert replica.worker.tasks.segments == {}
        assert {await mesh.state(each) for each in task_ids} == {TaskState.WAITING}
    finally:
        await mesh.close()
