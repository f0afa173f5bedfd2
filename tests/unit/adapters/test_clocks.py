"""System and fake clocks."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from meshpoint.adapters import clocks
from meshpoint.adapters.clocks import SystemClock
from meshpoint.testing.clock import FakeClock

SECOND = timedelta(seconds=1)


async def test_a_fake_clock_wakes_due_sleepers_earliest_first() -> None:
    clock, woken = FakeClock(), list[int]()

    async def sleeper(seconds: int) -> None:
        await clock.sleep(seconds * SECOND)
        woken.append(seconds)

    third, second, first = (asyncio.create_task(sleeper(seconds)) for seconds in (3, 2, 1))
    await clock.wait_for_sleepers(3)
    clock.advance(2 * SECOND)
    await asyncio.gather(second, first)
    assert (woken, third.done()) == ([1, 2], False)
    clock.advance(SECOND)
    await third
    assert woken == [1, 2, 3]


async def test_a_fake_clock_stands_still_until_moved() -> None:
    clock = FakeClock()
    before = clock.now()
    await clock.sleep(timedelta())
    assert clock.now() == before
    clock.advance(SECOND)
    assert clock.now() == before + SECOND


async def test_a_cancelled_sleeper_is_forgotten() -> None:
    clock = FakeClock()
    sleeper = asyncio.create_task(clock.sleep(SECOND))
    await clock.wait_for_sleepers()
    sleeper.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeper
    clock.advance(SECOND)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await clock.wait_for_sleepers()


async def test_the_system_clock_is_timezone_aware_and_advances() -> None:
    clock = SystemClock()
    before = clock.now()
    await clock.sleep(timedelta(milliseconds=1))
    assert clock.now() > before
    assert before.tzinfo is UTC


@pytest.mark.parametrize("step", [timedelta(hours=-1), timedelta(minutes=10)])
async def test_a_wall_clock_step_does_not_affect_the_system_clock(
    monkeypatch: pytest.MonkeyPatch, step: timedelta
) -> None:
    clock = SystemClock()
    before = clock.now()

    class Stepped(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + step

    monkeypatch.setattr(clocks, "datetime", Stepped)
    after = clock.now()
    assert timedelta() <= after - before < abs(step) / 2
