"""Change of a task's owner, and what the new owner reads to run its next segment."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial, reduce
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.batcher import PART_BYTES, split_by_size
from meshpoint.adapters.sql.database import Database, Transaction
from meshpoint.adapters.sql.rows import (
    AgentNames,
    Columns,
    StoredOutcome,
    group_by_task,
    resumable_from_row,
    run_from_row,
)
from meshpoint.model.checkpoint import SUSPECT_FROM, Release, Replica, Resumable, Run, TaskState

log = logging.getLogger("meshpoint.store")


def owner_columns(replica: Replica, row: Row[Any], run_id: str, *, attempt: int, now: float) -> Columns:
    """The columns that make `replica` the owner of a task, with a new fence and lease."""
    return {
        "task_id": row.logical_task_id,
        "status": TaskState.RUNNING.value,
        "fence": row.fence + 1,
        "run_id": run_id,
        "owner": replica.id,
        "attempt": attempt,
        "wake_at": now + replica.lease.total_seconds(),
    }


def ready_columns(row: Row[Any], run_id: str, now: float) -> Columns:
    """The columns that make a task ready for any replica."""
    return {
        "task_id": row.logical_task_id,
        "status": TaskState.READY.value,
        "fence": row.fence,
        "run_id": run_id,
        "owner": None,
        "attempt": 0,
        "wake_at": now,
    }


@dataclass(frozen=True, slots=True)
class OwnedTasks:
    """Rows of owned tasks, read under their locks and decoded after the locks are released.

    A task that is missing from `calls` has too many outcome bytes to read at once: see
    `read_outcomes_in_parts`.
    """

    tasks: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, list[StoredOutcome]] = field(default_factory=dict)

    def merged_with(self, others: OwnedTasks) -> OwnedTasks:
        """The union of both. Neither is changed."""
        return OwnedTasks(self.tasks | others.tasks, self.calls | others.calls)

    @classmethod
    def merge(cls, results: Sequence[OwnedTasks]) -> OwnedTasks:
        """Merge the results of several transactions."""
        return reduce(cls.merged_with, results, cls())

    @property
    def suspect_count(self) -> int:
        """Number of suspects among the tasks."""
        return sum(row.rescues >= SUSPECT_FROM for row in self.tasks.values())

    @property
    def with_unread_outcomes(self) -> list[Any]:
        """The rows of tasks whose outcomes have not been read yet."""
        return [row for task_id, row in self.tasks.items() if task_id not in self.calls]

    async def decode(
        self, names: AgentNames, retry_after: timedelta, max_join_bytes: int
    ) -> tuple[dict[str, Resumable], list[Release]]:
        """Decode the tasks.

        Returns the decoded tasks by id, and a release for each task that cannot be decoded here:
        a replica of another release may be able to.
        """
        readable: dict[str, Resumable] = {}
        unreadable: list[Release] = []
        for task_id, row in self.tasks.items():
            try:
                readable[task_id] = await resumable_from_row(row, self.calls.get(task_id), names, max_join_bytes)
            except Exception as error:  # one damaged row must not stop the other tasks
                log.exception("task %s: cannot decode its row; releasing it", task_id)
                unreadable.append(Release(run_from_row(row, names), retry_after, f"the row cannot be read: {error}"))
        return readable, unreadable


async def read_owned(tx: Transaction, task_ids: Sequence[str]) -> OwnedTasks:
    """Read tasks that this transaction has locked, with outcomes unless they are too large."""
    if not task_ids:
        return OwnedTasks()
    ids = sorted(task_ids)
    rows = await tx.fetch(sql.READ_TASKS, ids=ids)
    small = [row.logical_task_id for row in rows if row.outcome_bytes <= PART_BYTES]
    outcomes: dict[str, list[StoredOutcome]] = {task_id: [] for task_id in small}
    if small:
        for task_id, calls in group_by_task(await tx.fetch(sql.READ_OUTCOMES, ids=small)).items():
            outcomes[task_id] = [(row.call_id, row.peer_agent, row.outcome) for row in calls]
    return OwnedTasks({row.logical_task_id: row for row in rows}, outcomes)


async def read_outcomes_in_parts(database: Database, row: Any) -> list[StoredOutcome]:
    """Read the outcomes of an owned task in several reads, in call order.

    They do not change while the task is owned, so the reads need no common transaction.

    Raises:
        LookupError: An outcome is missing, because another run owns the task by now.
    """
    task_id = row.logical_task_id
    sizes = await database.read(
        lambda tx: tx.fetch(sql.READ_OUTCOME_SIZES, task_id=task_id, generation=row.generation)
    )
    found: dict[str, bytes | None] = {}
    for part in split_by_size(sizes, [call.bytes for call in sizes]):
        ids = [call.sub_task_id for call in part]
        some = partial(Transaction.fetch, template=sql.READ_OUTCOMES_BY_ID, task_id=task_id, ids=ids)
        found.update({call.sub_task_id: call.outcome for call in await database.read(some)})
    return [(call.call_id, call.peer_agent, found[call.sub_task_id]) for call in sizes]


async def read_owned_by(tx: Transaction, run: Run) -> OwnedTasks:
    """Read the task owned by exactly this run, without a lock. Empty if the run has lost it."""
    owned = await read_owned(tx, [run.task_id])
    row = owned.tasks.get(run.task_id)
    mine = row is not None and (row.status, row.run_id, row.fence) == (TaskState.RUNNING, run.id, run.fence)
    return owned if mine else OwnedTasks()


def can_run(replica: Replica, row: Row[Any], slots: int) -> bool:
    """Whether `replica` has a free slot and reads the task's state format."""
    return slots > 0 and (row.generation == 0 or row.state_format in replica.formats)
