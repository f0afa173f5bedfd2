"""Keep a replica registered in the database, so that others know which replicas exist."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

from meshpoint.errors import Unavailable
from meshpoint.model.replicas import Registration
from meshpoint.ports.clock import OutageTracker
from meshpoint.ports.task_store import Fleet

log = logging.getLogger("meshpoint.leases")

MIN_INTERVAL = timedelta(seconds=10)
"""Minimum time between two registrations, so that they cost next to nothing."""
INTERVALS_UNTIL_LOST = 3
MAX_CLOCK_OFFSET = timedelta(seconds=2)
"""More than a slow statement adds to the difference between two clocks."""
_LEAVE_TIMEOUT = 1.0  # seconds


class Presence:
    """Registers a replica from time to time, on one event loop.

    Nothing depends on it: a replica that cannot register works as before. It also compares the
    clocks of the host and of the database, which no other host can.
    """

    def __init__(self, registration: Registration) -> None:
        self._registration = registration
        self._is_clock_apart = False
        self._interval = registration.valid_for.total_seconds() / INTERVALS_UNTIL_LOST
        self._outage = OutageTracker(time.monotonic)
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def drain(self) -> None:
        """Register as draining from now on. May be called from any thread."""
        self._registration = replace(self._registration, is_draining=True)
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._changed.set)

    async def keep(self, store: Fleet) -> None:
        """Register in `store` until cancelled."""
        self._loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            await self._register(store)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval):
                    await self._changed.wait()

    async def leave(self, store: Fleet) -> None:
        """Unregister, if the database answers within a second."""
        each = self._registration
        with suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(_LEAVE_TIMEOUT):
                await store.unregister(each.agent, each.id)

    async def _register(self, store: Fleet) -> None:
        try:
            await store.register(self._registration)
        except Exception as error:  # leases must be renewed all the same
            if (seconds := self._outage.record_failure()) is not None:
                log.warning(
                    "replica %s: not registered for %.0f s: %s",
                    self._registration.id,
                    seconds,
                    error,
                    exc_info=None if isinstance(error, Unavailable) else error,
                )
        else:
            self._outage.record_success()
            self._compare_clocks(store.clock_offset)

    def _compare_clocks(self, offset: timedelta | None) -> None:
        """Log once that the clocks are apart, and once that they agree again."""
        if offset is None:
            return
        is_apart = abs(offset) > MAX_CLOCK_OFFSET
        if is_apart and not self._is_clock_apart:
            log.warning(
                "replica %s: the clock of this host is %.1f s %s the database's; synchronize it, "
                "for example with chrony",
                self._registration.id,
                abs(offset).total_seconds(),
                "behind" if offset > timedelta() else "ahead of",
            )
        elif self._is_clock_apart and not is_apart:
            log.info("replica %s: the clocks agree again", self._registration.id)
        self._is_clock_apart = is_apart
