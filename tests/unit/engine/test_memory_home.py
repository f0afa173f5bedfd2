"""Tasks of the in-process backend: by configuration, or because their first checkpoint failed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.checkpoint import TaskState
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Address, Message, nested_of, responses_of
from meshpoint.model.options import OnCheckpointFailure
from meshpoint.model.outcomes import Failed, Ok, Outcomes
from meshpoint.ports.broker import Published

from .agents import Gate, Scripted, asker, doubler, gated_after, summer
from .faults import IN_DOUBT, LOST_IN_DOUBT, NOT_COMMITTED
from .mesh import Mesh, Running
from .puppet import Puppet

itself = Peer("itself", int, int)


@agent("itself", version="1")
async def counts_down(ctx: TaskExecutionContext, number: int) -> int:
    """Calls itself, `number` levels deep."""
    return 0 if number == 0 else 1 + await ctx.call(itself(number - 1))


async def test_no_row_is_written_and_the_answers_are_the_same(mesh: Mesh, boss: Puppet) -> None:
    await mesh.replica(doubler, summer, durable=False)
    assert await boss.reply(await boss.ask("summer", [1, 2, 3])) == Ok(12)
    assert await mesh.store.tasks() == []
    assert all(replica.store.calls == [] for replica in mesh.replicas)


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("depth", [3, 9])
async def test_an_agent_that_calls_itself(mesh: Mesh, boss: Puppet, durable: bool, depth: int) -> None:
    """With one slot and a prefetch of one, each pause must make room for the next call."""
    replica = await mesh.replica(counts_down, durable=durable, max_concurrency=1)
    assert await boss.reply(await boss.ask("itself", depth)) == Ok(depth)
    await mesh.settle()
    assert replica.worker.site.slots.free == 1
    assert mesh.unacked("itself") == 0
    if durable:
        assert replica.broker.prefetches == []
    else:
        assert max(replica.broker.prefetches) > depth
        assert replica.broker.prefetches[-1] == 1  # the prefetch shrinks again


async def test_its_answers_come_to_this_replica(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    first = await mesh.replica(asker("asker", "peer"), durable=False)
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await mesh.replica(asker("asker", "peer"), durable=False)
    assert request.reply_to == f"asker.private.{first.id}"
    await peer.respond(request, 1)
    assert await boss.reply(task_id) == Ok({"peer": 1})


@pytest.mark.parametrize("again", ["redelivered", "sent twice"])
async def test_a_request_that_comes_again_while_its_task_waits(
    mesh: Mesh, boss: Puppet, peer: Puppet, again: str
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), durable=False)
    request = boss.request(1)
    await boss.send("asker", request)
    call = await peer.request_number()
    await mesh.settle()
    if again == "redelivered":
        replica.broker.lose_connection()
    else:
        await boss.send("asker", request)
    await mesh.settle()
    assert mesh.unacked("asker") == (1 if again == "redelivered" else 2)
    await peer.respond(call, 1)
    assert await boss.reply(request.correlation_id) == Ok({"peer": 1})
    await mesh.settle()
    assert mesh.unacked("asker") == mesh.waiting("asker") == 0
    assert len(peer.requests) == 1


async def test_copies_of_a_request_leave_room_for_others(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"), durable=False, max_concurrency=1)
    request = boss.request(1)
    for _ in range(6):
        await boss.send("asker", request)
        await mesh.settle()
    other = await boss.ask("asker", 2)
    await peer.respond(await peer.request_number(2), 2)
    assert await boss.reply(other) == Ok({"peer": 2})


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
async def test_copies_of_a_request_are_bounded(
    mesh: Mesh, boss: Puppet, peer: Puppet, depth: int, ended: bool
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), durable=False, max_concurrency=1)
    replica.broker.fail(*[Published.OVERLOADED] * 100, type="response")
    request = boss.request(1, call_depth=depth)
    await boss.send("asker", request)
    call = await peer.request_number()
    if ended:
        await peer.respond(call, 1)
    for _ in range(30):
        await boss.send("asker", request)
        await mesh.settle()
    assert (mesh.unacked("asker"), mesh.waiting("asker")) == (8, 0)
    replica.broker.lose_connection()
    await mesh.settle()
    assert (mesh.unacked("asker"), mesh.waiting("asker")) == (8, 0)
    if not ended:
        await peer.respond(call, 1)
    replica.broker.heal()
    await mesh.advance(60)
    assert set(map(str, boss.replies(request.correlation_id))) == {str(Ok({"peer": 1}))}
    assert (mesh.unacked("asker"), mesh.waiting("asker")) == (0, 0)
    assert len(peer.requests) == 1


async def test_after_its_end_the_reply_is_sent_again(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"), durable=False)
    request = boss.request(1)
    await boss.send("asker", request)
    await peer.respond(await peer.request_number(), 1)
    await boss.reply(request.correlation_id)
    await boss.send("asker", request)
    await mesh.settle()
    assert boss.replies() == [Ok({"peer": 1})] * 2
    assert mesh.unacked("asker") == 0
    assert len(peer.requests) == 1


async def test_a_crash_gives_the_request_to_another_replica(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    first = await mesh.replica(asker("asker", "peer"), durable=False)
    task_id = await boss.ask("asker", 1)
    await peer.request_number()
    await mesh.settle()
    await first.crash()
    await mesh.replica(asker("asker", "peer"), durable=False)
    await peer.respond(await peer.request_number(2), 2)
    assert await boss.reply(task_id) == Ok({"peer": 2})


async def test_no_more_than_max_in_memory(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"), durable=False, max_concurrency=2, max_in_memory=5)
    tasks = [await boss.ask("asker", number) for number in range(20)]
    await mesh.settle()
    assert (len(peer.requests), mesh.unacked("asker")) == (7, 7)
    for count in range(1, 21):
        await peer.respond(await peer.request_number(count), "ok")
        await mesh.settle()
    for task_id in tasks:
        assert await boss.reply(task_id) == Ok({"peer": "ok"})


async def test_ready_tasks_in_memory_come_before_new_requests(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    order: list[str] = []
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        order.append(f"start {request}")
        if request == "slow":
            await gate()
            return Done("slow")
        return Paused([Call("peer", "peer", request)], b"")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Any:
        order.append("resume")
        return Done("resumed")

    await mesh.replica(Scripted("agent", start, resume), durable=False, max_concurrency=1)
    waiting = await boss.ask("agent", "first")
    request = await peer.request_number()
    await mesh.settle()
    await boss.ask("agent", "slow")
    await gate.reach()
    await peer.respond(request, 1)
    await boss.ask("agent", "last")
    await mesh.settle()
    gate.opened.set()
    assert await boss.reply(waiting) == Ok("resumed")
    await mesh.settle()
    assert order == ["start first", "start slow", "resume", "start last"]


async def test_a_first_checkpoint_that_fails_keeps_the_task_in_memory(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"), checkpoint_retry_time=timedelta(seconds=5))
    replica.store.fail_always("pause")
    task_id = await boss.ask("asker", 1)
    await mesh.advance(4)
    assert peer.requests == []
    await mesh.advance(3)
    request = await peer.request_number()
    (degraded,) = mesh.events.of(Step.DEGRADED)
    assert degraded.task_ids == (task_id,)
    assert request.reply_to == f"asker.private.{replica.id}"
    assert mesh.unacked("asker") == 1
    assert await mesh.state(task_id) is None
    replica.store.heal()
    await mesh.advance(5)
    await peer.respond(request, 1)
    assert await boss.reply(task_id) == Ok({"peer": 1})
    await mesh.advance(10)
    assert boss.replies() == [Ok({"peer": 1})]
    assert await mesh.store.tasks() == []
    assert mesh.unacked("asker") == 0
    # of the response and of the request
    assert len(mesh.events.of(Step.ACK, Phase.AFTER, task_id)) == 2


async def test_a_reply_put_away_by_a_write_in_doubt_is_not_reported_as_lost(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), checkpoint_retry_time=timedelta(seconds=5))
    replica.store.fail_always("pause")
    task_id = await boss.ask("asker", 1)
    await mesh.advance(7)
    replica.store.heal()
    await mesh.advance(5)
    replica.broker.fail(*[Published.OVERLOADED] * 100, type="response")
    replica.store.fail("keep_replies", IN_DOUBT)
    await peer.respond(await peer.request_number(), 1)
    await mesh.advance(60)
    assert replica.store.calls.count("keep_replies") == 2
    assert mesh.events.of(Step.REPLY_DROPPED) == []
    assert mesh.unacked("asker") == 0
    replica.broker.heal()
    await mesh.advance(400)
    assert boss.replies(task_id) == [Ok({"peer": 1})]


@pytest.mark.parametrize("doubt", [IN_DOUBT, LOST_IN_DOUBT])
async def test_a_checkpoint_in_doubt_never_degrades(mesh: Mesh, boss: Puppet, peer: Puppet, doubt: str) -> None:
    replica = await mesh.replica(asker("asker", "peer"), checkpoint_retry_time=timedelta(seconds=5))
    replica.store.fail("pause", NOT_COMMITTED, doubt)
    replica.store.fail_always("pause")
    task_id = await boss.ask("asker", 1)
    await mesh.advance(60)
    assert mesh.events.of(Step.DEGRADED) == []
    assert replica.memory.calls.count("pause") == 0
    replica.store.heal()
    await mesh.advance(5)
    request = await peer.request_number()
    assert request.reply_to == responses_of("asker")  # type: ignore[arg-type]
    await peer.respond(request, 1)
    assert await boss.reply(task_id) == Ok({"peer": 1})
    assert len({each.correlation_id for each in peer.requests}) == 1


async def test_on_checkpoint_failure_wait(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"), on_checkpoint_failure=OnCheckpointFailure.WAIT)
    replica.store.fail_always("pause")
    task_id = await boss.ask("asker", 1)
    await mesh.advance(120)
    assert peer.requests == []
    assert mesh.unacked("asker") == 1
    replica.store.heal()
    await mesh.advance(5)
    await peer.respond(await peer.request_number(), 1)
    assert await boss.reply(task_id) == Ok({"peer": 1})
    assert mesh.events.of(Step.DEGRADED) == []


def twice() -> Scripted:
    """Pauses twice."""

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        return Paused([Call("one", "peer", 1)], b"1")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Any:
        return Paused([Call("two", "peer", 2)], b"2") if state == b"1" else Done("done")

    return Scripted("twice", start, resume)


async def test_a_resumed_task_never_leaves_the_database(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(twice(), checkpoint_retry_time=timedelta(seconds=5))
    task_id = await boss.ask("twice", 1)
    request = await peer.request_number()
    await mesh.settle()
    replica.store.fail_always("pause")
    await peer.respond(request, 1)
    await mesh.advance(60)
    assert mesh.events.of(Step.DEGRADED) == []
    assert await mesh.state(task_id) is TaskState.RUNNING
    replica.store.heal()
    await mesh.advance(5)
    request = await peer.request_number(2)
    assert request.reply_to == responses_of("twice")  # type: ignore[arg-type]
    await peer.respond(request, 2)
    assert await boss.reply(task_id) == Ok("done")


async def test_a_resumed_task_never_leaves_memory(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """The database is available again, but a task that began in process ends there."""
    replica = await mesh.replica(twice(), checkpoint_retry_time=timedelta(seconds=5))
    replica.store.fail_always("pause")
    task_id = await boss.ask("twice", 1)
    await mesh.advance(7)
    replica.store.heal()
    await peer.respond(await peer.request_number(), 1)
    request = await peer.request_number(2)
    assert request.reply_to == f"twice.private.{replica.id}"
    assert await mesh.state(task_id) is None
    await peer.respond(request, 2)
    assert await boss.reply(task_id) == Ok("done")
    await mesh.settle()
    assert mesh.unacked("twice") == 0


async def test_in_an_outage_tasks_in_memory_go_on(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """New requests wait for the database, without a slot that an in-process task needs."""
    replica = await mesh.replica(asker("asker", "peer"), max_concurrency=1)
    gate = Gate()
    replica.store.before["pause"] = gate
    task_id = await boss.ask("asker", 1)
    await gate.reach()
    replica.store.away = True
    gate.opened.set()
    await mesh.advance(7)
    request = await peer.request_number()
    stuck = await boss.ask("asker", 2)
    await mesh.advance(3)
    await peer.respond(request, 1)
    await mesh.advance(3)
    assert boss.replies(task_id) == [Ok({"peer": 1})]
    replica.store.heal()
    await mesh.advance(3)
    await peer.respond(await peer.request_number(2), 2)
    assert await boss.reply(stuck) == Ok({"peer": 2})


async def test_a_begun_task_does_not_degrade(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """The task has a row, so other replicas would run it a second time."""
    replica = await mesh.replica(asker("asker", "peer"), begin_at_delivery=1)
    replica.store.fail_always("pause")
    task_id = await boss.ask("asker", 1)
    await mesh.advance(12)
    assert mesh.events.of(Step.DEGRADED) == []
    replica.store.heal()
    await mesh.advance(3)
    await peer.respond(await peer.request_number(), 1)
    assert await boss.reply(task_id) == Ok({"peer": 1})


async def test_a_degraded_task_times_out_as_any_other(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer", timeout=timedelta(seconds=30)))
    replica.store.fail_always("pause")
    task_id = await boss.ask("asker", 1)
    await mesh.advance(7)
    request = await peer.request_number()
    await mesh.advance(35)
    assert await boss.reply(task_id) == Ok({"peer": "timeout"})
    assert peer.cancels() == [request.correlation_id]


async def test_a_degraded_task_can_be_cancelled(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"))
    second = await mesh.replica(asker("asker", "peer"))
    for replica in mesh.replicas:
        replica.store.fail_always("pause")
    task_id = await boss.ask("asker", 1)
    await mesh.advance(7)
    request = await peer.request_number()
    second.store.heal()
    await boss.cancel("asker", task_id)
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind == "cancelled"
    assert await peer.cancelled() == [request.correlation_id]
    await mesh.settle()
    assert mesh.unacked("asker") == 0


async def degraded(mesh: Mesh, boss: Puppet, peer: Puppet, agent: Scripted) -> tuple[Running, TaskId, Message]:
    """Let a task fall back to the in-process backend, then heal the database.

    Returns the replica, the task and its call to `peer`.
    """
    first = await mesh.replica(agent, checkpoint_retry_time=timedelta(0))
    first.store.fail("pause", *[NOT_COMMITTED] * 3)
    task_id = await boss.ask("agent", 1)
    request = await peer.request_number()
    await mesh.settle()
    assert mesh.events.of(Step.DEGRADED)
    first.store.heal()
    return first, task_id, request


async def lose_its_request(replica: Running) -> None:
    """Make the broker requeue the request to the next replica."""
    await replica.worker._subscriptions["requests"].cancel()
    replica.broker.lose_connection()


@pytest.mark.parametrize("order", ["in memory first", "in the database first"])
async def test_a_degraded_task_that_another_replica_runs_in_the_database_has_one_answer(
    mesh: Mesh, boss: Puppet, peer: Puppet, order: str
) -> None:
    agent = asker("agent", "peer")
    first, task_id, in_memory = await degraded(mesh, boss, peer, agent)
    await lose_its_request(first)
    second = await mesh.replica(agent)
    in_database = await peer.request_number(2)
    answers = [(in_memory, "first run"), (in_database, "second run")]
    for request, answer in answers if order == "in memory first" else reversed(answers):
        await peer.respond(request, answer)
        await mesh.settle()
    assert await boss.reply(task_id) == Ok({"peer": "second run"})
    await second.drain()
    await boss.send("agent", boss.request(1, task_id), nested_of("agent"))  # type: ignore[arg-type]
    await mesh.advance(20)
    # the first replica answers from the row
    assert boss.replies() == [Ok({"peer": "second run"})] * 2
    assert first.worker.segments.live == {}
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_degraded_task_whose_request_nobody_else_ran_is_answered_once_the_database_is_back(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    agent = asker("agent", "peer")
    first, task_id, request = await degraded(mesh, boss, peer, agent)
    await lose_its_request(first)
    first.store.away = True
    await peer.respond(request, "first run")
    await mesh.advance(20)
    assert boss.replies() == []  # the row may be another replica's
    first.store.away = False
    await mesh.advance(20)
    assert boss.replies() == [Ok({"peer": "first run"})]
    await mesh.replica(agent)
    await mesh.advance(20)
    assert set(map(str, boss.replies(task_id))) == {str(Ok({"peer": "first run"}))}
    assert len(peer.requests) == 1
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_degraded_task_whose_request_comes_back_here_is_answered(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    first, _, request = await degraded(mesh, boss, peer, asker("agent", "peer"))
    first.broker.lose_connection()
    await mesh.settle()
    await peer.respond(request, "first run")
    await mesh.advance(20)
    assert boss.replies() == [Ok({"peer": "first run"})]
    assert len(peer.requests) == 1
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_degraded_task_whose_request_is_lost_while_its_reply_is_sent_has_one_answer(
    mesh: Mesh, boss: Puppet, peer: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = asker("agent", "peer")
    first, task_id, request = await degraded(mesh, boss, peer, agent)
    publish = first.broker.publish

    async def publish_and_lose(messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        words = await publish(messages)
        monkeypatch.undo()
        await lose_its_request(first)
        return words

    monkeypatch.setattr(first.broker, "publish", publish_and_lose)
    await peer.respond(request, "first run")
    await mesh.advance(20)
    assert boss.replies() == [Ok({"peer": "first run"})]
    await mesh.replica(agent)
    await mesh.advance(20)
    # copies of one reply
    assert set(map(str, boss.replies(task_id))) == {str(Ok({"peer": "first run"}))}
    assert len(peer.requests) == 1
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_degraded_task_answers_again_as_before_although_a_cancel_came_late(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    """The row that the cancel left in the database is a tombstone, not the task's row."""
    _, task_id, request = await degraded(mesh, boss, peer, asker("agent", "peer"))
    await peer.respond(request, 1)
    assert await boss.reply(task_id) == Ok({"peer": 1})
    await boss.cancel("agent", task_id)
    await mesh.settle()
    assert await mesh.state(task_id) is TaskState.CANCELLED
    await boss.ask("agent", 1, task_id)
    await mesh.settle()
    assert boss.replies() == [Ok({"peer": 1})] * 2


@pytest.mark.parametrize("at_work", ["in memory", "in the database"])
async def test_two_runs_of_a_task_in_one_replica_do_not_stop_each_other(
    mesh: Mesh, boss: Puppet, peer: Puppet, at_work: str
) -> None:
    """Any replica may record the response to the other run, even the in-process task's replica."""
    gate = Gate()
    agent = gated_after("agent", "peer", gate)
    first, task_id, in_memory = await degraded(mesh, boss, peer, agent)
    await lose_its_request(first)
    second = await mesh.replica(agent)
    answers = [(in_memory, "first run"), (await peer.request_number(2), "second run")]
    await mesh.settle()
    await second.crash()
    for request, answer in answers if at_work == "in memory" else reversed(answers):
        await peer.respond(request, answer)
        await mesh.settle()
    assert gate.visits == 1
    assert first.worker.site.slots.free == 9
    gate.opened.set()
    await mesh.advance(20)
    assert gate.cancelled == 0
    assert boss.replies(task_id) == [Ok({"peer": "second run"})]
    assert await mesh.state(task_id) is TaskState.COMPLETED
    assert mesh.events.of(Step.TAKE_OVER) == []
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert first.worker.site.slots.free == 10
