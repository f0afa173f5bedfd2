"""The clocks of a replica: the machine's clock, and a clock that follows the database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial

from meshpoint.ports.clock import Clock
from meshpoint.ports.task_store import CheckpointStore

_monotonic: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if hasattr(time, "CLOCK_BOOTTIME")
    else time.monotonic
)


class SystemClock:
    """The wall clock at creation, advanced by the monotonic clock.

    A step of the wall clock, in either direction, therefore neither delays nor triggers deadlines.
    """

    monotonic = staticmethod(_monotonic)
    """Seconds unaffected by changes of the wall clock.

    Time asleep is included where the platform reports it.
    """

    def __init__(self) -> None:
        self._started_at = datetime.now(UTC)
        self._started_monotonic = self.monotonic()

    def now(self) -> datetime:
        """The current time, in UTC."""
        return self._started_at + timedelta(seconds=self.monotonic() - self._started_monotonic)

    async def sleep(self, duration: timedelta) -> None:
        """Sleep for `duration`."""
        await asyncio.sleep(duration.total_seconds())


class DatabaseClock:
    """A clock that follows the store's time where it is known, and `host` otherwise.

    Other replicas computed the deadlines of incoming requests by the database's clock. A task
    that falls back to the in-process backend keeps those deadlines, so the host's clock must not
    judge them.
    """

    def __init__(self, host: Clock, store: CheckpointStore) -> None:
        self._host, self._store = host, store
        self.monotonic, self.sleep = host.monotonic, host.sleep

    def now(self) -> datetime:
        """The current time, in UTC."""
        known = self._store.current_time
        return self._host.now() if known is None else known
