"""What `meshpoint doctor` reads of the queues in a SQLite file."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from meshpoint.adapters.sqlite_queue.queues import Queues
from meshpoint.adapters.sqlite_queue.schema import MARKER_TABLE, has_schema, has_table
from meshpoint.adapters.stored_messages import QueueLimits
from meshpoint.errors import BrokerUnavailable
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import Address
from meshpoint.ports.inspection import MissingRight, OtherArguments, QueueFacts

_T = TypeVar("_T")
_INTERVAL, _LOOKS = 0.1, 15
"""Seconds between two reads of the heartbeats, and the number of reads.

Together they take longer than the interval between the heartbeats of a process.
"""


class SqliteInspection:
    """`meshpoint.ports.inspection.BrokerInspection`. Does not create the file or its tables.

    Args:
        path: The file.
        namespace: The namespace of the mesh.
        timeout: Limit for waiting for writers.
        sleep: Waits between two looks at the heartbeats.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        namespace: str,
        timeout: timedelta,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._path, self._namespace = Path(path), namespace
        self._timeout = timeout.total_seconds()
        self._sleep = sleep
        self._looks = 0
        self._first_heartbeats: dict[int, int] = {}
        self._living: set[int] = set()  # holders whose heartbeat has advanced

    async def open(self) -> None:
        """Check that the file is readable, if it exists.

        Raises:
            BrokerUnavailable: it cannot be read.
        """
        await self._read(lambda queues: None, None)

    async def close(self) -> None:
        """Do nothing: each look opens the file."""

    async def queue(self, address: Address) -> QueueFacts | None:
        """A queue. Consumers leave no trace in the file: see `replicas`."""

        def look(queues: Queues) -> QueueFacts | None:
            depth = queues.depth(address)
            return None if depth is None else QueueFacts(depth, 0)

        return await self._read(look, None)

    async def replicas(self, agent: AgentName) -> int:
        """Number of processes with a private queue of `agent` whose heartbeat advances."""
        holders = await self._read(lambda queues: queues.replica_holders(agent), list[int]())
        if holders and not self._looks:
            self._first_heartbeats = await self._read(Queues.heartbeats, dict[int, int]())
        open_holders = self._first_heartbeats.keys() & set(holders)
        while self._looks < _LOOKS and not self._living >= open_holders:
            await self._sleep(_INTERVAL)
            await self._look_for_heartbeats()
        return sum(holder in self._living for holder in holders)

    async def _look_for_heartbeats(self) -> None:
        self._looks += 1
        before = self._first_heartbeats
        after = await self._read(Queues.heartbeats, dict[int, int]())
        self._living |= {holder for holder, beat in after.items() if beat != before.get(holder)}

    async def has_database_marker(self, agent: AgentName) -> bool:
        """Whether the marker of `agent` is set."""
        return await self._read(
            lambda queues: queues.has_database_marker(agent), False, table=MARKER_TABLE
        )

    async def missing_rights(self, agent: AgentName, shards: int) -> list[MissingRight]:
        """None: a file has no logins."""
        return []

    async def other_arguments(self, agent: AgentName, shards: int) -> list[OtherArguments]:
        """None: limits are not stored with a queue."""
        return []

    async def _read(
        self, look: Callable[[Queues], _T], missing: _T, *, table: str = "meshpoint_queue"
    ) -> _T:
        try:
            return await asyncio.to_thread(self._look, look, missing, table)
        except (sqlite3.Error, OSError) as error:
            raise BrokerUnavailable(f"{self._path}: {error}") from error

    def _look(self, look: Callable[[Queues], _T], missing: _T, table: str) -> _T:
        """Return what `look` reads, or `missing` without the file or its `table`."""
        if not self._path.exists():
            return missing
        uri = f"{self._path.absolute().as_uri()}?mode=rw"  # `ro` could not use the WAL
        with closing(sqlite3.connect(uri, timeout=self._timeout, uri=True)) as db:
            db.execute("PRAGMA query_only = ON")
            if not has_schema(db) or not has_table(db, table):
                return missing
            return look(Queues(db, self._namespace, 1, QueueLimits()))
