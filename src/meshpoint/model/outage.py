"""How often an outage is reported: at its start, then less and less often, and at its end."""

from __future__ import annotations

from collections.abc import Callable

_FIRST_INTERVAL = 60.0
_LONGEST_INTERVAL = 900.0
"""Seconds between two reports of one outage."""


class Outage:
    """Something that may be unavailable. `clock` gives monotonic seconds.

    An outage that begins within a minute after the last one continues its reports, so that a server that comes and
    goes each second is not reported each second.
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
        """Note a failed attempt. If it is to be reported now: seconds since the first one of this outage."""
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
        """Note that an attempt worked: how many seconds the outage lasted, and whether it had been reported."""
        now, since = self._clock(), self._since
        if since is None:
            return 0.0, False
        self._since, self._ended = None, now
        return now - since, self._reported
