"""Append entries to the logs of running tasks, between two of their pauses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshpoint.adapters.sql import inventory
from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.batcher import split_by_size
from meshpoint.adapters.sql.codec import Codec, pack_entries
from meshpoint.adapters.sql.database import StoreOptions, Transaction
from meshpoint.adapters.sql.locking import LockedTasks, run_in_rounds
from meshpoint.adapters.sql.rows import Columns
from meshpoint.model.ids import RunId, TaskId
from meshpoint.model.subtasks import SaveCommitted
from meshpoint.model.tasks import Run, TaskState
from meshpoint.model.transitions import (
    Append,
    CancelFound,
    Fenced,
    LogChange,
    SaveResult,
    TaskLocked,
)


@dataclass(frozen=True, slots=True)
class PackedAppend:
    """An append with its entries encoded. `size` is the number of their bytes."""

    command: Append
    entries: tuple[bytes, ...]
    size: int

    @classmethod
    async def pack(cls, command: Append, options: StoreOptions) -> PackedAppend:
        """Encode `command`."""
        agent = options.names.qualified(command.run.agent)
        entries = await seal_entries(command.log, options.codec, agent, command.run.task_id)
        return cls(command, entries, sum(map(len, entries)))


async def seal_entries(
    log: LogChange, codec: Codec, agent: str, task_id: TaskId
) -> tuple[bytes, ...]:
    """Encode the new entries of a task's log. Each is bound to its number."""
    packed = await pack_entries(log.entries)
    if not codec.seals(agent):
        return packed
    key = (inventory.LOG_ENTRY, agent, task_id)
    sealed = (
        codec.seal(entry, *key, str(seq), seq=seq)
        for seq, entry in enumerate(packed, log.after + 1)
    )
    return tuple(entry for entry in sealed if entry is not None)


async def append(
    tx: Transaction, appends: Sequence[PackedAppend]
) -> list[SaveResult | TaskLocked]:
    """Append entries. A repeated append finds its own entries.

    They are written even if a cancel was requested: the work that they record is done.
    """

    async def process_round(batch: list[PackedAppend], locked: LockedTasks) -> list[SaveResult]:
        logs = [(each.command.run.task_id, each.command.log) for each in batch]
        unknown = await tasks_with_unknown_entries(tx, locked, logs)
        commands = [each.command for each in batch if _is_owner(each.command.run, locked)]
        written = {each.run.task_id for each in commands if await _is_repeated(tx, each, locked)}
        fresh = {
            run.task_id
            for run, log in ((each.run, each.log) for each in commands)
            if run.task_id not in written | unknown
            and locked.rows[run.task_id].log_seq == log.after
        }
        await _write(tx, [each for each in batch if each.command.run.task_id in fresh])
        runs = [each.command.run for each in batch]
        return [
            Fenced()
            if run.task_id not in written | fresh
            else CancelFound(run)
            if locked.rows[run.task_id].cancel_requested
            else SaveCommitted()
            for run in runs
        ]

    return await run_in_rounds(tx, appends, lambda each: each.command.run.task_id, process_round)


def _is_owner(run: Run, locked: LockedTasks) -> bool:
    row = locked.rows.get(run.task_id)
    return row is not None and row.status == TaskState.RUNNING and bool(row.fence == run.fence)


async def _write(tx: Transaction, appends: Sequence[PackedAppend]) -> None:
    await tx.execute_many(
        sql.UPDATE_APPENDED,
        [
            {"task_id": each.command.run.task_id, "new_entries": len(each.entries)}
            for each in appends
        ],
    )
    await write_logs(
        tx,
        [
            (each.command.run.task_id, each.command.run.id, each.command.log, each.entries)
            for each in appends
        ],
    )


async def _is_repeated(tx: Transaction, command: Append, locked: LockedTasks) -> bool:
    """Whether the run has already written `command`: its last entry is the last in the log."""
    row = locked.rows[command.run.task_id]
    if row.log_seq != command.log.after + len(command.log.entries):
        return False
    runs = await tx.fetch(sql.READ_ENTRY_RUN, task_id=row.logical_task_id, seq=row.log_seq)
    return [each.run_id for each in runs] == [command.run.id]


async def tasks_with_unknown_entries(
    tx: Transaction, locked: LockedTasks, changes: Iterable[tuple[TaskId, LogChange | None]]
) -> set[str]:
    """The tasks that have log entries of an unknown run, among those with a log to change.

    What is found before the first entry belongs to an earlier task with the same id, which the
    previous release has deleted without its log. `write_logs` deletes it.
    """
    logged = {task_id for task_id, log in changes if log is not None and log.after}
    if not (ids := sorted(locked.rows.keys() & logged)):
        return set()
    return {row.logical_task_id for row in await tx.fetch(sql.READ_UNKNOWN_ENTRIES, ids=ids)}


async def write_logs(
    tx: Transaction, changes: Sequence[tuple[TaskId, RunId, LogChange, Sequence[bytes]]]
) -> None:
    """Delete replaced entries from the logs of tasks, and append the packed new ones."""
    replaced = [
        task_id
        for task_id, _, log, packed in changes
        if log.replaces or (packed and not log.after)
    ]
    if replaced:
        await tx.execute(sql.DELETE_LOGS, ids=replaced)
    entries: list[Columns] = [
        {"task_id": task_id, "seq": seq, "run_id": run_id, "entry": entry}
        for task_id, run_id, log, packed in changes
        for seq, entry in enumerate(packed, log.after + 1)
    ]
    for part in split_by_size(entries, [len(row["entry"]) for row in entries]):
        await tx.execute_many(sql.INSERT_LOG_ENTRY, part)
