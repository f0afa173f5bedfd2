"""A caller attaches to a task from another connection, in every state of the task."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from fake_peer import FakePeer
from meshpoint import Mesh as Connection
from meshpoint import OtherRequester, StatusUpdate, TaskHandle, TaskNotFound, UnknownAgent
from meshpoint.client import attachment
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.envelopes import attach_message
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import Address, Header, MessageType
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import Attach, TaskLocked

from .agents import Gate, ScriptedAgent, asker, doubler, gated, gated_after
from .faults import LOST_IN_DOUBT, NOT_COMMITTED
from .mesh import Mesh, connected

BACKENDS = pytest.mark.parametrize("durable", [True, False])


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask again at once after each status."""
    monkeypatch.setattr(attachment, "_UNKNOWN_DELAYS", (0.0,))
    monkeypatch.setattr(attachment, "_QUEUED_DELAYS", (0.0,))


def attach(connection: Connection, agent: str, task_id: str) -> asyncio.Task[Ok[Any] | Failed]:
    """Wait for the outcome of a task in the background."""
    return asyncio.ensure_future(connection.task(agent, task_id).outcome())


def ask_again(connection: Connection, agent: str, task_id: str) -> None:
    """Let the waits for a task ask again, as they do by themselves after some seconds."""
    connection._transport._open[agent, task_id].ask_again()


async def text_error(handle: TaskHandle[Any], error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        await handle.result()
    return str(caught.value)


@BACKENDS
async def test_attach_while_the_task_waits(
    mesh: Mesh, client: FakePeer, peer: FakePeer, connection: Connection, durable: bool
) -> None:
    for _ in range(2):
        await mesh.replica(asker("asker", "peer"), durable=durable)
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    waits = [attach(connection, "asker", task_id) for _ in range(2)]
    await mesh.idle()
    await peer.respond(request, "done")
    assert await asyncio.gather(*waits) == 2 * [Ok({"peer": "done"})]
    await mesh.advance(10)
    assert await client.reply(task_id) == Ok({"peer": "done"})
    assert mesh.dead_letters("asker") == []


@BACKENDS
async def test_attach_while_the_first_segment_runs(
    mesh: Mesh, client: FakePeer, connection: Connection, durable: bool
) -> None:
    gate = Gate()
    for _ in range(3):  # in every case, no matter which replica gets the attach
        await mesh.replica(gated("agent", gate), durable=durable)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    wait = attach(connection, "agent", task_id)
    await mesh.idle()
    gate.opened.set()
    assert await wait == Ok("done")
    assert await client.reply(task_id) == Ok("done")


async def test_a_task_that_has_replied_counts_as_queued_until_its_request_is_acked(
    mesh: Mesh, client: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    replica = await mesh.replica(gated("agent", gate))
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    (segment,) = replica.worker.tasks.segments.values()
    (delivery,) = segment.deliveries
    ack = delivery.ack

    async def attach_before_ack() -> bool:
        message = attach_message(AgentName("client"), task_id, Address("client.resp"))
        await client.send_control("agent", message)
        await mesh.idle()
        return await ack()

    monkeypatch.setattr(delivery, "ack", attach_before_ack)
    gate.opened.set()
    assert await client.reply(task_id) == Ok("done")
    await mesh.idle()
    statuses = [message.headers.get(Header.ATTACH) for message in client.messages[1:]]
    assert statuses == ["queued"]


async def test_an_address_attached_in_the_first_segment_is_written_at_the_pause(
    mesh: Mesh, client: FakePeer, peer: FakePeer, connection: Connection
) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        await gate()
        return Paused([Call("peer", "peer", request)], b"state")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Done[str]:
        return Done("resumed")

    first = await mesh.replica(ScriptedAgent("agent", start, resume))
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    wait = attach(connection, "agent", task_id)
    await mesh.idle()
    gate.opened.set()
    request = await peer.wait_for_request()
    await mesh.idle()
    await first.crash()
    await mesh.replica(ScriptedAgent("agent", start, resume))
    await peer.respond(request, "done")
    assert await wait == Ok("resumed")
    await mesh.advance(10)
    assert await client.reply(task_id) == Ok("resumed")


@BACKENDS
async def test_attach_while_a_later_segment_runs(
    mesh: Mesh, client: FakePeer, peer: FakePeer, connection: Connection, durable: bool
) -> None:
    gate = Gate()
    for _ in range(2):
        await mesh.replica(gated_after("agent", "peer", gate), durable=durable)
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    await gate.wait_reached()
    wait = attach(connection, "agent", task_id)
    await mesh.idle()
    gate.opened.set()
    if not durable:  # its row is in memory, so it asks again
        ask_again(connection, "agent", task_id)
    assert await wait == Ok({"peer": 1})


async def test_attach_after_the_end(
    mesh: Mesh, client: FakePeer, peer: FakePeer, connection: Connection
) -> None:
    await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    await peer.respond(await peer.wait_for_request(), "done")
    await client.reply(task_id)
    for _ in range(2):
        assert await connection.task("asker", task_id).result() == {"peer": "done"}
    await mesh.advance(30)
    assert len(client.replies(task_id)) == 1


@BACKENDS
async def test_status_updates_reach_an_attached_caller(
    mesh: Mesh, client: FakePeer, connection: Connection, durable: bool
) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Done[str]:
        await gate()
        await ctx.update_status("halfway")
        return Done("done")

    for _ in range(2):
        await mesh.replica(ScriptedAgent("agent", start), durable=durable)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    updates = connection.task("agent", task_id).updates()
    first = asyncio.ensure_future(anext(updates))
    await mesh.idle()
    gate.opened.set()
    update = await first
    assert isinstance(update, StatusUpdate)
    assert update.message == "halfway"
    assert [each.kind async for each in updates] == ["ended"]
    assert client.statuses() == ["halfway"]


@pytest.mark.parametrize("state", ["first segment", "waiting", "ended"])
async def test_a_stranger_learns_only_the_requester(
    mesh: Mesh, client: FakePeer, peer: FakePeer, state: str
) -> None:
    gate = Gate()
    agent = gated("agent", gate) if state == "first segment" else asker("agent", "peer")
    for _ in range(2):
        await mesh.replica(agent)
    task_id = await client.ask("agent", 1)
    if state == "first segment":
        await gate.wait_reached()
    else:
        request = await peer.wait_for_request()
        if state == "ended":
            await peer.respond(request, "secret")
            await client.reply(task_id)
    await mesh.idle()
    async with connected(mesh, "stranger") as stranger:
        text = await text_error(stranger.task("agent", task_id), OtherRequester)
    owner = f"task '{task_id}' belongs to 'client', this client is 'stranger'"
    assert text == f'{owner}: connect(name="client")'
    gate.opened.set()
    if state == "waiting":
        await peer.respond(request, "secret")
    assert isinstance(await client.reply(task_id), Ok)


async def test_an_attach_with_the_address_of_another_is_refused(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("agent", "peer"))
    task_id = await client.ask("agent", 1)
    await peer.wait_for_request()
    message = attach_message(AgentName("stranger"), task_id, Address("client.resp"))
    await client.send_control("agent", message)
    await mesh.idle()
    (reason,) = mesh.dead_reasons("agent")
    assert reason == "reply_to: 'client.resp' is not an address under 'stranger'"
    assert client.messages == []


async def test_a_redelivered_attach_changes_nothing(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("agent", "peer"))
    task_id = await client.ask("agent", 1, reply_to="client.first")
    request = await peer.wait_for_request()
    for _ in range(3):
        await client.send_control(
            "agent", attach_message(AgentName("client"), task_id, Address("client.resp"))
        )
    await mesh.idle()
    statuses = [
        message.headers.get(Header.ATTACH)
        for message in client.messages
        if message.type is MessageType.STATUS
    ]
    assert statuses == 3 * ["recorded"]
    await peer.respond(request, "done")
    await mesh.advance(60)
    assert await client.reply(task_id) == Ok({"peer": "done"})


async def test_an_unknown_task_is_not_found(
    mesh: Mesh, connection: Connection, impatient: None
) -> None:
    for _ in range(2):
        await mesh.replica(doubler)
    handle = connection.task("doubler", "order-17")
    for _ in range(2):
        text = await text_error(handle, TaskNotFound)
        assert text == (
            "no task 'order-17' of 'doubler': never sent, or it has ended and its outcome is not "
            "kept (mesh.send keeps outcomes for 7 days, mesh.call need not)"
        )
    assert mesh.dead_letters("doubler") == []
    await text_error(connection.task("nobody", "order-17"), UnknownAgent)


async def test_a_task_is_found_after_it_was_unknown(
    mesh: Mesh, client: FakePeer, connection: Connection, impatient: None
) -> None:
    await mesh.replica(doubler)
    handle = connection.task("doubler", "order-17")
    await text_error(handle, TaskNotFound)
    gate = Gate()
    await mesh.replica(gated("agent", gate))
    wait = attach(connection, "agent", "order-17")
    await client.ask("agent", 1, "order-17")
    await gate.wait_reached()
    await mesh.idle()
    gate.opened.set()
    assert await wait == Ok("done")


async def test_a_task_whose_request_waits_in_the_queue_is_awaited(
    mesh: Mesh, client: FakePeer, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment, "_UNKNOWN_DELAYS", (0.0,))
    gate = Gate()
    await mesh.replica(gated("agent", gate), max_concurrency=1)
    await client.ask("agent", 1)
    await gate.wait_reached()
    for number in range(10):
        await client.ask("agent", number, f"order-{number}", keep_result=600)
    await mesh.advance(2)  # the replica leaves requests in the queue
    assert mesh.waiting("agent") > 0
    wait = attach(connection, "agent", "order-9")
    await mesh.idle()
    assert not wait.done()
    gate.opened.set()
    await client.reply("order-9")
    ask_again(connection, "agent", "order-9")
    assert await wait == Ok("done")


async def test_an_attach_reaches_a_replica_that_starts_later(
    mesh: Mesh, client: FakePeer, peer: FakePeer, connection: Connection
) -> None:
    first = await mesh.replica(asker("agent", "peer"))
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    await first.crash()
    wait = attach(connection, "agent", task_id)
    await mesh.idle()
    await mesh.replica(asker("agent", "peer"))
    await mesh.idle()
    await peer.respond(request, "done")
    assert await wait == Ok({"peer": "done"})


@pytest.mark.parametrize("fault", [NOT_COMMITTED, LOST_IN_DOUBT])
async def test_an_attach_survives_a_failed_write(
    mesh: Mesh, client: FakePeer, peer: FakePeer, connection: Connection, fault: str
) -> None:
    replica = await mesh.replica(asker("agent", "peer"))
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    replica.store.fail("attach", fault)
    wait = attach(connection, "agent", task_id)
    await mesh.advance(3)
    await peer.respond(request, "done")
    await mesh.advance(3)
    assert await wait == Ok({"peer": "done"})
    await mesh.advance(10)
    assert len(client.replies(task_id)) == 1


async def test_a_crash_between_the_end_and_its_reply_loses_no_address(
    mesh: Mesh, client: FakePeer, peer: FakePeer, connection: Connection
) -> None:
    first = await mesh.replica(asker("agent", "peer"))
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    wait = attach(connection, "agent", task_id)
    await mesh.idle()
    committed = asyncio.Event()

    async def stop_after_commit() -> None:
        committed.set()
        await asyncio.Event().wait()

    first.store.after["end"] = stop_after_commit
    await peer.respond(request, "done")
    await committed.wait()
    await first.crash()
    assert await mesh.state(task_id) is TaskState.COMPLETED
    await mesh.replica(asker("agent", "peer"))
    await mesh.advance(30)
    assert await wait == Ok({"peer": "done"})
    assert await client.reply(task_id) == Ok({"peer": "done"})


async def test_a_dead_address_does_not_delay_the_others_for_long(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("agent", "peer"))
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    async with connected(mesh) as closed:
        wait = attach(closed, "agent", task_id)
        await mesh.idle()
        wait.cancel()
        address = closed._transport.reply_to
    del mesh.exchange.queues[address]
    await peer.respond(request, "done")
    await mesh.advance(60)
    assert await client.reply(task_id) == Ok({"peer": "done"})


@BACKENDS
@pytest.mark.parametrize("place", ["running", "waiting"])
async def test_a_repeated_request_from_another_connection_gets_the_reply_too(
    mesh: Mesh,
    client: FakePeer,
    peer: FakePeer,
    connection: Connection,
    durable: bool,
    place: str,
) -> None:
    gate = Gate()
    agent = gated("agent", gate) if place == "running" else asker("agent", "peer")
    await mesh.replica(agent, durable=durable)
    await client.ask("agent", 1, "order-17")
    if place == "running":
        await gate.wait_reached()
    else:
        request = await peer.wait_for_request()
    await mesh.idle()
    again = await connection.send("agent", 1, task_id="order-17")
    await mesh.idle()
    if place == "running":
        gate.opened.set()
    else:
        await peer.respond(request, 1)
    assert isinstance(await again.outcome(), Ok)
    await mesh.advance(10)
    assert isinstance(await client.reply("order-17"), Ok)


async def test_a_task_without_an_agent_is_refused(mesh: Mesh, connection: Connection) -> None:
    task: Any = connection.task
    with pytest.raises(TypeError) as caught:
        task("order-17")
    assert str(caught.value) == 'task() needs the agent: mesh.task("travel", "order-17")'


async def test_an_early_cancel_is_the_outcome(
    mesh: Mesh, client: FakePeer, connection: Connection
) -> None:
    await mesh.replica(doubler)
    await client.cancel("doubler", "order-17")
    await mesh.idle()
    outcome = await connection.task("doubler", "order-17").outcome()
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.CANCELLED


@BACKENDS
async def test_a_reply_lost_with_the_queue_of_its_requester_arrives_after_the_outage(
    mesh: Mesh, peer: FakePeer, connection: Connection, durable: bool
) -> None:
    gate = Gate()
    await mesh.replica(gated_after("agent", "peer", gate), durable=durable)
    task = await connection.send("agent", 1)
    wait = asyncio.ensure_future(task.outcome())
    await peer.respond(await peer.wait_for_request(), "done")
    await gate.wait_reached()
    transport = connection._transport
    del mesh.exchange.queues[transport.reply_to]  # the broker has lost it
    if durable:  # an agent without a database keeps no outcomes
        gate.opened.set()
    await mesh.advance(60)
    assert not wait.done()
    await transport._broker.declare(transport.name, transport._id)
    await transport._broker.consume(transport.reply_to, 10, transport._handle_delivery)
    transport.ask_again()
    await mesh.idle()
    gate.opened.set()
    assert await wait == Ok({"peer": "done"})


async def test_status_updates_of_a_later_segment_reach_an_attached_caller(
    mesh: Mesh, client: FakePeer, peer: FakePeer, connection: Connection
) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        return Paused([Call("peer", "peer", request)], b"state")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Done[str]:
        await gate()
        await ctx.update_status("halfway")
        return Done("resumed")

    for _ in range(2):
        await mesh.replica(ScriptedAgent("agent", start, resume))
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    await gate.wait_reached()
    updates = connection.task("agent", task_id).updates()
    found = asyncio.ensure_future(_list_messages(updates))
    await mesh.idle()
    gate.opened.set()
    assert "halfway" in await found


async def _list_messages(updates: Any) -> list[Any]:
    return [each.message async for each in updates if isinstance(each, StatusUpdate)]


async def test_an_address_attached_in_the_first_segment_waits_for_a_locked_row(
    mesh: Mesh, client: FakePeer, peer: FakePeer, connection: Connection
) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        await gate()
        return Paused([Call("peer", "peer", request)], b"state")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Done[str]:
        return Done("resumed")

    replica = await mesh.replica(ScriptedAgent("agent", start, resume))
    database = replica.worker.runtime.database
    assert database is not None
    store, locked = cast(Any, database.store), 2
    attach_to_row = store.attach  # of the replica

    async def attach_unless_locked(commands: Sequence[Attach]) -> list[Any]:
        nonlocal locked
        exists = await store.task(task_id) is not None
        if exists and locked > 0:
            locked -= 1
            return [TaskLocked(each.task_id) for each in commands]
        results: list[Any] = await attach_to_row(commands)
        return results

    store.attach = attach_unless_locked
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    wait = attach(connection, "agent", task_id)
    await mesh.idle()
    gate.opened.set()
    await mesh.idle()
    await mesh.advance(10)
    request = await peer.wait_for_request()
    assert locked == 0
    await peer.respond(request, "done")
    assert await wait == Ok("resumed")
