"""Lock tasks for a transition, and split batches that repeat a task."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import Row

from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.database import OnLock, Transaction
from meshpoint.errors import RowLocked
from meshpoint.model.ids import TaskId
from meshpoint.model.transitions import TaskLocked

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class LockedTasks:
    """Tasks locked by this transaction, and the database's time after the last lock.

    `locked_elsewhere` has the tasks left out because another session holds a row of them.
    """

    now: float
    rows: dict[str, Row[Any]]
    locked_elsewhere: set[str] = field(default_factory=set)

    async def delete(self, tx: Transaction, task_ids: Sequence[str]) -> None:
        """Delete the rows of tasks that have no calls and no joins."""
        if task_ids:
            await tx.execute(sql.DELETE_TASKS, ids=list(task_ids))
            for task_id in task_ids:
                del self.rows[task_id]


async def lock_tasks(tx: Transaction, task_ids: Iterable[str]) -> LockedTasks:
    """Lock tasks in order of id. Tasks that do not exist are left out."""
    ids = sorted(set(task_ids))
    rows = await tx.fetch(
        sql.LOCK_TASKS if tx.on_lock is OnLock.WAIT else sql.LOCK_TASKS_SKIP_LOCKED, ids=ids
    )
    locked = LockedTasks(
        max(row.now for row in rows),
        {row.logical_task_id: row for row in rows if row.logical_task_id is not None},
    )
    if tx.on_lock is not OnLock.WAIT:
        if len(locked.rows) < rows[0].existing:
            existing = await tx.fetch(sql.READ_EXISTING_IDS, ids=ids)
            locked.locked_elsewhere.update(row.logical_task_id for row in existing)
            locked.locked_elsewhere.difference_update(locked.rows)
        for task_id in await lock_child_rows(tx, locked.rows):
            locked.locked_elsewhere.add(task_id)
            del locked.rows[task_id]
    return locked


async def lock_task(tx: Transaction, task_id: str) -> tuple[Row[Any] | None, float]:
    """Lock one task, and return its row, if it exists, and the database's time.

    Raises:
        RowLocked: Another session holds the task, or a row that belongs to it.
    """
    locked = await lock_tasks(tx, [task_id])
    if locked.locked_elsewhere:
        raise RowLocked(f"another session holds task {task_id}")
    return locked.rows.get(task_id), locked.now


async def lock_child_rows(tx: Transaction, task_ids: Iterable[str]) -> set[str]:
    """Lock the calls, joins, checkpoints and operations of locked tasks.

    Returns the tasks with a row that another session holds. Always empty if this transaction
    waits for such rows.
    """
    ids = sorted(task_ids)
    if not (tx.on_lock is OnLock.SKIP and ids):
        return set()
    return {row.task_id for row in await tx.fetch(sql.LOCK_CHILD_ROWS, ids=ids)}


async def run_in_rounds(
    tx: Transaction,
    items: Sequence[_Item],
    task_id: Callable[[_Item], TaskId],
    process_round: Callable[[list[_Item], LockedTasks], Awaitable[list[_Result]]],
) -> list[_Result | TaskLocked]:
    """Lock the tasks of `items`, process the items in rounds, and return results in their order.

    Each round has at most one item per task, so that the next round sees what this one wrote.
    Tasks that another session holds are left out.
    """
    results: dict[int, _Result | TaskLocked] = {}
    while len(results) < len(items):
        first: dict[TaskId, int] = {}
        for place, item in enumerate(items):
            if place not in results:
                first.setdefault(task_id(item), place)
        locked = await lock_tasks(tx, first)
        free = []
        for id_, place in first.items():
            if id_ in locked.locked_elsewhere:
                results[place] = TaskLocked(id_)
            else:
                free.append(place)
        answers = await process_round([items[place] for place in free], locked) if free else []
        results.update(zip(free, answers, strict=True))
    return [results[place] for place in range(len(items))]
