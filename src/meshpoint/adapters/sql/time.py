"""This process's estimate of the database's clock."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from time import monotonic


class DatabaseTime:
    """Estimates the database's clock from timestamps in results, advanced by the monotonic clock.

    The database reads its clock after the statement is sent and before its result is received.
    Each result therefore bounds the difference between the two clocks on both sides. The estimate
    changes only when it is outside these bounds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.clock = clock
        self._offset: float | None = None

    def observe(self, now: float, sent_at: float) -> None:
        """Record that a statement sent at `sent_at` (monotonic) returned database time `now`."""
        least, most = now - self.clock(), now - sent_at
        self._offset = least if self._offset is None else min(max(self._offset, least), most)

    @property
    def current_time(self) -> datetime | None:
        """The current time, or `None` before the first result."""
        return None if self._offset is None else datetime.fromtimestamp(self.clock() + self._offset, UTC)
