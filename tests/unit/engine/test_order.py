"""Commit, publish, ack: what a crash between any two of them leaves to other replicas."""

from __future__ import annotations

from datetime import timedelta

import pytest

from meshpoint.model.checkpoint import TaskState
from meshpoint.model.events import Phase, Step
from meshpoint.model.options import AckPolicy
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import Gate, asker, doubler, gated, gated_after
from .mesh import Mesh
from .puppet import Puppet


async def test_commit_publish_ack(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await mesh.settle()
    assert mesh.events.story(task_id) == [
        "receive before",
        "receive after",
        "segment before",
        "segment after",
        "checkpoint before",
        "checkpoint after",
        "dispatch before",
        "dispatch after",
        "mark before",
        "mark after",
        "ack before",
        "ack after",
    ]
    mesh.events.all.clear()
    await peer.respond(request, 1)
    await boss.reply(task_id)
    await mesh.settle()
    assert mesh.events.story(task_id) == [
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
        "reply before",
        "reply after",
        "mark before",
        "mark after",
    ]


async def test_a_task_that_never_pauses_writes_nothing(mesh: Mesh, boss: Puppet) -> None:
    replica = await mesh.replica(doubler)
    await mesh.settle()
    replica.store.calls.clear()
    task_id = await boss.ask("doubler", 1)
    await boss.reply(task_id)
    await mesh.settle()
    assert mesh.events.story(task_id, Step.REPLY, Step.ACK) == [
        "reply before",
        "reply after",
        "ack before",
        "ack after",
    ]
    assert replica.store.calls == ["lookup"]


async def test_in_memory_the_request_is_acked_last(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"), durable=False)
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await mesh.settle()
    assert mesh.unacked("asker") == 1
    await peer.respond(request, 1)
    await boss.reply(task_id)
    await mesh.settle()
    assert mesh.events.story(task_id)[-4:] == ["mark before", "mark after", "ack before", "ack after"]
    assert mesh.unacked("asker") == 0


async def test_again_while_its_task_waits(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"))
    request = boss.request(1)
    task_id = request.correlation_id
    await boss.send("asker", request)
    call = await peer.request_number()
    await mesh.settle()
    await boss.send("asker", request)
    await mesh.events.wait(Step.ACK, Phase.AFTER, count=2, task_id=task_id)
    await mesh.settle()
    assert mesh.unacked("asker") == 0
    assert len(peer.requests) == 1
    await peer.respond(call, 1)
    assert await boss.reply(task_id) == Ok({"peer": 1})


async def test_again_while_its_call_is_due_for_dispatch(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """The redelivered request triggers a dispatch, so the call does not wait for a sweep."""
    first = await mesh.replica(asker("asker", "peer"), sweep_interval=timedelta(hours=1))
    first.broker.fail("not committed", type="request")
    request = boss.request(1)
    await boss.send("asker", request)
    await mesh.events.wait(Step.DISPATCH, Phase.FAILED)
    await mesh.settle()
    assert peer.requests == []
    await mesh.advance(6)  # the dispatch lease has expired
    assert peer.requests == []
    await boss.send("asker", request)
    assert (await peer.request_number()).headers["x-attempt"] == 2


async def test_again_while_its_task_runs_elsewhere(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    gate = Gate()
    await mesh.replica(gated_after("agent", "peer", gate))
    request = boss.request(1)
    await boss.send("agent", request)
    await peer.respond(await peer.request_number(), 1)
    await gate.reach()
    await mesh.replica(gated_after("agent", "peer", gate))
    for _ in range(2):  # one for each replica
        await boss.send("agent", request)
    await mesh.settle()
    assert mesh.waiting("agent") == 0
    gate.opened.set()
    assert await boss.reply(request.correlation_id) == Ok({"peer": 1})
    await mesh.settle()
    assert mesh.unacked("agent") == 0
    assert gate.visits == 1
    assert len(peer.requests) == 1


async def test_again_while_its_task_is_ready(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    gate = Gate()
    await mesh.replica(gated_after("agent", "peer", gate), max_concurrency=1)
    tasks = [boss.request(number) for number in (1, 2)]
    for request in tasks:
        await boss.send("agent", request)
    for count in (1, 2):
        await peer.respond(await peer.request_number(count), 1)
    await gate.reach()
    await mesh.settle()
    assert sorted([await mesh.state(each.correlation_id) or "" for each in tasks]) == ["ready", "running"]
    for request in tasks:
        await boss.send("agent", request)
    gate.opened.set()
    for request in tasks:
        assert await boss.reply(request.correlation_id) == Ok({"peer": 1})
    await mesh.settle()
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert gate.visits == 2


async def test_again_after_the_end_the_stored_reply_is_sent_again(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    first = await mesh.replica(asker("asker", "peer"))
    request = boss.request(1)
    await boss.send("asker", request)
    await peer.respond(await peer.request_number(), 1)
    await boss.reply(request.correlation_id)
    await mesh.settle()
    await first.crash()
    await mesh.replica(asker("asker", "peer"))
    await boss.send("asker", request)
    await mesh.settle()
    assert boss.replies() == [Ok({"peer": 1})] * 2
    assert len(peer.requests) == 1
    assert mesh.unacked("asker") == 0


async def test_a_task_id_of_another_agent(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"), doubler)
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await mesh.settle()
    await boss.ask("doubler", 1, task_id=task_id)
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert "'asker'" in reply.message
    boss.letters.clear()
    await peer.respond(request, 1)
    assert await boss.reply(task_id) == Ok({"peer": 1})


@pytest.mark.parametrize("durable", [True, False])
async def test_again_while_it_runs_here(mesh: Mesh, boss: Puppet, durable: bool) -> None:
    gate = Gate()
    replica = await mesh.replica(gated("agent", gate), durable=durable)
    request = boss.request(1)
    await boss.send("agent", request)
    await gate.reach()
    await boss.send("agent", request)
    replica.broker.lose_connection()
    await mesh.settle()
    assert mesh.unacked("agent") == 2
    gate.opened.set()
    await boss.reply(request.correlation_id)
    await mesh.settle()
    assert mesh.unacked("agent") == 0
    assert gate.visits == 1
    assert len(boss.replies()) == 1


async def test_again_while_it_runs_here_under_a_lease(mesh: Mesh, boss: Puppet) -> None:
    """The row is enough, so the request is acked while the code still runs."""
    gate = Gate()
    await mesh.replica(gated("agent", gate), begin_at_delivery=1)
    request = boss.request(1)
    await boss.send("agent", request)
    await gate.reach()
    await boss.send("agent", request)
    await mesh.events.wait(Step.ACK, Phase.AFTER, count=2)
    assert mesh.unacked("agent") == 0
    gate.opened.set()
    await boss.reply(request.correlation_id)
    assert gate.visits == 1


@pytest.mark.parametrize("durable", [True, False])
async def test_again_at_the_very_moment_of_the_ack(
    mesh: Mesh, boss: Puppet, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    replica = await mesh.replica(gated("agent", gate), durable=durable)
    request = boss.request(1)
    await boss.send("agent", request)
    await gate.reach()
    (segment,) = replica.worker.segments.live.values()
    (delivery,) = segment.deliveries
    ack, sent = delivery.ack, False

    async def slow_ack() -> bool:
        nonlocal sent
        if not sent:
            sent = True
            await boss.send("agent", request)
            await mesh.settle()
        return await ack()

    monkeypatch.setattr(delivery, "ack", slow_ack)
    gate.opened.set()
    await boss.reply(request.correlation_id)
    await mesh.settle()
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert replica.worker.segments.live == {}


async def test_the_third_delivery_is_written_first(mesh: Mesh, boss: Puppet) -> None:
    gate = Gate()
    first = await mesh.replica(gated("agent", gate))
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    assert await mesh.state(task_id) is None
    await first.crash()
    second = await mesh.replica(gated("agent", gate))
    await gate.reach(2)
    assert await mesh.state(task_id) is None
    await second.crash()
    await mesh.replica(gated("agent", gate))
    await gate.reach(3)
    assert await mesh.state(task_id) is TaskState.RUNNING
    assert mesh.events.story(task_id)[-5:] == [
        "begin before",
        "begin after",
        "ack before",
        "ack after",
        "segment before",
    ]
    gate.opened.set()
    assert await boss.reply(task_id) == Ok("done")
    assert await mesh.state(task_id) is TaskState.COMPLETED


async def test_a_request_that_kills_every_process_ends_as_failed(mesh: Mesh, boss: Puppet) -> None:
    gate = Gate()
    replica = await mesh.replica(gated("agent", gate), max_attempts=3)
    request = boss.request(1)
    await boss.send("agent", request)
    for death in range(1, 6):  # twice without a row, then three times with one
        await gate.reach(death)
        await replica.crash()
        replica = await mesh.replica(gated("agent", gate), max_attempts=3)
        if death >= 3:
            await mesh.advance(32)
    reply = await boss.reply(request.correlation_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.ERROR
    assert "3 times" in reply.message
    assert gate.visits == 5
    (dead,) = mesh.events.of(Step.DEAD_TASK)
    assert dead.task_ids == (request.correlation_id,)
    summary, _ = await mesh.task(request.correlation_id)
    assert (summary.state, summary.dead_reason) == (TaskState.FAILED, reply.message)
    assert mesh.waiting("agent") == mesh.unacked("agent") == 0


async def test_without_a_database_it_ends_as_failed_and_among_the_dead_letters(mesh: Mesh, boss: Puppet) -> None:
    gate = Gate()
    request = boss.request(1)
    replica = await mesh.replica(gated("agent", gate), durable=False, max_attempts=2)
    await boss.send("agent", request)
    for death in range(1, 5):
        await gate.reach(death)
        await replica.crash()
        replica = await mesh.replica(gated("agent", gate), durable=False, max_attempts=2)
    reply = await boss.reply(request.correlation_id)
    assert isinstance(reply, Failed)
    assert gate.visits == 4
    await mesh.settle()
    assert mesh.dead_reasons("agent") == [reply.message]
    assert len(mesh.events.of(Step.DEAD_TASK)) == 1


async def test_on_receipt_the_row_is_written_and_the_request_acked_before_the_run(mesh: Mesh, boss: Puppet) -> None:
    gate = Gate()
    first = await mesh.replica(gated("agent", gate), ack_policy=AckPolicy.ON_RECEIPT)
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    assert mesh.unacked("agent") == 0
    assert await mesh.state(task_id) is TaskState.RUNNING
    assert mesh.events.story(task_id)[2:] == [
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
    await gate.reach(2)
    gate.opened.set()
    assert await boss.reply(task_id) == Ok("done")
