"""The time of this machine."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

_COUNTS_SLEEP = hasattr(time, "CLOCK_BOOTTIME")


class SystemClock:
    """A clock that goes by itself: the wall clock when it was made, carried on by the monotonic one.

    So no step of the wall clock, back or forth, stops what waits for a deadline or ends it early.
    """

    def __init__(self) -> None:
        self._made = datetime.now(UTC)
        self._made_at = self.monotonic()

    def now(self) -> datetime:
        """The present instant, in UTC."""
        return self._made + timedelta(seconds=self.monotonic() - self._made_at)

    def monotonic(self) -> float:
        """Seconds that no change of the wall clock touches. They pass while the machine sleeps, where it tells so."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) if _COUNTS_SLEEP else time.monotonic()

    async def sleep(self, duration: timedelta) -> None:
        """Return after `duration`."""
        await asyncio.sleep(duration.total_seconds())
