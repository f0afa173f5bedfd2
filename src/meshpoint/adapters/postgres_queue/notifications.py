"""Wake-ups between processes: one channel for each mesh, and a list of queues as the payload.

A notification is only a hint. It is sent after the commit, because NOTIFY inside a transaction
takes a lock that serializes all commits of the database. A lost one costs one slow poll.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import monotonic
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from meshpoint.adapters.postgres_queue.statements import NOTIFY
from meshpoint.adapters.sql.failures import driver_errors
from meshpoint.adapters.sql.prepared import PreparedConnection
from meshpoint.errors import StoreUnavailable

_log = logging.getLogger(__name__)

_MIN_GAP_SECONDS = 0.002
"""Minimum seconds between two notifications of a process. The first goes at once.

Short, because the tasks of an idle mesh wait for each of them.
"""
_MAX_GAP_SECONDS = 0.02
_GAP_PER_DURATION = 4
"""The gap, relative to the time that the last notification took.

Where the process or the database is busy, notifications take longer, and more messages share one.
"""
_RETRY_SECONDS = 1.0
_PROBE_SECONDS = 15.0
"""Between two checks that the listening connection works. A host that is gone closes nothing."""
_MAX_QUEUES = 500
"""Queues in one payload, which may have 8,000 bytes. An empty payload means any queue."""


def channel_name(namespace: str) -> str:
    """The channel of a mesh. PostgreSQL allows 63 bytes."""
    return f"meshpoint_queue_{hashlib.sha256(namespace.encode()).hexdigest()[:32]}"


def gap_after(duration: float) -> float:
    """Seconds from a notification of `duration` seconds to the next."""
    return min(max(_MIN_GAP_SECONDS, _GAP_PER_DURATION * duration), _MAX_GAP_SECONDS)


class Notifier:
    """Tells other processes which queues have new messages, at most once per gap."""

    def __init__(self, engine: AsyncEngine, namespace: str) -> None:
        self._connection = PreparedConnection(engine)
        self._channel = channel_name(namespace)
        self._queues = set[int]()
        self._task: asyncio.Task[None] | None = None

    def notify(self, queues: Iterable[int]) -> None:
        """Schedule a notification."""
        self._queues.update(queues)
        if self._queues and self._task is None:
            self._task = asyncio.create_task(self._send(), name="meshpoint-queue-notify")

    async def _send(self) -> None:
        try:
            while self._queues:
                queues, self._queues = self._queues, set()
                payload = " ".join(map(str, queues)) if len(queues) <= _MAX_QUEUES else ""
                began = monotonic()
                with suppress(StoreUnavailable):  # the slow poll finds the messages
                    await self._connection.read(NOTIFY, self._channel, payload)
                await asyncio.sleep(gap_after(monotonic() - began))
        finally:
            self._task = None

    async def close(self) -> None:
        """Send what is scheduled, and disconnect."""
        if self._task is not None:
            await asyncio.wait({self._task})
        await self._connection.close()


class Listener:
    """Calls `wake` with the queues of each notification, or with `None` for any queue.

    Reconnects when the connection is lost.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        namespace: str,
        wake: Callable[[frozenset[int] | None], None],
    ) -> None:
        self._engine, self._wake = engine, wake
        self._channel = channel_name(namespace)
        self._lost = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="meshpoint-queue-listen")

    async def close(self) -> None:
        """Disconnect."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            try:
                await self._listen()
            except driver_errors() as error:
                _log.debug("notifications are unavailable: %s", error)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _listen(self) -> None:
        async with self._engine.connect() as connection:
            try:
                driver = await _driver(connection)
                self._lost.clear()
                driver.add_termination_listener(self._on_lost)
                await driver.add_listener(self._channel, self._on_notification)
                self._wake(None)  # a notification may have been missed before
                while not self._lost.is_set():
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_PROBE_SECONDS):
                            await self._lost.wait()
                    await driver.execute("SELECT 1")
            finally:
                await connection.invalidate()  # nobody else may get a listening connection

    def _on_lost(self, *_: object) -> None:
        self._lost.set()

    def _on_notification(self, _driver: object, _pid: int, _channel: str, payload: str) -> None:
        try:
            queues = frozenset(map(int, payload.split()))
        except ValueError:
            return  # sent by another program
        self._wake(queues or None)


async def _driver(connection: AsyncConnection) -> Any:
    return (await connection.get_raw_connection()).driver_connection
