"""Lock tasks for a transition, and process batches in which a task occurs more than once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from sqlalchemy import Row

from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.rows import AgentNames
from meshpoint.errors import RowLocked

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options that all transitions of one store share. Durations are in seconds."""

    names: AgentNames
    dispatch_lease: float
    tombstone_ttl: float
    incompatible_limit: float
    checkpoint_ttl: float
    checkpoint_history: int
    checkpoint_archive: bool
    max_join_bytes: int

    def backoff(self, attempts: int) -> float:
        """Seconds that the sender of an item has it leased on the given attempt, starting at 1."""
        return self.dispatch_lease * float(2 ** min(max(attempts - 1, 0), 6))


@dataclass(frozen=True, slots=True)
class LockedTasks:
    """Tasks locked by this transaction, and the database's time after the last lock.

    `locked_elsewhere` has the tasks left out because another session holds a row of them.
    """

    now: float
    rows: dict[str, Row[Any]]
    locked_elsewhere: frozenset[str] = frozenset()


async def lock_tasks(tx: Transaction, task_ids: Iterable[str]) -> LockedTasks:
    """Lock tasks in order of id. Tasks that do not exist are left out."""
    ids = sorted(set(task_ids))
    rows = await tx.fetch(sql.LOCK_TASKS_SKIP_LOCKED if tx.skip_locked else sql.LOCK_TASKS, ids=ids)
    present = {row.logical_task_id: row for row in rows if row.logical_task_id is not None}
    locked_elsewhere: set[str] = set()
    if tx.skip_locked:
        if len(present) < len(ids):
            locked_elsewhere.update(row.logical_task_id for row in await tx.fetch(sql.READ_EXISTING_IDS, ids=ids))
            locked_elsewhere -= present.keys()
        locked_elsewhere |= await lock_child_rows(tx, present)
    free = {task_id: row for task_id, row in present.items() if task_id not in locked_elsewhere}
    return LockedTasks(now=max(row.now for row in rows), rows=free, locked_elsewhere=frozenset(locked_elsewhere))


async def lock_task(tx: Transaction, task_id: str) -> LockedTasks:
    """Lock one task.

    Raises:
        RowLocked: Another session holds the task, or a row that belongs to it.
    """
    locked = await lock_tasks(tx, [task_id])
    if locked.locked_elsewhere:
        raise RowLocked(f"another session holds task {task_id}")
    return locked


async def lock_child_rows(tx: Transaction, task_ids: Iterable[str]) -> set[str]:
    """Lock the calls, joins, checkpoints and operations of locked tasks.

    Returns the tasks with a row that another session holds. Always empty if this transaction
    waits for locked rows instead of skipping them.
    """
    ids = sorted(task_ids)
    if not (tx.skip_locked and ids):
        return set()
    return {row.task_id for row in await tx.fetch(sql.LOCK_CHILD_ROWS, ids=ids)}


async def run_in_rounds(
    items: Sequence[Item],
    task_id: Callable[[Item], str],
    process_round: Callable[[list[Item]], Awaitable[list[Result]]],
) -> list[Result]:
    """Process `items` in rounds, and return their results in the same order.

    Each round has at most one item per task, so that the next round sees what this one wrote.
    """
    results: dict[int, Result] = {}
    waiting = list(enumerate(items))
    while waiting:
        first: dict[str, tuple[int, Item]] = {}
        for index, item in waiting:
            first.setdefault(task_id(item), (index, item))
        answers = await process_round([item for _, item in first.values()])
        results.update(zip((index for index, _ in first.values()), answers, strict=True))
        waiting = [(index, item) for index, item in waiting if index not in results]
    return [results[index] for index in range(len(items))]


def duration_seconds(duration: timedelta | None) -> float | None:
    """Convert a duration to seconds, as the database stores it."""
    return None if duration is None else duration.total_seconds()
