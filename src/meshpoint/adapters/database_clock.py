"""A clock that follows the database, for tasks that a replica keeps in memory."""

from __future__ import annotations

from datetime import datetime, timedelta

from meshpoint.ports.clock import Clock
from meshpoint.ports.task_store import CheckpointStore


class DatabaseClock:
    """A clock that follows the store's time where it is known, and `host` otherwise.

    Other replicas computed the deadlines of incoming requests by the database's clock. A task
    that falls back to the in-process backend keeps those deadlines, so the host's clock must not
    judge them.
    """

    def __init__(self, host: Clock, store: CheckpointStore) -> None:
        self._host, self._store = host, store

    def now(self) -> datetime:
        """The current time, in UTC."""
        known = self._store.present
        return self._host.now() if known is None else known

    def monotonic(self) -> float:
        """Seconds by the host's monotonic clock."""
        return self._host.monotonic()

    async def sleep(self, duration: timedelta) -> None:
        """Sleep for `duration`."""
        await self._host.sleep(duration)
