"""The time of the database, for what a replica keeps in memory."""

from __future__ import annotations

from datetime import datetime, timedelta

from meshpoint.ports.clock import Clock
from meshpoint.ports.task_store import CheckpointStore


class DatabaseClock:
    """`host`, with the database's time in place of its own where `store` knows it.

    Other replicas computed the deadlines of the requests that arrive here by the database's clock. A task that falls
    back to memory keeps them, so the host's clock must not judge them.
    """

    def __init__(self, host: Clock, store: CheckpointStore) -> None:
        self._host, self._store = host, store

    def now(self) -> datetime:
        """The present instant, in UTC."""
        known = self._store.present
        return self._host.now() if known is None else known

    def monotonic(self) -> float:
        """Seconds of the host's monotonic clock."""
        return self._host.monotonic()

    async def sleep(self, duration: timedelta) -> None:
        """Return after `duration`."""
        await self._host.sleep(duration)
