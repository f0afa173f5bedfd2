"""Timeouts, joins, deadlines and grace periods."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.model.calls import ALL, AT_LEAST, FIRST, Call, Done, Join, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.messages import Header
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState

from .agents import Gate, ScriptedAgent, asker, caller, gated_after
from .mesh import Mesh

BACKENDS = pytest.mark.parametrize("durable", [True, False])


def seconds(count: float) -> timedelta:
    return timedelta(seconds=count)


def calling_three(join: Join = ALL, **call: Any) -> ScriptedAgent:
    """Calls `peer` three times, as a, b and c."""
    return caller("three", lambda _: [Call(name, "peer", name, **call) for name in "abc"], join)


async def ask_three(peer: FakePeer) -> dict[str, Any]:
    """The three requests, by call name."""
    requests = [await peer.wait_for_request(count) for count in (1, 2, 3)]
    return dict(zip("abc", requests, strict=True))


@BACKENDS
async def test_a_call_without_a_response_in_time_times_out(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    await mesh.replica(calling_three(timeout=seconds(60)), durable=durable)
    task_id = await client.ask("three", 1)
    requests = await ask_three(peer)
    await peer.respond(requests["a"], 1)
    await mesh.advance(59)
    assert client.replies() == []
    assert peer.cancels() == []
    await mesh.advance(2)
    assert client.replies(task_id) == [Ok({"a": 1, "b": "timeout", "c": "timeout"})]
    await mesh.advance(20)
    assert sorted(peer.cancels()) == sorted(requests[name].correlation_id for name in "bc")
    await peer.respond(requests["b"], "late")
    await mesh.idle()
    assert len(client.replies()) == 1


@BACKENDS
async def test_calls_expire_at_their_own_timeouts(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    agent = caller(
        "agent", lambda _: [Call(f"{s}", "peer", s, timeout=seconds(s)) for s in (20, 40)]
    )
    await mesh.replica(agent, durable=durable)
    task_id = await client.ask("agent", 1)
    first, second = await peer.wait_for_request(1), await peer.wait_for_request(2)
    await mesh.advance(22)
    assert peer.cancels() == [first.correlation_id]
    assert client.replies() == []
    await peer.respond(second, "in time")
    assert await client.reply(task_id) == Ok({"20": "timeout", "40": "in time"})
    await mesh.advance(30)
    assert peer.cancels() == [first.correlation_id]


async def test_the_default_timeout_is_the_agents_peer_timeout(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"), peer_timeout=seconds(45))
    task_id = await client.ask("asker", 1)
    await mesh.advance(44)
    assert client.replies() == []
    await mesh.advance(2)
    assert client.replies(task_id) == [Ok({"peer": "timeout"})]


@BACKENDS
async def test_a_first_join_completes_with_the_first_response(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    await mesh.replica(calling_three(FIRST), durable=durable)
    task_id = await client.ask("three", 1)
    requests = await ask_three(peer)
    await peer.respond(requests["a"], Failed(FailureKind.ERROR, "no"))
    await mesh.idle()
    assert client.replies() == []
    await peer.respond(requests["b"], 2)
    assert await client.reply(task_id) == Ok({"a": "error", "b": 2, "c": "cancelled"})
    assert await peer.wait_for_cancels() == [requests["c"].correlation_id]
    await mesh.advance(30)
    assert len(peer.cancels()) == 1


@BACKENDS
async def test_an_at_least_join_completes_with_enough_responses(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    await mesh.replica(calling_three(AT_LEAST(2)), durable=durable)
    task_id = await client.ask("three", 1)
    requests = await ask_three(peer)
    await peer.respond(requests["c"], 3)
    await mesh.idle()
    assert client.replies() == []
    await peer.respond(requests["a"], 1)
    assert await client.reply(task_id) == Ok({"a": 1, "b": "cancelled", "c": 3})
    assert await peer.wait_for_cancels() == [requests["b"].correlation_id]


@BACKENDS
async def test_a_join_that_cannot_be_met_ends_early(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    await mesh.replica(calling_three(AT_LEAST(2)), durable=durable)
    task_id = await client.ask("three", 1)
    requests = await ask_three(peer)
    await peer.respond(requests["a"], Failed(FailureKind.ERROR))
    await peer.respond(requests["b"], Failed(FailureKind.ERROR))
    await mesh.idle()
    assert client.replies() == []
    await peer.respond(requests["c"], 3)
    assert await client.reply(task_id) == Ok({"a": "error", "b": "error", "c": 3})
    assert peer.cancels() == []


@BACKENDS
@pytest.mark.parametrize("join", [ALL, AT_LEAST(2), FIRST])
async def test_a_within_join_completes_at_its_deadline(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool, join: Join
) -> None:
    await mesh.replica(calling_three(join.within(seconds(30))), durable=durable)
    task_id = await client.ask("three", 1)
    requests = await ask_three(peer)
    answer: Any = Failed(FailureKind.ERROR) if join is FIRST else 1
    await peer.respond(requests["a"], answer)
    await mesh.advance(29)
    assert client.replies() == []
    await mesh.advance(2)
    answered_request = "error" if join is FIRST else 1
    assert client.replies(task_id) == [Ok({"a": answered_request, "b": "timeout", "c": "timeout"})]
    await mesh.idle()
    assert sorted(peer.cancels()) == sorted(requests[name].correlation_id for name in "bc")


async def test_obsolete_calls_are_cancelled_once(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """The outbox and the sweep's result both have the expired calls; each cancel is sent once."""
    replica = await mesh.replica(calling_three(FIRST, timeout=seconds(20)))
    task_id = await client.ask("three", 1)
    requests = await ask_three(peer)
    await mesh.advance(25)
    assert client.replies(task_id) == [Ok(dict.fromkeys("abc", "timeout"))]
    cancels = [
        message.correlation_id
        for _, message in replica.broker.published
        if message.type == "cancel"
    ]
    assert sorted(cancels) == sorted(request.correlation_id for request in requests.values())


async def test_a_join_met_while_all_slots_are_taken_resumes_later(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        if request == "block":
            await gate()
            return Done("unblocked")
        return Paused([Call(name, "peer", name) for name in "ab"], b"", FIRST)

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        return Done(sorted(type(outcome).__name__ for outcome in outcomes.values()))

    await mesh.replica(ScriptedAgent("agent", start, resume), max_concurrency=1)
    task_id = await client.ask("agent", 1)
    a, b = await peer.wait_for_request(1), await peer.wait_for_request(2)
    await mesh.idle()
    await client.ask("agent", "block")
    await gate.wait_reached()
    await peer.respond(a, 1)
    assert await peer.wait_for_cancels() == [b.correlation_id]
    assert await mesh.state(task_id) is TaskState.READY
    gate.opened.set()
    assert await client.reply(task_id) == Ok(["Failed", "Ok"])


async def test_after_a_start_a_queued_answer_beats_the_timeout(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    first = await mesh.replica(asker("asker", "peer", timeout=seconds(30)))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    await first.crash()
    await peer.respond(request, "in time")
    await mesh.advance(60)
    await mesh.replica(asker("asker", "peer"))
    await mesh.advance(3)
    assert client.replies(task_id) == [Ok({"peer": "in time"})]


async def test_after_a_start_calls_expire_only_after_the_grace_period(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    first = await mesh.replica(asker("asker", "peer", timeout=seconds(30)))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    await first.crash()
    await mesh.advance(60)
    await mesh.replica(asker("asker", "peer"), settle_time=seconds(3))
    await mesh.advance(2)
    assert client.replies() == []
    await peer.respond(request, "just in time")
    assert await client.reply(task_id) == Ok({"peer": "just in time"})


@pytest.mark.parametrize("unavailable_service", ["store", "broker"])
async def test_after_a_slow_start_a_queued_response_beats_the_timeout(
    mesh: Mesh, client: FakePeer, peer: FakePeer, unavailable_service: str
) -> None:
    first = await mesh.replica(asker("asker", "peer", timeout=seconds(30)))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    await first.crash()
    second = await mesh.launch(
        asker("asker", "peer"), unavailable_service=unavailable_service, settle_time=seconds(5)
    )
    await mesh.advance(10)
    mesh.clock.advance(seconds(30))
    second.store.unavailable = second.broker.unavailable = False
    await mesh.advance(3)
    assert client.replies() == []
    await peer.respond(request, "in time")
    assert await client.reply(task_id) == Ok({"peer": "in time"})


async def test_after_a_database_outage_an_unacked_response_beats_the_timeout(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(
        asker("asker", "peer", timeout=seconds(30)), settle_time=seconds(3)
    )
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    replica.store.unavailable = True
    await mesh.advance(20)
    await peer.respond(request, "in time")
    await mesh.advance(40)
    replica.store.unavailable = False
    replica.store.fail("claim", "not committed")  # the sweeper runs before the claim is repeated
    await mesh.advance(10)
    assert client.replies(task_id) == [Ok({"peer": "in time"})]


async def test_after_a_broker_outage_a_queued_response_beats_the_timeout(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(
        asker("asker", "peer", timeout=seconds(30)), settle_time=seconds(3)
    )
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    replica.broker.unavailable = True
    await mesh.advance(60)
    assert mesh.events.matching(Step.EXPIRE, Phase.AFTER) == []
    replica.broker.unavailable = False
    await mesh.advance(1)
    await peer.respond(request, "in time")
    await mesh.advance(10)
    assert client.replies(task_id) == [Ok({"peer": "in time"})]


async def test_after_an_outage_owners_renew_before_their_tasks_are_rescued(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    gate = Gate()
    owner = await mesh.replica(gated_after("agent", "peer", gate))
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    await gate.wait_reached()
    other = await mesh.replica(gated_after("agent", "peer", gate))
    owner.store.unavailable = other.store.unavailable = True
    await mesh.advance(60)
    owner.store.unavailable = other.store.unavailable = False
    await mesh.advance(10)
    (segment,) = owner.worker.tasks.segments.values()
    assert await mesh.store.renew([segment.run], owner.worker.runtime.replica) == []
    await mesh.advance(10)
    assert mesh.events.matching(Step.RESCUE, Phase.AFTER) == []
    gate.opened.set()
    assert await client.reply(task_id) == Ok({"peer": 1})


async def test_peers_get_the_deadline_minus_a_margin(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    agent = caller("agent", lambda s: [Call("call", "peer", 1, timeout=seconds(s))])
    await mesh.replica(agent, deadline_margin=seconds(0.5))
    await client.ask("agent", 20)
    assert (await peer.wait_for_request(1)).headers[Header.DEADLINE.value] == mesh.deadline_in(
        19.5
    )
    await client.ask("agent", 20, deadline=mesh.deadline_in(10))
    assert (await peer.wait_for_request(2)).headers[Header.DEADLINE.value] == mesh.deadline_in(9.5)
    await client.ask("agent", 5, deadline=mesh.deadline_in(10))
    assert (await peer.wait_for_request(3)).headers[Header.DEADLINE.value] == mesh.deadline_in(4.5)


async def test_a_deadline_is_passed_down_level_by_level(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("one", "two"), asker("two", "peer"), deadline_margin=seconds(0.5))
    await client.ask("one", 1, deadline=mesh.deadline_in(10))
    request = await peer.wait_for_request()
    assert request.headers[Header.DEADLINE.value] == mesh.deadline_in(9)
    assert request.headers[Header.CALL_DEPTH.value] == 2


@BACKENDS
async def test_a_task_waits_no_longer_than_its_deadline(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable)
    task_id = await client.ask("asker", 1, deadline=mesh.deadline_in(10))
    await peer.wait_for_request()
    await mesh.advance(9)
    assert client.replies() == []
    await mesh.advance(2)
    assert client.replies(task_id) == [
        Failed(FailureKind.TIMEOUT, "the task's deadline has passed while it waited for 'peer'")
    ]


@BACKENDS
async def test_a_pause_past_the_deadline_ends_the_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        await gate()
        return Paused([Call("call", "peer", 1)], b"")

    await mesh.replica(ScriptedAgent("agent", start), durable=durable)
    task_id = await client.ask("agent", 1, deadline=mesh.deadline_in(10))
    await gate.wait_reached()
    await mesh.advance(11)
    gate.opened.set()
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.TIMEOUT
    await mesh.idle()
    assert peer.requests == []
    assert mesh.unacked("agent") == 0


async def test_a_pause_resets_the_attempts(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        return Paused([Call("call", "peer", 1)], b"0")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        await gate()
        times = int(state) + 1
        return (
            Done(times)
            if times == 3
            else Paused([Call("call", "peer", times)], str(times).encode())
        )

    replica = await mesh.replica(ScriptedAgent("agent", start, resume), max_attempts=2)
    task_id = await client.ask("agent", 1)
    for count in (1, 2, 3):  # each segment crashes once
        gate.opened.clear()
        await peer.respond(await peer.wait_for_request(count), 1)
        await gate.wait_reached(2 * count - 1)
        await replica.crash()
        replica = await mesh.replica(ScriptedAgent("agent", start, resume), max_attempts=2)
        await mesh.advance(17)
        await gate.wait_reached(2 * count)
        gate.opened.set()
    assert await client.reply(task_id) == Ok(3)


async def test_tombstones_are_purged(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    await client.reply(task_id)
    await mesh.idle()
    await mesh.advance(61)
    assert await mesh.state(task_id) is TaskState.COMPLETED
    mesh.clock.advance(timedelta(days=1))
    await mesh.advance(61)
    assert await mesh.state(task_id) is None
    assert len(mesh.events.matching(Step.PURGE, Phase.AFTER)) == 1


def count_keep_alives(mesh: Mesh) -> list[Event]:
    """All events except sweeps and the start of queries for due work."""
    return [
        event
        for event in mesh.events.all
        if event.step is not Step.SWEEP
        and not (event.step.is_search and event.phase is Phase.BEFORE)
    ]


async def test_nothing_is_written_while_nothing_is_due(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    await client.ask("asker", 1)
    await peer.wait_for_request()
    await mesh.advance(20)
    events = len(count_keep_alives(mesh))
    replica.store.calls.clear()
    await mesh.advance(10)
    assert len(count_keep_alives(mesh)) == events
    assert replica.store.calls == ["due"] * 10
    assert mesh.events.matching(Step.SEGMENT, Phase.FAILED) == []
