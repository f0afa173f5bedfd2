"""Everything fails at random, for a while; then every task has its one outcome, and nothing is left over."""

from __future__ import annotations

import asyncio
import os
import random
from datetime import timedelta

import pytest

from meshpoint.model.calls import AT_LEAST, Call, Done, Paused
from meshpoint.model.checkpoint import TaskState
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Ok, Outcomes

from .agents import Scripted, doubler, said
from .faults import IN_DOUBT, LOST_IN_DOUBT, NOT_COMMITTED
from .mesh import Mesh, Running
from .puppet import Puppet

SEEDS = range(int(os.environ.get("CHAOS_SEEDS", "8")))
METHODS = [
    "lookup",
    "begin",
    "pause",
    "claim",
    "end",
    "take",
    "take_over",
    "unsent",
    "mark_sent",
    "expire",
    "release",
]


def twice(name: str, peer: str) -> Scripted:
    """An agent that pauses twice, for three calls each."""

    async def ask(ctx: TaskExecutionContext, number: int, state: bytes) -> Paused:
        calls = [Call(str(n), peer, number + n) for n in range(3)]
        return Paused(calls, state, AT_LEAST(3))

    async def start(ctx: TaskExecutionContext, request: int) -> Paused:
        return await ask(ctx, request, b"first")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Paused | Done[object]:
        if state == b"first":
            return await ask(ctx, sum(each.value for each in outcomes.values() if isinstance(each, Ok)), b"second")
        return Done(said(outcomes))

    return Scripted(name, start, resume)


def expected(number: int) -> object:
    total = sum(2 * (number + n) for n in range(3))
    return {str(n): 2 * (total + n) for n in range(3)}


async def kill(running: Running) -> None:
    running.task.cancel()
    await asyncio.gather(running.task, return_exceptions=True)
    await running.broker.close()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("durable", [True, False])
async def test_chaos(mesh: Mesh, boss: Puppet, seed: int, durable: bool) -> None:
    dice = random.Random(seed)
    agents = [twice("top", "doubler"), doubler]
    moment = timedelta(seconds=0.02)
    options = {
        "durable": durable,
        "max_concurrency": 3,
        "max_attempts": 1000,
        "peer_timeout": timedelta(days=1),
        "drain_timeout": moment,
        "release_timeout": moment,
    }
    living: list[tuple[Scripted, Running]] = []
    for agent in agents * 2:
        living.append((agent, await mesh.replica(agent, **options)))
    asked = {}
    for turn in range(60):
        if turn < 40:
            asked[await boss.ask("top", turn)] = turn
        agent, running = living[dice.randrange(len(living))]
        match dice.randrange(8):
            case 0:
                living.remove((agent, running))
                await kill(running)
                living.append((agent, await mesh.replica(agent, **options)))
            case 1:
                living.remove((agent, running))
                await running.drain()
                living.append((agent, await mesh.replica(agent, **options)))
            case 2:
                running.broker.lose_connection()
            case 3:
                running.broker.fail(*dice.choices([NOT_COMMITTED, IN_DOUBT], k=2))
            case 4 | 5:
                for method in dice.choices(METHODS, k=3):
                    running.store.fail(method, *dice.choices([NOT_COMMITTED, IN_DOUBT, LOST_IN_DOUBT], k=2))
            case 6:
                await mesh.advance(dice.choice([1, 3, 20]))
        for _ in range(dice.randrange(30)):
            await asyncio.sleep(0)
    for _, running in living:
        running.store.heal()
        running.broker.heal()
    await mesh.advance(120)
    for task_id, number in asked.items():
        replies = boss.replies(task_id)
        assert replies, f"{task_id} was lost: {await mesh.store.task(task_id)}"
        assert all(isinstance(reply, Ok) and reply.value == expected(number) for reply in replies)
    for summary in await mesh.store.tasks(limit=1000):
        assert summary.state is TaskState.COMPLETED
    for agent, running in living:
        assert running.worker.site.slots.free == 3
        assert mesh.unacked(agent.name) == 0
        assert running.worker.segments.live == {}
        assert len(running.worker.segments.held) == 0
    assert mesh.dead_letters("top") == mesh.dead_letters("doubler") == []
