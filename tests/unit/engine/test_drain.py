"""A draining replica: nothing is lost, nothing hangs, and others continue its tasks at once."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.checkpoint import TaskState
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.envelopes import cancel_message
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import Message
from meshpoint.model.options import AckPolicy
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import Gate, Scripted, asker, doubler, gated, gated_after, said
from .mesh import Mesh, Running
from .puppet import Puppet

HOMES = pytest.mark.parametrize("durable", [True, False])
AT_ONCE = {"drain_timeout": timedelta(0)}
GIVES_BACK = {"drain_timeout": timedelta(0), "release_timeout": timedelta(minutes=1)}
NEVER = {"drain_timeout": timedelta(hours=1), "release_timeout": timedelta(hours=1)}


@HOMES
async def test_an_idle_replica_stops_at_once(mesh: Mesh, durable: bool) -> None:
    replica = await mesh.replica(doubler, durable=durable, **NEVER)
    await replica.drain()
    assert len(mesh.events.of(Step.DRAINED)) == 1
    assert replica.memory.calls[-1] == "close"
    assert not durable or replica.store.calls[-1] == "close"


@HOMES
async def test_segments_end_and_new_requests_are_left_to_others(mesh: Mesh, boss: Puppet, durable: bool) -> None:
    gate = Gate()
    replica = await mesh.replica(gated("agent", gate), durable=durable, max_concurrency=2, **NEVER)
    tasks = [await boss.ask("agent", number) for number in range(5)]
    await gate.reach(2)
    draining = asyncio.create_task(replica.drain())
    await mesh.settle()
    gate.opened.set()
    await draining
    assert [await boss.reply(task_id) for task_id in tasks[:2]] == [Ok("done")] * 2
    assert gate.visits == 2
    assert (mesh.unacked("agent"), mesh.waiting("agent")) == (0, 3)
    await mesh.replica(gated("agent", gate), durable=durable)
    assert [await boss.reply(task_id) for task_id in tasks[2:]] == [Ok("done")] * 3


async def test_segments_pause(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        await gate()
        return Paused([Call("call", "peer", 1)], b"")

    replica = await mesh.replica(Scripted("agent", start), **NEVER)
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    draining = asyncio.create_task(replica.drain())
    await mesh.settle()
    gate.opened.set()
    await draining
    assert await mesh.state(task_id) is TaskState.WAITING
    assert len(peer.requests) == 1
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


@HOMES
async def test_first_segments_that_take_too_long_are_given_back(mesh: Mesh, boss: Puppet, durable: bool) -> None:
    gate = Gate()
    replica = await mesh.replica(gated("agent", gate), durable=durable, **AT_ONCE)
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await replica.drain()
    assert gate.cancelled == 1
    assert boss.replies() == []
    assert mesh.waiting("agent") == 1
    await mesh.replica(gated("agent", gate), durable=durable)
    gate.opened.set()
    assert await boss.reply(task_id) == Ok("done")
    assert gate.visits == 2


@pytest.mark.parametrize("first", [True, False])
async def test_owned_tasks_that_take_too_long_are_ready_for_others_at_once(
    mesh: Mesh, boss: Puppet, peer: Puppet, first: bool
) -> None:
    gate = Gate()
    agent = gated("agent", gate) if first else gated_after("agent", "peer", gate)
    policy = AckPolicy.ON_RECEIPT if first else AckPolicy.AT_CHECKPOINT
    replica = await mesh.replica(agent, ack_policy=policy, **AT_ONCE)
    await mesh.replica(agent, max_concurrency=1)
    await mesh.replicas[1].worker._subscriptions["requests"].cancel()
    await mesh.replicas[1].worker._subscriptions["shared"].cancel()
    task_id = await boss.ask("agent", 1)
    if not first:
        await peer.respond(await peer.request_number(), 1)
    await gate.reach()
    await replica.drain()
    assert gate.cancelled == 1
    await gate.reach(2)  # the clock stands still, so only a wake can have started this run
    gate.opened.set()
    assert await boss.reply(task_id) == Ok("done" if first else {"peer": 1})
    summary, _ = await mesh.task(task_id)
    assert summary.attempt <= 1, "a drain must not count as a failed attempt"


async def test_a_task_that_waits_in_memory_may_still_end(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"), durable=False, **NEVER)
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await mesh.settle()
    draining = asyncio.create_task(replica.drain())
    await mesh.settle()
    assert not draining.done()
    await peer.respond(request, 1)
    await draining
    assert await boss.reply(task_id) == Ok({"peer": 1})
    assert mesh.unacked("asker") == mesh.waiting("asker") == 0


async def test_a_task_that_waits_in_memory_may_still_time_out(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """The sweeper keeps processing in-process tasks during a drain."""
    waiting = asker("asker", "peer", timeout=timedelta(seconds=20))
    replica = await mesh.replica(waiting, durable=False, **NEVER)
    task_id = await boss.ask("asker", 1)
    await peer.request_number()
    await mesh.settle()
    draining = asyncio.create_task(replica.drain())
    await mesh.advance(22)
    await draining
    assert await boss.reply(task_id) == Ok({"peer": "timeout"})


async def test_a_task_that_waits_in_memory_may_still_be_cancelled(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"), durable=False)
    draining_one = await mesh.replica(asker("asker", "peer"), durable=False, **NEVER)
    await mesh.replicas[0].worker._subscriptions["requests"].cancel()
    task_id = await boss.ask("asker", 1)
    await peer.request_number()
    await mesh.settle()
    draining = asyncio.create_task(draining_one.drain())
    await mesh.settle()
    await boss.cancel("asker", task_id)
    await draining
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED


@pytest.mark.parametrize("running", [True, False])
async def test_a_task_in_memory_that_takes_too_long_is_given_back(
    mesh: Mesh, boss: Puppet, peer: Puppet, running: bool
) -> None:
    gate = Gate()
    replica = await mesh.replica(gated_after("agent", "peer", gate), durable=False, **AT_ONCE)
    task_id = await boss.ask("agent", 1)
    request = await peer.request_number()
    await mesh.settle()
    if running:
        await peer.respond(request, 1)
        await gate.reach()
    await replica.drain()
    assert mesh.waiting("agent") == 1
    assert boss.replies() == []
    gate.opened.set()
    await mesh.replica(gated_after("agent", "peer", gate), durable=False)
    await peer.respond(await peer.request_number(2), 2)
    assert await boss.reply(task_id) == Ok({"peer": 2})


@pytest.mark.parametrize(("what", "durable"), [("response", True), ("response", False), ("cancel", False)])
async def test_a_task_whose_request_was_given_back_does_not_go_on(
    mesh: Mesh, boss: Puppet, peer: Puppet, what: str, durable: bool
) -> None:
    """While other code is still stopping, another replica may have the requeued request."""
    stub, visits = Gate(), Gate()
    visits.opened.set()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        if request == "stubborn":
            return await _ignoring_cancels(stub)
        return Paused([Call("call", "peer", request)], b"state")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        await visits()
        return Done(said(outcomes))

    agent = Scripted("agent", start, resume)
    replica = await mesh.replica(agent, durable=durable, checkpoint_retry_time=timedelta(0), **GIVES_BACK)
    replica.store.fail_always("pause")
    task_id = await boss.ask("agent", 1)
    request = await peer.request_number()
    await boss.ask("agent", "stubborn", "stubborn")
    await stub.reach()
    await mesh.settle()
    draining = asyncio.create_task(replica.drain())
    await mesh.settle()
    assert mesh.waiting("agent") == 1
    if what == "response":
        await peer.respond(request, "old")
    else:
        await replica.broker.broadcast(AgentName("agent"), _cancel(task_id))
    await mesh.settle()
    assert (visits.visits, boss.replies(task_id)) == (0, [])
    stub.opened.set()
    await draining
    assert (visits.visits, boss.replies(task_id)) == (0, [])


def _cancel(task_id: TaskId) -> Message:
    return cancel_message(AgentName("agent"), task_id, on_behalf_of="boss")


async def _ignoring_cancels(gate: Gate) -> Done[str]:
    while True:
        with suppress(asyncio.CancelledError):
            await gate()
            return Done("at last")


@pytest.mark.parametrize("answers", [True, False])
async def test_the_request_of_code_in_memory_that_does_not_stop_is_kept_until_it_has(
    mesh: Mesh, boss: Puppet, peer: Puppet, answers: bool
) -> None:
    """If the request were requeued earlier, two replicas would answer it."""
    stub = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        return Paused([Call("call", "peer", request)], b"state")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        await _ignoring_cancels(stub)
        return Done(said(outcomes)) if answers else Paused([Call("again", "peer", 2)], b"state")

    replica = await mesh.replica(Scripted("agent", start, resume), durable=False, **GIVES_BACK)
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), "old")
    await stub.reach()
    draining = asyncio.create_task(replica.drain())
    await mesh.settle()
    assert mesh.waiting("agent") == 0
    stub.opened.set()
    await draining
    assert (mesh.waiting("agent"), len(boss.replies(task_id))) == ((0, 1) if answers else (1, 0))
    assert len(peer.requests) == 1


async def test_a_request_in_memory_is_kept_while_its_reply_is_being_sent(
    mesh: Mesh, boss: Puppet, peer: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = await mesh.replica(asker("agent", "peer"), durable=False, **GIVES_BACK)
    task_id = await boss.ask("agent", 1)
    await peer.request_number()
    await mesh.settle()
    gate = _slow_publish(replica, monkeypatch)
    await replica.broker.broadcast(AgentName("agent"), _cancel(task_id))
    await gate.reach()
    draining = asyncio.create_task(replica.drain())
    await mesh.settle()
    assert mesh.waiting("agent") == 0
    gate.opened.set()
    await draining
    assert (mesh.waiting("agent"), len(boss.replies(task_id))) == (0, 1)


def _slow_publish(replica: Running, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A gate in front of every publish of `replica`."""
    publish, gate = replica.broker.publish, Gate()

    async def slowly(messages: Any) -> Any:
        await gate()
        return await publish(messages)

    monkeypatch.setattr(replica.broker, "publish", slowly)
    return gate


async def test_a_claim_that_is_under_way_is_finished(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """A claim abandoned halfway could own a task that no replica runs."""
    replica = await mesh.replica(asker("asker", "peer"), **NEVER)
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await mesh.settle()
    gate = replica.store.after["claim"] = Gate()
    await peer.respond(request, 1)
    await gate.reach()
    draining = asyncio.create_task(replica.drain())
    await mesh.settle()
    gate.opened.set()
    await draining
    assert await boss.reply(task_id) == Ok({"peer": 1})


@pytest.mark.parametrize("method", ["take", "take_over", "expire"])
async def test_a_look_that_is_under_way_is_finished(mesh: Mesh, boss: Puppet, peer: Puppet, method: str) -> None:
    task_id, replica = await _due(mesh, boss, peer, method)
    gate = replica.store.after[method] = Gate()
    mesh.clock.advance(timedelta(seconds=20))
    await gate.reach()
    draining = asyncio.create_task(replica.drain())
    await mesh.settle()
    gate.opened.set()
    await draining
    assert isinstance(await boss.reply(task_id), Ok)
    assert await mesh.state(task_id) is TaskState.COMPLETED


async def _due(mesh: Mesh, boss: Puppet, peer: Puppet, method: str) -> Any:
    """Prepare a task that `method` picks up at the next sweep of the returned replica."""
    held = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        return Paused([Call("call", "peer", 1, timeout=timedelta(seconds=10))], b"")

    async def wait(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        await held()

    async def end(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        return Done("went on")

    drains_first = AT_ONCE if method == "take" else {}
    first = await mesh.replica(Scripted("agent", start, wait), **drains_first)
    task_id = await boss.ask("agent", 1)
    request = await peer.request_number()
    await mesh.settle()
    if method == "expire":
        await first.crash()
    else:
        await peer.respond(request, 1)
        await held.reach()
        await (first.drain() if method == "take" else first.crash())
    replica = await mesh.launch(Scripted("agent", start, end), **NEVER)
    if method == "take":
        replica.store.fail("take", "not committed")
    await mesh.events.wait(Step.STARTED, replica=replica.id)
    await mesh.settle()
    return task_id, replica


async def test_a_look_up_that_is_under_way_is_finished(mesh: Mesh, boss: Puppet) -> None:
    replica = await mesh.replica(doubler, **NEVER)
    gate = replica.store.after["lookup"] = Gate()
    task_id = await boss.ask("doubler", 1)
    await gate.reach()
    draining = asyncio.create_task(replica.drain())
    await mesh.settle()
    gate.opened.set()
    await draining
    assert await boss.reply(task_id) == Ok(2)


async def test_code_that_does_not_stop_holds_nobody_up(mesh: Mesh, boss: Puppet) -> None:
    gate = Gate()

    async def stubborn(ctx: TaskExecutionContext, request: Any) -> Any:
        while True:
            with suppress(asyncio.CancelledError):
                await gate()
                return Done("at last")

    replica = await mesh.replica(Scripted("agent", stubborn), **AT_ONCE, release_timeout=timedelta(0))
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await replica.drain()
    assert gate.cancelled >= 1
    assert mesh.waiting("agent") == 1
    gate.opened.set()
    await mesh.settle()
    assert boss.replies() == [], "the result of an abandoned run must not be sent"
    await mesh.replica(Scripted("agent", stubborn))
    assert await boss.reply(task_id) == Ok("at last")


def held_when_resumed(gate: Gate) -> Scripted:
    """An agent that answers "new" at once; other requests call the peer and wait for `gate`."""

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        return Done("new") if request == "new" else Paused([Call("call", "peer", request)], b"")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        await gate()
        return Done("resumed")

    return Scripted("agent", start, resume)


async def test_an_admitted_request_runs_and_ready_tasks_are_left(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """An admitted request still gets its slot; a ready task waiting for one is left to others."""
    gate = Gate()
    replica = await mesh.replica(held_when_resumed(gate), max_concurrency=1, **NEVER)
    tasks = [await boss.ask("agent", number) for number in (1, 2)]
    requests = [await peer.request_number(count) for count in (1, 2)]
    await mesh.settle()
    lookup = replica.store.after["lookup"] = Gate()
    new = await boss.ask("agent", "new")
    await lookup.reach()
    for request in requests:
        await peer.respond(request, 1)
        await gate.reach()
    await mesh.settle()
    lookup.opened.set()
    await mesh.settle()
    draining = asyncio.create_task(replica.drain())
    await mesh.settle()
    gate.opened.set()
    await draining
    assert await boss.reply(new) == Ok("new")
    assert [await mesh.state(task_id) for task_id in tasks] == [TaskState.COMPLETED, TaskState.READY]


@pytest.mark.parametrize("options", [NEVER, GIVES_BACK])
async def test_a_request_that_waited_for_another_one_is_left_to_others(
    mesh: Mesh, boss: Puppet, peer: Puppet, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """It waits until the request of another requester with the same id has been refused."""
    replica = await mesh.replica(doubler, **options)
    gate = _slow_publish(replica, monkeypatch)
    await boss.ask("doubler", 1, "task", deadline=mesh.in_seconds(-1))
    await gate.reach()
    await peer.ask("doubler", 2, "task")
    await mesh.settle()
    draining = asyncio.create_task(replica.drain())
    await mesh.settle()
    gate.opened.set()
    await draining
    assert mesh.events.of(Step.SEGMENT) == []
    assert mesh.waiting("doubler") == 1
    await mesh.replica(doubler)
    assert await peer.reply("task") == Ok(4)


async def test_a_row_that_waits_for_a_slot_is_released(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """The row was written as running before a slot was free, and a resumed task got that slot."""
    gate = Gate()
    options = {"max_concurrency": 1, "ack_policy": AckPolicy.ON_RECEIPT}
    replica = await mesh.replica(held_when_resumed(gate), **options, **GIVES_BACK)
    resumed = await boss.ask("agent", 1)
    request = await peer.request_number()
    await mesh.settle()
    begin = replica.store.after["begin"] = Gate()
    new = await boss.ask("agent", "new")
    await begin.reach()
    await peer.respond(request, 1)
    await gate.reach()
    begin.opened.set()
    await mesh.settle()
    await replica.drain()
    assert [await mesh.state(task_id) for task_id in (resumed, new)] == [TaskState.READY] * 2
    assert replica.worker.site.slots.free == 1


async def test_a_claim_of_an_undeliverable_call_is_finished(mesh: Mesh, boss: Puppet) -> None:
    """Such claims run in the background."""
    task_id, replica = await _unsent(mesh, boss)
    gate = replica.store.after["claim"] = Gate()
    mesh.clock.advance(timedelta(seconds=6))
    await gate.reach()
    draining = asyncio.create_task(replica.drain())
    await mesh.settle()
    assert not draining.done()
    gate.opened.set()
    await draining
    assert await boss.reply(task_id) == Ok({"nobody": "undeliverable"})
    assert await mesh.state(task_id) is TaskState.COMPLETED


async def test_an_undeliverable_call_is_not_claimed_any_more(
    mesh: Mesh, boss: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim could otherwise happen after the drain."""
    running = Gate()
    task_id, replica = await _unsent(mesh, boss, running)
    gate = _slow_publish(replica, monkeypatch)
    mesh.clock.advance(timedelta(seconds=6))
    await gate.reach()
    draining = asyncio.create_task(replica.drain())
    await mesh.settle()
    gate.opened.set()
    await mesh.settle()
    running.opened.set()
    await draining
    assert "claim" not in replica.store.calls
    assert await mesh.state(task_id) is TaskState.WAITING
    await mesh.replica(asker("agent", "nobody"))
    await mesh.advance(20)
    assert await boss.reply(task_id) == Ok({"nobody": "undeliverable"})


async def _unsent(mesh: Mesh, boss: Puppet, gate: Gate | None = None) -> tuple[TaskId, Running]:
    """A task whose call to a missing agent is due to be sent again.

    With `gate`, another task runs until it opens.
    """
    asks = asker("agent", "nobody")

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        if request == "runs" and gate is not None:
            await gate()
            return Done("ran")
        return await asks.start(ctx, request)

    replica = await mesh.replica(Scripted("agent", start, asks.resume), **NEVER)
    if gate is not None:
        await boss.ask("agent", "runs")
        await gate.reach()
    replica.broker.fail("not committed", type="request")
    task_id = await boss.ask("agent", 1)
    await mesh.settle()
    return task_id, replica


async def test_while_the_database_is_away(mesh: Mesh, boss: Puppet) -> None:
    """Requests that wait for the database are requeued within the drain's timeout."""
    replica = await mesh.replica(doubler, **AT_ONCE, release_timeout=timedelta(hours=1))
    replica.store.away = True
    task_id = await boss.ask("doubler", 1)
    await mesh.events.wait(Step.STORE_AWAY)
    await replica.drain()
    assert mesh.waiting("doubler") == 1
    await mesh.replica(doubler)
    assert await boss.reply(task_id) == Ok(2)


async def test_while_the_database_is_away_from_a_segment(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """The drain does not hang: once the lease expires, another replica rescues the task."""
    gate = Gate()
    replica = await mesh.replica(gated_after("agent", "peer", gate), **AT_ONCE, release_timeout=timedelta(0))
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 1)
    await gate.reach()
    replica.store.away = True
    await replica.drain()
    assert await mesh.state(task_id) is TaskState.RUNNING
    gate.opened.set()
    await mesh.replica(gated_after("agent", "peer", gate))
    await mesh.advance(17)
    assert await boss.reply(task_id) == Ok({"peer": 1})


@HOMES
@pytest.mark.parametrize("what", ["reply", "refusal", "dead letter", "repeated reply"])
async def test_while_the_broker_is_away(mesh: Mesh, boss: Puppet, peer: Puppet, what: str, durable: bool) -> None:
    """Work that waits for the broker is abandoned, and its unacked request is redelivered."""
    replica = await mesh.replica(doubler, durable=durable, **AT_ONCE, release_timeout=timedelta(0))
    if what == "repeated reply":
        await boss.cancel("doubler", "task")
        await mesh.settle()
    replica.broker.away = True
    match what:
        case "dead letter":
            message = boss.request(1, "task")
            object.__setattr__(message, "body", b"?")
            await boss.send("doubler", message)
        case "refusal":
            await boss.ask("doubler", 1, "task", deadline=mesh.in_seconds(-1))
        case _:
            await boss.ask("doubler", 1, "task")
    await mesh.events.wait(Step.BROKER_AWAY)
    await replica.drain()
    assert mesh.waiting("doubler") == 1
    await mesh.replica(doubler, durable=durable)
    await boss.reply("task")


async def test_while_the_broker_is_away_from_an_ended_task(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"), **AT_ONCE, release_timeout=timedelta(0))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await mesh.settle()
    replica.broker.fail(*["not committed"] * 5, type="response")
    await peer.respond(request, 1)
    await mesh.events.wait(Step.REPLY, Phase.FAILED)
    await replica.drain()
    await mesh.replica(asker("asker", "peer"))
    await mesh.advance(12)
    assert await boss.reply(task_id) == Ok({"peer": 1})


async def test_ready_tasks_are_left_to_others(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    gate = Gate()
    replica = await mesh.replica(gated_after("agent", "peer", gate), max_concurrency=1, **NEVER)
    tasks = [await boss.ask("agent", number) for number in (1, 2)]
    for count in (1, 2):
        await peer.respond(await peer.request_number(count), 1)
    await gate.reach()
    await mesh.settle()
    draining = asyncio.create_task(replica.drain())
    await mesh.settle()
    gate.opened.set()
    await draining
    assert gate.visits == 1
    states = sorted([str(await mesh.state(task_id)) for task_id in tasks])
    assert states == ["completed", "ready"]


@pytest.mark.parametrize("method", ["close", "release", "end"])
async def test_a_database_that_is_silent_holds_nobody_up(mesh: Mesh, boss: Puppet, peer: Puppet, method: str) -> None:
    """It accepts the statement but never answers, and its driver swallows the cancellation."""

    async def silence() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await silent.wait()
                return

    silent, gate = asyncio.Event(), Gate()
    options = {"drain_timeout": timedelta(seconds=0.1), "release_timeout": timedelta(seconds=0.4)}
    replica = await mesh.replica(gated_after("agent", "peer", gate), **options)
    await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 1)
    await gate.reach()
    replica.store.before[method] = silence
    if method == "end":
        gate.opened.set()
    await replica.drain()
    silent.set()
    await mesh.settle()
