"""A replica with a wrong clock and a database with a correct one."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from meshpoint.adapters.database_clock import DatabaseClock
from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.model.calls import Call, Done, Join, Paused
from meshpoint.model.events import Step
from meshpoint.model.messages import Header
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import Scripted, asker
from .mesh import Mesh
from .puppet import Puppet


class Skewed:
    """A clock that is off by `skew` but runs at the normal rate."""

    def __init__(self, clock: FakeClock, skew: timedelta) -> None:
        self._clock, self.skew = clock, skew
        self.sleep, self.monotonic = clock.sleep, clock.monotonic

    def now(self) -> datetime:
        return self._clock.now() + self.skew


def misled(mesh: Mesh, minutes: int) -> DatabaseClock:
    """The clock of a replica whose host clock is off by `minutes`."""
    return DatabaseClock(Skewed(mesh.clock, timedelta(minutes=minutes)), mesh.store)


@pytest.mark.parametrize("minutes", [10, -10])
async def test_deadlines_are_judged_by_the_database(mesh: Mesh, boss: Puppet, peer: Puppet, minutes: int) -> None:
    await mesh.replica(asker("asker", "peer"), clock=misled(mesh, minutes))
    fresh = await boss.ask("asker", 1, deadline=mesh.clock.now().timestamp() + 30)
    request = await peer.request_number(1)
    await peer.respond(request, "answer")
    assert isinstance(await boss.reply(fresh), Ok)
    late = await boss.ask("asker", 2, deadline=mesh.clock.now().timestamp() - 1)
    outcome = await boss.reply(late)
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.TIMEOUT


@pytest.mark.parametrize("minutes", [10, -10])
async def test_a_task_that_falls_back_to_memory_keeps_its_deadline(
    mesh: Mesh, boss: Puppet, peer: Puppet, minutes: int
) -> None:
    clock, retry = misled(mesh, minutes), timedelta(seconds=5)
    replica = await mesh.replica(asker("asker", "peer"), clock=clock, checkpoint_retry_time=retry)
    replica.store.fail_always("pause")
    deadline = mesh.clock.now().timestamp() + 60
    answered = await boss.ask("asker", 1, deadline=deadline)
    late = await boss.ask("asker", 2, deadline=deadline)
    await mesh.advance(7)
    assert len(mesh.events.of(Step.DEGRADED)) == 2
    requests = [await peer.request_number(number) for number in (1, 2)]
    for request in requests:
        assert 0 < float(request.headers[Header.DEADLINE.value]) - mesh.clock.now().timestamp() < 60  # type: ignore[arg-type]
    (first,) = [each for each in requests if each.headers[Header.PARENT_TASK.value] == answered]
    await peer.respond(first, "answer")
    assert isinstance(await boss.reply(answered), Ok)
    await mesh.advance(60)
    assert await boss.reply(late) == Ok({"peer": "timeout"})


@pytest.mark.parametrize(
    "paused",
    [
        lambda: Paused([Call("a", "peer", 1, timeout=timedelta(days=365 * 8100))], b""),
        lambda: Paused([Call("a", "peer", 1, timeout=timedelta(seconds=-1))], b""),
        lambda: Paused([Call("a", "peer", 1, idle_timeout=timedelta())], b""),
        lambda: Paused([Call("a", "peer", 1)], b"", Join(deadline=timedelta.max)),
        lambda: Paused([Call("a", "peer", 1, timeout=5)], b""),  # type: ignore[arg-type]
    ],
)
async def test_a_duration_that_cannot_be_kept_fails_the_task_and_leaves_nothing(
    mesh: Mesh, boss: Puppet, paused: object
) -> None:
    async def start(*_: object) -> Paused | Done[int]:
        return paused()  # type: ignore[operator, no-any-return]

    await mesh.replica(Scripted("agent", start))
    task_id = await boss.ask("agent", 1)
    outcome = await boss.reply(task_id)
    assert isinstance(outcome, Failed)
    assert "must be" in outcome.message
    assert await mesh.state(task_id) is None
    assert mesh.events.of(Step.CHECKPOINT) == []
