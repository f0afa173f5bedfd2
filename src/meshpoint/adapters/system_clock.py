"""The time of this machine."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta


class SystemClock:
    """A clock that goes by itself."""

    def now(self) -> datetime:
        """The present instant, in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds that no change of the wall clock touches."""
        return time.monotonic()

    async def sleep(self, duration: timedelta) -> None:
        """Return after `duration`."""
        await asyncio.sleep(duration.total_seconds())
