"""Track and save operations, and close their checkpoints when they end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sqlalchemy import Row

from meshpoint.adapters.sql import inventory, statements
from meshpoint.adapters.sql import operation_statements as sql
from meshpoint.adapters.sql.batcher import split_by_size
from meshpoint.adapters.sql.codec import Codec, Packed
from meshpoint.adapters.sql.database import StoreOptions, Transaction
from meshpoint.adapters.sql.locking import lock_task
from meshpoint.adapters.sql.records import (
    CheckpointRows,
    checkpoint_rows,
    operation_columns,
    sanitize,
    usage_details,
    without_counted_usage,
)
from meshpoint.adapters.sql.rows import (
    FAR_FUTURE,
    Columns,
    group_by_task,
    read_outcome,
    tombstone_expiry,
    unpack_request,
)
from meshpoint.errors import KeyMissing
from meshpoint.model.bodies import without_security_context
from meshpoint.model.outcomes import Ok, Outcome
from meshpoint.model.subtasks import AgentCheckpoint, Operation, SaveCommitted
from meshpoint.model.tasks import Run, TaskState
from meshpoint.model.transitions import (
    BeginCommitted,
    BeginResult,
    CancelFound,
    Fenced,
    Save,
    SaveResult,
)
from meshpoint.model.usage import TokenUsage

_log = logging.getLogger("meshpoint.store")


async def track(tx: Transaction, run: Run, operation: Operation) -> BeginResult:
    """Make a running task an operation."""
    row, now = await lock_task(tx, run.task_id)
    if row is None or not _is_owned_by(row, run):
        return Fenced()
    if row.checkpoint_seq is None:
        if row.cancel_requested:
            return CancelFound(run)
        await tx.execute(sql.UPDATE_TRACKED, task_id=run.task_id)
        columns = operation_columns(run.task_id, row.agent_name, operation, now, tx.options)
        await tx.execute(sql.INSERT_OPERATION, **columns)
    return BeginCommitted(run)


async def save(tx: Transaction, command: Save, encoded: CheckpointRows) -> SaveResult:
    """Write a checkpoint of a running operation. `encoded` is the same checkpoint.

    A repeated save finds the checkpoint it wrote and changes nothing.
    """
    row, now = await lock_task(tx, command.run.task_id)
    if row is None or not _is_owned_by(row, command.run) or row.checkpoint_seq is None:
        return Fenced()
    seq = command.checkpoint.seq
    if seq > row.checkpoint_seq:
        if row.cancel_requested:
            return CancelFound(command.run)
        await tx.execute(
            sql.UPDATE_SAVED, task_id=command.run.task_id, seq=seq, progressed=command.progressed
        )
        await _write_checkpoints(tx, [(row, seq, encoded)], now)
    return SaveCommitted()


async def save_with_pauses(
    tx: Transaction, saves: Sequence[_NumberedCheckpoint], now: float
) -> None:
    """Write the checkpoints of operations that pause, unless they are written already."""
    new = [each for each in saves if each[1] > each[0].checkpoint_seq]
    saved = [
        {"task_id": row.logical_task_id, "seq": seq, "progressed": False} for row, seq, _ in new
    ]
    await tx.execute_many(sql.UPDATE_SAVED, saved)
    await _write_checkpoints(tx, new, now)


def _is_owned_by(row: Row[Any], run: Run) -> bool:
    return row.status == TaskState.RUNNING and bool(row.fence == run.fence)


def _checkpoint_key(row: Row[Any], seq: int) -> Columns:
    return {"task_id": row.logical_task_id, "agent": row.agent_name, "seq": seq}


async def _write_checkpoints(
    tx: Transaction, checkpoints: Sequence[_NumberedCheckpoint], now: float
) -> None:
    """Write one checkpoint for each of several operations, and prune the older ones.

    If the new checkpoint has a working memory, it is removed from the older ones.
    """
    keyed = [(_checkpoint_key(row, seq), encoded) for row, seq, encoded in checkpoints]
    times = {"checkpoint_time": now, "created_at": now}
    await tx.execute_many(
        sql.INSERT_CHECKPOINT, [{**key, **times, **encoded.columns} for key, encoded in keyed]
    )
    await tx.execute_many(
        sql.DELETE_LATER_RECORDS, [key for key, encoded in keyed if encoded.starts]
    )
    records = [{**key, **record} for key, encoded in keyed for record in encoded.records]
    for part in split_by_size(
        records, [len(row["record"]) + len(row["result"] or "") for row in records]
    ):
        await tx.execute_many(sql.INSERT_RECORD, part)
    with_memory = [key for key, encoded in keyed if encoded.columns["l1_snapshot"] is not None]
    await tx.execute_many(sql.DROP_OLDER_SNAPSHOTS, with_memory)
    await _prune(tx, [key for key, _ in keyed])


async def _prune(tx: Transaction, newest: Sequence[Columns]) -> None:
    """Delete checkpoints beyond the history that is kept, counted from `newest`."""
    history = tx.options.checkpoint_history
    too_old = [
        {"task_id": key["task_id"], "agent": key["agent"], "last": key["seq"] - history}
        for key in newest
        if key["seq"] > history
    ]
    await tx.execute_many(sql.PRUNE_CHECKPOINTS, too_old)


_NumberedCheckpoint: TypeAlias = tuple[Row[Any], int, CheckpointRows]
"""An operation's locked row, and a checkpoint of it with its `seq`."""


@dataclass(frozen=True, slots=True)
class EndingOperation:
    """A locked operation that ends.

    `checkpoint` is its last checkpoint. If it is `None`, the latest stored one is copied with
    `reason`.
    """

    row: Row[Any]
    state: TaskState
    reason: str | None = None
    checkpoint: AgentCheckpoint | None = None
    usage: TokenUsage | None = None

    @property
    def keeps_pause(self) -> bool:
        """Whether its last pause is kept: it may be resumed there."""
        return self.state is not TaskState.COMPLETED and self.row.generation > 0


async def _keep_pauses(
    tx: Transaction, closings: Sequence[EndingOperation]
) -> dict[str, TokenUsage]:
    """Remove what no resume needs from the calls of the pauses that are kept.

    These are the requests of calls with a result, and, unless they are kept, security contexts.
    Returns, by task, the tokens up to the end of the pause, including its calls. A run that ends
    its task has counted them itself.
    """
    ids = sorted(closing.row.logical_task_id for closing in closings if closing.keeps_pause)
    if not ids:
        return {}
    calls = group_by_task(await tx.fetch(statements.READ_KEPT_CALLS, ids=ids))
    usage: dict[str, TokenUsage] = {}
    codec = tx.options.codec
    for row in await tx.fetch(statements.READ_PAUSE_USAGE, ids=ids):
        key = (inventory.TOKEN_USAGE, row.agent_name, row.logical_task_id)
        try:
            stored = codec.read_text(row.token_usage, *key)
        except KeyMissing:
            continue  # the stored total stays
        counted = TokenUsage.model_validate_json(stored or "{}")
        for call in calls.get(row.logical_task_id, ()):
            if (outcome := await find_outcome(call, codec)) is not None:
                counted.merge(outcome.usage, source=call.peer_agent)
        if not counted.is_empty:
            usage[row.logical_task_id] = counted
    await tx.execute_many(
        statements.UPDATE_REQUEST,
        [
            {
                "task_id": call.logical_task_id,
                "sub_task_id": call.sub_task_id,
                "request": await _kept_request(call, tx.options),
            }
            for rows in calls.values()
            for call in rows
        ],
    )
    return usage


async def find_outcome(call: Row[Any], codec: Codec) -> Outcome | None:
    """The outcome of a call; `None` if missing or unreadable, which must not stop an end."""
    if call.outcome is None:
        return None
    try:
        return await read_outcome(call, codec)
    except KeyMissing as error:
        _log.warning("task %s: the outcome of a call is %s", call.logical_task_id, error)
        return None
    except Exception:
        _log.exception("task %s: the outcome of a call is damaged", call.logical_task_id)
        return None


async def _kept_request(call: Row[Any], options: StoreOptions) -> Packed:
    codec = options.codec
    key = (inventory.CALL_REQUEST, call.agent_name, call.logical_task_id, call.sub_task_id)
    if isinstance(await find_outcome(call, codec), Ok):
        return await codec.pack(b"", *key)
    try:
        request = await unpack_request(call, codec)
        return await codec.pack(
            request if options.keep_security_context else without_security_context(request), *key
        )
    except KeyMissing:
        kept: Packed = call.request
        return kept
    except Exception:
        _log.exception("task %s: the request of a call is damaged", call.logical_task_id)
        return await codec.pack(b"", *key)


async def close_operations(
    tx: Transaction, closings: Sequence[EndingOperation], now: float
) -> dict[str, Columns]:
    """Keep, archive or delete the checkpoints of operations that end.

    Returns, by task, the tombstone columns in which an operation differs from other tasks.
    """
    if not closings:
        return {}
    ids = sorted(closing.row.logical_task_id for closing in closings)
    preserved = {row.operation_id for row in await tx.fetch(sql.READ_PRESERVED, ids=ids)}
    completed = {
        closing.row.logical_task_id for closing in closings if closing.state is TaskState.COMPLETED
    }
    usage = await _keep_pauses(tx, closings)
    if deleted := sorted(completed - preserved):
        if tx.options.checkpoint_archive:
            await tx.execute(sql.ARCHIVE_CHECKPOINTS, ids=deleted, now=now)
        await tx.execute(sql.DELETE_CHECKPOINTS, ids=deleted)
        await tx.execute(sql.DELETE_RECORDS, ids=deleted)
    return {
        closing.row.logical_task_id: {
            "checkpoint_seq": await _write_last_checkpoint(tx, closing, now),
            "keep_request": closing.state is not TaskState.COMPLETED,
            "keep_usage": True,
            "keep_pause": closing.keeps_pause,
            "keep_security_context": closing.keeps_pause and tx.options.keep_security_context,
            "usage": None
            if (total := closing.usage or usage.get(closing.row.logical_task_id)) is None
            else tx.options.codec.text(
                total.model_dump_json(),
                inventory.TOKEN_USAGE,
                closing.row.agent_name,
                closing.row.logical_task_id,
            ),
            "expires_at": expiry(
                closing.row,
                closing.state,
                now,
                tx.options,
                preserve=closing.row.logical_task_id in preserved,
            ),
        }
        for closing in closings
    }


async def _write_last_checkpoint(tx: Transaction, closing: EndingOperation, now: float) -> int:
    """Write the last checkpoint of an operation unless it has completed, and return its number."""
    row = closing.row
    current_seq: int = row.checkpoint_seq
    if closing.state is TaskState.COMPLETED:
        return current_seq
    if closing.checkpoint is not None:
        # A save whose response was lost may have used this number, and must not hide the failure.
        seq = max(closing.checkpoint.seq, current_seq + 1)
        rows = checkpoint_rows(closing.checkpoint, tx.options.codec, tx.options.names)
        await _write_checkpoints(tx, [(row, seq, rows)], now)
        return seq
    if current_seq > 0:
        await _copy_last_checkpoint(tx, row, closing.reason, now)
        return current_seq + 1
    return 0


async def _copy_last_checkpoint(
    tx: Transaction, row: Row[Any], reason: str | None, now: float
) -> None:
    """Write the last checkpoint of an operation again, with the reason for its end."""
    last = _checkpoint_key(row, row.checkpoint_seq)
    copy = _checkpoint_key(row, row.checkpoint_seq + 1)
    stored = await tx.fetch(sql.READ_RECORDS, **last)
    in_row = not stored or stored[0].in_row
    codec, key = tx.options.codec, (row.agent_name, row.logical_task_id)
    records, changed = without_counted_usage(
        stored[0].subtasks if stored else "[]", row, codec, in_row=in_row
    )
    usage = stored[0].token_usage if stored else None
    details = usage_details(codec.read_text(usage, inventory.TOKEN_USAGE, *key))
    await tx.execute(
        sql.COPY_LAST_CHECKPOINT,
        **last,
        now=now,
        reason=codec.text(sanitize(reason), inventory.FAILURE_REASON, *key),
        error_details=codec.json(details, inventory.ERROR_DETAILS, *key),
        retry_count=row.retry_count,
        subtasks=records if in_row else "[]",
    )
    if not in_row:
        await tx.execute_many(sql.COPY_RECORD, [{**copy, **record} for record in changed])
    await _prune(tx, [copy])


def expiry(
    row: Row[Any], state: TaskState, ended_at: float, options: StoreOptions, *, preserve: bool
) -> float:
    """When an operation may be deleted."""
    if preserve:
        return FAR_FUTURE
    tombstone = tombstone_expiry(row, ended_at, options.tombstone_ttl)
    return (
        tombstone
        if state is TaskState.COMPLETED
        else max(tombstone, ended_at + options.checkpoint_ttl)
    )
