"""Which failures are retried during an outage, and when retrying ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from meshpoint.engine.retry import Retry
from meshpoint.errors import BrokerUnavailable, StoreUnavailable
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.ports.observer import Steps
from meshpoint.testing.clock import FakeClock
from recorded_events import RecordedEvents


@pytest.fixture
def recorded() -> RecordedEvents:
    return RecordedEvents()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def retry(recorded: RecordedEvents, clock: FakeClock) -> Retry:
    return Retry(clock, Steps(recorded, AgentName("a"), ReplicaId("r")))


def failing_attempts(*errors: Exception) -> tuple[Callable[[], Awaitable[str]], list[int]]:
    """An attempt that raises `errors` in order and then succeeds, and a list of its calls."""
    remaining_errors, attempt_times = list(errors), list[int]()

    async def attempt() -> str:
        attempt_times.append(len(attempt_times) + 1)
        if remaining_errors:
            raise remaining_errors.pop(0)
        return "done"

    return attempt, attempt_times


async def test_an_unavailable_service_is_retried_after_a_delay(
    retry: Retry, recorded: RecordedEvents, clock: FakeClock
) -> None:
    attempt, attempt_times = failing_attempts(
        BrokerUnavailable("gone"), BrokerUnavailable("still gone")
    )
    task = asyncio.create_task(retry.until_available(attempt))
    await clock.wait_for_sleepers()
    assert attempt_times == [1]
    clock.advance(timedelta(seconds=2))
    await clock.wait_for_sleepers()
    assert attempt_times == [1, 2]
    clock.advance(timedelta(seconds=2))
    assert await task == "done"
    assert recorded.steps == [Step.BROKER_UNAVAILABLE]


async def test_an_outage_is_reported_with_backoff_until_it_ends(
    retry: Retry, recorded: RecordedEvents, clock: FakeClock
) -> None:
    for _ in range(600):
        retry.record_outage(StoreUnavailable("gone"))
        retry.record_outage(BrokerUnavailable("gone"))
        clock.advance(timedelta(seconds=1))
    for is_down in (Step.STORE_UNAVAILABLE, Step.BROKER_UNAVAILABLE):
        assert recorded.steps.count(is_down) == 4  # at once, and after 1, 3 and 7 minutes
    assert retry.record_recovery()
    assert retry.record_broker_recovery()
    assert not retry.record_recovery()
    assert recorded.all[-2].step is Step.STORE_AVAILABLE
    assert recorded.all[-2].detail == {"seconds": 600}
    assert recorded.all[-1].step is Step.BROKER_AVAILABLE


async def test_a_flapping_broker_is_not_reported_each_time(
    retry: Retry, recorded: RecordedEvents, clock: FakeClock
) -> None:
    for _ in range(50):
        retry.record_outage(BrokerUnavailable("gone"))
        clock.advance(timedelta(seconds=1))
        retry.record_broker_recovery()
        clock.advance(timedelta(seconds=1))
    assert recorded.steps.count(Step.BROKER_UNAVAILABLE) == 2
    clock.advance(timedelta(minutes=10))
    retry.record_outage(BrokerUnavailable("gone"))
    assert recorded.steps.count(Step.BROKER_UNAVAILABLE) == 3


async def test_at_the_limit_the_last_failure_is_raised(
    retry: Retry, recorded: RecordedEvents
) -> None:
    attempt, attempt_times = failing_attempts(StoreUnavailable("gone"))
    with pytest.raises(StoreUnavailable, match="gone"):
        await retry.for_at_most(attempt, timedelta())
    assert attempt_times == [1]
    assert recorded.steps == [Step.STORE_UNAVAILABLE]


async def test_a_defect_is_not_retried(retry: Retry, clock: FakeClock) -> None:
    attempt, attempt_times = failing_attempts(StoreUnavailable("gone"), ValueError("a defect"))
    task = asyncio.create_task(retry.until_available(attempt))
    await clock.wait_for_sleepers()
    clock.advance(timedelta(seconds=2))
    with pytest.raises(ValueError, match="a defect"):
        await task
    assert attempt_times == [1, 2]
