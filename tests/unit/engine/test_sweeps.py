"""The sweeper handles due work in batches until none is left, and reserves only needed slots."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.engine import replies
from meshpoint.model.calls import Call
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.messages import Address, Header, Message, MessageType
from meshpoint.model.outcomes import Ok
from meshpoint.model.tasks import TaskState
from meshpoint.ports.broker import PublishResult

from .agents import asker, caller, doubler
from .mesh import Mesh, RunningReplica


class GatedMethods:
    """Blocks methods of the database until `opened` is set."""

    def __init__(self, replica: RunningReplica, *methods: str) -> None:
        self.reached, self.opened = asyncio.Event(), asyncio.Event()
        for method in methods:
            replica.store.before[method] = self._wait_at_gate

    async def _wait_at_gate(self) -> None:
        self.reached.set()
        await self.opened.wait()


@pytest.mark.parametrize(
    "gated_methods",
    [["acquire", "due"], ["expire", "due"], ["rescue", "due"]],
    ids=lambda each: each[0],
)
async def test_responses_that_coincide_with_a_sweep_run_in_this_replica(
    mesh: Mesh, client: FakePeer, peer: FakePeer, gated_methods: list[str]
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    await mesh.advance(20)  # past both grace periods
    tasks = [await client.ask("asker", number) for number in range(5)]
    requests = [await peer.wait_for_request(number) for number in range(1, 6)]
    await mesh.idle()
    gated = GatedMethods(replica, *gated_methods)
    mesh.clock.advance(timedelta(seconds=1))
    await gated.reached.wait()
    for request in requests:
        await peer.respond(request, 2)
    for task_id in tasks:
        assert await client.reply(task_id) == Ok({"peer": 2})
    assert mesh.events.matching(Step.ACQUIRE, Phase.AFTER) == [], "no task became ready"
    gated.opened.set()
    await mesh.idle()
    assert replica.worker.runtime.slots.free == 10


async def test_a_claim_acquires_one_slot_for_all_responses_of_a_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    four = caller("agent", lambda _: [Call(name, "peer", name) for name in "abcd"])
    replica = await mesh.replica(four, max_concurrency=2)
    await client.ask("agent", 1)
    requests = [await peer.wait_for_request(number) for number in (1, 2, 3, 4)]
    await mesh.idle()
    first = GatedMethods(replica, "claim")
    await peer.respond(requests[0], 1)
    await first.reached.wait()
    for request in requests[1:]:  # these are claimed together
        await peer.respond(request, 1)
    second = GatedMethods(replica, "claim")
    first.opened.set()
    await second.reached.wait()
    await client.ask("agent", 2)  # gets the other slot even if the claim is delayed
    await peer.wait_for_request(8)
    second.opened.set()


async def test_due_keep_alives_are_sent_in_one_batch(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), sweep_batch=20)
    tasks = {await client.ask("asker", number, idle_timeout=60) for number in range(150)}
    await peer.wait_for_request(150)
    await mesh.idle()
    published = len(replica.broker.published)
    calls = count_publishes(replica)
    await mesh.advance(20)
    notified_ids = {
        message.correlation_id for message in client.messages if message.type is MessageType.STATUS
    }
    assert notified_ids == tasks
    assert len(replica.broker.published) - published == 150
    assert len(calls) <= 8 + 1, "each batch must be one publish"


def count_publishes(replica: RunningReplica) -> list[int]:
    """Sizes of all later publishes, updated as they happen."""
    calls: list[int] = []
    publish = replica.broker.publish

    async def counting(messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        calls.append(len(messages))
        return await publish(messages)

    replica.broker.publish = counting  # type: ignore[method-assign]  # a fake
    return calls


async def test_overdue_calls_expire_in_one_sweep(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer", timeout=timedelta(seconds=60)), sweep_batch=10)
    tasks = [await client.ask("asker", number) for number in range(200)]
    await peer.wait_for_request(200)
    await mesh.advance(59)
    mesh.clock.advance(timedelta(seconds=2))
    for task_id in tasks:  # the clock stands still
        assert await client.reply(task_id) == Ok({"peer": "timeout"})


async def test_due_messages_are_sent_in_one_sweep(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), sweep_batch=10)
    replica.broker.unavailable = True
    tasks = [await client.ask("asker", number) for number in range(95)]
    for task_id in tasks:
        await mesh.events.wait(Step.ACK, Phase.AFTER, task_id=task_id)
    await mesh.advance(10)
    replica.broker.unavailable = False
    mesh.clock.advance(timedelta(seconds=1))
    await peer.wait_for_request(95)


async def test_a_silent_address_delays_no_keep_alive_and_no_other_reply(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """The queue has lost its leader, so the broker confirms nothing for it."""
    replica = await mesh.replica(asker("asker", "peer"))
    silent, published, publish = (
        await mesh.fake_peer("silent"),
        asyncio.Event(),
        replica.broker.publish,
    )

    async def publish_unconfirmed(
        messages: Sequence[tuple[Address, Message]],
    ) -> list[PublishResult]:
        if any(address == "silent.resp" for address, _ in messages):
            published.set()
            await asyncio.Event().wait()
        return await publish(messages)

    for number in range(3):
        await silent.ask("asker", number)
    silent_id = await silent.ask("asker", 4, idle_timeout=60)
    long_task_id = await client.ask("asker", 7, idle_timeout=60)
    quick_id = await client.ask("asker", 8)
    requests = {
        request.correlation_id: request
        for request in [await peer.wait_for_request(index) for index in range(1, 7)]
    }
    await mesh.idle()
    replica.broker.publish = publish_unconfirmed  # type: ignore[method-assign]  # a fake
    parents = {request.headers[Header.PARENT_TASK.value]: request for request in requests.values()}
    for task_id, request in parents.items():
        if task_id not in {long_task_id, silent_id}:
            await peer.respond(request, 1)
    await published.wait()
    assert await client.reply(quick_id) == Ok({"peer": 1})
    await mesh.advance(30)
    assert {"alive": True} in client.statuses()
    await peer.respond(parents[long_task_id], 1)
    assert await client.reply(long_task_id) == Ok({"peer": 1})


async def test_rows_that_stay_due_do_not_cause_a_busy_loop(
    mesh: Mesh, client: FakePeer, peer: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locked rows stay due without being acquired, so the next sweep waits for the interval."""
    replica = await mesh.replica(asker("asker", "peer"), sweep_batch=5)
    due = replica.store.due

    async def always_due(*args: Any) -> Any:
        counts = await due(*args)
        return type(counts)(5, 5, 5, 5, 5)

    monkeypatch.setattr(replica.store, "due", always_due)
    replica.store.calls.clear()
    mesh.clock.advance(timedelta(seconds=2))
    await mesh.idle()
    assert replica.store.calls.count("due") <= 201
    task_id = await client.ask("asker", 1)
    await peer.respond(await peer.wait_for_request(), 2)
    assert await client.reply(task_id) == Ok({"peer": 2})


async def test_a_locked_private_queue_does_not_delay_durable_deadlines(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.launch(asker("asker", "peer", timeout=timedelta(seconds=30)))
    replica.broker.locked_addresses.add("private")
    await mesh.events.wait(Step.STARTED)
    task_id = await client.ask("asker", 1)
    await peer.wait_for_request()
    await mesh.advance(40)
    assert await client.reply(task_id) == Ok({"peer": "timeout"})
    assert not replica.broker.is_consuming(replica.worker.runtime.in_process.reply_to)
    replica.broker.locked_addresses.clear()
    await mesh.advance(6)
    assert replica.broker.is_consuming(replica.worker.runtime.in_process.reply_to)


async def test_expiry_but_not_rescue_waits_for_the_shared_queue(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    first = await mesh.replica(asker("asker", "peer", timeout=timedelta(seconds=30)))
    waiting = await client.ask("asker", 1)
    await peer.respond(await peer.wait_for_request(), 2)
    await client.reply(waiting)
    second_id = await client.ask("asker", 2)
    await peer.wait_for_request(2)
    await mesh.idle()
    first.broker.locked_addresses.add("asker.resp")
    await mesh.advance(60)
    assert client.replies(second_id) == [], "a response may still wait in the unconsumed queue"
    first.broker.locked_addresses.clear()
    await mesh.advance(5)
    assert await client.reply(second_id) == Ok({"peer": "timeout"})
    assert await mesh.state(second_id) is TaskState.COMPLETED


async def test_an_undelivered_reply_is_retried_with_backoff(mesh: Mesh, client: FakePeer) -> None:
    replica = await mesh.replica(doubler)
    replica.broker.fail(*[PublishResult.OVERLOADED] * 1000, type="response")
    await client.ask("doubler", 1)
    await mesh.advance(600)
    assert len(mesh.events.matching(Step.REPLY, Phase.AFTER)) < 12


@pytest.mark.parametrize("durable", [True, False])
async def test_a_silent_reply_queue_delays_others_only_briefly(
    mesh: Mesh, client: FakePeer, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    monkeypatch.setattr(replies, "_CONFIRM_TIMEOUT", 0.01)
    replica = await mesh.replica(doubler, durable=durable, max_concurrency=2)
    publish, opened = replica.broker.publish, asyncio.Event()

    async def publish_unconfirmed(
        messages: Sequence[tuple[Address, Message]],
    ) -> list[PublishResult]:
        if any(address == "silent.resp" for address, _ in messages):
            await opened.wait()
        return await publish(messages)

    replica.broker.publish = publish_unconfirmed  # type: ignore[method-assign]  # a fake
    silent = await mesh.fake_peer("silent")
    tasks = [await silent.ask("doubler", number) for number in range(10)]
    healthy_id = await client.ask("doubler", 21)
    assert await client.reply(healthy_id) == Ok(42)
    # without a database, only this process has the replies
    for task_id in tasks if durable else ():
        await mesh.events.wait(Step.ACK, Phase.AFTER, task_id=task_id)
    opened.set()
    await mesh.advance(60)
    for number, task_id in enumerate(tasks):
        assert set(map(str, silent.replies(task_id))) == {str(Ok(2 * number))}
    assert mesh.unacked("doubler") == 0


@agent("long_task", version="1")
async def call_if_large(ctx: TaskExecutionContext, number: int) -> int:
    return number if number < 10 else await Peer("peer", int, int)(number)


async def test_a_slow_broker_loses_no_reply_of_an_in_process_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "_CONFIRM_TIMEOUT", 0)
    replica = await mesh.replica(call_if_large, durable=False, max_concurrency=4, max_in_memory=3)
    publish, quick_id = replica.broker.publish, asyncio.Event()

    async def slow(messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        if messages[0][1].type is MessageType.RESPONSE:
            await quick_id.wait()
        return await publish(messages)

    replica.broker.publish = slow  # type: ignore[method-assign]  # a fake
    paused = [await client.ask("long_task", number) for number in (10, 11)]
    requests = [await peer.wait_for_request(count) for count in (1, 2)]
    tasks = [await client.ask("long_task", number) for number in range(8)]
    await mesh.idle()
    for number, request in enumerate(requests, 10):
        await peer.respond(request, number)
    await mesh.idle()
    quick_id.set()
    await mesh.advance(60)
    assert mesh.events.matching(Step.REPLY_DROPPED) == []
    for number, task_id in [*enumerate(tasks), *enumerate(paused, 10)]:
        assert set(map(str, client.replies(task_id))) == {str(Ok(number))}
    assert mesh.unacked("long_task") == 0


async def test_a_cancelled_task_with_a_silent_requester_delays_no_message(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    publish = replica.broker.publish

    async def publish_unconfirmed(
        messages: Sequence[tuple[Address, Message]],
    ) -> list[PublishResult]:
        if any(address == "silent.resp" for address, _ in messages):
            await asyncio.Event().wait()
        return await publish(messages)

    silent = await mesh.fake_peer("silent")
    cancelled_id = await silent.ask("asker", 1)
    task_id = await client.ask("asker", 2)
    requests = [await peer.wait_for_request(number) for number in (1, 2)]
    await mesh.idle()
    replica.broker.publish = publish_unconfirmed  # type: ignore[method-assign]  # a fake
    await silent.cancel("asker", cancelled_id)
    for request in requests:
        await peer.respond(request, 2)
    assert await client.reply(task_id) == Ok({"peer": 2})
