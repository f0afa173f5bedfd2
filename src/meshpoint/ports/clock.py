"""Time, so that tests can move it."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """The replica's clock, for waiting and for tasks in memory. With a database, its instants are the database's."""

    def now(self) -> datetime:
        """The present instant, aware, in UTC."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, for measuring durations. Never steps."""

    async def sleep(self, duration: timedelta) -> None:
        """Return after `duration`."""
