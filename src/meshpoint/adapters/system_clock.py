"""The time of this machine."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta


class SystemClock:
    """A clock that goes by itself."""

    def now(self) -> datetime:
        """The present instant, in UTC."""
        return datetime.now(UTC)

    async def sleep(self, duration: timedelta) -> None:
        """Return after `duration`."""
        await asyncio.sleep(duration.total_seconds())
