"""A run whose task is owned by another run changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.errors import BrokerUnavailable, IncompatibleState
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Address, Message
from meshpoint.model.outcomes import Ok, Outcomes
from meshpoint.model.tasks import TaskState
from meshpoint.ports.broker import PublishResult

from .agents import Gate, ScriptedAgent, doubler
from .mesh import Mesh, RunningReplica


def two_step_agent(gates: list[Gate], second_step: str) -> ScriptedAgent:
    """Calls `peer`; the second segment waits at a gate of its own and then does `second_step`."""

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        return Paused([Call("first", "peer", 1)], b"1")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Any:
        if state == b"2":
            return Done("paused twice")
        gate = Gate()
        gates.append(gate)
        await gate()
        match second_step:
            case "pause":
                return Paused([Call("second", "peer", 2)], b"2")
            case "fail":
                raise ValueError("a zombie's opinion")
            case "release":
                raise IncompatibleState("a zombie's opinion")
            case _:
                return Done(f"run {gates.index(gate) + 1}")

    return ScriptedAgent("agent", start, resume)


async def start_and_rescue(
    mesh: Mesh, client: FakePeer, peer: FakePeer, second_step: str
) -> tuple[TaskId, RunningReplica, list[Gate]]:
    """A task that runs in two replicas. The first renewed no lease, so its run is a zombie."""
    gates: list[Gate] = []
    # as if frozen
    zombie = await mesh.replica(
        two_step_agent(gates, second_step), sweep_interval=timedelta(hours=1)
    )
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    await peer.respond(request, 1)
    await mesh.idle()
    await mesh.replica(two_step_agent(gates, second_step))
    await mesh.advance(17)
    await mesh.events.wait(Step.RESCUE, Phase.AFTER)
    await mesh.idle()
    assert len(gates) == 2
    return task_id, zombie, gates


@pytest.mark.parametrize("then", ["end", "pause", "fail", "release"])
async def test_the_result_of_a_zombie_changes_nothing(
    mesh: Mesh, client: FakePeer, peer: FakePeer, then: str
) -> None:
    task_id, zombie, gates = await start_and_rescue(mesh, client, peer, then)
    before = await mesh.task(task_id)
    gates[0].opened.set()
    await mesh.idle()
    assert await mesh.task(task_id) == before
    assert client.replies() == []
    assert len(peer.requests) == 1
    assert zombie.worker.tasks.segments == {}
    fenced = mesh.events.matching(Step.FENCED)
    assert [event.replica for event in fenced] == ([] if then == "release" else [zombie.id])


async def test_the_owner_ends_the_task_once(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    task_id, zombie, gates = await start_and_rescue(mesh, client, peer, "end")
    gates[1].opened.set()
    assert await client.reply(task_id) == Ok("run 2")
    gates[0].opened.set()
    await mesh.advance(20)
    assert client.replies() == [Ok("run 2")]
    (fenced,) = mesh.events.matching(Step.FENCED)
    assert fenced.replica == zombie.id
    assert await mesh.state(task_id) is TaskState.COMPLETED


async def test_the_owner_can_pause_again(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    task_id, _, gates = await start_and_rescue(mesh, client, peer, "pause")
    gates[1].opened.set()
    second = await peer.wait_for_request(2)
    gates[0].opened.set()
    await mesh.idle()
    assert len(peer.requests) == 2
    assert await mesh.state(task_id) is TaskState.WAITING
    await peer.respond(second, 2)
    assert await client.reply(task_id) == Ok("paused twice")


async def test_a_lost_lease_stops_the_code(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    task_id, zombie, gates = await start_and_rescue(mesh, client, peer, "end")
    (segment,) = zombie.worker.tasks.segments.values()
    zombie.worker.tasks.stop_lost(segment.run)
    await mesh.idle()
    assert gates[0].cancelled == 1
    assert zombie.worker.tasks.segments == {}
    (lost,) = mesh.events.matching(Step.LEASE_LOST)
    assert lost.task_ids == (task_id,)
    gates[1].opened.set()
    assert await client.reply(task_id) == Ok("run 2")
    assert gates[1].cancelled == 0


async def test_a_lease_of_an_earlier_run_stops_nothing(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    task_id, zombie, gates = await start_and_rescue(mesh, client, peer, "end")
    (stale,) = zombie.worker.tasks.segments.values()
    owner = mesh.replicas[1]
    owner.worker.tasks.stop_lost(stale.run)
    await mesh.idle()
    assert gates[1].cancelled == 0
    assert mesh.events.matching(Step.LEASE_LOST) == []
    gates[1].opened.set()
    assert await client.reply(task_id) == Ok("run 2")


async def test_a_lease_that_ends_with_its_run_is_not_lost(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """A renewal concurrent with the end of the run finds no running row, which is not an error."""
    gates: list[Gate] = []
    replica = await mesh.replica(two_step_agent(gates, "end"))
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    await mesh.idle()
    (segment,) = replica.worker.tasks.segments.values()

    async def renewal() -> None:
        replica.worker.tasks.stop_lost(segment.run)

    replica.store.after["end"] = renewal
    gates[0].opened.set()
    assert await client.reply(task_id) == Ok("run 1")
    assert mesh.events.matching(Step.LEASE_LOST) == []


async def test_a_task_that_resumes_while_its_request_is_answered_loses_no_lease(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """A repeated request has a segment without a lease while its row is looked up."""
    gates: list[Gate] = []
    replica = await mesh.replica(two_step_agent(gates, "end"))
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()

    async def resume() -> None:
        del replica.store.after["lookup"]
        await peer.respond(request, 1)
        await mesh.events.wait(Step.RESTORE, Phase.BEFORE)

    replica.store.after["lookup"] = resume
    await client.ask("agent", 1, task_id=task_id)
    await mesh.idle()
    gates[0].opened.set()
    assert await client.reply(task_id) == Ok("run 1")
    assert mesh.events.matching(Step.LEASE_LOST) == []


async def test_concurrent_first_segments_of_one_request_are_fenced(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """A replica loses its connection, so another one gets the request too; one checkpoint wins."""
    gates: list[Gate] = []

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        gates.append(Gate())
        number = len(gates)
        await gates[-1]()
        return Paused([Call("call", "peer", number)], b"")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Done[Any]:
        return Done(outcomes["call"].value)  # type: ignore[union-attr]  # else the test fails

    first = await mesh.replica(ScriptedAgent("agent", start, resume))
    task_id = await client.ask("agent", 1)
    await mesh.idle()
    await mesh.replica(ScriptedAgent("agent", start, resume), max_concurrency=1)
    stolen = [
        subscription
        for name, subscription in first.worker._subscriptions.items()
        if name == "requests"
    ]
    await stolen[0].cancel()
    first.broker.lose_connection()
    await mesh.idle()
    assert len(gates) == 2
    gates[1].opened.set()
    request = await peer.wait_for_request()
    gates[0].opened.set()
    await mesh.idle()
    (fenced,) = mesh.events.matching(Step.FENCED)
    assert fenced.replica == first.id
    assert len(peer.requests) == 1
    await peer.respond(request, 1)
    assert await client.reply(task_id) == Ok(1)
    await mesh.idle()
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_only_one_of_two_concurrent_first_segments_replies(
    mesh: Mesh, client: FakePeer, order: tuple[int, int]
) -> None:
    gates: list[Gate] = []

    async def start(ctx: TaskExecutionContext, request: Any) -> Done[str]:
        gate = Gate()
        gates.append(gate)
        number = len(gates)
        await gate()
        return Done(f"run {number}")

    first = await mesh.replica(ScriptedAgent("agent", start))
    task_id = await client.ask("agent", 1)
    await mesh.idle()
    await mesh.replica(ScriptedAgent("agent", start), max_concurrency=1)
    await first.worker._subscriptions["requests"].cancel()
    first.broker.lose_connection()
    await mesh.idle()
    assert len(gates) == 2
    for number in order:
        gates[number].opened.set()
        await mesh.idle()
    assert await client.reply(task_id) == Ok(f"run {order[0] + 1}")
    await mesh.advance(20)
    assert client.replies() == [Ok(f"run {order[0] + 1}")]
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_request_lost_while_its_reply_is_sent_has_one_answer(
    mesh: Mesh, client: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a long freeze, the replica notices the lost request only after it sent the reply."""
    runs = count(1)

    async def start(ctx: TaskExecutionContext, request: Any) -> Done[str]:
        return Done(f"run {next(runs)}")

    first = await mesh.replica(ScriptedAgent("agent", start))
    publish = first.broker.publish

    async def publish_and_lose(messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        results = await publish(messages)
        monkeypatch.undo()
        await first.worker._subscriptions["requests"].cancel()
        first.broker.lose_connection()
        return results

    monkeypatch.setattr(first.broker, "publish", publish_and_lose)
    task_id = await client.ask("agent", 1)
    assert await client.reply(task_id) == Ok("run 1")
    await mesh.idle()
    await mesh.replica(ScriptedAgent("agent", start))
    await mesh.idle()
    await mesh.advance(20)
    assert all(reply == Ok("run 1") for reply in client.replies())  # copies of one reply
    assert next(runs) == 2
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


def lose_request_with_next_reply(replica: RunningReplica, patch: pytest.MonkeyPatch) -> None:
    """Simulate a broker outage: the next reply is lost and its request goes to other replicas."""

    async def publish_and_lose(messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        patch.undo()
        await replica.worker._subscriptions["requests"].cancel()
        replica.broker.lose_connection()
        raise BrokerUnavailable("the broker restarts")

    patch.setattr(replica.broker, "publish", publish_and_lose)


async def test_a_resent_reply_whose_request_was_lost_is_received_once(
    mesh: Mesh, client: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = count(1)

    async def start(ctx: TaskExecutionContext, request: Any) -> Done[str]:
        return Done(f"run {next(runs)}")

    first = await mesh.replica(ScriptedAgent("agent", start))
    lose_request_with_next_reply(first, monkeypatch)
    task_id = await client.ask("agent", 1)
    await mesh.events.wait(Step.BROKER_UNAVAILABLE)
    await mesh.replica(ScriptedAgent("agent", start))
    assert await client.reply(task_id) == Ok("run 2")
    await mesh.advance(20)
    assert client.replies() == [Ok("run 2")]
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


@pytest.mark.parametrize("durable", [True, False])
async def test_a_reply_whose_request_was_lost_is_sent_if_no_one_else_runs_it(
    mesh: Mesh, client: FakePeer, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    first = await mesh.replica(doubler, durable=durable)
    lose_request_with_next_reply(first, monkeypatch)
    task_id = await client.ask("doubler", 1)
    await mesh.advance(20)
    assert client.replies(task_id) == [Ok(2)]
    await mesh.replica(doubler, durable=durable)
    await mesh.advance(20)
    assert set(map(str, client.replies(task_id))) == {str(Ok(2))}
    assert len(mesh.events.matching(Step.SEGMENT, Phase.BEFORE)) == (1 if durable else 2)
    assert mesh.unacked("doubler") == mesh.waiting("doubler") == 0


async def test_a_second_begin_runs_nothing(mesh: Mesh, client: FakePeer) -> None:
    """Both copies of the request are looked up at the same time, and the rows decide."""
    gates: list[Gate] = []

    async def start(ctx: TaskExecutionContext, request: Any) -> Done[str]:
        gates.append(Gate())
        await gates[-1]()
        return Done("once")

    first = await mesh.replica(ScriptedAgent("agent", start), ack_policy="on_receipt")
    second = await mesh.replica(ScriptedAgent("agent", start), ack_policy="on_receipt")
    begin_gate = Gate()
    first.store.after["lookup"] = second.store.after["lookup"] = begin_gate
    request = client.request(1)
    await client.send("agent", request)
    await client.send("agent", request)
    await begin_gate.wait_reached(2)
    begin_gate.opened.set()
    await mesh.idle()
    assert len(gates) == 1
    gates[0].opened.set()
    assert await client.reply(request.correlation_id) == Ok("once")
    await mesh.idle()
    assert len(mesh.events.matching(Step.SEGMENT, Phase.AFTER)) == 1
    assert mesh.unacked("agent") == 0


async def test_a_replica_that_rescues_its_own_task_runs_it_once(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """It was frozen for longer than its lease and sweeps before it renews."""
    gates: list[Gate] = []
    await mesh.replica(two_step_agent(gates, "end"))
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    await mesh.advance(17)
    await mesh.events.wait(Step.RESCUE, Phase.AFTER)
    await mesh.idle()
    assert [gate.cancelled for gate in gates] == [1, 0]
    gates[1].opened.set()
    assert await client.reply(task_id) == Ok("run 2")
