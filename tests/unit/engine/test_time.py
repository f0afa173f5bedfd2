"""Timeouts, joins, deadlines and grace periods."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from meshpoint.model.calls import ALL, AT_LEAST, FIRST, Call, Done, Join, Paused
from meshpoint.model.checkpoint import TaskState
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import LOOKS, Event, Phase, Step
from meshpoint.model.messages import Header
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import Gate, Scripted, asker, caller, gated_after
from .mesh import Mesh
from .puppet import Puppet

HOMES = pytest.mark.parametrize("durable", [True, False])


def seconds(count: float) -> timedelta:
    return timedelta(seconds=count)


def three(join: Join = ALL, **call: Any) -> Scripted:
    """Calls `peer` three times, as a, b and c."""
    return caller("three", lambda _: [Call(name, "peer", name, **call) for name in "abc"], join)


async def asked(peer: Puppet) -> dict[str, Any]:
    """The three requests, by call name."""
    requests = [await peer.request_number(count) for count in (1, 2, 3)]
    return dict(zip("abc", requests, strict=True))


@HOMES
async def test_a_call_that_is_not_answered_in_time(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    await mesh.replica(three(timeout=seconds(60)), durable=durable)
    task_id = await boss.ask("three", 1)
    requests = await asked(peer)
    await peer.respond(requests["a"], 1)
    await mesh.advance(59)
    assert boss.replies() == []
    assert peer.cancels() == []
    await mesh.advance(2)
    assert boss.replies(task_id) == [Ok({"a": 1, "b": "timeout", "c": "timeout"})]
    await mesh.advance(20)
    assert sorted(peer.cancels()) == sorted(requests[name].correlation_id for name in "bc")
    await peer.respond(requests["b"], "late")
    await mesh.settle()
    assert len(boss.replies()) == 1


@HOMES
async def test_some_calls_expire_before_others(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    agent = caller("agent", lambda _: [Call(f"{s}", "peer", s, timeout=seconds(s)) for s in (20, 40)])
    await mesh.replica(agent, durable=durable)
    task_id = await boss.ask("agent", 1)
    first, second = await peer.request_number(1), await peer.request_number(2)
    await mesh.advance(22)
    assert peer.cancels() == [first.correlation_id]
    assert boss.replies() == []
    await peer.respond(second, "in time")
    assert await boss.reply(task_id) == Ok({"20": "timeout", "40": "in time"})
    await mesh.advance(30)
    assert peer.cancels() == [first.correlation_id]


async def test_the_default_is_the_agents_peer_timeout(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"), peer_timeout=seconds(45))
    task_id = await boss.ask("asker", 1)
    await mesh.advance(44)
    assert boss.replies() == []
    await mesh.advance(2)
    assert boss.replies(task_id) == [Ok({"peer": "timeout"})]


@HOMES
async def test_first(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    await mesh.replica(three(FIRST), durable=durable)
    task_id = await boss.ask("three", 1)
    requests = await asked(peer)
    await peer.respond(requests["a"], Failed(FailureKind.ERROR, "no"))
    await mesh.settle()
    assert boss.replies() == []
    await peer.respond(requests["b"], 2)
    assert await boss.reply(task_id) == Ok({"a": "error", "b": 2, "c": "cancelled"})
    assert await peer.cancelled() == [requests["c"].correlation_id]
    await mesh.advance(30)
    assert len(peer.cancels()) == 1


@HOMES
async def test_at_least(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    await mesh.replica(three(AT_LEAST(2)), durable=durable)
    task_id = await boss.ask("three", 1)
    requests = await asked(peer)
    await peer.respond(requests["c"], 3)
    await mesh.settle()
    assert boss.replies() == []
    await peer.respond(requests["a"], 1)
    assert await boss.reply(task_id) == Ok({"a": 1, "b": "cancelled", "c": 3})
    assert await peer.cancelled() == [requests["b"].correlation_id]


@HOMES
async def test_a_join_that_can_no_longer_be_met(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    await mesh.replica(three(AT_LEAST(2)), durable=durable)
    task_id = await boss.ask("three", 1)
    requests = await asked(peer)
    await peer.respond(requests["a"], Failed(FailureKind.ERROR))
    await peer.respond(requests["b"], Failed(FailureKind.ERROR))
    await mesh.settle()
    assert boss.replies() == []
    await peer.respond(requests["c"], 3)
    assert await boss.reply(task_id) == Ok({"a": "error", "b": "error", "c": 3})
    assert peer.cancels() == []


@HOMES
@pytest.mark.parametrize("join", [ALL, AT_LEAST(2), FIRST])
async def test_within_a_deadline(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool, join: Join) -> None:
    await mesh.replica(three(join.within(seconds(30))), durable=durable)
    task_id = await boss.ask("three", 1)
    requests = await asked(peer)
    answer: Any = Failed(FailureKind.ERROR) if join is FIRST else 1
    await peer.respond(requests["a"], answer)
    await mesh.advance(29)
    assert boss.replies() == []
    await mesh.advance(2)
    of_a = "error" if join is FIRST else 1
    assert boss.replies(task_id) == [Ok({"a": of_a, "b": "timeout", "c": "timeout"})]
    await mesh.settle()
    assert sorted(peer.cancels()) == sorted(requests[name].correlation_id for name in "bc")


async def test_losers_are_told_once(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """The outbox and the sweep's result both have the expired calls; each cancel is sent once."""
    replica = await mesh.replica(three(FIRST, timeout=seconds(20)))
    task_id = await boss.ask("three", 1)
    requests = await asked(peer)
    await mesh.advance(25)
    assert boss.replies(task_id) == [Ok(dict.fromkeys("abc", "timeout"))]
    cancels = [message.correlation_id for _, message in replica.broker.published if message.type == "cancel"]
    assert sorted(cancels) == sorted(request.correlation_id for request in requests.values())


async def test_a_join_met_while_all_slots_are_taken(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        if request == "block":
            await gate()
            return Done("unblocked")
        return Paused([Call(name, "peer", name) for name in "ab"], b"", FIRST)

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        return Done(sorted(type(each).__name__ for each in outcomes.values()))

    await mesh.replica(Scripted("agent", start, resume), max_concurrency=1)
    task_id = await boss.ask("agent", 1)
    a, b = await peer.request_number(1), await peer.request_number(2)
    await mesh.settle()
    await boss.ask("agent", "block")
    await gate.reach()
    await peer.respond(a, 1)
    assert await peer.cancelled() == [b.correlation_id]
    assert await mesh.state(task_id) is TaskState.READY
    gate.opened.set()
    assert await boss.reply(task_id) == Ok(["Failed", "Ok"])


async def test_after_a_start_a_queued_answer_beats_the_timeout(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    first = await mesh.replica(asker("asker", "peer", timeout=seconds(30)))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await mesh.settle()
    await first.crash()
    await peer.respond(request, "in time")
    await mesh.advance(60)
    await mesh.replica(asker("asker", "peer"))
    await mesh.advance(3)
    assert boss.replies(task_id) == [Ok({"peer": "in time"})]


async def test_after_a_start_it_looks_only_when_answers_had_their_time(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    first = await mesh.replica(asker("asker", "peer", timeout=seconds(30)))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await mesh.settle()
    await first.crash()
    await mesh.advance(60)
    await mesh.replica(asker("asker", "peer"), settle_time=seconds(3))
    await mesh.advance(2)
    assert boss.replies() == []
    await peer.respond(request, "just in time")
    assert await boss.reply(task_id) == Ok({"peer": "just in time"})


@pytest.mark.parametrize("away", ["store", "broker"])
async def test_after_a_start_that_took_long(mesh: Mesh, boss: Puppet, peer: Puppet, away: str) -> None:
    first = await mesh.replica(asker("asker", "peer", timeout=seconds(30)))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await mesh.settle()
    await first.crash()
    second = await mesh.launch(asker("asker", "peer"), away=away, settle_time=seconds(5))
    await mesh.advance(10)
    mesh.clock.advance(seconds(30))
    second.store.away = second.broker.away = False
    await mesh.advance(3)
    assert boss.replies() == []
    await peer.respond(request, "in time")
    assert await boss.reply(task_id) == Ok({"peer": "in time"})


async def test_after_an_outage_of_the_database_a_held_answer_beats_the_timeout(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    replica = await mesh.replica(asker("asker", "peer", timeout=seconds(30)), settle_time=seconds(3))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await mesh.settle()
    replica.store.away = True
    await mesh.advance(20)
    await peer.respond(request, "in time")
    await mesh.advance(40)
    replica.store.away = False
    replica.store.fail("claim", "not committed")  # the sweeper runs before the claim is repeated
    await mesh.advance(10)
    assert boss.replies(task_id) == [Ok({"peer": "in time"})]


async def test_after_an_outage_of_the_broker_a_queued_answer_beats_the_timeout(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    replica = await mesh.replica(asker("asker", "peer", timeout=seconds(30)), settle_time=seconds(3))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await mesh.settle()
    replica.broker.away = True
    await mesh.advance(60)
    assert mesh.events.of(Step.EXPIRE, Phase.AFTER) == []
    replica.broker.away = False
    await mesh.advance(1)
    await peer.respond(request, "in time")
    await mesh.advance(10)
    assert boss.replies(task_id) == [Ok({"peer": "in time"})]


async def test_after_an_outage_owners_renew_before_their_tasks_are_taken(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    gate = Gate()
    owner = await mesh.replica(gated_after("agent", "peer", gate))
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 1)
    await gate.reach()
    other = await mesh.replica(gated_after("agent", "peer", gate))
    owner.store.away = other.store.away = True
    await mesh.advance(60)
    owner.store.away = other.store.away = False
    await mesh.advance(10)
    (segment,) = owner.worker.segments.live.values()
    assert await mesh.store.renew([segment.run], owner.worker.site.replica) == []
    await mesh.advance(10)
    assert mesh.events.of(Step.TAKE_OVER, Phase.AFTER) == []
    gate.opened.set()
    assert await boss.reply(task_id) == Ok({"peer": 1})


async def test_peers_get_the_deadline_less_a_margin(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    agent = caller("agent", lambda s: [Call("call", "peer", 1, timeout=seconds(s))])
    await mesh.replica(agent, deadline_margin=seconds(0.5))
    await boss.ask("agent", 20)
    assert (await peer.request_number(1)).headers[Header.DEADLINE.value] == mesh.in_seconds(19.5)
    await boss.ask("agent", 20, deadline=mesh.in_seconds(10))
    assert (await peer.request_number(2)).headers[Header.DEADLINE.value] == mesh.in_seconds(9.5)
    await boss.ask("agent", 5, deadline=mesh.in_seconds(10))
    assert (await peer.request_number(3)).headers[Header.DEADLINE.value] == mesh.in_seconds(4.5)


async def test_a_deadline_is_handed_down_level_by_level(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("one", "two"), asker("two", "peer"), deadline_margin=seconds(0.5))
    await boss.ask("one", 1, deadline=mesh.in_seconds(10))
    request = await peer.request_number()
    assert request.headers[Header.DEADLINE.value] == mesh.in_seconds(9)
    assert request.headers[Header.CALL_DEPTH.value] == 2


@HOMES
async def test_a_task_waits_no_longer_than_its_deadline(
    mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable)
    task_id = await boss.ask("asker", 1, deadline=mesh.in_seconds(10))
    await peer.request_number()
    await mesh.advance(9)
    assert boss.replies() == []
    await mesh.advance(2)
    assert boss.replies(task_id) == [Ok({"peer": "timeout"})]


@HOMES
async def test_a_pause_past_the_deadline_ends_the_task(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        await gate()
        return Paused([Call("call", "peer", 1)], b"")

    await mesh.replica(Scripted("agent", start), durable=durable)
    task_id = await boss.ask("agent", 1, deadline=mesh.in_seconds(10))
    await gate.reach()
    await mesh.advance(11)
    gate.opened.set()
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.TIMEOUT
    await mesh.settle()
    assert peer.requests == []
    assert mesh.unacked("agent") == 0


async def test_a_pause_resets_the_attempts(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        return Paused([Call("call", "peer", 1)], b"0")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        await gate()
        times = int(state) + 1
        return Done(times) if times == 3 else Paused([Call("call", "peer", times)], str(times).encode())

    replica = await mesh.replica(Scripted("agent", start, resume), max_attempts=2)
    task_id = await boss.ask("agent", 1)
    for count in (1, 2, 3):  # each segment crashes once
        gate.opened.clear()
        await peer.respond(await peer.request_number(count), 1)
        await gate.reach(2 * count - 1)
        await replica.crash()
        replica = await mesh.replica(Scripted("agent", start, resume), max_attempts=2)
        await mesh.advance(17)
        await gate.reach(2 * count)
        gate.opened.set()
    assert await boss.reply(task_id) == Ok(3)


async def test_tombstones_are_purged(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"))
    task_id = await boss.ask("asker", 1)
    await peer.respond(await peer.request_number(), 1)
    await boss.reply(task_id)
    await mesh.settle()
    await mesh.advance(61)
    assert await mesh.state(task_id) is TaskState.COMPLETED
    mesh.clock.advance(timedelta(days=1))
    await mesh.advance(61)
    assert await mesh.state(task_id) is None
    assert len(mesh.events.of(Step.PURGE, Phase.AFTER)) == 1


def told(mesh: Mesh) -> list[Event]:
    """All events except sweeps and the start of queries for due work."""
    return [
        event
        for event in mesh.events.all
        if event.step is not Step.SWEEP and (event.step not in LOOKS or event.phase is not Phase.BEFORE)
    ]


async def test_nothing_is_written_while_nothing_is_due(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    await boss.ask("asker", 1)
    await peer.request_number()
    await mesh.advance(20)
    events = len(told(mesh))
    replica.store.calls.clear()
    await mesh.advance(10)
    assert len(told(mesh)) == events
    assert replica.store.calls == ["due"] * 10
    assert mesh.events.of(Step.SEGMENT, Phase.FAILED) == []
