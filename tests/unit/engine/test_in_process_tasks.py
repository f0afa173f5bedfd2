"""Tasks of the in-process backend: by configuration, or because their first checkpoint failed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import Address, Message, nested_queue, response_queue
from meshpoint.model.outcomes import Failed, Ok, Outcomes
from meshpoint.model.tasks import TaskState
from meshpoint.ports.broker import PublishResult

from .agents import Gate, ScriptedAgent, asker, doubler, gated_after, summer
from .faults import IN_DOUBT, LOST_IN_DOUBT, NOT_COMMITTED
from .mesh import Mesh, RunningReplica

itself_peer = Peer("itself", int, int)


@agent("itself", version="1")
async def count_down(ctx: TaskExecutionContext, number: int) -> int:
    """Calls itself, `number` levels deep."""
    return 0 if number == 0 else 1 + await itself_peer(number - 1)


async def test_in_process_tasks_write_no_row_and_give_the_same_answers(
    mesh: Mesh, client: FakePeer
) -> None:
    await mesh.replica(doubler, summer, durable=False)
    assert await client.reply(await client.ask("summer", [1, 2, 3])) == Ok(12)
    assert await mesh.store.tasks() == []
    assert all(replica.store.calls == [] for replica in mesh.replicas)


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("depth", [3, 9])
async def test_an_agent_can_call_itself(
    mesh: Mesh, client: FakePeer, durable: bool, depth: int
) -> None:
    """With one slot and a prefetch of one, each pause must make room for the next call."""
    replica = await mesh.replica(count_down, durable=durable, max_concurrency=1)
    assert await client.reply(await client.ask("itself", depth)) == Ok(depth)
    await mesh.idle()
    assert replica.worker.runtime.slots.free == 1
    assert mesh.unacked("itself") == 0
    if durable:
        assert replica.broker.prefetches == []
    else:
        assert max(replica.broker.prefetches) > depth
        assert replica.broker.prefetches[-1] == 1  # the prefetch shrinks again


async def test_responses_return_to_the_replica_that_called(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    first = await mesh.replica(asker("asker", "peer"), durable=False)
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.replica(asker("asker", "peer"), durable=False)
    assert request.reply_to == f"asker.private.{first.id}"
    await peer.respond(request, 1)
    assert await client.reply(task_id) == Ok({"peer": 1})


@pytest.mark.parametrize("repetition", ["redelivered", "sent twice"])
async def test_a_redelivered_request_does_not_restart_its_waiting_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer, repetition: str
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), durable=False)
    request = client.request(1)
    await client.send("asker", request)
    call = await peer.wait_for_request()
    await mesh.idle()
    if repetition == "redelivered":
        replica.broker.lose_connection()
    else:
        await client.send("asker", request)
    await mesh.idle()
    assert mesh.unacked("asker") == (1 if repetition == "redelivered" else 2)
    await peer.respond(call, 1)
    assert await client.reply(request.correlation_id) == Ok({"peer": 1})
    await mesh.idle()
    assert mesh.unacked("asker") == mesh.waiting("asker") == 0
    assert len(peer.requests) == 1


async def test_duplicates_of_a_request_leave_capacity_for_others(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=False, max_concurrency=1)
    request = client.request(1)
    for _ in range(6):
        await client.send("asker", request)
        await mesh.idle()
    other = await client.ask("asker", 2)
    await peer.respond(await peer.wait_for_request(2), 2)
    assert await client.reply(other) == Ok({"peer": 2})


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
async def test_the_number_of_duplicates_held_is_bounded(
    mesh: Mesh, client: FakePeer, peer: FakePeer, depth: int, ended: bool
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), durable=False, max_concurrency=1)
    replica.broker.fail(*[PublishResult.OVERLOADED] * 100, type="response")
    request = client.request(1, call_depth=depth)
    await client.send("asker", request)
    call = await peer.wait_for_request()
    if ended:
        await peer.respond(call, 1)
    for _ in range(30):
        await client.send("asker", request)
        await mesh.idle()
    assert (mesh.unacked("asker"), mesh.waiting("asker")) == (8, 0)
    replica.broker.lose_connection()
    await mesh.idle()
    assert (mesh.unacked("asker"), mesh.waiting("asker")) == (8, 0)
    if not ended:
        await peer.respond(call, 1)
    replica.broker.heal()
    await mesh.advance(60)
    assert set(map(str, client.replies(request.correlation_id))) == {str(Ok({"peer": 1}))}
    assert (mesh.unacked("asker"), mesh.waiting("asker")) == (0, 0)
    assert len(peer.requests) == 1


async def test_a_duplicate_after_the_end_gets_the_reply_again(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=False)
    request = client.request(1)
    await client.send("asker", request)
    await peer.respond(await peer.wait_for_request(), 1)
    await client.reply(request.correlation_id)
    await client.send("asker", request)
    await mesh.idle()
    assert client.replies() == [Ok({"peer": 1})] * 2
    assert mesh.unacked("asker") == 0
    assert len(peer.requests) == 1


async def test_a_crash_gives_the_request_to_another_replica(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    first = await mesh.replica(asker("asker", "peer"), durable=False)
    task_id = await client.ask("asker", 1)
    await peer.wait_for_request()
    await mesh.idle()
    await first.crash()
    await mesh.replica(asker("asker", "peer"), durable=False)
    await peer.respond(await peer.wait_for_request(2), 2)
    assert await client.reply(task_id) == Ok({"peer": 2})


async def test_waiting_in_process_tasks_are_limited(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=False, max_concurrency=2, max_in_memory=5)
    tasks = [await client.ask("asker", number) for number in range(20)]
    await mesh.idle()
    assert (len(peer.requests), mesh.unacked("asker")) == (7, 7)
    for count in range(1, 21):
        await peer.respond(await peer.wait_for_request(count), "ok")
        await mesh.idle()
    for task_id in tasks:
        assert await client.reply(task_id) == Ok({"peer": "ok"})


async def test_ready_in_process_tasks_run_before_new_requests(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
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

    await mesh.replica(ScriptedAgent("agent", start, resume), durable=False, max_concurrency=1)
    waiting = await client.ask("agent", "first")
    request = await peer.wait_for_request()
    await mesh.idle()
    await client.ask("agent", "slow")
    await gate.wait_reached()
    await peer.respond(request, 1)
    await client.ask("agent", "last")
    await mesh.idle()
    gate.opened.set()
    assert await client.reply(waiting) == Ok("resumed")
    await mesh.idle()
    assert order == ["start first", "start slow", "resume", "start last"]


async def test_a_task_whose_first_checkpoint_fails_stays_in_process(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(
        asker("asker", "peer"), checkpoint_retry_time=timedelta(seconds=5)
    )
    replica.store.fail_always("pause")
    task_id = await client.ask("asker", 1)
    await mesh.advance(4)
    assert peer.requests == []
    await mesh.advance(3)
    request = await peer.wait_for_request()
    (degraded_event,) = mesh.events.matching(Step.DEGRADED)
    assert degraded_event.task_ids == (task_id,)
    assert request.reply_to == f"asker.private.{replica.id}"
    assert mesh.unacked("asker") == 1
    assert await mesh.state(task_id) is None
    replica.store.heal()
    await mesh.advance(5)
    await peer.respond(request, 1)
    assert await client.reply(task_id) == Ok({"peer": 1})
    await mesh.advance(10)
    assert client.replies() == [Ok({"peer": 1})]
    assert await mesh.store.tasks() == []
    assert mesh.unacked("asker") == 0
    # of the response and of the request
    assert len(mesh.events.matching(Step.ACK, Phase.AFTER, task_id)) == 2


async def test_a_reply_stored_by_a_write_in_doubt_is_not_reported_as_lost(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(
        asker("asker", "peer"), checkpoint_retry_time=timedelta(seconds=5)
    )
    replica.store.fail_always("pause")
    task_id = await client.ask("asker", 1)
    await mesh.advance(7)
    replica.store.heal()
    await mesh.advance(5)
    replica.broker.fail(*[PublishResult.OVERLOADED] * 100, type="response")
    replica.store.fail("store_replies", IN_DOUBT)
    await peer.respond(await peer.wait_for_request(), 1)
    await mesh.advance(60)
    assert replica.store.calls.count("store_replies") == 2
    assert mesh.events.matching(Step.REPLY_DROPPED) == []
    assert mesh.unacked("asker") == 0
    replica.broker.heal()
    await mesh.advance(400)
    assert client.replies(task_id) == [Ok({"peer": 1})]


@pytest.mark.parametrize("doubtful_commit", [IN_DOUBT, LOST_IN_DOUBT])
async def test_a_checkpoint_in_doubt_never_degrades(
    mesh: Mesh, client: FakePeer, peer: FakePeer, doubtful_commit: str
) -> None:
    replica = await mesh.replica(
        asker("asker", "peer"), checkpoint_retry_time=timedelta(seconds=5)
    )
    replica.store.fail("pause", NOT_COMMITTED, doubtful_commit)
    replica.store.fail_always("pause")
    task_id = await client.ask("asker", 1)
    await mesh.advance(60)
    assert mesh.events.matching(Step.DEGRADED) == []
    assert replica.memory.calls.count("pause") == 0
    replica.store.heal()
    await mesh.advance(5)
    request = await peer.wait_for_request()
    assert request.reply_to == response_queue(AgentName("asker"))
    await peer.respond(request, 1)
    assert await client.reply(task_id) == Ok({"peer": 1})
    assert len({item.correlation_id for item in peer.requests}) == 1


async def test_a_failed_first_checkpoint_is_retried_if_configured(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), on_checkpoint_failure="wait")
    replica.store.fail_always("pause")
    task_id = await client.ask("asker", 1)
    await mesh.advance(120)
    assert peer.requests == []
    assert mesh.unacked("asker") == 1
    replica.store.heal()
    await mesh.advance(5)
    await peer.respond(await peer.wait_for_request(), 1)
    assert await client.reply(task_id) == Ok({"peer": 1})
    assert mesh.events.matching(Step.DEGRADED) == []


def pausing_twice() -> ScriptedAgent:
    """Pauses twice."""

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        return Paused([Call("one", "peer", 1)], b"1")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Any:
        return Paused([Call("two", "peer", 2)], b"2") if state == b"1" else Done("done")

    return ScriptedAgent("twice", start, resume)


async def test_a_durable_task_stays_durable_when_resumed(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(pausing_twice(), checkpoint_retry_time=timedelta(seconds=5))
    task_id = await client.ask("twice", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    replica.store.fail_always("pause")
    await peer.respond(request, 1)
    await mesh.advance(60)
    assert mesh.events.matching(Step.DEGRADED) == []
    assert await mesh.state(task_id) is TaskState.RUNNING
    replica.store.heal()
    await mesh.advance(5)
    request = await peer.wait_for_request(2)
    assert request.reply_to == response_queue(AgentName("twice"))
    await peer.respond(request, 2)
    assert await client.reply(task_id) == Ok("done")


async def test_a_degraded_task_stays_in_process_when_resumed(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """The database is available again, but a task that began in process ends there."""
    replica = await mesh.replica(pausing_twice(), checkpoint_retry_time=timedelta(seconds=5))
    replica.store.fail_always("pause")
    task_id = await client.ask("twice", 1)
    await mesh.advance(7)
    replica.store.heal()
    await peer.respond(await peer.wait_for_request(), 1)
    request = await peer.wait_for_request(2)
    assert request.reply_to == f"twice.private.{replica.id}"
    assert await mesh.state(task_id) is None
    await peer.respond(request, 2)
    assert await client.reply(task_id) == Ok("done")
    await mesh.idle()
    assert mesh.unacked("twice") == 0


async def test_in_process_tasks_continue_during_a_database_outage(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """New requests wait for the database, without a slot that an in-process task needs."""
    replica = await mesh.replica(asker("asker", "peer"), max_concurrency=1)
    gate = Gate()
    replica.store.before["pause"] = gate
    task_id = await client.ask("asker", 1)
    await gate.wait_reached()
    replica.store.unavailable = True
    gate.opened.set()
    await mesh.advance(7)
    request = await peer.wait_for_request()
    blocked_id = await client.ask("asker", 2)
    await mesh.advance(3)
    await peer.respond(request, 1)
    await mesh.advance(3)
    assert client.replies(task_id) == [Ok({"peer": 1})]
    replica.store.heal()
    await mesh.advance(3)
    await peer.respond(await peer.wait_for_request(2), 2)
    assert await client.reply(blocked_id) == Ok({"peer": 2})


async def test_a_begun_task_does_not_degrade(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    """The task has a row, so other replicas would run it a second time."""
    replica = await mesh.replica(asker("asker", "peer"), begin_at_delivery=1)
    replica.store.fail_always("pause")
    task_id = await client.ask("asker", 1)
    await mesh.advance(12)
    assert mesh.events.matching(Step.DEGRADED) == []
    replica.store.heal()
    await mesh.advance(3)
    await peer.respond(await peer.wait_for_request(), 1)
    assert await client.reply(task_id) == Ok({"peer": 1})


async def test_a_degraded_task_can_time_out(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    replica = await mesh.replica(asker("asker", "peer", timeout=timedelta(seconds=30)))
    replica.store.fail_always("pause")
    task_id = await client.ask("asker", 1)
    await mesh.advance(7)
    request = await peer.wait_for_request()
    await mesh.advance(35)
    assert await client.reply(task_id) == Ok({"peer": "timeout"})
    assert peer.cancels() == [request.correlation_id]


async def test_a_degraded_task_can_be_cancelled(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"))
    second = await mesh.replica(asker("asker", "peer"))
    for replica in mesh.replicas:
        replica.store.fail_always("pause")
    task_id = await client.ask("asker", 1)
    await mesh.advance(7)
    request = await peer.wait_for_request()
    second.store.heal()
    await client.cancel("asker", task_id)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind == "cancelled"
    assert await peer.wait_for_cancels() == [request.correlation_id]
    await mesh.idle()
    assert mesh.unacked("asker") == 0


async def start_degraded(
    mesh: Mesh, client: FakePeer, peer: FakePeer, agent: ScriptedAgent
) -> tuple[RunningReplica, TaskId, Message]:
    """Let a task fall back to the in-process backend, then heal the database.

    Returns the replica, the task and its call to `peer`.
    """
    first = await mesh.replica(agent, checkpoint_retry_time=timedelta(0))
    first.store.fail("pause", *[NOT_COMMITTED] * 3)
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    assert mesh.events.matching(Step.DEGRADED)
    first.store.heal()
    return first, task_id, request


async def lose_request(replica: RunningReplica) -> None:
    """Make the broker requeue the request to the next replica."""
    await replica.worker._subscriptions["requests"].cancel()
    replica.broker.lose_connection()


@pytest.mark.parametrize("order", ["in memory first", "in the database first"])
async def test_a_degraded_task_that_another_replica_runs_durably_has_one_answer(
    mesh: Mesh, client: FakePeer, peer: FakePeer, order: str
) -> None:
    agent = asker("agent", "peer")
    first, task_id, in_process_run = await start_degraded(mesh, client, peer, agent)
    await lose_request(first)
    second = await mesh.replica(agent)
    database_run = await peer.wait_for_request(2)
    answers = [(in_process_run, "first run"), (database_run, "second run")]
    for request, answer in answers if order == "in memory first" else reversed(answers):
        await peer.respond(request, answer)
        await mesh.idle()
    assert await client.reply(task_id) == Ok({"peer": "second run"})
    await second.drain()
    await client.send("agent", client.request(1, task_id), nested_queue(AgentName("agent")))
    await mesh.advance(20)
    # the first replica answers from the row
    assert client.replies() == [Ok({"peer": "second run"})] * 2
    assert first.worker.tasks.segments == {}
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_degraded_task_is_answered_once_the_database_is_available(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    agent = asker("agent", "peer")
    first, task_id, request = await start_degraded(mesh, client, peer, agent)
    await lose_request(first)
    first.store.unavailable = True
    await peer.respond(request, "first run")
    await mesh.advance(20)
    assert client.replies() == []  # the row may be another replica's
    first.store.unavailable = False
    await mesh.advance(20)
    assert client.replies() == [Ok({"peer": "first run"})]
    await mesh.replica(agent)
    await mesh.advance(20)
    assert set(map(str, client.replies(task_id))) == {str(Ok({"peer": "first run"}))}
    assert len(peer.requests) == 1
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_degraded_task_whose_request_returns_to_its_replica_is_answered(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    first, _, request = await start_degraded(mesh, client, peer, asker("agent", "peer"))
    first.broker.lose_connection()
    await mesh.idle()
    await peer.respond(request, "first run")
    await mesh.advance(20)
    assert client.replies() == [Ok({"peer": "first run"})]
    assert len(peer.requests) == 1
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_degraded_task_whose_request_is_lost_mid_reply_has_one_answer(
    mesh: Mesh, client: FakePeer, peer: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = asker("agent", "peer")
    first, task_id, request = await start_degraded(mesh, client, peer, agent)
    publish = first.broker.publish

    async def publish_and_lose(messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        results = await publish(messages)
        monkeypatch.undo()
        await lose_request(first)
        return results

    monkeypatch.setattr(first.broker, "publish", publish_and_lose)
    await peer.respond(request, "first run")
    await mesh.advance(20)
    assert client.replies() == [Ok({"peer": "first run"})]
    await mesh.replica(agent)
    await mesh.advance(20)
    # copies of one reply
    assert set(map(str, client.replies(task_id))) == {str(Ok({"peer": "first run"}))}
    assert len(peer.requests) == 1
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_degraded_task_repeats_its_answer_despite_a_late_cancel(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """The row that the cancel left in the database is a tombstone, not the task's row."""
    _, task_id, request = await start_degraded(mesh, client, peer, asker("agent", "peer"))
    await peer.respond(request, 1)
    assert await client.reply(task_id) == Ok({"peer": 1})
    await client.cancel("agent", task_id)
    await mesh.idle()
    assert await mesh.state(task_id) is TaskState.CANCELLED
    await client.ask("agent", 1, task_id)
    await mesh.idle()
    assert client.replies() == [Ok({"peer": 1})] * 2


@pytest.mark.parametrize("answered_first", ["in memory", "in the database"])
async def test_two_runs_of_a_task_in_one_replica_do_not_stop_each_other(
    mesh: Mesh, client: FakePeer, peer: FakePeer, answered_first: str
) -> None:
    """Any replica may record the response to the other run, even the in-process task's replica."""
    gate = Gate()
    agent = gated_after("agent", "peer", gate)
    first, task_id, in_process_run = await start_degraded(mesh, client, peer, agent)
    await lose_request(first)
    second = await mesh.replica(agent)
    answers = [(in_process_run, "first run"), (await peer.wait_for_request(2), "second run")]
    await mesh.idle()
    await second.crash()
    for request, answer in answers if answered_first == "in memory" else reversed(answers):
        await peer.respond(request, answer)
        await mesh.idle()
    assert gate.visits == 1
    assert first.worker.runtime.slots.free == 9
    gate.opened.set()
    await mesh.advance(20)
    assert gate.cancelled == 0
    assert client.replies(task_id) == [Ok({"peer": "second run"})]
    assert await mesh.state(task_id) is TaskState.COMPLETED
    assert mesh.events.matching(Step.RESCUE) == []
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert first.worker.runtime.slots.free == 10
