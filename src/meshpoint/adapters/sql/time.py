"""The database's time, as far as this process knows it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from time import monotonic


class DatabaseTime:
    """An estimate of the database's clock from what its statements say, carried on by the monotonic clock.

    The database read its clock between the moment when a statement was sent and the one when its answer came. So each
    answer bounds the difference between the two clocks from both sides; the estimate moves only when it is outside.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.clock = clock
        self._ahead: float | None = None

    def heard(self, now: float, sent_at: float) -> None:
        """The answer to a statement that was sent at `sent_at`, of the monotonic clock, said that it was `now`."""
        least, most = now - self.clock(), now - sent_at
        self._ahead = least if self._ahead is None else min(max(self._ahead, least), most)

    @property
    def present(self) -> datetime | None:
        """The present instant; None before anything was heard."""
        return None if self._ahead is None else datetime.fromtimestamp(self.clock() + self._ahead, UTC)
