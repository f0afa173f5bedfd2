"""What is repeated while something is away, and when that ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from meshpoint.adapters.memory.clock import FakeClock
from meshpoint.errors import BrokerUnavailable, StoreUnavailable
from meshpoint.lifecycle.patience import Patience
from meshpoint.model.events import Event, Step
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.ports.observer import Steps


class Heard:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def emit(self, event: Event) -> None:
        self.steps.append(event.step)


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
    """An attempt that fails so often; and each attempt that was made."""
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
    await clock.sleepers()
    assert made == [1]
    clock.advance(timedelta(seconds=2))
    await clock.sleepers()
    assert made == [1, 2]
    clock.advance(timedelta(seconds=2))
    assert await coming == "done"
    assert heard.steps == [Step.BROKER_AWAY, Step.BROKER_AWAY]


async def test_at_the_limit_the_last_failure_is_raised(patience: Patience, heard: Heard) -> None:
    attempt, made = failing(StoreUnavailable("gone"))
    with pytest.raises(StoreUnavailable, match="gone"):
        await patience.for_a_while(attempt, timedelta())
    assert made == [1]
    assert heard.steps == [Step.STORE_AWAY]


async def test_a_defect_is_not_repeated(patience: Patience, clock: FakeClock) -> None:
    attempt, made = failing(StoreUnavailable("gone"), ValueError("a defect"))
    coming = asyncio.create_task(patience.until_answered(attempt))
    await clock.sleepers()
    clock.advance(timedelta(seconds=2))
    with pytest.raises(ValueError, match="a defect"):
        await coming
    assert made == [1, 2]
