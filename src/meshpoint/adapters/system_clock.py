"""A clock based on this machine's time."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

_HAS_BOOTTIME = hasattr(time, "CLOCK_BOOTTIME")


class SystemClock:
    """The wall clock at creation, advanced by the monotonic clock.

    A step of the wall clock, in either direction, therefore neither delays nor triggers deadlines.
    """

    def __init__(self) -> None:
        self._started_at = datetime.now(UTC)
        self._started_monotonic = self.monotonic()

    def now(self) -> datetime:
        """The current time, in UTC."""
        return self._started_at + timedelta(seconds=self.monotonic() - self._started_monotonic)

    def monotonic(self) -> float:
        """Seconds unaffected by changes of the wall clock. Time asleep is included where the platform reports it."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) if _HAS_BOOTTIME else time.monotonic()

    async def sleep(self, duration: timedelta) -> None:
        """Sleep for `duration`."""
        await asyncio.sleep(duration.total_seconds())
