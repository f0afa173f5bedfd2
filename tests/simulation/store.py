"""The in-process store as a database: all writes are observed, and calls go through the network."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from meshpoint.adapters.inprocess.due import InProcessDueWork
from meshpoint.adapters.inprocess.operations import InProcessOperations
from meshpoint.adapters.inprocess.outbox import InProcessCatalog, InProcessOutbox
from meshpoint.adapters.inprocess.rows import Tables, TaskRow
from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.adapters.inprocess.transitions import InProcessTransitions
from meshpoint.errors import CommitInDoubt, StoreUnavailable
from meshpoint.model.checkpoint import (
    Committed,
    End,
    Ended,
    EndResult,
    Pause,
    PauseResult,
    Release,
    Replica,
    Run,
    Save,
    SaveResult,
)
from meshpoint.model.subtasks import Saved
from meshpoint.ports.clock import Clock
from meshpoint.ports.task_store import StoreTimings

from .weather import Weather, Word
from .wire import at_once, call

STORE = "store"
Written = Callable[[TaskRow], None]
"""Called with each written row."""
Must = Callable[[bool, str], None]
"""Records a violation if its first argument is false."""


class WatchedTables(Tables):
    """Tables that report every write to the ledger."""

    def __init__(self, clock: Clock, timings: StoreTimings, written: Written) -> None:
        super().__init__(clock, timings)
        self._written = written

    def put(self, row: TaskRow) -> None:
        """Write `row`."""
        super().put(row)
        self._written(row)


class WatchedStore(InProcessStore):
    """An in-process store on observed tables. As a database it outlives every process."""

    def __init__(self, clock: Clock, timings: StoreTimings, written: Written, must: Must, *, durable: bool) -> None:
        self.tables = WatchedTables(clock, timings, written)
        for part in (InProcessTransitions, InProcessDueWork, InProcessOutbox, InProcessCatalog, InProcessOperations):
            part.__init__(self, self.tables)
        self._durable, self._must = durable, must

    @property
    def durable(self) -> bool:
        """Whether it plays the database."""
        return self._durable

    async def pause(self, pauses: Sequence[Pause]) -> list[PauseResult]:
        """Checkpoint; a zombie must not succeed."""
        owned = [self._is_owner(each.run) for each in pauses]
        results = await super().pause(pauses)
        for each, owns, result in zip(pauses, owned, results, strict=True):
            self._must(owns or not isinstance(result, Committed), f"a zombie paused: {each.run}")
        return results

    async def end(self, ends: Sequence[End]) -> list[EndResult]:
        """Commit outcomes; a zombie must not succeed."""
        owned = [self._is_owner(each.run) for each in ends]
        results = await super().end(ends)
        for each, owns, result in zip(ends, owned, results, strict=True):
            self._must(owns or not isinstance(result, Ended), f"a zombie ended: {each.run}")
        return results

    async def release(self, releases: Sequence[Release]) -> list[bool]:
        """Release tasks; a zombie must not succeed."""
        owned = [self._is_owner(each.run) for each in releases]
        results = await super().release(releases)
        for each, owns, released in zip(releases, owned, results, strict=True):
            self._must(owns or not released, f"a zombie released: {each.run}")
        return results

    async def save(self, wish: Save) -> SaveResult:
        """Record subtasks; a zombie must not succeed."""
        owns = self._is_owner(wish.run)
        result = await super().save(wish)
        self._must(owns or not isinstance(result, Saved), f"a zombie saved: {wish.run}")
        return result

    async def renew(self, runs: Sequence[Run], replica: Replica) -> list[Run]:
        """Extend leases; a zombie's lease is lost."""
        owned = [self._is_owner(each) for each in runs]
        lost = await super().renew(runs, replica)
        for run, owns in zip(runs, owned, strict=True):
            self._must(owns or run in lost, f"a zombie renewed: {run}")
        return lost

    def _is_owner(self, run: Run) -> bool:
        """Whether this run may write the task, or wrote its current content."""
        row = self.tables.tasks.get(run.task_id)
        if row is None or run.fence == 0:
            return (row is None and run.fence == 0) or (row is not None and row.run_id == run.id)
        return row.fence == run.fence


class RemoteStore:
    """A process's connection to the database. Every method may fail as a database's would."""

    def __init__(self, database: WatchedStore, weather: Weather) -> None:
        self._database, self._weather = database, weather
        self.durable = True
        self.present = None  # the processes' own clocks judge deadlines

    async def close(self) -> None:
        """Close the connection."""

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        method = getattr(self._database, name)

        async def remote(*args: Any, **options: Any) -> Any:
            fate = self._weather.fate(STORE, name)
            return await call(lambda: at_once(method(*args, **options)), fate, partial(_failed, name))

        return remote


def _failed(method: str, word: Word) -> Exception:
    kind = StoreUnavailable if word is Word.REFUSED else CommitInDoubt
    return kind(f"{method}: {word}")
