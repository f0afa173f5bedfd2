"""A replica with a wrong clock and a database with a correct one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest

from fake_peer import FakePeer
from meshpoint.adapters.clocks import DatabaseClock
from meshpoint.model.calls import Call, Done, Join, Paused
from meshpoint.model.events import Step
from meshpoint.model.messages import Header
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.testing.clock import FakeClock

from .agents import Gate, ScriptedAgent, asker, gated
from .mesh import Mesh


class SkewedClock:
    """A clock that is off by `skew` but runs at the normal rate."""

    def __init__(self, clock: FakeClock, skew: timedelta) -> None:
        self._clock, self.skew = clock, skew
        self.sleep, self.monotonic = clock.sleep, clock.monotonic

    def now(self) -> datetime:
        return self._clock.now() + self.skew


def start_with_skewed_clock(mesh: Mesh, minutes: int) -> DatabaseClock:
    """The clock of a replica whose host clock is off by `minutes`."""
    return DatabaseClock(SkewedClock(mesh.clock, timedelta(minutes=minutes)), mesh.store)


@pytest.mark.parametrize("minutes", [10, -10])
async def test_deadlines_are_judged_by_the_database(
    mesh: Mesh, client: FakePeer, peer: FakePeer, minutes: int
) -> None:
    await mesh.replica(asker("asker", "peer"), clock=start_with_skewed_clock(mesh, minutes))
    fresh_request = await client.ask("asker", 1, deadline=mesh.clock.now().timestamp() + 30)
    request = await peer.wait_for_request(1)
    await peer.respond(request, "answer")
    assert isinstance(await client.reply(fresh_request), Ok)
    late = await client.ask("asker", 2, deadline=mesh.clock.now().timestamp() - 1)
    outcome = await client.reply(late)
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.TIMEOUT


@pytest.mark.parametrize("minutes", [10, -10])
async def test_a_degraded_task_keeps_its_deadline(
    mesh: Mesh, client: FakePeer, peer: FakePeer, minutes: int
) -> None:
    clock, retry = start_with_skewed_clock(mesh, minutes), timedelta(seconds=5)
    replica = await mesh.replica(asker("asker", "peer"), clock=clock, checkpoint_retry_time=retry)
    replica.store.fail_always("pause")
    deadline = mesh.clock.now().timestamp() + 60
    answered_id = await client.ask("asker", 1, deadline=deadline)
    late = await client.ask("asker", 2, deadline=deadline)
    await mesh.advance(7)
    assert len(mesh.events.matching(Step.DEGRADED)) == 2
    requests = [await peer.wait_for_request(number) for number in (1, 2)]
    for request in requests:
        assert (
            0 < float(request.headers[Header.DEADLINE.value]) - mesh.clock.now().timestamp() < 60
        )
    (first,) = [item for item in requests if item.headers[Header.PARENT_TASK.value] == answered_id]
    await peer.respond(first, "answer")
    assert isinstance(await client.reply(answered_id), Ok)
    await mesh.advance(60)
    assert await client.reply(late) == Failed(
        FailureKind.TIMEOUT, "the task's deadline has passed while it waited for 'peer'"
    )


@pytest.mark.parametrize("minutes", [10, -10])
@pytest.mark.parametrize("durable", [True, False])
async def test_running_code_is_stopped_by_the_databases_clock(
    mesh: Mesh, client: FakePeer, minutes: int, durable: bool
) -> None:
    gate = Gate()
    clock = start_with_skewed_clock(mesh, minutes)
    await mesh.replica(gated("agent", gate), clock=clock, checkpointing=durable)
    await client.ask("agent", 1, deadline=mesh.clock.now().timestamp() + 30)
    await gate.wait_reached()
    await mesh.advance(29)
    assert gate.cancelled == 0
    await mesh.advance(1)
    assert gate.cancelled == 1


@pytest.mark.parametrize(
    "paused",
    [
        lambda: Paused([Call("a", "peer", 1, timeout=timedelta(days=365 * 8100))], b""),
        lambda: Paused([Call("a", "peer", 1, timeout=timedelta(seconds=-1))], b""),
        lambda: Paused([Call("a", "peer", 1, idle_timeout=timedelta())], b""),
        lambda: Paused([Call("a", "peer", 1)], b"", Join(deadline=timedelta.max)),
        lambda: Paused([Call("a", "peer", 1, timeout=5)], b""),  # type: ignore[arg-type]  # wrong on purpose
    ],
)
async def test_a_duration_too_long_to_store_fails_the_task_and_leaves_no_row(
    mesh: Mesh, client: FakePeer, paused: Callable[[], Paused | Done[int]]
) -> None:
    async def start(*_: object) -> Paused | Done[int]:
        return paused()

    await mesh.replica(ScriptedAgent("agent", start))
    task_id = await client.ask("agent", 1)
    outcome = await client.reply(task_id)
    assert isinstance(outcome, Failed)
    assert "must be" in outcome.message
    assert await mesh.state(task_id) is None
    assert mesh.events.matching(Step.CHECKPOINT) == []
