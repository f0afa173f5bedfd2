"""A run whose task is owned by another run changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import pytest

from meshpoint.errors import BrokerUnavailable, IncompatibleState
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.checkpoint import TaskState
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Address, Message
from meshpoint.model.options import AckPolicy
from meshpoint.model.outcomes import Ok, Outcomes
from meshpoint.ports.broker import Published

from .agents import Gate, Scripted, doubler
from .mesh import Mesh, Running
from .puppet import Puppet


def two_steps(gates: list[Gate], then: str) -> Scripted:
    """Calls `peer`; the second segment waits at a gate of its own and then does `then`."""

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        return Paused([Call("first", "peer", 1)], b"1")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Any:
        if state == b"2":
            return Done("paused twice")
        gate = Gate()
        gates.append(gate)
        await gate()
        match then:
            case "pause":
                return Paused([Call("second", "peer", 2)], b"2")
            case "fail":
                raise ValueError("a zombie's opinion")
            case "release":
                raise IncompatibleState("a zombie's opinion")
            case _:
                return Done(f"run {gates.index(gate) + 1}")

    return Scripted("agent", start, resume)


async def taken_over(mesh: Mesh, boss: Puppet, peer: Puppet, then: str) -> tuple[TaskId, Running, list[Gate]]:
    """A task that runs in two replicas. The first renewed no lease, so its run is a zombie."""
    gates: list[Gate] = []
    # as if frozen
    zombie = await mesh.replica(two_steps(gates, then), sweep_interval=timedelta(hours=1))
    task_id = await boss.ask("agent", 1)
    request = await peer.request_number()
    await mesh.settle()
    await peer.respond(request, 1)
    await mesh.settle()
    await mesh.replica(two_steps(gates, then))
    await mesh.advance(17)
    await mesh.events.wait(Step.TAKE_OVER, Phase.AFTER)
    await mesh.settle()
    assert len(gates) == 2
    return task_id, zombie, gates


@pytest.mark.parametrize("then", ["end", "pause", "fail", "release"])
async def test_what_a_zombie_comes_to_changes_nothing(mesh: Mesh, boss: Puppet, peer: Puppet, then: str) -> None:
    task_id, zombie, gates = await taken_over(mesh, boss, peer, then)
    before = await mesh.task(task_id)
    gates[0].opened.set()
    await mesh.settle()
    assert await mesh.task(task_id) == before
    assert boss.replies() == []
    assert len(peer.requests) == 1
    assert zombie.worker.segments.live == {}
    fenced = mesh.events.of(Step.FENCED)
    assert [event.replica for event in fenced] == ([] if then == "release" else [zombie.id])


async def test_the_owner_ends_it_once(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    task_id, zombie, gates = await taken_over(mesh, boss, peer, "end")
    gates[1].opened.set()
    assert await boss.reply(task_id) == Ok("run 2")
    gates[0].opened.set()
    await mesh.advance(20)
    assert boss.replies() == [Ok("run 2")]
    (fenced,) = mesh.events.of(Step.FENCED)
    assert fenced.replica == zombie.id
    assert await mesh.state(task_id) is TaskState.COMPLETED


async def test_the_owner_goes_on_to_another_pause(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    task_id, _, gates = await taken_over(mesh, boss, peer, "pause")
    gates[1].opened.set()
    second = await peer.request_number(2)
    gates[0].opened.set()
    await mesh.settle()
    assert len(peer.requests) == 2
    assert await mesh.state(task_id) is TaskState.WAITING
    await peer.respond(second, 2)
    assert await boss.reply(task_id) == Ok("paused twice")


async def test_a_lost_lease_stops_the_code(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    task_id, zombie, gates = await taken_over(mesh, boss, peer, "end")
    (segment,) = zombie.worker.segments.live.values()
    zombie.worker.segments.lose(segment.run)
    await mesh.settle()
    assert gates[0].cancelled == 1
    assert zombie.worker.segments.live == {}
    (lost,) = mesh.events.of(Step.LEASE_LOST)
    assert lost.task_ids == (task_id,)
    gates[1].opened.set()
    assert await boss.reply(task_id) == Ok("run 2")
    assert gates[1].cancelled == 0


async def test_a_lease_of_an_earlier_run_stops_nothing(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    task_id, zombie, gates = await taken_over(mesh, boss, peer, "end")
    (stale,) = zombie.worker.segments.live.values()
    owner = mesh.replicas[1]
    owner.worker.segments.lose(stale.run)
    await mesh.settle()
    assert gates[1].cancelled == 0
    assert mesh.events.of(Step.LEASE_LOST) == []
    gates[1].opened.set()
    assert await boss.reply(task_id) == Ok("run 2")


async def test_a_lease_that_ends_with_its_run_is_not_lost(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """A renewal concurrent with the end of the run finds no running row, which is not an error."""
    gates: list[Gate] = []
    replica = await mesh.replica(two_steps(gates, "end"))
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 1)
    await mesh.settle()
    (segment,) = replica.worker.segments.live.values()

    async def renewal() -> None:
        replica.worker.segments.lose(segment.run)

    replica.store.after["end"] = renewal
    gates[0].opened.set()
    assert await boss.reply(task_id) == Ok("run 1")
    assert mesh.events.of(Step.LEASE_LOST) == []


async def test_two_first_segments_of_one_request(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """A replica loses its connection, so another one gets the request too; one checkpoint wins."""
    gates: list[Gate] = []

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        gates.append(Gate())
        number = len(gates)
        await gates[-1]()
        return Paused([Call("call", "peer", number)], b"")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Done[Any]:
        return Done(outcomes["call"].value)  # type: ignore[union-attr]

    first = await mesh.replica(Scripted("agent", start, resume))
    task_id = await boss.ask("agent", 1)
    await mesh.settle()
    await mesh.replica(Scripted("agent", start, resume), max_concurrency=1)
    stolen = [subscription for name, subscription in first.worker._subscriptions.items() if name == "requests"]
    await stolen[0].cancel()
    first.broker.lose_connection()
    await mesh.settle()
    assert len(gates) == 2
    gates[1].opened.set()
    request = await peer.request_number()
    gates[0].opened.set()
    await mesh.settle()
    (fenced,) = mesh.events.of(Step.FENCED)
    assert fenced.replica == first.id
    assert len(peer.requests) == 1
    await peer.respond(request, 1)
    assert await boss.reply(task_id) == Ok(1)
    await mesh.settle()
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_of_two_first_segments_that_end_without_a_pause_one_answers(
    mesh: Mesh, boss: Puppet, order: tuple[int, int]
) -> None:
    gates: list[Gate] = []

    async def start(ctx: TaskExecutionContext, request: Any) -> Done[str]:
        gate = Gate()
        gates.append(gate)
        number = len(gates)
        await gate()
        return Done(f"run {number}")

    first = await mesh.replica(Scripted("agent", start))
    task_id = await boss.ask("agent", 1)
    await mesh.settle()
    await mesh.replica(Scripted("agent", start), max_concurrency=1)
    await first.worker._subscriptions["requests"].cancel()
    first.broker.lose_connection()
    await mesh.settle()
    assert len(gates) == 2
    for number in order:
        gates[number].opened.set()
        await mesh.settle()
    assert await boss.reply(task_id) == Ok(f"run {order[0] + 1}")
    await mesh.advance(20)
    assert boss.replies() == [Ok(f"run {order[0] + 1}")]
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_request_lost_while_its_reply_is_sent_has_one_answer(
    mesh: Mesh, boss: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a long freeze, the replica notices the lost request only after it sent the reply."""
    runs = count(1)

    async def start(ctx: TaskExecutionContext, request: Any) -> Done[str]:
        return Done(f"run {next(runs)}")

    first = await mesh.replica(Scripted("agent", start))
    publish = first.broker.publish

    async def publish_and_lose(messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        words = await publish(messages)
        monkeypatch.undo()
        await first.worker._subscriptions["requests"].cancel()
        first.broker.lose_connection()
        return words

    monkeypatch.setattr(first.broker, "publish", publish_and_lose)
    task_id = await boss.ask("agent", 1)
    assert await boss.reply(task_id) == Ok("run 1")
    await mesh.settle()
    await mesh.replica(Scripted("agent", start))
    await mesh.settle()
    await mesh.advance(20)
    assert all(reply == Ok("run 1") for reply in boss.replies())  # copies of one reply
    assert next(runs) == 2
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


def lose_the_request_with_the_next_reply(replica: Running, patch: pytest.MonkeyPatch) -> None:
    """Simulate a broker outage: the next reply is lost and its request goes to other replicas."""

    async def lose(messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        patch.undo()
        await replica.worker._subscriptions["requests"].cancel()
        replica.broker.lose_connection()
        raise BrokerUnavailable("the broker restarts")

    patch.setattr(replica.broker, "publish", lose)


async def test_a_reply_that_is_sent_again_after_its_request_was_lost_has_one_answer(
    mesh: Mesh, boss: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = count(1)

    async def start(ctx: TaskExecutionContext, request: Any) -> Done[str]:
        return Done(f"run {next(runs)}")

    first = await mesh.replica(Scripted("agent", start))
    lose_the_request_with_the_next_reply(first, monkeypatch)
    task_id = await boss.ask("agent", 1)
    await mesh.events.wait(Step.BROKER_AWAY)
    await mesh.replica(Scripted("agent", start))
    assert await boss.reply(task_id) == Ok("run 2")
    await mesh.advance(20)
    assert boss.replies() == [Ok("run 2")]
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


@pytest.mark.parametrize("durable", [True, False])
async def test_a_reply_whose_request_was_lost_is_sent_though_nobody_else_runs_it(
    mesh: Mesh, boss: Puppet, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    first = await mesh.replica(doubler, durable=durable)
    lose_the_request_with_the_next_reply(first, monkeypatch)
    task_id = await boss.ask("doubler", 1)
    await mesh.advance(20)
    assert boss.replies(task_id) == [Ok(2)]
    await mesh.replica(doubler, durable=durable)
    await mesh.advance(20)
    assert set(map(str, boss.replies(task_id))) == {str(Ok(2))}
    assert len(mesh.events.of(Step.SEGMENT, Phase.BEFORE)) == (1 if durable else 2)
    assert mesh.unacked("doubler") == mesh.waiting("doubler") == 0


async def test_a_begin_that_comes_second_runs_nothing(mesh: Mesh, boss: Puppet) -> None:
    """Both copies of the request are looked up at the same time, and the rows decide."""
    gates: list[Gate] = []

    async def start(ctx: TaskExecutionContext, request: Any) -> Done[str]:
        gates.append(Gate())
        await gates[-1]()
        return Done("once")

    first = await mesh.replica(Scripted("agent", start), ack_policy=AckPolicy.ON_RECEIPT)
    second = await mesh.replica(Scripted("agent", start), ack_policy=AckPolicy.ON_RECEIPT)
    both = Gate()
    first.store.after["lookup"] = second.store.after["lookup"] = both
    request = boss.request(1)
    await boss.send("agent", request)
    await boss.send("agent", request)
    await both.reach(2)
    both.opened.set()
    await mesh.settle()
    assert len(gates) == 1
    gates[0].opened.set()
    assert await boss.reply(request.correlation_id) == Ok("once")
    await mesh.settle()
    assert len(mesh.events.of(Step.SEGMENT, Phase.AFTER)) == 1
    assert mesh.unacked("agent") == 0


async def test_a_replica_that_takes_over_from_itself_runs_the_task_once(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    """It was frozen for longer than its lease and sweeps before it renews."""
    gates: list[Gate] = []
    await mesh.replica(two_steps(gates, "end"))
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 1)
    await mesh.advance(17)
    await mesh.events.wait(Step.TAKE_OVER, Phase.AFTER)
    await mesh.settle()
    assert [gate.cancelled for gate in gates] == [1, 0]
    gates[1].opened.set()
    assert await boss.reply(task_id) == Ok("run 2")
