"""A draining replica: nothing is lost, nothing hangs, and others continue its tasks at once."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.envelopes import cancel_message
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import Message
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState

from .agents import Gate, ScriptedAgent, asker, doubler, gated, gated_after, outcome_values
from .mesh import Mesh, RunningReplica

BACKENDS = pytest.mark.parametrize("durable", [True, False])
NO_DRAIN: dict[str, Any] = {"drain_timeout": timedelta(0)}
RELEASES: dict[str, Any] = {"drain_timeout": timedelta(0), "release_timeout": timedelta(minutes=1)}
NO_SWEEP: dict[str, Any] = {
    "drain_timeout": timedelta(hours=1),
    "release_timeout": timedelta(hours=1),
}


@BACKENDS
async def test_an_idle_replica_drains_at_once(mesh: Mesh, durable: bool) -> None:
    replica = await mesh.replica(doubler, durable=durable, **NO_SWEEP)
    await replica.drain()
    assert len(mesh.events.matching(Step.DRAINED)) == 1
    assert replica.memory.calls[-1] == "close"
    assert not durable or replica.store.calls[-1] == "close"


@BACKENDS
async def test_a_drain_finishes_segments_and_takes_no_new_requests(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    gate = Gate()
    replica = await mesh.replica(
        gated("agent", gate), durable=durable, max_concurrency=2, **NO_SWEEP
    )
    tasks = [await client.ask("agent", number) for number in range(5)]
    await gate.wait_reached(2)
    draining = asyncio.create_task(replica.drain())
    await mesh.idle()
    gate.opened.set()
    await draining
    assert [await client.reply(task_id) for task_id in tasks[:2]] == [Ok("done")] * 2
    assert gate.visits == 2
    assert (mesh.unacked("agent"), mesh.waiting("agent")) == (0, 3)
    await mesh.replica(gated("agent", gate), durable=durable)
    assert [await client.reply(task_id) for task_id in tasks[2:]] == [Ok("done")] * 3


async def test_a_drain_lets_segments_pause(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        await gate()
        return Paused([Call("call", "peer", 1)], b"")

    replica = await mesh.replica(ScriptedAgent("agent", start), **NO_SWEEP)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    draining = asyncio.create_task(replica.drain())
    await mesh.idle()
    gate.opened.set()
    await draining
    assert await mesh.state(task_id) is TaskState.WAITING
    assert len(peer.requests) == 1
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


@BACKENDS
async def test_first_segments_that_outlast_a_drain_are_requeued(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    gate = Gate()
    replica = await mesh.replica(gated("agent", gate), durable=durable, **NO_DRAIN)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await replica.drain()
    assert gate.cancelled == 1
    assert client.replies() == []
    assert mesh.waiting("agent") == 1
    await mesh.replica(gated("agent", gate), durable=durable)
    gate.opened.set()
    assert await client.reply(task_id) == Ok("done")
    assert gate.visits == 2


@pytest.mark.parametrize("first", [True, False])
async def test_owned_tasks_that_outlast_a_drain_are_released_at_once(
    mesh: Mesh, client: FakePeer, peer: FakePeer, first: bool
) -> None:
    gate = Gate()
    agent = gated("agent", gate) if first else gated_after("agent", "peer", gate)
    policy = "on_receipt" if first else "at_checkpoint"
    replica = await mesh.replica(agent, ack_policy=policy, **NO_DRAIN)
    await mesh.replica(agent, max_concurrency=1)
    await mesh.replicas[1].worker._subscriptions["requests"].cancel()
    await mesh.replicas[1].worker._subscriptions["shared"].cancel()
    task_id = await client.ask("agent", 1)
    if not first:
        await peer.respond(await peer.wait_for_request(), 1)
    await gate.wait_reached()
    await replica.drain()
    assert gate.cancelled == 1
    await gate.wait_reached(2)  # the clock stands still, so only a wake can have started this run
    gate.opened.set()
    assert await client.reply(task_id) == Ok("done" if first else {"peer": 1})
    summary, _ = await mesh.task(task_id)
    assert summary.attempt <= 1, "a drain must not count as a failed attempt"


async def test_an_in_process_task_can_end_during_a_drain(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), durable=False, **NO_SWEEP)
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    draining = asyncio.create_task(replica.drain())
    await mesh.idle()
    assert not draining.done()
    await peer.respond(request, 1)
    await draining
    assert await client.reply(task_id) == Ok({"peer": 1})
    assert mesh.unacked("asker") == mesh.waiting("asker") == 0


async def test_an_in_process_task_can_time_out_during_a_drain(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """The sweeper keeps processing in-process tasks during a drain."""
    waiting = asker("asker", "peer", timeout=timedelta(seconds=20))
    replica = await mesh.replica(waiting, durable=False, **NO_SWEEP)
    task_id = await client.ask("asker", 1)
    await peer.wait_for_request()
    await mesh.idle()
    draining = asyncio.create_task(replica.drain())
    await mesh.advance(22)
    await draining
    assert await client.reply(task_id) == Ok({"peer": "timeout"})


async def test_an_in_process_task_can_be_cancelled_during_a_drain(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=False)
    draining_one = await mesh.replica(asker("asker", "peer"), durable=False, **NO_SWEEP)
    await mesh.replicas[0].worker._subscriptions["requests"].cancel()
    task_id = await client.ask("asker", 1)
    await peer.wait_for_request()
    await mesh.idle()
    draining = asyncio.create_task(draining_one.drain())
    await mesh.idle()
    await client.cancel("asker", task_id)
    await draining
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED


@pytest.mark.parametrize("running", [True, False])
async def test_an_in_process_task_that_outlasts_a_drain_is_requeued(
    mesh: Mesh, client: FakePeer, peer: FakePeer, running: bool
) -> None:
    gate = Gate()
    replica = await mesh.replica(gated_after("agent", "peer", gate), durable=False, **NO_DRAIN)
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    if running:
        await peer.respond(request, 1)
        await gate.wait_reached()
    await replica.drain()
    assert mesh.waiting("agent") == 1
    assert client.replies() == []
    gate.opened.set()
    await mesh.replica(gated_after("agent", "peer", gate), durable=False)
    await peer.respond(await peer.wait_for_request(2), 2)
    assert await client.reply(task_id) == Ok({"peer": 2})


@pytest.mark.parametrize(
    ("message", "durable"), [("response", True), ("response", False), ("cancel", False)]
)
async def test_a_task_whose_request_was_requeued_does_not_continue(
    mesh: Mesh, client: FakePeer, peer: FakePeer, message: str, durable: bool
) -> None:
    """While other code is still stopping, another replica may have the requeued request."""
    stub, visits = Gate(), Gate()
    visits.opened.set()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        if request == "stubborn":
            return await _wait_ignoring_cancels(stub)
        return Paused([Call("call", "peer", request)], b"state")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        await visits()
        return Done(outcome_values(outcomes))

    agent = ScriptedAgent("agent", start, resume)
    replica = await mesh.replica(
        agent, durable=durable, checkpoint_retry_time=timedelta(0), **RELEASES
    )
    replica.store.fail_always("pause")
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await client.ask("agent", "stubborn", "stubborn")
    await stub.wait_reached()
    await mesh.idle()
    draining = asyncio.create_task(replica.drain())
    await mesh.idle()
    assert mesh.waiting("agent") == 1
    if message == "response":
        await peer.respond(request, "old")
    else:
        await replica.broker.broadcast(AgentName("agent"), _cancel(task_id))
    await mesh.idle()
    assert (visits.visits, client.replies(task_id)) == (0, [])
    stub.opened.set()
    await draining
    assert (visits.visits, client.replies(task_id)) == (0, [])


def _cancel(task_id: TaskId) -> Message:
    return cancel_message(AgentName("agent"), task_id, on_behalf_of="client")


async def _wait_ignoring_cancels(gate: Gate) -> Done[str]:
    while True:
        with suppress(asyncio.CancelledError):
            await gate()
            return Done("at last")


@pytest.mark.parametrize("answers", [True, False])
async def test_the_request_of_unstoppable_in_process_code_stays_unacked(
    mesh: Mesh, client: FakePeer, peer: FakePeer, answers: bool
) -> None:
    """If the request were requeued earlier, two replicas would answer it."""
    stub = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        return Paused([Call("call", "peer", request)], b"state")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        await _wait_ignoring_cancels(stub)
        return (
            Done(outcome_values(outcomes))
            if answers
            else Paused([Call("again", "peer", 2)], b"state")
        )

    replica = await mesh.replica(ScriptedAgent("agent", start, resume), durable=False, **RELEASES)
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), "old")
    await stub.wait_reached()
    draining = asyncio.create_task(replica.drain())
    await mesh.idle()
    assert mesh.waiting("agent") == 0
    stub.opened.set()
    await draining
    assert (mesh.waiting("agent"), len(client.replies(task_id))) == ((0, 1) if answers else (1, 0))
    assert len(peer.requests) == 1


async def test_an_in_process_request_stays_unacked_while_its_reply_is_sent(
    mesh: Mesh, client: FakePeer, peer: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = await mesh.replica(asker("agent", "peer"), durable=False, **RELEASES)
    task_id = await client.ask("agent", 1)
    await peer.wait_for_request()
    await mesh.idle()
    gate = _slow_publish(replica, monkeypatch)
    await replica.broker.broadcast(AgentName("agent"), _cancel(task_id))
    await gate.wait_reached()
    draining = asyncio.create_task(replica.drain())
    await mesh.idle()
    assert mesh.waiting("agent") == 0
    gate.opened.set()
    await draining
    assert (mesh.waiting("agent"), len(client.replies(task_id))) == (0, 1)


def _slow_publish(replica: RunningReplica, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A gate in front of every publish of `replica`."""
    publish, gate = replica.broker.publish, Gate()

    async def slow_publish(messages: Any) -> Any:
        await gate()
        return await publish(messages)

    monkeypatch.setattr(replica.broker, "publish", slow_publish)
    return gate


async def test_a_drain_finishes_a_claim_in_progress(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """A claim abandoned halfway could own a task that no replica runs."""
    replica = await mesh.replica(asker("asker", "peer"), **NO_SWEEP)
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    gate = replica.store.after["claim"] = Gate()
    await peer.respond(request, 1)
    await gate.wait_reached()
    draining = asyncio.create_task(replica.drain())
    await mesh.idle()
    gate.opened.set()
    await draining
    assert await client.reply(task_id) == Ok({"peer": 1})


@pytest.mark.parametrize("method", ["acquire", "rescue", "expire"])
async def test_a_drain_finishes_a_sweep_in_progress(
    mesh: Mesh, client: FakePeer, peer: FakePeer, method: str
) -> None:
    task_id, replica = await _start_due_work(mesh, client, peer, method)
    gate = replica.store.after[method] = Gate()
    mesh.clock.advance(timedelta(seconds=20))
    await gate.wait_reached()
    draining = asyncio.create_task(replica.drain())
    await mesh.idle()
    gate.opened.set()
    await draining
    assert isinstance(await client.reply(task_id), Ok)
    assert await mesh.state(task_id) is TaskState.COMPLETED


async def _start_due_work(mesh: Mesh, client: FakePeer, peer: FakePeer, method: str) -> Any:
    """Prepare a task that `method` picks up at the next sweep of the returned replica."""
    hold_gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        return Paused([Call("call", "peer", 1, timeout=timedelta(seconds=10))], b"")

    async def wait(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        await hold_gate()

    async def end(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        return Done("went on")

    drain_options: dict[str, Any] = NO_DRAIN if method == "acquire" else {}
    first = await mesh.replica(ScriptedAgent("agent", start, wait), **drain_options)
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    if method == "expire":
        await first.crash()
    else:
        await peer.respond(request, 1)
        await hold_gate.wait_reached()
        await (first.drain() if method == "acquire" else first.crash())
    replica = await mesh.launch(ScriptedAgent("agent", start, end), **NO_SWEEP)
    if method == "acquire":
        replica.store.fail("acquire", "not committed")
    await mesh.events.wait(Step.STARTED, replica=replica.id)
    await mesh.idle()
    return task_id, replica


async def test_a_drain_finishes_a_lookup_in_progress(mesh: Mesh, client: FakePeer) -> None:
    replica = await mesh.replica(doubler, **NO_SWEEP)
    gate = replica.store.after["lookup"] = Gate()
    task_id = await client.ask("doubler", 1)
    await gate.wait_reached()
    draining = asyncio.create_task(replica.drain())
    await mesh.idle()
    gate.opened.set()
    await draining
    assert await client.reply(task_id) == Ok(2)


async def test_unstoppable_code_does_not_block_a_drain(mesh: Mesh, client: FakePeer) -> None:
    gate = Gate()

    async def stubborn(ctx: TaskExecutionContext, request: Any) -> Any:
        while True:
            with suppress(asyncio.CancelledError):
                await gate()
                return Done("at last")

    replica = await mesh.replica(
        ScriptedAgent("agent", stubborn), **NO_DRAIN, release_timeout=timedelta(0)
    )
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await replica.drain()
    assert gate.cancelled >= 1
    assert mesh.waiting("agent") == 1
    gate.opened.set()
    await mesh.idle()
    assert client.replies() == [], "the result of an abandoned run must not be sent"
    await mesh.replica(ScriptedAgent("agent", stubborn))
    assert await client.reply(task_id) == Ok("at last")


def gated_when_resumed(gate: Gate) -> ScriptedAgent:
    """An agent that answers "new" at once; other requests call the peer and wait for `gate`."""

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        return Done("new") if request == "new" else Paused([Call("call", "peer", request)], b"")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        await gate()
        return Done("resumed")

    return ScriptedAgent("agent", start, resume)


async def test_a_drain_runs_admitted_requests_and_leaves_ready_tasks(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """An admitted request still gets its slot; a ready task waiting for one is left to others."""
    gate = Gate()
    replica = await mesh.replica(gated_when_resumed(gate), max_concurrency=1, **NO_SWEEP)
    tasks = [await client.ask("agent", number) for number in (1, 2)]
    requests = [await peer.wait_for_request(count) for count in (1, 2)]
    await mesh.idle()
    lookup = replica.store.after["lookup"] = Gate()
    new = await client.ask("agent", "new")
    await lookup.wait_reached()
    for request in requests:
        await peer.respond(request, 1)
        await gate.wait_reached()
    await mesh.idle()
    lookup.opened.set()
    await mesh.idle()
    draining = asyncio.create_task(replica.drain())
    await mesh.idle()
    gate.opened.set()
    await draining
    assert await client.reply(new) == Ok("new")
    assert [await mesh.state(task_id) for task_id in tasks] == [
        TaskState.COMPLETED,
        TaskState.READY,
    ]


@pytest.mark.parametrize("options", [NO_SWEEP, RELEASES])
async def test_a_drain_requeues_a_request_that_waited_for_another(
    mesh: Mesh,
    client: FakePeer,
    peer: FakePeer,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    """It waits until the request of another requester with the same id has been refused."""
    replica = await mesh.replica(doubler, **options)
    gate = _slow_publish(replica, monkeypatch)
    await client.ask("doubler", 1, "task", deadline=mesh.deadline_in(-1))
    await gate.wait_reached()
    await peer.ask("doubler", 2, "task")
    await mesh.idle()
    draining = asyncio.create_task(replica.drain())
    await mesh.idle()
    gate.opened.set()
    await draining
    assert mesh.events.matching(Step.SEGMENT) == []
    assert mesh.waiting("doubler") == 1
    await mesh.replica(doubler)
    assert await peer.reply("task") == Ok(4)


async def test_a_drain_releases_a_row_that_waits_for_a_slot(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """The row was written as running before a slot was free, and a resumed task got that slot."""
    gate = Gate()
    options: dict[str, Any] = {"max_concurrency": 1, "ack_policy": "on_receipt"}
    replica = await mesh.replica(gated_when_resumed(gate), **options, **RELEASES)
    resumed = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    begin = replica.store.after["begin"] = Gate()
    new = await client.ask("agent", "new")
    await begin.wait_reached()
    await peer.respond(request, 1)
    await gate.wait_reached()
    begin.opened.set()
    await mesh.idle()
    await replica.drain()
    assert [await mesh.state(task_id) for task_id in (resumed, new)] == [TaskState.READY] * 2
    assert replica.worker.runtime.slots.free == 1


async def test_a_drain_finishes_the_claim_of_an_undeliverable_call(
    mesh: Mesh, client: FakePeer
) -> None:
    """Such claims run in the background."""
    task_id, replica = await _start_unsent_call(mesh, client)
    gate = replica.store.after["claim"] = Gate()
    mesh.clock.advance(timedelta(seconds=6))
    await gate.wait_reached()
    draining = asyncio.create_task(replica.drain())
    await mesh.idle()
    assert not draining.done()
    gate.opened.set()
    await draining
    assert await client.reply(task_id) == Ok({"nobody": "undeliverable"})
    assert await mesh.state(task_id) is TaskState.COMPLETED


async def test_a_draining_replica_claims_no_undeliverable_call(
    mesh: Mesh, client: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim could otherwise happen after the drain."""
    second_replica = Gate()
    task_id, replica = await _start_unsent_call(mesh, client, second_replica)
    gate = _slow_publish(replica, monkeypatch)
    mesh.clock.advance(timedelta(seconds=6))
    await gate.wait_reached()
    draining = asyncio.create_task(replica.drain())
    await mesh.idle()
    gate.opened.set()
    await mesh.idle()
    second_replica.opened.set()
    await draining
    assert "claim" not in replica.store.calls
    assert await mesh.state(task_id) is TaskState.WAITING
    await mesh.replica(asker("agent", "nobody"), undeliverable_after=timedelta())
    await mesh.advance(20)
    assert await client.reply(task_id) == Ok({"nobody": "undeliverable"})


async def _start_unsent_call(
    mesh: Mesh, client: FakePeer, gate: Gate | None = None
) -> tuple[TaskId, RunningReplica]:
    """A task whose call to a missing agent is due to be sent again.

    With `gate`, another task runs until it opens.
    """
    asker_ = asker("agent", "nobody")

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        if request == "runs" and gate is not None:
            await gate()
            return Done("ran")
        return await asker_.start(ctx, request)

    replica = await mesh.replica(
        ScriptedAgent("agent", start, asker_.resume), undeliverable_after=timedelta(), **NO_SWEEP
    )
    if gate is not None:
        await client.ask("agent", "runs")
        await gate.wait_reached()
    replica.broker.fail("not committed", type="request")
    task_id = await client.ask("agent", 1)
    await mesh.idle()
    return task_id, replica


async def test_a_drain_completes_during_a_database_outage(mesh: Mesh, client: FakePeer) -> None:
    """Requests that wait for the database are requeued within the drain's timeout."""
    replica = await mesh.replica(doubler, **NO_DRAIN, release_timeout=timedelta(hours=1))
    replica.store.unavailable = True
    task_id = await client.ask("doubler", 1)
    await mesh.events.wait(Step.STORE_UNAVAILABLE)
    await replica.drain()
    assert mesh.waiting("doubler") == 1
    await mesh.replica(doubler)
    assert await client.reply(task_id) == Ok(2)


async def test_a_drain_with_a_running_segment_completes_during_a_database_outage(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """The drain does not hang: once the lease expires, another replica rescues the task."""
    gate = Gate()
    replica = await mesh.replica(
        gated_after("agent", "peer", gate), **NO_DRAIN, release_timeout=timedelta(0)
    )
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    await gate.wait_reached()
    replica.store.unavailable = True
    await replica.drain()
    assert await mesh.state(task_id) is TaskState.RUNNING
    gate.opened.set()
    await mesh.replica(gated_after("agent", "peer", gate))
    await mesh.advance(17)
    assert await client.reply(task_id) == Ok({"peer": 1})


@BACKENDS
@pytest.mark.parametrize("outgoing", ["reply", "refusal", "dead letter", "repeated reply"])
async def test_a_drain_completes_during_a_broker_outage(
    mesh: Mesh, client: FakePeer, peer: FakePeer, outgoing: str, durable: bool
) -> None:
    """Work that waits for the broker is abandoned, and its unacked request is redelivered."""
    replica = await mesh.replica(
        doubler, durable=durable, **NO_DRAIN, release_timeout=timedelta(0)
    )
    if outgoing == "repeated reply":
        await client.cancel("doubler", "task")
        await mesh.idle()
    replica.broker.unavailable = True
    match outgoing:
        case "dead letter":
            message = client.request(1, "task")
            object.__setattr__(message, "body", b"?")
            await client.send("doubler", message)
        case "refusal":
            await client.ask("doubler", 1, "task", deadline=mesh.deadline_in(-1))
        case _:
            await client.ask("doubler", 1, "task")
    await mesh.events.wait(Step.BROKER_UNAVAILABLE)
    await replica.drain()
    assert mesh.waiting("doubler") == 1
    await mesh.replica(doubler, durable=durable)
    await client.reply("task")


async def test_a_drain_with_an_unsent_reply_completes_during_a_broker_outage(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), **NO_DRAIN, release_timeout=timedelta(0))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    replica.broker.fail(*["not committed"] * 5, type="response")
    await peer.respond(request, 1)
    await mesh.events.wait(Step.REPLY, Phase.FAILED)
    await replica.drain()
    await mesh.replica(asker("asker", "peer"))
    await mesh.advance(12)
    assert await client.reply(task_id) == Ok({"peer": 1})


async def test_a_drain_leaves_ready_tasks_to_other_replicas(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    gate = Gate()
    replica = await mesh.replica(gated_after("agent", "peer", gate), max_concurrency=1, **NO_SWEEP)
    tasks = [await client.ask("agent", number) for number in (1, 2)]
    for count in (1, 2):
        await peer.respond(await peer.wait_for_request(count), 1)
    await gate.wait_reached()
    await mesh.idle()
    draining = asyncio.create_task(replica.drain())
    await mesh.idle()
    gate.opened.set()
    await draining
    assert gate.visits == 1
    states = sorted([str(await mesh.state(task_id)) for task_id in tasks])
    assert states == ["completed", "ready"]


@pytest.mark.parametrize("method", ["close", "release", "end"])
async def test_a_silent_database_does_not_block_a_drain(
    mesh: Mesh, client: FakePeer, peer: FakePeer, method: str
) -> None:
    """It accepts the statement but never answers, and its driver swallows the cancellation."""

    async def never_answer() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await never_set.wait()
                return

    never_set, gate = asyncio.Event(), Gate()
    options: dict[str, Any] = {
        "drain_timeout": timedelta(seconds=0.1),
        "release_timeout": timedelta(seconds=0.4),
    }
    replica = await mesh.replica(gated_after("agent", "peer", gate), **options)
    await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    await gate.wait_reached()
    replica.store.before[method] = never_answer
    if method == "end":
        gate.opened.set()
    await replica.drain()
    never_set.set()
    await mesh.idle()
