"""Time behind a protocol, so that tests can control it."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """The replica's clock, used for waiting and for in-process tasks.

    With a database, instants come from the database's clock.
    """

    def now(self) -> datetime:
        """The current time as an aware UTC datetime."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start, for measuring durations. Never jumps."""

    async def sleep(self, duration: timedelta) -> None:
        """Wait for `duration`."""
