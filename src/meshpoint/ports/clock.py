"""Time behind a protocol, so that tests can control it, and outages measured with it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Protocol

_FIRST_INTERVAL = 60.0
_MAX_INTERVAL = 900.0
"""Seconds between reports of one outage."""


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


class OutageTracker:
    """Decides when to report an outage of one service: at its start, then at growing intervals.

    `active`: the last attempt failed. `clock` returns monotonic seconds.

    An outage that starts within a minute of the last one continues its report schedule, so that a
    flapping server is not reported every time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.active = False
        self._started_at = self._ended_at = float("-inf")
        self._reported = False
        self._next_report_at = float("-inf")
        self._interval = _FIRST_INTERVAL

    def record_failure(self) -> float | None:
        """Record a failed attempt.

        Returns the outage's length in seconds if a report is due, otherwise `None`.
        """
        now = self._clock()
        if not self.active:
            self.active, self._started_at, self._reported = True, now, False
            if now - self._ended_at >= _FIRST_INTERVAL:
                self._next_report_at, self._interval = now, _FIRST_INTERVAL
        if now < self._next_report_at:
            return None
        self._next_report_at = now + self._interval
        self._interval = min(2 * self._interval, _MAX_INTERVAL)
        self._reported = True
        return now - self._started_at

    def record_success(self) -> tuple[float, bool]:
        """Record a successful attempt.

        Returns the outage's length in seconds and whether it had been reported.
        """
        if not self.active:
            return 0.0, False
        self.active, self._ended_at = False, self._clock()
        return self._ended_at - self._started_at, self._reported
