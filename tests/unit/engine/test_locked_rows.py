"""Another session locks a task's row: messages for that task wait, others are handled."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.engine.postponed import PostponedMessages
from meshpoint.errors import BrokerUnavailable, ConfigurationError, RowLocked
from meshpoint.model.calls import Done
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.envelopes import signal_message
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.messages import Message, response_queue
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.signals import Signal
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import TaskLocked

from .agents import Gate, ScriptedAgent, asker
from .mesh import Mesh, RunningReplica

chat = Signal("chat", int)


def lock_rows(
    target: RunningReplica, locked_ids: set[TaskId], *, locks_at_end: set[TaskId] | None = None
) -> None:
    """Make the replica's database report these tasks as locked by another session."""
    store = target.store._inner

    class LockingStore:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        async def claim(self, claims: Any, replica: Any, slots: int) -> Any:
            unlocked = [claim for claim in claims if claim.task_id not in locked_ids]
            answers = iter(await store.claim(unlocked, replica, slots))
            return [
                TaskLocked(claim.task_id, claim.sub_task_id)
                if claim.task_id in locked_ids
                else next(answers)
                for claim in claims
            ]

        async def cancel(self, cancels: Any) -> Any:
            unlocked = [cancel for cancel in cancels if cancel.task_id not in locked_ids]
            answers = iter(await store.cancel(unlocked))
            return [
                TaskLocked(cancel.task_id) if cancel.task_id in locked_ids else next(answers)
                for cancel in cancels
            ]

        async def signal(self, signals: Any) -> Any:
            (signal,) = signals
            if signal.task_id in locked_ids:
                return [TaskLocked(signal.task_id)]
            return await store.signal(signals)

        async def end(self, ends: Any) -> Any:
            if any(end.run.task_id in (locks_at_end or ()) for end in ends):
                raise RowLocked("another session holds a row")
            return await store.end(ends)

    target.store._inner = LockingStore()


@agent("listener")
async def listener(ctx: TaskExecutionContext, count: int) -> list[int]:
    return [await ctx.receive(chat) for _ in range(count)]


def a_signal(task_id: TaskId, number: int) -> Message:
    client = AgentName("client")
    return signal_message(
        client, task_id, "chat", f"signal-{number}", number, response_queue(client)
    )


def count_unacked(mesh: Mesh, agent: str) -> tuple[int, int]:
    """Responses to `agent`: queued, and unacked at replicas."""
    queue = mesh.exchange.queues.get(response_queue(AgentName(agent)))
    assert queue is not None
    return len(queue.ready), sum(len(consumer.unacked) for consumer in queue.consumers)


def claim_sizes(replica: RunningReplica) -> list[int]:
    """Number of outcomes in each claim of the replica."""
    return [len(arguments[0]) for name, arguments in replica.store.arguments if name == "claim"]


async def test_a_response_waits_for_its_own_task_only(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    locked, other = await client.ask("asker", 1), await client.ask("asker", 2)
    requests = [await peer.wait_for_request(1), await peer.wait_for_request(2)]
    locked_ids = {locked}
    lock_rows(replica, locked_ids)
    for request in requests:
        await peer.respond(request, "answer")
    assert isinstance(await client.reply(other), Ok)
    await mesh.advance(30)
    assert client.replies(locked) == []
    assert mesh.events.matching(Step.ROW_LOCKED, Phase.INFO, locked)
    assert mesh.events.matching(Step.STORE_UNAVAILABLE) == []
    locked_ids.clear()
    await mesh.advance(2)
    assert isinstance(await client.reply(locked), Ok)
    assert count_unacked(mesh, "asker") == (0, 0)


async def test_more_responses_than_the_prefetch_may_wait(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), response_prefetch=2)
    tasks = [await client.ask("asker", number) for number in range(5)]
    requests = [await peer.wait_for_request(number) for number in range(1, 6)]
    locked_ids = set(tasks[:4])
    lock_rows(replica, locked_ids)
    for request in requests:
        await peer.respond(request, "answer")
    await mesh.advance(5)
    assert isinstance(await client.reply(tasks[4]), Ok)
    locked_ids.clear()
    await mesh.advance(5)
    for task in tasks:
        assert isinstance(await client.reply(task), Ok)
    assert count_unacked(mesh, "asker") == (0, 0)


async def test_a_cancel_waits_for_its_own_task_only(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    locked, other = await client.ask("asker", 1), await client.ask("asker", 2)
    await peer.wait_for_request(2)
    await mesh.idle()
    locked_ids = {locked}
    lock_rows(replica, locked_ids)
    for task in (locked, other):
        await client.cancel("asker", task)
    assert (await client.reply(other)).kind is FailureKind.CANCELLED  # type: ignore[union-attr]  # else the test fails
    await mesh.advance(10)
    assert client.replies(locked) == []
    locked_ids.clear()
    await mesh.advance(2)
    outcome = await client.reply(locked)
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.CANCELLED
    assert count_unacked(mesh, "asker") == (0, 0)


async def test_signals_do_not_overtake_one_that_waits_for_a_lock(
    mesh: Mesh, client: FakePeer
) -> None:
    replica = await mesh.replica(listener)
    locked, other = await client.ask("listener", 3), await client.ask("listener", 1)
    await mesh.idle()
    locked_ids = {locked}
    lock_rows(replica, locked_ids)
    await client.send_control("listener", a_signal(locked, 1))
    await mesh.idle()
    locked_ids.clear()
    for number in (2, 3):
        await client.send_control("listener", a_signal(locked, number))
    await client.send_control("listener", a_signal(other, 4))
    assert await client.reply(other) == Ok([4])
    await mesh.advance(2)
    assert await client.reply(locked) == Ok([1, 2, 3])
    assert count_unacked(mesh, "listener") == (0, 0)


async def test_an_end_on_a_locked_row_is_retried_without_reporting_an_outage(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    locked = await client.ask("asker", 1)
    request = await peer.wait_for_request(1)
    await mesh.idle()
    locked_ids = {locked}
    lock_rows(replica, set(), locks_at_end=locked_ids)
    await peer.respond(request, "answer")
    await mesh.idle()
    await mesh.advance(5)
    assert mesh.events.matching(Step.ROW_LOCKED, Phase.INFO)
    assert client.replies(locked) == []
    locked_ids.clear()
    await mesh.advance(5)
    assert isinstance(await client.reply(locked), Ok)
    assert mesh.events.matching(Step.STORE_UNAVAILABLE) == []


async def test_a_draining_replica_requeues_messages_that_wait_for_a_lock(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    locked = await client.ask("asker", 1)
    request = await peer.wait_for_request(1)
    lock_rows(replica, {locked})
    await peer.respond(request, "answer")
    await mesh.idle()
    assert count_unacked(mesh, "asker") == (0, 1)
    replica.stop.set()
    await replica.task
    assert count_unacked(mesh, "asker") == (1, 0)
    await mesh.replica(asker("asker", "peer"))
    assert await client.reply(locked) == Ok({"peer": "answer"})
    assert count_unacked(mesh, "asker") == (0, 0)


async def test_a_drain_waits_for_an_attempt_that_owns_the_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), drain_timeout=timedelta(hours=1))
    locked = await client.ask("asker", 1)
    request = await peer.wait_for_request(1)
    locked_ids, gate = {locked}, Gate()
    lock_rows(replica, locked_ids)
    await peer.respond(request, "answer")
    await mesh.idle()
    locked_ids.clear()
    replica.store.after["claim"] = gate
    await mesh.advance(2)
    await gate.wait_reached()
    replica.stop.set()
    await mesh.idle()
    assert not replica.task.done()
    gate.opened.set()
    await replica.task
    assert await client.reply(locked) == Ok({"peer": "answer"})
    assert mesh.events.matching(Step.RELEASE) == []


async def test_a_message_is_postponed_once_although_its_batch_had_a_defect(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    locked = await client.ask("asker", 1)
    request = await peer.wait_for_request(1)
    locked_ids = {locked}
    lock_rows(replica, locked_ids)
    defect_count = iter([RuntimeError("a defect")])

    async def raise_defect() -> None:
        for error in defect_count:
            raise error

    replica.store.before["record_progress"] = raise_defect
    await asyncio.gather(peer.respond(request, "answer"), peer.status(request, "news"))
    await mesh.idle()
    assert claim_sizes(replica) == [1]  # not retried within the same attempt
    locked_ids.clear()
    replica.store.arguments.clear()
    await mesh.advance(2)
    assert await client.reply(locked) == Ok({"peer": "answer"})
    assert claim_sizes(replica) == [1]
    assert count_unacked(mesh, "asker") == (0, 0)


@pytest.mark.parametrize("response_count", [1, 2])
async def test_messages_with_a_defect_on_retry_are_handled_one_by_one(
    mesh: Mesh, client: FakePeer, peer: FakePeer, response_count: int
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    tasks = [await client.ask("asker", number) for number in range(response_count)]
    requests = [await peer.wait_for_request(number + 1) for number in range(response_count)]
    locked_ids = set(tasks)
    lock_rows(replica, locked_ids)
    for request in requests:
        await peer.respond(request, "answer")
    await mesh.idle()
    defect_count = iter([RuntimeError("a defect")])

    async def raise_defect() -> None:
        for error in defect_count:
            raise error

    replica.store.before["claim"] = raise_defect
    locked_ids.clear()
    await mesh.advance(2)
    for task in tasks:
        assert await client.reply(task) == Ok({"peer": "answer"})
    assert count_unacked(mesh, "asker") == (0, 0)


async def test_messages_wait_while_a_setting_is_wrong(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """For example, the login may not write to the exchange."""
    replica = await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request(1)
    setting_error = True

    async def refused() -> None:
        if setting_error:
            raise ConfigurationError("mesh.broker_url", "the login may not write", "grant it that")

    replica.store.before["claim"] = refused
    await peer.respond(request, "answer")
    await mesh.advance(10)
    assert count_unacked(mesh, "asker") == (0, 1)
    setting_error = False
    await mesh.advance(2)
    assert await client.reply(task_id) == Ok({"peer": "answer"})
    assert count_unacked(mesh, "asker") == (0, 0)


async def test_postponed_messages_are_retried_after_any_defect(mesh: Mesh) -> None:
    errors = iter(
        [RuntimeError("a defect"), BrokerUnavailable("unavailable"), RuntimeError("another")]
    )
    handled: list[object] = []

    async def handle(received: Any, backend: Any, shared: bool) -> None:
        for error in errors:
            raise error
        handled.extend(received)

    capacities = list[int]()
    runtime = (await mesh.replica(asker("asker", "peer"))).worker.runtime
    postponed = PostponedMessages(handle, runtime, capacities.append)
    message: Any = (SimpleNamespace(message=a_signal(TaskId("task"), 1)), RunId("claim"))
    backend: Any = None
    await postponed.postpone(message, backend, shared=True)
    await mesh.advance(5)
    assert handled == [message]
    assert capacities[-1] == 0  # no message waits or is being retried


async def test_postponed_signals_keep_their_order(mesh: Mesh) -> None:
    """More than one batch waits, some wait again, and others arrive in between."""
    task_ids = [TaskId("first"), TaskId("second")]
    signals: list[Any] = [
        (SimpleNamespace(message=a_signal(task_ids[number % 2], number)), RunId(str(number)))
        for number in range(602)
    ]
    locked, arriving = {"0", "1", "401"}, signals[600:]
    handled: dict[str, list[str]] = {task_id: [] for task_id in task_ids}

    async def handle_one(item: Any) -> None:
        delivery, claim_id = item
        if postponed.is_behind(item, shared=True) or claim_id in locked:
            await postponed.postpone(item, backend, shared=True)
        else:
            handled[delivery.message.correlation_id].append(claim_id)

    async def handle(received: Any, backend: Any, shared: bool) -> None:
        for item in (*received, *arriving):
            await handle_one(item)
        arriving.clear()

    capacities = list[int]()
    runtime = (await mesh.replica(asker("asker", "peer"))).worker.runtime
    postponed = PostponedMessages(handle, runtime, capacities.append)
    backend: Any = None
    for item in signals[:600]:
        await postponed.postpone(item, backend, shared=True)
    await mesh.advance(2)
    assert handled == {"first": [], "second": []}
    for claim_id in ("0", "1", "401"):
        locked.remove(claim_id)
        await mesh.advance(5)
    assert handled == {
        task_id: [str(number) for number in range(start, 602, 2)]
        for start, task_id in enumerate(task_ids)
    }
    assert capacities[-1] == 0
    assert not postponed.is_behind(signals[0], shared=True)


async def test_a_drain_that_times_out_requeues_waiting_responses(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """Otherwise their tasks would start a segment here while slower code is still stopping."""
    stub, asks = Gate(), asker("asker", "peer")

    async def start(ctx: Any, request: Any) -> Any:
        while request == "stubborn":
            with suppress(asyncio.CancelledError):
                await stub()
                return Done("at last")
        return await asks.start(ctx, request)

    options: dict[str, Any] = {
        "drain_timeout": timedelta(0),
        "release_timeout": timedelta(minutes=1),
    }
    replica = await mesh.replica(ScriptedAgent("asker", start, asks.resume), **options)
    locked = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await client.ask("asker", "stubborn")
    await stub.wait_reached()
    locked_ids = {locked}
    lock_rows(replica, locked_ids)
    await peer.respond(request, "answer")
    await mesh.events.wait(Step.ROW_LOCKED)
    draining = asyncio.create_task(replica.drain())
    await mesh.idle()
    locked_ids.clear()
    await mesh.advance(2)
    assert count_unacked(mesh, "asker") == (1, 0)
    assert await mesh.state(locked) is TaskState.WAITING
    stub.opened.set()
    await draining
    await mesh.replica(asks)
    assert await client.reply(locked) == Ok({"peer": "answer"})
