"""A replica with a wrong clock and a database with a correct one."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from meshpoint.adapters.memory.clock import FakeClock
from meshpoint.model.calls import Call, Done, Join, Paused
from meshpoint.model.events import Step
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import Scripted, asker
from .mesh import Mesh, Running
from .puppet import Puppet


class Skewed:
    """A clock that is wrong by `skew`, and goes like the others."""

    def __init__(self, clock: FakeClock, skew: timedelta) -> None:
        self._clock, self.skew = clock, skew
        self.sleep, self.monotonic = clock.sleep, clock.monotonic

    def now(self) -> datetime:
        return self._clock.now() + self.skew


def mislead(mesh: Mesh, replica: Running, skew: timedelta) -> None:
    object.__setattr__(replica.worker.site, "clock", Skewed(mesh.clock, skew))


@pytest.mark.parametrize("minutes", [10, -10])
async def test_deadlines_are_judged_by_the_database(mesh: Mesh, boss: Puppet, peer: Puppet, minutes: int) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    mislead(mesh, replica, timedelta(minutes=minutes))
    fresh = await boss.ask("asker", 1, deadline=mesh.clock.now().timestamp() + 30)
    request = await peer.request_number(1)
    await peer.respond(request, "answer")
    assert isinstance(await boss.reply(fresh), Ok)
    late = await boss.ask("asker", 2, deadline=mesh.clock.now().timestamp() - 1)
    outcome = await boss.reply(late)
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.TIMEOUT


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
