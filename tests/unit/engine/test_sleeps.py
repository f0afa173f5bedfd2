"""Tasks that sleep: a pause whose end is a matter of time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import FunctionAgent, agent
from meshpoint.agents.peer import Peer
from meshpoint.agents.stateful import Replies, StatefulAgent
from meshpoint.errors import AgentMisbehaved
from meshpoint.model.calls import FIRST, Call, Done, Join, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState
from meshpoint.model.waits import INTERRUPTED, Sleep
from meshpoint.subtasks.resuming import resume_operation

from .agents import caller
from .mesh import Mesh

BACKENDS = pytest.mark.parametrize("durable", [True, False])
Run = Callable[[TaskExecutionContext], Coroutine[Any, Any, Any]]

flights = Peer("peer", str, str, timeout=timedelta(days=30))


def sleeper(run: Run, version: str = "1") -> FunctionAgent[Any, Any]:
    """An agent that runs `run` and ignores its input."""

    @agent("agent", version=version)
    async def wrapper(ctx: TaskExecutionContext, _: Any) -> Any:
        return await run(ctx)

    return wrapper


async def nap(ctx: TaskExecutionContext) -> str:
    await ctx.sleep(20)
    return "rested"


async def fall_asleep(mesh: Mesh, client: FakePeer, count: int = 1) -> list[TaskId]:
    """Start tasks, and wait for their first checkpoints."""
    task_ids = [await client.ask("agent", number) for number in range(count)]
    for task_id in task_ids:
        await mesh.events.wait(Step.CHECKPOINT, Phase.AFTER, task_id=task_id)
    return task_ids


async def test_a_task_sleeps_and_continues(any_mesh: Mesh) -> None:
    client = await any_mesh.fake_peer("client")
    await any_mesh.replica(sleeper(nap))
    (task_id,) = await fall_asleep(any_mesh, client)
    await any_mesh.advance(18)
    assert client.replies() == []
    assert await any_mesh.state(task_id) is TaskState.WAITING
    await any_mesh.advance(4)
    assert await client.reply(task_id) == Ok("rested")


@BACKENDS
async def test_nothing_is_sent_for_a_sleep(mesh: Mesh, client: FakePeer, durable: bool) -> None:
    replica = await mesh.replica(sleeper(nap), durable=durable)
    await client.ask("agent", 1)
    await mesh.advance(70)
    sent = [(address, message.type) for address, message in replica.broker.published]
    assert [str(address) for address, _ in sent] == ["client.resp"]


async def test_another_replica_wakes_the_task_of_a_killed_one(any_mesh: Mesh) -> None:
    client = await any_mesh.fake_peer("client")
    first = await any_mesh.replica(sleeper(nap))
    (task_id,) = await fall_asleep(any_mesh, client)
    await any_mesh.advance(5)
    await first.crash()
    await any_mesh.replica(sleeper(nap))
    await any_mesh.advance(35)
    assert await client.reply(task_id) == Ok("rested")


async def test_two_replicas_race_to_wake_tasks(any_mesh: Mesh) -> None:
    client = await any_mesh.fake_peer("client")
    for _ in range(2):
        await any_mesh.replica(sleeper(nap))
    task_ids = await fall_asleep(any_mesh, client, 20)
    await any_mesh.advance(23)
    for task_id in task_ids:
        assert await client.reply(task_id) == Ok("rested")
    assert len(client.replies()) == len(task_ids)


@BACKENDS
async def test_a_deadline_before_the_wake_up_ends_the_task(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    await mesh.replica(sleeper(nap), durable=durable)
    task_id = await client.ask("agent", 1, deadline=mesh.deadline_in(10))
    await mesh.advance(9)
    assert client.replies() == []
    await mesh.advance(3)
    outcome = await client.reply(task_id)
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.TIMEOUT


async def test_a_sleeping_task_is_cancelled(any_mesh: Mesh) -> None:
    client = await any_mesh.fake_peer("client")
    await any_mesh.replica(sleeper(nap))
    (task_id,) = await fall_asleep(any_mesh, client)
    await client.cancel("agent", task_id)
    outcome = await client.reply(task_id)
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.CANCELLED
    await any_mesh.advance(25)
    assert len(client.replies()) == 1


async def test_a_suspended_task_wakes_when_it_is_resumed(any_mesh: Mesh) -> None:
    client = await any_mesh.fake_peer("client")
    await any_mesh.replica(sleeper(nap))
    (task_id,) = await fall_asleep(any_mesh, client)
    await any_mesh.store.suspend([task_id])
    await any_mesh.advance(25)
    assert client.replies() == []
    assert await any_mesh.state(task_id) is TaskState.READY
    await any_mesh.store.unsuspend([task_id])
    await any_mesh.advance(3)
    assert await client.reply(task_id) == Ok("rested")


@BACKENDS
async def test_a_sleep_until_an_instant(mesh: Mesh, client: FakePeer, durable: bool) -> None:
    until = mesh.clock.now() + timedelta(seconds=30)

    async def run(ctx: TaskExecutionContext) -> float:
        await ctx.sleep_until(until)
        return mesh.clock.now().timestamp() - until.timestamp()

    await mesh.replica(sleeper(run), durable=durable)
    task_id = await client.ask("agent", 1)
    await mesh.advance(29)
    assert client.replies() == []
    await mesh.advance(3)
    outcome = await client.reply(task_id)
    assert isinstance(outcome, Ok)
    assert isinstance(outcome.value, float)
    assert 0 <= outcome.value < 3


@BACKENDS
async def test_a_sleep_of_zero_and_a_past_instant_end_at_once(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    past = datetime(2020, 1, 1, tzinfo=UTC)

    async def run(ctx: TaskExecutionContext) -> str:
        await ctx.sleep(0)
        await ctx.sleep_until(past)
        await ctx.gather(ctx.sleep(0), ctx.sleep_until(past))
        return await flights("rome")

    await mesh.replica(sleeper(run), durable=durable)
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await peer.respond(request, "AZ 1")
    assert await client.reply(task_id) == Ok("AZ 1")


async def test_a_sleep_among_peer_calls(any_mesh: Mesh) -> None:
    client, peer = await any_mesh.fake_peer("client"), await any_mesh.fake_peer("peer")

    async def run(ctx: TaskExecutionContext) -> list[Any]:
        quote, slept = await ctx.gather(flights("rome"), ctx.sleep(20))
        return [quote, slept]

    await any_mesh.replica(sleeper(run))
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), "AZ 1")
    await any_mesh.advance(18)
    assert client.replies() == []
    await any_mesh.advance(4)
    assert await client.reply(task_id) == Ok(["AZ 1", None])


async def test_a_sleep_wins_a_race_against_a_peer(any_mesh: Mesh) -> None:
    client, peer = await any_mesh.fake_peer("client"), await any_mesh.fake_peer("peer")

    async def run(ctx: TaskExecutionContext) -> list[str]:
        outcomes = await ctx.gather_outcomes(flights("rome"), ctx.sleep(20), join=FIRST)
        return [each.kind if isinstance(each, Failed) else "ok" for each in outcomes]

    await any_mesh.replica(sleeper(run))
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await any_mesh.advance(23)
    assert await client.reply(task_id) == Ok(["cancelled", "ok"])
    await any_mesh.advance(20)
    assert peer.cancels() == [request.correlation_id]


async def test_an_answer_wins_a_race_against_a_sleep(any_mesh: Mesh) -> None:
    client, peer = await any_mesh.fake_peer("client"), await any_mesh.fake_peer("peer")

    async def run(ctx: TaskExecutionContext) -> list[str]:
        outcomes = await ctx.gather_outcomes(flights("rome"), ctx.sleep(20), join=FIRST)
        await flights("oslo")
        return [each.kind if isinstance(each, Failed) else "ok" for each in outcomes]

    replica = await any_mesh.replica(sleeper(run))
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(1), "AZ 1")
    await peer.respond(await peer.wait_for_request(2), "SK 1")
    assert await client.reply(task_id) == Ok(["ok", "cancelled"])
    await any_mesh.advance(30)
    addresses = {str(address) for address, _ in replica.broker.published}
    assert not any("~" in address for address in addresses), "a sleep has no peer to cancel"


async def test_a_join_deadline_interrupts_a_sleep(mesh: Mesh, client: FakePeer) -> None:
    async def run(ctx: TaskExecutionContext) -> str:
        join = Join(deadline=timedelta(seconds=10))
        (outcome,) = await ctx.gather_outcomes(ctx.sleep(60), join=join)
        return outcome.message if isinstance(outcome, Failed) else "ok"

    await mesh.replica(sleeper(run))
    task_id = await client.ask("agent", 1)
    await mesh.advance(13)
    assert await client.reply(task_id) == Ok(INTERRUPTED.message)


async def test_a_pause_of_any_agent_may_have_sleeps(any_mesh: Mesh) -> None:
    def calls(_: Any) -> list[Call]:
        return [Sleep("nap", timedelta(seconds=10)), Sleep("night", duration=20)]

    client = await any_mesh.fake_peer("client")
    await any_mesh.replica(caller("agent", calls, FIRST))
    (task_id,) = await fall_asleep(any_mesh, client)
    await any_mesh.advance(13)
    assert await client.reply(task_id) == Ok({"nap": None, "night": "cancelled"})


async def test_a_stateful_agent_asks_for_a_sleep(mesh: Mesh, client: FakePeer) -> None:
    class Napping(StatefulAgent[str, str, str]):
        name = "agent"

        async def on_request(
            self, ctx: TaskExecutionContext, request: str, /
        ) -> Paused | Done[str]:
            return self.ask("tired", {"nap": ctx.sleep(30)}, then=self.on_rested)

        async def on_rested(
            self, ctx: TaskExecutionContext, state: str, replies: Replies
        ) -> Paused | Done[str]:
            return self.done(f"{state} {replies['nap']}")

    await mesh.replica(Napping())
    task_id = await client.ask("agent", "go")
    await mesh.advance(33)
    assert await client.reply(task_id) == Ok(f"tired {Ok(None)}")


async def test_a_sleep_is_not_awaited_outside_function_agents(
    mesh: Mesh, client: FakePeer
) -> None:
    class Napping(StatefulAgent[str, str, str]):
        name = "agent"

        async def on_request(
            self, ctx: TaskExecutionContext, request: str, /
        ) -> Paused | Done[str]:
            await ctx.sleep(1)
            return self.done("never")

    await mesh.replica(Napping())
    task_id = await client.ask("agent", "go")
    outcome = await client.reply(task_id)
    assert isinstance(outcome, Failed)
    assert "in a StatefulAgent, return self.ask(state" in outcome.message


async def test_code_that_calls_a_peer_where_it_slept_does_not_fit(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    async def sleeps(ctx: TaskExecutionContext) -> str:
        await flights("rome")
        return await flights("oslo")

    async def changed(ctx: TaskExecutionContext) -> str:
        await flights("rome")
        await ctx.sleep(1)
        return await flights("oslo")

    old = await mesh.replica(sleeper(sleeps))
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(1), "AZ 1")
    request = await peer.wait_for_request(2)
    await mesh.idle()
    await old.drain()
    await mesh.replica(sleeper(changed))
    await peer.respond(request, "SK 1")
    await mesh.idle()
    (row, _) = await mesh.task(task_id)
    assert row.state is TaskState.PARKED
    assert "call 2: expected sleep, recorded peer" in (row.parked_reason or "")


async def test_the_state_of_a_task_that_slept_has_a_format_of_its_own(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    async def run(ctx: TaskExecutionContext) -> str:
        await flights("rome")
        await ctx.sleep(5)
        return await flights("oslo")

    await mesh.replica(sleeper(run))
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request(1)
    await mesh.idle()
    formats = [(await mesh.task(task_id))[0].state_format]
    await peer.respond(request, "AZ 1")
    await mesh.idle()
    formats.append((await mesh.task(task_id))[0].state_format)
    await mesh.advance(8)
    request = await peer.wait_for_request(2)
    await mesh.idle()
    formats.append((await mesh.task(task_id))[0].state_format)
    assert formats == [
        "agent/function/1",
        "agent/function/1+waits",
        "agent/function/1+waits",
    ]
    await peer.respond(request, "SK 1")
    assert await client.reply(task_id) == Ok("SK 1")


@pytest.mark.parametrize(
    ("duration", "problem"),
    [
        (
            86_400_000,
            "sleep: 86400000 s is 2.7 years; durations are in seconds: timedelta(days=1)",
        ),
        (-1, "sleep is -1; it must not be negative"),
        (timedelta(days=4000), "it must be at most ten years"),
        ("1 h", "sleep must be a timedelta or a number of seconds, not str"),
    ],
)
def test_durations_that_make_no_sense_are_refused(duration: Any, problem: str) -> None:
    with pytest.raises(AgentMisbehaved) as refused:
        TaskExecutionContext(TaskId("1")).sleep(duration)
    assert problem in str(refused.value)


def test_an_instant_without_a_time_zone_is_refused() -> None:
    with pytest.raises(AgentMisbehaved, match="has no time zone"):
        TaskExecutionContext(TaskId("1")).sleep_until(datetime(2030, 1, 1))  # noqa: DTZ001


async def test_an_operation_that_was_cancelled_asleep_sleeps_again(any_mesh: Mesh) -> None:
    async def run(ctx: TaskExecutionContext) -> str:
        await ctx.subtask("once", int, 1)
        return await nap(ctx)

    client = await any_mesh.fake_peer("client")
    await any_mesh.replica(sleeper(run))
    (task_id,) = await fall_asleep(any_mesh, client)
    await client.cancel("agent", task_id)
    assert isinstance(await client.reply(task_id), Failed)
    await any_mesh.idle()
    await resume_operation(any_mesh.store, task_id, resume_from="last-pause")
    await any_mesh.advance(18)
    assert await any_mesh.state(task_id) is TaskState.WAITING
    await any_mesh.advance(5)
    await any_mesh.events.wait(Step.END, Phase.AFTER, task_id=task_id)
    assert await any_mesh.state(task_id) is TaskState.COMPLETED


async def test_days_pass_while_everything_restarts(any_mesh: Mesh) -> None:
    """Nothing runs when the clock moves, and every connection is new at each check."""

    async def run(ctx: TaskExecutionContext, days: int) -> str:
        await ctx.sleep(timedelta(days=days))
        return "rested"

    def tourist() -> FunctionAgent[Any, Any]:
        return agent("agent")(run)

    day = timedelta(days=1)
    client = await any_mesh.fake_peer("client")
    replica = await any_mesh.replica(tourist())
    deadline = any_mesh.deadline_in(7 * day.total_seconds())
    ids = [await client.ask("agent", days, deadline=deadline) for days in (3, 8)]
    for task_id in ids:
        await any_mesh.events.wait(Step.CHECKPOINT, Phase.AFTER, task_id=task_id)
    begun = any_mesh.clock.now()
    replied_after: dict[TaskId, timedelta] = {}
    for _ in range(15):
        await replica.crash()
        any_mesh.clock.advance(day / 2)
        replica = await any_mesh.replica(tourist())
        await any_mesh.advance(10)
        for task_id in ids:
            if task_id not in replied_after and client.replies(task_id):
                replied_after[task_id] = any_mesh.clock.now() - begun
    outcomes = [await client.reply(task_id) for task_id in ids]
    assert outcomes[0] == Ok("rested")
    assert isinstance(outcomes[1], Failed)
    assert outcomes[1].kind is FailureKind.TIMEOUT
    assert [round(replied_after[task_id] / day, 1) for task_id in ids] == [3, 7]
