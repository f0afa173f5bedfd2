"""The memory store as a database: watched from within, and reached through the network."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from meshpoint.adapters.memory.due import MemoryDueWork
from meshpoint.adapters.memory.outbox import MemoryCatalog, MemoryOutbox
from meshpoint.adapters.memory.rows import Tables, TaskRow
from meshpoint.adapters.memory.store import MemoryCheckpointStore
from meshpoint.adapters.memory.transitions import MemoryTransitions
from meshpoint.errors import CommitInDoubt, StoreUnavailable
from meshpoint.ports.clock import Clock
from meshpoint.ports.store import StoreTimings

from .weather import Weather, Word
from .wire import at_once, call

STORE = "store"
Written = Callable[[TaskRow], None]
"""Hears of each write of a row."""


class WatchedTables(Tables):
    """Tables that show every write to the ledger."""

    def __init__(self, clock: Clock, timings: StoreTimings, written: Written) -> None:
        super().__init__(clock, timings)
        self._written = written

    def put(self, row: TaskRow) -> None:
        """Write `row`."""
        super().put(row)
        self._written(row)


class WatchedStore(MemoryCheckpointStore):
    """A memory store over watched tables. As a database it outlives every process."""

    def __init__(self, clock: Clock, timings: StoreTimings, written: Written, *, durable: bool) -> None:
        self.tables = WatchedTables(clock, timings, written)
        for part in (MemoryTransitions, MemoryDueWork, MemoryOutbox, MemoryCatalog):
            part.__init__(self, self.tables)
        self._durable = durable

    @property
    def durable(self) -> bool:
        """Whether it plays the database."""
        return self._durable


class RemoteStore:
    """A process's way to the database. Every method of the store's port may fail as a database's would."""

    def __init__(self, database: WatchedStore, weather: Weather) -> None:
        self._database, self._weather = database, weather
        self.durable = True

    async def close(self) -> None:
        """Let go."""

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        method = getattr(self._database, name)

        async def remote(*args: Any, **options: Any) -> Any:
            fate = self._weather.fate(STORE, name)
            return await call(lambda: at_once(method(*args, **options)), fate, partial(_failed, name))

        return remote


def _failed(method: str, word: Word) -> Exception:
    kind = StoreUnavailable if word is Word.REFUSED else CommitInDoubt
    return kind(f"{method}: {word}")
