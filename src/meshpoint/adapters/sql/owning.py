"""Change of a task's owner, and what the new owner reads to run its next segment."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

from sqlalchemy import Row

from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.batcher import PART_BYTES, split_by_size
from meshpoint.adapters.sql.database import Database, Transaction
from meshpoint.adapters.sql.log_cache import CachedLog, LogCache, read_log
from meshpoint.adapters.sql.rows import (
    Columns,
    StoredOutcome,
    group_by_task,
    is_suspended,
    ready_at,
)
from meshpoint.errors import StoreUnavailable
from meshpoint.model.tasks import Replica, TaskState, has_log

_log = logging.getLogger("meshpoint.store")


def owner_columns(
    replica: Replica, row: Row[Any], run_id: str, *, attempt: int, now: float
) -> Columns:
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
    """The columns that make a task ready for any replica, once it is not suspended."""
    return {
        "task_id": row.logical_task_id,
        "status": TaskState.READY.value,
        "fence": row.fence,
        "run_id": run_id,
        "owner": None,
        "attempt": 0,
        "wake_at": ready_at(row, now),
    }


def assign_owners(
    met: Iterable[tuple[Row[Any], str, float]], replica: Replica, slots: int
) -> list[Columns]:
    """The new owners of waiting tasks whose joins are met.

    Each is given as its row, the id of the next run, and the time. Slots go to the first tasks
    that are not suspended and whose state `replica` can read; the others become ready.
    """
    owners: list[Columns] = []
    for row, run_id, now in met:
        is_readable = row.generation == 0 or row.state_format in replica.formats
        if slots > 0 and is_readable and not is_suspended(row):
            slots -= 1
            owners.append(owner_columns(replica, row, run_id, attempt=1, now=now))
        else:
            owners.append(ready_columns(row, run_id, now))
    return owners


@dataclass(frozen=True, slots=True)
class OwnedTask:
    """The row of an owned task, read under its lock and decoded after the lock is released.

    `outcomes` are in call order. `log` has the packed entries of the task's log. Either is `None`
    until `read_missing_parts` has read it, if it is too large to read at once.
    """

    row: Any
    outcomes: Sequence[StoredOutcome] | None
    log: Sequence[bytes] | None = ()

    @property
    def is_complete(self) -> bool:
        """Whether all parts are read."""
        return self.outcomes is not None and self.log is not None


OwnedTasks: TypeAlias = dict[str, OwnedTask]
"""Owned tasks by id."""


def complete_log(row: Any, last: int | None, entries: Sequence[bytes]) -> Sequence[bytes] | None:
    """Return the entries of a task's log if `last` is the last one, and `None` otherwise.

    The last entry proves that the others were read too, because it was committed after them. A log
    that does not continue the stored state need not be complete.
    """
    counts = row.generation == 0 or has_log(row.state_format or "")
    return None if row.log_seq and counts and last != row.log_seq else entries


def keep_log(cache: LogCache, row: Any, log: CachedLog | None) -> Sequence[bytes] | None:
    """Return a task's log entries as `complete_log` does, and cache the log if complete."""
    if log is None:
        return complete_log(row, None, ())
    if log.seq == row.log_seq:
        cache.store(row.logical_task_id, log)
    return complete_log(row, log.seq, log.entries)


async def read_owned(tx: Transaction, task_ids: Sequence[str]) -> OwnedTasks:
    """Read tasks that this transaction has locked, with outcomes and log unless too large.

    In the order of `task_ids`.
    """
    if not task_ids:
        return {}
    found = await tx.fetch(sql.READ_TASKS, ids=sorted(task_ids))
    rows = {row.logical_task_id: row for row in found}
    small = [row.logical_task_id for row in found if row.outcome_bytes <= PART_BYTES]
    calls = group_by_task(await tx.fetch(sql.READ_OUTCOMES, ids=small)) if small else {}
    logs = await _read_small_logs(tx, [row for row in found if row.log_seq])
    return {
        task_id: OwnedTask(
            rows[task_id],
            [
                (row.call_id, row.peer_agent, row.outcome, row.sub_task_id)
                for row in calls.get(task_id, ())
            ]
            if rows[task_id].outcome_bytes <= PART_BYTES
            else None,
            logs.get(task_id, ()),
        )
        for task_id in task_ids
        if task_id in rows
    }


async def _read_small_logs(
    tx: Transaction, rows: Sequence[Row[Any]]
) -> dict[str, Sequence[bytes] | None]:
    """Read the logs of locked tasks. `None` for a log that is too large."""
    logs = {row.logical_task_id: await _continue_cached_log(tx, row) for row in rows}
    found: dict[str, list[Row[Any]]] = {id_: [] for id_, log in logs.items() if log is None}
    if found:
        read = await tx.fetch(sql.READ_LOGS, ids=sorted(found), max_bytes=PART_BYTES)
        for entry in read:
            found[entry.logical_task_id].append(entry)
        for task_id, entries in found.items():
            logs[task_id] = read_log(sorted(entries, key=_SEQ))
    return {row.logical_task_id: keep_log(tx.logs, row, logs[row.logical_task_id]) for row in rows}


_SEQ = attrgetter("seq")


async def _continue_cached_log(tx: Transaction, row: Row[Any]) -> CachedLog | None:
    """Read the new entries of a cached log; `None` if the log has been replaced."""
    if (cached := tx.logs.find(row.logical_task_id)) is None:
        return None
    rows = await tx.fetch(
        sql.READ_LOG_END,
        task_id=row.logical_task_id,
        first=cached.seq,
        last=row.log_seq,
        max_bytes=PART_BYTES,
    )
    return cached.extend(rows)


async def read_missing_parts(
    database: Database, owned: Mapping[str, OwnedTask], max_bytes: int
) -> OwnedTasks:
    """Read outcomes and logs that are too large to read at once, in several reads per task.

    Leaves out tasks that another run owns by now, and tasks with a damaged row unless their
    cancel was requested. Outcomes of more than `max_bytes` stay unread.
    """
    found: OwnedTasks = {}
    for task_id, task in owned.items():
        try:
            found[task_id] = await _with_missing_parts(database, task, max_bytes)
        except LookupError:
            pass
        except StoreUnavailable:
            raise
        except Exception:  # one damaged task must not stop the others
            _log.exception("task %s: cannot read its calls' outcomes or its log", task_id)
            if task.row.cancel_requested:  # its end needs neither
                found[task_id] = task
    return found


async def _with_missing_parts(database: Database, task: OwnedTask, max_bytes: int) -> OwnedTask:
    row, outcomes, log = task.row, task.outcomes, task.log
    if outcomes is None and row.outcome_bytes <= max_bytes:
        outcomes = await _read_outcomes_in_parts(database, row)
    if log is None:
        log = await read_log_in_parts(database, row)
    return OwnedTask(row, outcomes, log)


async def read_log_in_parts(database: Database, row: Any) -> list[bytes] | None:
    """Read the log of a task in several reads.

    It does not change while the task is owned, so the reads need no common transaction. Returns
    `None` if an entry is missing, because another run owns the task by now or the log is damaged.
    """
    task_id = row.logical_task_id
    sizes = await database.fetch(sql.READ_LOG_SIZES, task_id=task_id, last=row.log_seq)
    if not sizes and row.generation == 0:  # the log was deleted before the task was revived
        return []
    if not sizes or sizes[-1].seq != row.log_seq:
        return None
    entries: list[bytes] = []
    for part in split_by_size(sizes, [each.bytes for each in sizes]):
        first, last = part[0].seq, part[-1].seq
        rows = await database.fetch(sql.READ_LOG, task_id=task_id, first=first, last=last)
        if len(rows) != len(part):
            return None
        entries += [each.entry for each in rows]
    return entries


async def _read_outcomes_in_parts(database: Database, row: Any) -> list[StoredOutcome]:
    """Read the outcomes of an owned task in several reads, in call order.

    They do not change while the task is owned, so the reads need no common transaction.

    Raises:
        LookupError: An outcome is missing, because another run owns the task by now.
    """
    task_id = row.logical_task_id
    sizes = await database.fetch(
        sql.READ_OUTCOME_SIZES, task_id=task_id, generation=row.generation
    )
    found: dict[str, bytes | None] = {}
    for part in split_by_size(sizes, [call.bytes for call in sizes]):
        ids = [call.sub_task_id for call in part]
        calls = await database.fetch(sql.READ_OUTCOMES_BY_ID, task_id=task_id, ids=ids)
        found.update({call.sub_task_id: call.outcome for call in calls})
    return [
        (call.call_id, call.peer_agent, found[call.sub_task_id], call.sub_task_id)
        for call in sizes
    ]
