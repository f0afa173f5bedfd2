"""A clock that only tests advance."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta


class FakeClock:
    """A clock that stands still until `advance` is called."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._now = self._start = start
        self._sleepers: dict[asyncio.Future[None], datetime] = {}
        self._sleeper_added = asyncio.Condition()

    def now(self) -> datetime:
        """The current fake time, in UTC."""
        return self._now

    def monotonic(self) -> float:
        """Seconds by which the clock has been advanced."""
        return (self._now - self._start).total_seconds()

    async def sleep(self, duration: timedelta) -> None:
        """Sleep until the clock has been advanced by `duration`."""
        if duration <= timedelta():
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers[woken] = self._now + duration
        try:
            async with self._sleeper_added:
                self._sleeper_added.notify_all()
            await woken
        finally:
            del self._sleepers[woken]

    def advance(self, duration: timedelta) -> None:
        """Move the clock forward and wake the sleepers that are due, earliest first."""
        self._now += duration
        for woken, due in sorted(self._sleepers.items(), key=lambda sleeper: sleeper[1]):
            if due <= self._now and not woken.done():
                woken.set_result(None)

    @contextmanager
    def looking_ahead(self, duration: timedelta) -> Iterator[None]:
        """Show a time `duration` later, to code that awaits nothing. Sleepers stay asleep."""
        now, self._now = self._now, self._now + duration
        try:
            yield
        finally:
            self._now = now

    async def wait_for_sleepers(self, count: int = 1) -> None:
        """Wait until `count` tasks or more sleep on this clock, so that `advance` wakes them."""
        async with self._sleeper_added:
            await self._sleeper_added.wait_for(
                lambda: sum(not woken.done() for woken in self._sleepers) >= count
            )
