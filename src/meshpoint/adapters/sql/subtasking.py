"""Track and save, and what the end of an operation does to its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import operation_statements as sql
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.locking import Terms, lock_task
from meshpoint.adapters.sql.records import checkpoint_columns, operation_columns, plain
from meshpoint.adapters.sql.rows import FAR_FUTURE, Columns
from meshpoint.model.checkpoint import (
    BeginResult,
    Begun,
    CancelFound,
    Fenced,
    Run,
    Save,
    SaveResult,
    TaskState,
    Track,
)
from meshpoint.model.subtasks import AgentCheckpoint, Saved


async def track(tx: Transaction, wish: Track) -> BeginResult:
    """Make a running task an operation."""
    locked = await lock_task(tx, wish.run.task_id)
    row = locked.rows.get(wish.run.task_id)
    if row is None or not _runs(row, wish.run):
        return Fenced()
    if row.checkpoint_seq is None:
        if row.cancel_requested:
            return CancelFound(wish.run)
        await tx.run(sql.UPDATE_TRACKED, task_id=wish.run.task_id)
        columns = operation_columns(wish.run.task_id, row.agent_name, wish.operation, locked.now)
        await tx.run(sql.INSERT_OPERATION, **columns)
    return Begun(wish.run)


async def save(tx: Transaction, wish: Save, columns: Columns, terms: Terms) -> SaveResult:
    """Write a checkpoint, given as columns too."""
    locked = await lock_task(tx, wish.run.task_id)
    row = locked.rows.get(wish.run.task_id)
    if row is None or not _runs(row, wish.run) or row.checkpoint_seq is None:
        return Fenced()
    seq = wish.checkpoint.seq
    if seq > row.checkpoint_seq:
        if row.cancel_requested:
            return CancelFound(wish.run)
        await tx.run(sql.UPDATE_SAVED, task_id=wish.run.task_id, seq=seq, progressed=wish.progressed)
        await _write(tx, [_row(row, seq, columns, locked.now)], terms)
    return Saved()


async def save_with_pauses(
    tx: Transaction, each: Sequence[tuple[Row[Any], int, Columns]], now: float, terms: Terms
) -> None:
    """Write checkpoints, each given as its operation's locked row, its `seq` and its columns, of those that pause."""
    new = [(row, seq, columns) for row, seq, columns in each if seq > row.checkpoint_seq]
    saved = [{"task_id": row.logical_task_id, "seq": seq, "progressed": False} for row, seq, _ in new]
    await tx.each(sql.UPDATE_SAVED, saved)
    await _write(tx, [_row(row, seq, columns, now) for row, seq, columns in new], terms)


def _runs(row: Row[Any], run: Run) -> bool:
    return row.status == TaskState.RUNNING and bool(row.fence == run.fence)


def _row(row: Row[Any], seq: int, columns: Columns, now: float) -> Columns:
    """The checkpoint `seq` of an operation whose task is locked, as it is written."""
    return {**_key(row, seq), "checkpoint_time": now, "created_at": now, **columns}


def _key(row: Row[Any], seq: int) -> Columns:
    return {"task_id": row.logical_task_id, "agent": row.agent_name, "seq": seq}


async def _write(tx: Transaction, rows: Sequence[Columns], terms: Terms) -> None:
    """Write checkpoints, one each of different operations; the older ones lose to them what is kept but once."""
    await tx.each(sql.INSERT_CHECKPOINT, rows)
    with_memory = [row for row in rows if row["l1_snapshot"] is not None]
    keys = [{name: row[name] for name in ("task_id", "agent", "seq")} for row in with_memory]
    await tx.each(sql.DROP_OLDER_SNAPSHOTS, keys)
    await _prune(tx, rows, terms)


async def _prune(tx: Transaction, newest: Sequence[Columns], terms: Terms) -> None:
    """Delete the checkpoints that are too old beside these."""
    last = [(key["task_id"], key["agent"], key["seq"] - terms.checkpoint_history) for key in newest]
    too_old = [{"task_id": task_id, "agent": agent, "last": seq} for task_id, agent, seq in last if seq > 0]
    await tx.each(sql.PRUNE_CHECKPOINTS, too_old)


# ── the end ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Closing:
    """A locked operation that ends. `checkpoint` is its last one; None: the one that stands, with `reason`."""

    row: Row[Any]
    state: TaskState
    reason: str | None = None
    checkpoint: AgentCheckpoint | None = None


async def close(tx: Transaction, closings: Sequence[Closing], now: float, terms: Terms) -> dict[str, Columns]:
    """Keep, move or delete checkpoints; by task, what its tombstone has other than that of another task."""
    if not closings:
        return {}
    ids = sorted(closing.row.logical_task_id for closing in closings)
    preserved = {row.operation_id for row in await tx.rows(sql.READ_PRESERVED, ids=ids)}
    completed = [closing.row.logical_task_id for closing in closings if closing.state is TaskState.COMPLETED]
    await _forget(tx, sorted(set(completed) - preserved), now, terms)
    return {
        closing.row.logical_task_id: {
            "checkpoint_seq": await _last(tx, closing, now, terms),
            "keep_request": closing.state is not TaskState.COMPLETED,
            "expires_at": expiry(
                closing.row, closing.state, now, terms, preserve=closing.row.logical_task_id in preserved
            ),
        }
        for closing in closings
    }


async def _forget(tx: Transaction, ids: list[str], now: float, terms: Terms) -> None:
    if ids:
        if terms.checkpoint_archive:
            await tx.run(sql.ARCHIVE_CHECKPOINTS, ids=ids, now=now)
        await tx.run(sql.DELETE_CHECKPOINTS, ids=ids)


async def _last(tx: Transaction, closing: Closing, now: float, terms: Terms) -> int:
    """The number of its last checkpoint, once that of its failure is written."""
    row = closing.row
    stands: int = row.checkpoint_seq
    if closing.state is TaskState.COMPLETED:
        return stands
    if closing.checkpoint is not None:
        seq = max(closing.checkpoint.seq, stands + 1)  # one that was saved unheard does not hide why it failed
        await _write(tx, [_row(row, seq, checkpoint_columns(closing.checkpoint), now)], terms)
        return seq
    if stands > 0:
        await tx.run(
            sql.REPEAT_CHECKPOINT,
            task_id=row.logical_task_id,
            agent=row.agent_name,
            seq=stands,
            now=now,
            reason=plain(closing.reason),
            retry_count=row.retry_count,
        )
        await _prune(tx, [_key(row, stands + 1)], terms)
        return stands + 1
    return 0


def expiry(row: Row[Any], state: TaskState, ended_at: float, terms: Terms, *, preserve: bool) -> float:
    """When an operation may be deleted. An old duplicate of its request finds it, or is past its deadline."""
    if preserve:
        return FAR_FUTURE
    tombstone: float = max(ended_at, row.task_deadline or ended_at) + terms.tombstone_ttl
    return tombstone if state is TaskState.COMPLETED else max(tombstone, ended_at + terms.checkpoint_ttl)
