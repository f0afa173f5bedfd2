"""Begin and pause: write a task's row and its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import operation_statements
from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.batcher import PART_BYTES, split_by_size
from meshpoint.adapters.sql.codec import pack, pack_all
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.locking import LockedTasks, StoreOptions, duration_seconds, lock_tasks, run_in_rounds
from meshpoint.adapters.sql.records import checkpoint_columns, children_json, operation_columns
from meshpoint.adapters.sql.rows import (
    Columns,
    context_columns,
    dispatch_from_row,
    epoch_seconds,
    group_by_task,
    instant,
    is_early_cancel,
    outcome_columns,
    requester_columns,
)
from meshpoint.adapters.sql.subtasking import save_with_pauses
from meshpoint.errors import AgentMisbehaved
from meshpoint.model.checkpoint import (
    MOST_OF_A_ROW,
    Begin,
    BeginResult,
    Begun,
    CallState,
    CancelFound,
    Committed,
    Dispatch,
    Fenced,
    Locked,
    PastDeadline,
    Pause,
    PauseResult,
    PlannedCall,
    Requester,
    Run,
    TaskState,
)
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.model.requesters import binds, same_requester

NOT_NEEDED = Failed(FailureKind.CANCELLED, "the join no longer needed it")

KEEP_ALIVES_PER_TIMEOUT = 3  # so that a requester misses two before it gives up


async def begin(
    tx: Transaction, begins: Sequence[tuple[Begin, bytes | None]], options: StoreOptions
) -> list[BeginResult | Locked]:
    """Insert tasks as running, or as ready if queued, each with its packed request."""

    async def process_round(batch: list[tuple[Begin, bytes | None]]) -> list[BeginResult | Locked]:
        locked = await lock_tasks(tx, [wish.run.task_id for wish, _ in batch])
        first_runs = [(command.run, command.requester) for command, _ in batch]
        locked = await _delete_unrelated_early_cancels(tx, first_runs, locked, options)
        known = {*locked.rows, *locked.locked_elsewhere}
        fresh = [pair for pair in batch if pair[0].run.task_id not in known]
        await tx.execute_many(
            sql.INSERT_TASK, [_begin_columns(wish, request, locked.now, options) for wish, request in fresh]
        )
        await tx.execute_many(
            operation_statements.INSERT_OPERATION, _operation_rows([wish for wish, _ in fresh], locked, options)
        )
        return [
            Locked(wish.run.task_id)
            if wish.run.task_id in locked.locked_elsewhere
            else _begin_result(wish, locked.rows.get(wish.run.task_id), options)
            for wish, _ in batch
        ]

    return await run_in_rounds(begins, lambda pair: pair[0].run.task_id, process_round)


async def _delete_unrelated_early_cancels(
    tx: Transaction, first_runs: Sequence[tuple[Run, Requester]], locked: LockedTasks, options: StoreOptions
) -> LockedTasks:
    """Delete tombstones of early cancels that do not apply to these first runs.

    Returns `locked` without them.
    """
    unrelated = [
        run.task_id
        for run, requester in first_runs
        if run.fence == 0
        and (row := locked.rows.get(run.task_id)) is not None
        and is_early_cancel(row)
        and not (_is_same_agent(row, run, options) and binds(row.requester_app_id, requester.app_id))
    ]
    if not unrelated:
        return locked
    await tx.execute(sql.DELETE_TASKS, ids=unrelated)
    return replace(locked, rows={id_: row for id_, row in locked.rows.items() if id_ not in unrelated})


def _is_same_agent(row: Row[Any], run: Run, options: StoreOptions) -> bool:
    return bool(row.agent_name == options.names.qualified(run.agent))


def _is_cancelled(row: Row[Any], run: Run, requester: Requester, options: StoreOptions) -> bool:
    """Whether this requester's task was cancelled, rather than another task with the same id."""
    if row.status != TaskState.CANCELLED:
        return False
    same = _is_same_agent(row, run, options) and same_requester(row.requester_app_id, requester.app_id)
    return run.fence > 0 or is_early_cancel(row) or same


def _begin_result(command: Begin, row: Row[Any] | None, options: StoreOptions) -> BeginResult:
    run = command.run
    owned = Run(run.task_id, run.agent, run.id, fence=1, generation=0)
    if row is None:
        return Begun(owned, command.queued)
    if _is_cancelled(row, run, command.requester, options):
        return CancelFound(None)
    is_repeat = (row.run_id, row.fence, row.generation) == (run.id, 1, 0)
    # A released run has attempt 1 or more.
    queued = row.status == TaskState.READY and row.attempt == 0
    return Begun(owned, queued) if is_repeat and (queued or row.status == TaskState.RUNNING) else Fenced()


def _begin_columns(command: Begin, request: bytes | None, now: float, options: StoreOptions) -> Columns:
    return {
        "task_id": command.run.task_id,
        "agent": options.names.qualified(command.run.agent),
        "run_id": command.run.id,
        "status": (TaskState.READY if command.queued else TaskState.RUNNING).value,
        "owner": None if command.queued else command.replica.id,
        "attempt": 0 if command.queued else 1,
        "wake_at": now if command.queued else now + command.replica.lease.total_seconds(),
        "request": request,
        "now": now,
        "checkpoint_seq": None if command.operation is None else 0,
        "order": command.order,
        "digest": command.digest,
        **requester_columns(command.requester),
    }


def _operation_rows(begins: Sequence[Begin], locked: LockedTasks, options: StoreOptions) -> list[Columns]:
    return [
        operation_columns(
            command.run.task_id, options.names.qualified(command.run.agent), command.operation, locked.now
        )
        for command in begins
        if command.operation is not None
    ]


@dataclass(frozen=True, slots=True)
class PackedPause:
    """A pause with its values encoded, so that no lock is held while they are compressed."""

    pause: Pause
    columns: Columns
    bodies: tuple[bytes | None, ...]
    outcomes: tuple[bytes | None, ...]
    met: bool  # the join is met by calls that could not be sent
    failed: int  # number of calls that could not be sent
    earliest_timeout: float | None  # seconds until the first sendable call times out
    checkpoint: Columns | None  # the operation's checkpoint, if the pause has one
    size: int  # approximate bytes it adds to a statement

    @classmethod
    async def pack(cls, pause: Pause) -> PackedPause:
        """Encode `pause`.

        Raises:
            AgentMisbehaved: The state is larger than a row can store.
        """
        columns = {
            **await context_columns(pause.context),
            "state": await pack(pause.state),
            "state_format": pause.state_format,
            "app_version": pause.app_version,
            "framework": pause.framework,
        }
        if (size := sum(map(len, filter(None, columns.values())))) > MOST_OF_A_ROW:
            raise AgentMisbehaved(f"the task's state has {size} bytes; a checkpoint keeps {MOST_OF_A_ROW} at most")
        sendable = [call for call in pause.calls if call.outcome is None]
        failed = len(pause.calls) - len(sendable)
        met = pause.join.met(total=len(pause.calls), completed=failed, succeeded=0)
        kept = [call.outcome or (NOT_NEEDED if met else None) for call in pause.calls] if failed else []
        bodies = tuple(await pack_all([call.body for call in pause.calls]))
        checkpoint = None if pause.checkpoint is None else checkpoint_columns(pause.checkpoint)
        return cls(
            pause,
            columns,
            bodies=bodies,
            outcomes=tuple(await outcome_columns(kept)) if failed else (None,) * len(pause.calls),
            met=met,
            failed=failed,
            earliest_timeout=min([_shortest_timeout(call) for call in sendable], default=None),
            checkpoint=checkpoint,
            size=_size(pause, bodies, checkpoint),
        )

    @property
    def fits_fast_path(self) -> bool:
        """Whether the fast path can write it.

        It cannot if a call failed before it was sent, if the pause adds children or a checkpoint,
        or if it is larger than one statement may be.
        """
        return not (self.failed or self.pause.children or self.checkpoint or self.size > PART_BYTES)


def _size(pause: Pause, bodies: Iterable[bytes | None], checkpoint: Columns | None) -> int:
    saved = sum(len(value) for value in (checkpoint or {}).values() if isinstance(value, str | bytes))
    return 1024 + len(pause.state) + 512 * len(pause.calls) + sum(map(len, filter(None, bodies))) + saved


async def pause(
    tx: Transaction, pauses: Sequence[tuple[PackedPause, bytes | None]], options: StoreOptions
) -> list[PauseResult | Locked]:
    """Write checkpoints, each with the packed request of its task.

    A repeated pause finds its own checkpoint and returns the requests that are still unsent.
    """

    async def process_round(batch: list[tuple[PackedPause, bytes | None]]) -> list[PauseResult | Locked]:
        locked = await lock_tasks(tx, [packed.pause.run.task_id for packed, _ in batch])
        first_runs = [(packed.pause.run, packed.pause.requester) for packed, _ in batch]
        locked = await _delete_unrelated_early_cancels(tx, first_runs, locked, options)
        results = {packed.pause.run.task_id: _check_pause(packed.pause, locked, options) for packed, _ in batch}
        await _write_pauses(
            [pair for pair in batch if results[pair[0].pause.run.task_id] is None], locked, tx, options
        )
        await _reload_dispatches(results, tx, options)
        return [results[packed.pause.run.task_id] or committed_pause(packed, locked.now) for packed, _ in batch]

    return await run_in_rounds(pauses, lambda pair: pair[0].pause.run.task_id, process_round)


def _check_pause(pause: Pause, locked: LockedTasks, options: StoreOptions) -> PauseResult | Locked | None:
    """The result of a pause that must not be written, or `None` to write it.

    `Committed` means that the pause is a repetition; its dispatches are loaded later.
    """
    run, row = pause.run, locked.rows.get(pause.run.task_id)
    if run.task_id in locked.locked_elsewhere:
        return Locked(run.task_id)
    late = pause.requester.deadline is not None and pause.requester.deadline.timestamp() <= locked.now
    if row is None:
        if run.fence != 0 or pause.checkpoint is not None:  # an operation always has a row
            return Fenced()
        return PastDeadline() if late else None
    if _is_cancelled(row, run, pause.requester, options):
        return CancelFound(None)
    paused = row.status in {TaskState.WAITING, TaskState.READY}
    if paused and row.run_id == run.id and row.generation == run.generation + 1:
        return Committed(TaskState(row.status), ())
    if row.status != TaskState.RUNNING or row.fence != run.fence:
        return Fenced()
    if row.checkpoint_seq is None and pause.checkpoint is not None:
        return Fenced()
    if row.cancel_requested:
        return CancelFound(run)
    return PastDeadline() if late else None


async def _write_pauses(
    batch: list[tuple[PackedPause, bytes | None]], locked: LockedTasks, tx: Transaction, options: StoreOptions
) -> None:
    batch = sorted(batch, key=lambda pair: pair[0].pause.run.task_id)
    fresh = [pair for pair in batch if pair[0].pause.run.task_id not in locked.rows]
    known = [packed for packed, _ in batch if packed.pause.run.task_id in locked.rows]
    await tx.execute_many(
        sql.INSERT_PAUSED,
        [
            {
                **_task_columns(packed, locked.now, options),
                "request": request,
                "digest": packed.pause.digest,
                **requester_columns(packed.pause.requester),
            }
            for packed, request in fresh
        ],
    )
    if known:
        ids = [packed.pause.run.task_id for packed in known]
        await tx.execute_many(sql.UPDATE_PAUSED, [_task_columns(packed, locked.now, options) for packed in known])
        await tx.execute(sql.DELETE_DONE_CALLS, ids=ids)
        await tx.execute(sql.DELETE_JOINS, ids=ids)
    calls = [row for packed, _ in batch for row in _call_columns(packed, locked.now, options)]
    for part in split_by_size(calls, [len(row["request"] or b"") + len(row["outcome"] or b"") for row in calls]):
        await tx.execute_many(sql.INSERT_CALL, part)
    await tx.execute_many(sql.INSERT_JOIN, [_join_columns(packed, locked.now, options) for packed, _ in batch])
    pauses = [packed.pause for packed, _ in batch if packed.pause.children]
    await tx.execute_many(
        operation_statements.ADD_CHILDREN,
        [{"task_id": pause.run.task_id, "children": children_json(pause.children)} for pause in pauses],
    )
    await save_with_pauses(
        tx,
        [
            (locked.rows[packed.pause.run.task_id], packed.pause.checkpoint.seq, packed.checkpoint)
            for packed in known
            if packed.pause.checkpoint is not None and packed.checkpoint is not None
        ],
        locked.now,
        options,
    )


async def _reload_dispatches(
    results: dict[Any, PauseResult | Locked | None], tx: Transaction, options: StoreOptions
) -> None:
    again = {task_id: found for task_id, found in results.items() if isinstance(found, Committed)}
    if again:
        rows = group_by_task(await tx.fetch(sql.READ_DISPATCHES, ids=sorted(again)))
        for task_id, found in again.items():
            unsent = [row for row in rows.get(task_id, []) if (row.send_due_at or row.join_due_at) is not None]
            sends = [await dispatch_from_row(row, options.names, attempt=1) for row in unsent]
            results[task_id] = Committed(found.state, tuple(sends))


def committed_pause(packed: PackedPause, now: float) -> Committed:
    """The result of a checkpoint written at `now`, with the requests to dispatch."""
    pause = packed.pause
    if packed.met:
        return Committed(TaskState.READY, ())
    run, deadline_of = pause.run, _deadlines(pause, now)
    return Committed(
        TaskState.WAITING,
        tuple(
            Dispatch(
                run.agent,
                run.task_id,
                run.generation + 1,
                call.sub_task_id,
                call.peer,
                call.body,
                call.headers,
                deadline_of[call.timeout],
            )
            for call in pause.calls
            if call.outcome is None
        ),
    )


def _deadlines(pause: Pause, now: float) -> dict[timedelta, datetime]:
    """The calls' deadlines by timeout, since most calls of a pause have the same timeout."""
    calls = {call.timeout: call for call in pause.calls}
    return {timeout: instant(_absolute_deadline(pause, call, now)) for timeout, call in calls.items()}


def _absolute_deadline(pause: Pause, call: PlannedCall, now: float) -> float:
    own = now + call.timeout.total_seconds()
    task = pause.requester.deadline
    return own if task is None else min(own, task.timestamp())


def _effective_deadline(pause: Pause, call: PlannedCall, now: float) -> float:
    return min(_absolute_deadline(pause, call, now), now + _shortest_timeout(call))


def _shortest_timeout(call: PlannedCall) -> float:
    timeout, idle = call.timeout, call.idle_timeout
    return (timeout if idle is None else min(timeout, idle)).total_seconds()


def _join_deadline(pause: Pause, now: float) -> float | None:
    return None if pause.join.deadline is None else now + pause.join.deadline.total_seconds()


def keep_alive_at(requester: Requester, now: float) -> float | None:
    """When to send `requester` the first keep-alive of a task that waits since `now`."""
    idle = requester.idle_timeout
    return None if idle is None else now + idle.total_seconds() / KEEP_ALIVES_PER_TIMEOUT


def _task_columns(packed: PackedPause, now: float, options: StoreOptions) -> dict[str, Any]:
    pause = packed.pause
    earliest_timeout = None if packed.earliest_timeout is None else now + packed.earliest_timeout
    deadlines = [earliest_timeout, epoch_seconds(pause.requester.deadline), _join_deadline(pause, now)]
    return {
        "task_id": pause.run.task_id,
        "agent": options.names.qualified(pause.run.agent),
        "status": TaskState.READY.value if packed.met else TaskState.WAITING.value,
        "generation": pause.run.generation + 1,
        "run_id": pause.run.id,
        "wake_at": now if packed.met else min(each for each in deadlines if each is not None),
        "keep_alive_at": keep_alive_at(pause.requester, now),
        "keep_alives": KEEP_ALIVES_PER_TIMEOUT,
        "now": now,
        **packed.columns,
    }


def _call_columns(packed: PackedPause, now: float, options: StoreOptions) -> list[Columns]:
    pause = packed.pause
    rows: list[Columns] = []
    for seq, (call, body, outcome) in enumerate(zip(pause.calls, packed.bodies, packed.outcomes, strict=True)):
        sent = call.outcome is None and not packed.met
        rows.append(
            {
                "task_id": pause.run.task_id,
                "sub_task_id": call.sub_task_id,
                "agent": options.names.qualified(pause.run.agent),
                "generation": pause.run.generation + 1,
                "seq": seq,
                "call_id": call.call_id,
                "peer": call.peer,
                "headers": json.dumps(call.headers),
                "request": body,
                "status": CallState.PENDING.value if sent else CallState.DONE.value,
                "outcome": outcome,
                "send_attempts": 1 if sent else 0,
                "idle_timeout": duration_seconds(call.idle_timeout),
                "timeout_deadline": _effective_deadline(pause, call, now),
                "absolute_deadline": _absolute_deadline(pause, call, now),
                "now": now,
            }
        )
    return rows


def _join_columns(packed: PackedPause, now: float, options: StoreOptions) -> Columns:
    pause = packed.pause
    return {
        "task_id": pause.run.task_id,
        "generation": pause.run.generation + 1,
        "total": len(pause.calls),
        "completed": len(pause.calls) if packed.met else packed.failed,
        "succeeded": 0,
        "needed": pause.join.needed,
        "join_deadline": _join_deadline(pause, now),
        "agent": options.names.qualified(pause.run.agent),
        "send_due_at": None if packed.met else now + options.backoff(1),
        "send_attempts": 0 if packed.met else 1,
    }
