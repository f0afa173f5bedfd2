"""Report a service outage at its start, at increasing intervals, and at its end."""

from __future__ import annotations

from collections.abc import Callable

_FIRST_INTERVAL = 60.0
_LONGEST_INTERVAL = 900.0
"""Seconds between reports of one outage."""


class Outage:
    """Tracks outages of one service. `clock` returns monotonic seconds.

    An outage that starts within a minute of the last one continues its report schedule, so that a
    flapping server is not reported every time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None
        self._ended = float("-inf")
        self._reported = False
        self._next_report = float("-inf")
        self._interval = _FIRST_INTERVAL

    @property
    def active(self) -> bool:
        """Whether the last attempt failed."""
        return self._since is not None

    def failed(self) -> float | None:
        """Record a failed attempt.

        Returns the outage's length in seconds if a report is due, otherwise `None`.
        """
        now = self._clock()
        if self._since is None:
            self._since, self._reported = now, False
            if now - self._ended >= _FIRST_INTERVAL:
                self._next_report, self._interval = now, _FIRST_INTERVAL
        if now < self._next_report:
            return None
        self._next_report = now + self._interval
        self._interval = min(2 * self._interval, _LONGEST_INTERVAL)
        self._reported = True
        return now - self._since

    def over(self) -> tuple[float, bool]:
        """Record a successful attempt.

        Returns the outage's length in seconds and whether it had been reported.
        """
        now, since = self._clock(), self._since
        if since is None:
            return 0.0, False
        self._since, self._ended = None, now
        return now - since, self._reported
