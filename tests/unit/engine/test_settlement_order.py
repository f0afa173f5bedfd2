"""Commit, publish, ack: what a crash between any two of them leaves to other replicas."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest

from fake_peer import FakePeer
from meshpoint.model.events import Phase, Step
from meshpoint.model.messages import Address, Message
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState
from meshpoint.ports.broker import Delivery, PublishResult

from .agents import Gate, asker, doubler, gated, gated_after
from .mesh import Mesh, RunningReplica


async def test_a_pause_commits_then_publishes_then_acks(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    assert mesh.events.timeline(task_id) == [
        "receive before",
        "receive after",
        "segment before",
        "segment after",
        "checkpoint before",
        "checkpoint after",
        "dispatch before",
        "dispatch after",
        "confirm_sent before",
        "confirm_sent after",
        "ack before",
        "ack after",
    ]
    mesh.events.all.clear()
    await peer.respond(request, 1)
    await client.reply(task_id)
    await mesh.idle()
    assert mesh.events.timeline(task_id) == [
        "claim before",
        "claim after",
        "ack before",
        "ack after",
        "restore before",
        "restore after",
        "segment before",
        "segment after",
        "end before",
        "end after",
        "task_completed info",
        "reply before",
        "reply after",
        "confirm_sent before",
        "confirm_sent after",
    ]


async def test_a_task_that_never_pauses_writes_nothing(mesh: Mesh, client: FakePeer) -> None:
    replica = await mesh.replica(doubler)
    await mesh.idle()
    replica.store.calls.clear()
    task_id = await client.ask("doubler", 1)
    await client.reply(task_id)
    await mesh.idle()
    assert mesh.events.timeline(task_id, Step.REPLY, Step.ACK) == [
        "reply before",
        "reply after",
        "ack before",
        "ack after",
    ]
    assert replica.store.calls == ["lookup"]


async def test_an_in_process_request_is_acked_last(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=False)
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    assert mesh.unacked("asker") == 1
    await peer.respond(request, 1)
    await client.reply(task_id)
    await mesh.idle()
    assert mesh.events.timeline(task_id)[-4:] == [
        "confirm_sent before",
        "confirm_sent after",
        "ack before",
        "ack after",
    ]
    assert mesh.unacked("asker") == 0


async def test_a_duplicate_while_its_task_waits_is_acked(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"))
    request = client.request(1)
    task_id = request.correlation_id
    await client.send("asker", request)
    call = await peer.wait_for_request()
    await mesh.idle()
    await client.send("asker", request)
    await mesh.events.wait(Step.ACK, Phase.AFTER, count=2, task_id=task_id)
    await mesh.idle()
    assert mesh.unacked("asker") == 0
    assert len(peer.requests) == 1
    await peer.respond(call, 1)
    assert await client.reply(task_id) == Ok({"peer": 1})


async def test_a_duplicate_while_its_call_is_unsent_is_acked(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """The redelivered request triggers a dispatch, so the call does not wait for a sweep."""
    first = await mesh.replica(asker("asker", "peer"), sweep_interval=timedelta(hours=1))
    first.broker.fail("not committed", type="request")
    request = client.request(1)
    await client.send("asker", request)
    await mesh.events.wait(Step.DISPATCH, Phase.FAILED)
    await mesh.idle()
    assert peer.requests == []
    await mesh.advance(6)  # the dispatch lease has expired
    assert peer.requests == []
    await client.send("asker", request)
    assert (await peer.wait_for_request()).headers["x-attempt"] == 2


async def test_a_duplicate_while_its_task_runs_elsewhere_is_acked(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    gate = Gate()
    await mesh.replica(gated_after("agent", "peer", gate))
    request = client.request(1)
    await client.send("agent", request)
    await peer.respond(await peer.wait_for_request(), 1)
    await gate.wait_reached()
    await mesh.replica(gated_after("agent", "peer", gate))
    for _ in range(2):  # one for each replica
        await client.send("agent", request)
    await mesh.idle()
    assert mesh.waiting("agent") == 0
    gate.opened.set()
    assert await client.reply(request.correlation_id) == Ok({"peer": 1})
    await mesh.idle()
    assert mesh.unacked("agent") == 0
    assert gate.visits == 1
    assert len(peer.requests) == 1


async def test_a_duplicate_while_its_task_is_ready_is_acked(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    gate = Gate()
    await mesh.replica(gated_after("agent", "peer", gate), max_concurrency=1)
    tasks = [client.request(number) for number in (1, 2)]
    for request in tasks:
        await client.send("agent", request)
    for count in (1, 2):
        await peer.respond(await peer.wait_for_request(count), 1)
    await gate.wait_reached()
    await mesh.idle()
    assert sorted([await mesh.state(task.correlation_id) or "" for task in tasks]) == [
        "ready",
        "running",
    ]
    for request in tasks:
        await client.send("agent", request)
    gate.opened.set()
    for request in tasks:
        assert await client.reply(request.correlation_id) == Ok({"peer": 1})
    await mesh.idle()
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert gate.visits == 2


async def test_a_duplicate_after_the_end_gets_the_stored_reply(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    first = await mesh.replica(asker("asker", "peer"))
    request = client.request(1)
    await client.send("asker", request)
    await peer.respond(await peer.wait_for_request(), 1)
    await client.reply(request.correlation_id)
    await mesh.idle()
    await first.crash()
    await mesh.replica(asker("asker", "peer"))
    await client.send("asker", request)
    await mesh.idle()
    assert client.replies() == [Ok({"peer": 1})] * 2
    assert len(peer.requests) == 1
    assert mesh.unacked("asker") == 0


async def test_a_task_id_used_by_another_agent_is_refused(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"), doubler)
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    await client.ask("doubler", 1, task_id=task_id)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert "'asker'" in reply.message
    client.messages.clear()
    await peer.respond(request, 1)
    assert await client.reply(task_id) == Ok({"peer": 1})


@pytest.mark.parametrize("durable", [True, False])
async def test_a_duplicate_while_its_task_runs_here_is_acked_after_the_reply(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    gate = Gate()
    replica = await mesh.replica(gated("agent", gate), durable=durable)
    request = client.request(1)
    await client.send("agent", request)
    await gate.wait_reached()
    await client.send("agent", request)
    replica.broker.lose_connection()
    await mesh.idle()
    assert mesh.unacked("agent") == 2
    gate.opened.set()
    await client.reply(request.correlation_id)
    await mesh.idle()
    assert mesh.unacked("agent") == 0
    assert gate.visits == 1
    assert len(client.replies()) == 1


async def test_a_duplicate_while_its_leased_task_runs_here_is_acked(
    mesh: Mesh, client: FakePeer
) -> None:
    """The row is enough, so the request is acked while the code still runs."""
    gate = Gate()
    await mesh.replica(gated("agent", gate), begin_at_delivery=1)
    request = client.request(1)
    await client.send("agent", request)
    await gate.wait_reached()
    await client.send("agent", request)
    await mesh.events.wait(Step.ACK, Phase.AFTER, count=2)
    assert mesh.unacked("agent") == 0
    gate.opened.set()
    await client.reply(request.correlation_id)
    assert gate.visits == 1


@pytest.mark.parametrize("durable", [True, False])
async def test_a_duplicate_during_the_ack_is_answered(
    mesh: Mesh, client: FakePeer, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    replica = await mesh.replica(gated("agent", gate), durable=durable)
    request = client.request(1)
    await client.send("agent", request)
    await gate.wait_reached()
    (segment,) = replica.worker.tasks.segments.values()
    (delivery,) = segment.deliveries
    ack, sent = delivery.ack, False

    async def slow_ack() -> bool:
        nonlocal sent
        if not sent:
            sent = True
            await client.send("agent", request)
            await mesh.idle()
        return await ack()

    monkeypatch.setattr(delivery, "ack", slow_ack)
    gate.opened.set()
    await client.reply(request.correlation_id)
    await mesh.idle()
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert replica.worker.tasks.segments == {}


async def test_the_third_delivery_is_committed_before_it_runs(
    mesh: Mesh, client: FakePeer
) -> None:
    gate = Gate()
    first = await mesh.replica(gated("agent", gate))
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    assert await mesh.state(task_id) is None
    await first.crash()
    second = await mesh.replica(gated("agent", gate))
    await gate.wait_reached(2)
    assert await mesh.state(task_id) is None
    await second.crash()
    await mesh.replica(gated("agent", gate))
    await gate.wait_reached(3)
    assert await mesh.state(task_id) is TaskState.RUNNING
    assert mesh.events.timeline(task_id)[-5:] == [
        "begin before",
        "begin after",
        "ack before",
        "ack after",
        "segment before",
    ]
    gate.opened.set()
    assert await client.reply(task_id) == Ok("done")
    assert await mesh.state(task_id) is TaskState.COMPLETED


async def test_a_request_that_kills_every_process_ends_as_failed(
    mesh: Mesh, client: FakePeer
) -> None:
    gate = Gate()
    replica = await mesh.replica(gated("agent", gate), max_attempts=3)
    request = client.request(1)
    await client.send("agent", request)
    for attempt in range(1, 6):  # twice without a row, then three times with one
        await gate.wait_reached(attempt)
        await replica.crash()
        replica = await mesh.replica(gated("agent", gate), max_attempts=3)
        if attempt >= 3:
            await mesh.advance(32)
    reply = await client.reply(request.correlation_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.ERROR
    assert "3 times" in reply.message
    assert gate.visits == 5
    (event,) = mesh.events.matching(Step.DEAD_TASK)
    assert event.task_ids == (request.correlation_id,)
    summary, _ = await mesh.task(request.correlation_id)
    assert (summary.state, summary.dead_reason) == (TaskState.FAILED, reply.message)
    assert mesh.waiting("agent") == mesh.unacked("agent") == 0


async def test_without_a_database_a_poison_request_fails_and_is_dead_lettered(
    mesh: Mesh, client: FakePeer
) -> None:
    gate = Gate()
    request = client.request(1)
    replica = await mesh.replica(gated("agent", gate), durable=False, max_attempts=2)
    await client.send("agent", request)
    for attempt in range(1, 5):
        await gate.wait_reached(attempt)
        await replica.crash()
        replica = await mesh.replica(gated("agent", gate), durable=False, max_attempts=2)
    reply = await client.reply(request.correlation_id)
    assert isinstance(reply, Failed)
    assert gate.visits == 4
    await mesh.idle()
    assert mesh.dead_reasons("agent") == [reply.message]
    assert len(mesh.events.matching(Step.DEAD_TASK)) == 1


async def test_on_receipt_the_row_is_written_and_the_request_acked_before_the_run(
    mesh: Mesh, client: FakePeer
) -> None:
    gate = Gate()
    first = await mesh.replica(gated("agent", gate), ack_policy="on_receipt")
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    assert mesh.unacked("agent") == 0
    assert await mesh.state(task_id) is TaskState.RUNNING
    assert mesh.events.timeline(task_id)[2:] == [
        "begin before",
        "begin after",
        "ack before",
        "ack after",
        "segment before",
    ]
    await first.crash()
    await mesh.replica(gated("agent", gate))
    await mesh.advance(14)
    assert gate.visits == 1
    await mesh.advance(3)
    await gate.wait_reached(2)
    gate.opened.set()
    assert await client.reply(task_id) == Ok("done")


def ack_with_replies(replica: RunningReplica) -> list[int]:
    """Let the broker ack with its publishes. Returns the number of requests acked by each."""
    acked: list[int] = []

    async def publish_acking(
        envelope: tuple[Address, Message], deliveries: Sequence[Delivery]
    ) -> PublishResult:
        (result,) = await replica.broker.publish([envelope])
        acked.append(len(deliveries))
        for delivery in deliveries:
            await delivery.ack()
        return result

    replica.broker.publish_acking = publish_acking  # type: ignore[attr-defined]  # a capability
    return acked


async def test_a_reply_without_a_row_acks_its_request(mesh: Mesh, client: FakePeer) -> None:
    acked = ack_with_replies(await mesh.replica(doubler))
    assert await client.reply(await client.ask("doubler", 1)) == Ok(2)
    await mesh.idle()
    assert acked == [1]
    assert mesh.unacked("doubler") == 0


async def test_a_request_stays_until_all_callers_have_the_reply(
    mesh: Mesh, client: FakePeer
) -> None:
    gate = Gate()
    replica = await mesh.replica(gated("agent", gate), durable=False)
    acked = ack_with_replies(replica)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    (segment,) = replica.worker.tasks.segments.values()
    segment.attach(Address("client.other"), recorded=False)
    gate.opened.set()
    assert await client.reply(task_id) == Ok("done")
    await mesh.idle()
    assert acked == []
    assert mesh.unacked("agent") == 0
