"""Which failures are retried during an outage, and when retrying ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.engine.retry import Patience
from meshpoint.errors import BrokerUnavailable, StoreUnavailable
from meshpoint.model.events import Event, Step
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.ports.observer import Steps


class Heard:
    """Records events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    @property
    def steps(self) -> list[Step]:
        return [event.step for event in self.events]

    def emit(self, event: Event) -> None:
        self.events.append(event)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def patience(heard: Heard, clock: FakeClock) -> Patience:
    return Patience(clock, Steps(heard, AgentName("a"), ReplicaId("r")))


def failing(*errors: Exception) -> tuple[Callable[[], Awaitable[str]], list[int]]:
    """An attempt that raises `errors` in order and then succeeds, and a list of its calls."""
    left, made = list(errors), list[int]()

    async def attempt() -> str:
        made.append(len(made) + 1)
        if left:
            raise left.pop(0)
        return "done"

    return attempt, made


async def test_what_is_away_is_asked_again_after_a_while(patience: Patience, heard: Heard, clock: FakeClock) -> None:
    attempt, made = failing(BrokerUnavailable("gone"), BrokerUnavailable("still gone"))
    coming = asyncio.create_task(patience.until_answered(attempt))
    await clock.wait_for_sleepers()
    assert made == [1]
    clock.advance(timedelta(seconds=2))
    await clock.wait_for_sleepers()
    assert made == [1, 2]
    clock.advance(timedelta(seconds=2))
    assert await coming == "done"
    assert heard.steps == [Step.BROKER_AWAY]


async def test_an_outage_is_reported_less_and_less_often_until_its_end(
    patience: Patience, heard: Heard, clock: FakeClock
) -> None:
    for _ in range(600):
        patience.note_away(StoreUnavailable("gone"))
        patience.note_away(BrokerUnavailable("gone"))
        clock.advance(timedelta(seconds=1))
    for away in (Step.STORE_AWAY, Step.BROKER_AWAY):
        assert heard.steps.count(away) == 4  # at once, and after 1, 3 and 7 minutes
    assert patience.note_back()
    assert patience.note_broker_back()
    assert not patience.note_back()
    assert heard.events[-2].step is Step.STORE_BACK
    assert heard.events[-2].detail == {"seconds": 600}
    assert heard.events[-1].step is Step.BROKER_BACK


async def test_a_broker_that_comes_and_goes_is_not_reported_each_time(
    patience: Patience, heard: Heard, clock: FakeClock
) -> None:
    for _ in range(50):
        patience.note_away(BrokerUnavailable("gone"))
        clock.advance(timedelta(seconds=1))
        patience.note_broker_back()
        clock.advance(timedelta(seconds=1))
    assert heard.steps.count(Step.BROKER_AWAY) == 2
    clock.advance(timedelta(minutes=10))
    patience.note_away(BrokerUnavailable("gone"))
    assert heard.steps.count(Step.BROKER_AWAY) == 3


async def test_at_the_limit_the_last_failure_is_raised(patience: Patience, heard: Heard) -> None:
    attempt, made = failing(StoreUnavailable("gone"))
    with pytest.raises(StoreUnavailable, match="gone"):
        await patience.for_a_while(attempt, timedelta())
    assert made == [1]
    assert heard.steps == [Step.STORE_AWAY]


async def test_a_defect_is_not_repeated(patience: Patience, clock: FakeClock) -> None:
    attempt, made = failing(StoreUnavailable("gone"), ValueError("a defect"))
    coming = asyncio.create_task(patience.until_answered(attempt))
    await clock.wait_for_sleepers()
    clock.advance(timedelta(seconds=2))
    with pytest.raises(ValueError, match="a defect"):
        await coming
    assert made == [1, 2]
