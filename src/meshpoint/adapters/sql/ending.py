"""End and release, by the run that owns a task, and cancel, from outside the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import inventory
from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.claiming import close_pending
from meshpoint.adapters.sql.codec import Packed
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.locking import LockedTasks, run_in_rounds
from meshpoint.adapters.sql.rows import (
    FAR_FUTURE,
    Columns,
    add_version,
    is_early_cancel,
    is_suspended,
    ready_at,
    reply_from_row,
    requester_from_row,
    tombstone_expiry,
)
from meshpoint.adapters.sql.subtasking import EndingOperation, close_operations
from meshpoint.model.ids import ReplicaId, TaskId
from meshpoint.model.tasks import (
    CancelNotice,
    Reply,
    Run,
    TaskState,
    add_canceller,
    parked_until,
    same_requester,
)
from meshpoint.model.transitions import (
    Cancel,
    CancelBeforeRequest,
    CancelCommitted,
    CancelRefused,
    CancelRequested,
    CancelResult,
    CancelStale,
    CancelTooLate,
    End,
    EndCommitted,
    EndResult,
    Fenced,
    Release,
    SuspendRefused,
    SuspendResult,
    TaskLocked,
    TaskSuspended,
)

_IDLE_STATES = frozenset({TaskState.WAITING, TaskState.READY, TaskState.PARKED})


async def end(tx: Transaction, ends: Sequence[tuple[End, Packed]]) -> list[EndResult | TaskLocked]:
    """Turn running tasks into tombstones, each with its packed reply.

    A repeated end finds its own tombstone and returns the same result.
    """

    async def process_round(
        batch: list[tuple[End, Packed]], locked: LockedTasks
    ) -> list[EndResult]:
        owned = [
            (command, reply, row)
            for command, reply in batch
            if (row := _owned_row(command.run, locked)) is not None
        ]
        closings = [
            EndingOperation(
                row,
                command.state,
                command.reason or command.dead_reason,
                command.checkpoint,
                command.usage,
            )
            for command, _, row in owned
            if row.checkpoint_seq is not None
        ]
        tombstones = [
            {
                **_tombstone_columns(tx, row, command.state, reply, locked.now),
                "run_id": command.run.id,
                "dead_reason": tx.options.codec.text(
                    command.dead_reason, inventory.REASON, row.agent_name
                ),
                "keep_request": command.dead_reason is not None,
            }
            for command, reply, row in owned
        ]
        logged = [
            row.logical_task_id for command, _, row in owned if _ends_log(row, command.state)
        ]
        await _write_tombstones(tx, tombstones, closings, logged, locked.now)
        return [_end_result(tx, command, locked) for command, _ in batch]

    return await run_in_rounds(tx, ends, lambda pair: pair[0].run.task_id, process_round)


def _ends_log(row: Row[Any], state: TaskState) -> bool:
    """Whether a task that ends in `state` has a log that no resume will need."""
    is_resumable = row.checkpoint_seq is not None and state is not TaskState.COMPLETED
    return bool(row.log_seq) and not is_resumable


def _owned_row(run: Run, locked: LockedTasks) -> Row[Any] | None:
    """The row of the run's task, or `None` if the run does not own it."""
    row = locked.rows.get(run.task_id)
    owned = row is not None and row.status == TaskState.RUNNING and row.fence == run.fence
    return row if owned else None


def _end_result(tx: Transaction, command: End, locked: LockedTasks) -> EndResult:
    row = locked.rows.get(command.run.task_id)
    if row is None:
        return Fenced()
    is_repeat = TaskState(row.status).is_final and (row.run_id, row.fence) == (
        command.run.id,
        command.run.fence,
    )
    if not is_repeat and _owned_row(command.run, locked) is None:
        return Fenced()
    age = timedelta(seconds=locked.now - row.ended_at if is_repeat else 0.0)
    return EndCommitted(_new_reply(tx, row, command.state, command.reply, age))


def _tombstone_columns(
    tx: Transaction, row: Row[Any], state: TaskState, reply: Packed, now: float
) -> Columns:
    return {
        "task_id": row.logical_task_id,
        "status": state.value,
        "wake_at": now + tx.options.backoff(1),
        "reply": reply,
        "now": now,
        "expires_at": tombstone_expiry(row, now, tx.options.tombstone_ttl),
        "checkpoint_seq": None,
        "keep_usage": False,
        "keep_pause": False,
        "keep_security_context": False,
        "usage": None,
    }


def _new_reply(
    tx: Transaction, row: Row[Any], state: TaskState, body: bytes, age: timedelta
) -> Reply:
    agent = tx.options.names.plain(row.agent_name)
    return Reply(
        agent, row.logical_task_id, state, body, requester_from_row(row), age, fence=row.fence
    )


async def _write_tombstones(
    tx: Transaction,
    tombstones: Sequence[Columns],
    closings: Sequence[EndingOperation],
    logged: Sequence[str],
    now: float,
) -> None:
    """Write tombstones, close the operations among them, and delete the logs of `logged`."""
    if tombstones:
        # For operations, these columns override the others.
        closed = await close_operations(tx, closings, now)
        ended = [{**columns, **closed.get(columns["task_id"], {})} for columns in tombstones]
        await tx.execute_many(sql.UPDATE_ENDED, ended)
        if kept := [columns["task_id"] for columns in ended if columns["keep_pause"]]:
            await tx.execute(sql.UPDATE_JOINS_ENDED, ids=kept)
        if ids := [columns["task_id"] for columns in ended if not columns["keep_pause"]]:
            await tx.execute(sql.DELETE_DONE_CALLS, ids=ids)
            await tx.execute(sql.DELETE_JOINS, ids=ids)
        if logged:
            await tx.execute(sql.DELETE_LOGS, ids=list(logged))


async def release(tx: Transaction, releases: Sequence[Release]) -> list[bool | TaskLocked]:
    """Make running tasks ready again, or park them. A task that was cancelled becomes ready.

    A suspended task stays suspended.

    `False` means that the run no longer owns its task.
    """

    async def process_round(batch: list[Release], locked: LockedTasks) -> list[bool]:
        owned = {
            command.run.task_id: _release_columns(tx, command, row, locked.now)
            for command in batch
            if (row := _owned_row(command.run, locked)) is not None
        }
        await tx.execute_many(sql.UPDATE_RELEASED, list(owned.values()))
        return [
            command.run.task_id in owned or _is_repeated_release(command.run, locked)
            for command in batch
        ]

    return await run_in_rounds(tx, releases, lambda command: command.run.task_id, process_round)


def _is_repeated_release(run: Run, locked: LockedTasks) -> bool:
    row = locked.rows.get(run.task_id)
    # A pause by the same run also makes a task ready, but raises the generation.
    return (
        row is not None
        and row.status in {TaskState.READY, TaskState.PARKED}
        and (row.run_id, row.fence, row.generation) == (run.id, run.fence, run.generation)
    )


def _release_columns(tx: Transaction, command: Release, row: Row[Any], now: float) -> Columns:
    columns = {
        "task_id": command.run.task_id,
        "status": TaskState.READY.value,
        "run_id": command.run.id,
        "wake_at": ready_at(row, now + command.delay.total_seconds()),
        "attempt": row.attempt + command.counts_as_attempt,
        "incompatible_since": row.incompatible_since,
        "tried_versions": row.tried_versions,
        "parked_reason": None,
        "death": tx.options.codec.text(command.crash_reason, inventory.REASON, row.agent_name),
    }
    if command.parked_reason is None or row.cancel_requested:
        return columns
    since = row.incompatible_since or now
    # The previous release forgets only `incompatible_since` when it pauses a task.
    tried = None if row.incompatible_since is None else row.tried_versions
    return columns | {
        "status": TaskState.PARKED.value,
        "wake_at": parked_until(since + tx.options.parked_limit, row.task_deadline),
        "incompatible_since": since,
        "tried_versions": add_version(tried, command.version),
        "parked_reason": tx.options.codec.text(
            command.parked_reason, inventory.PARKED_REASON, row.agent_name
        ),
    }


async def unpark(tx: Transaction, task_ids: Sequence[TaskId]) -> list[bool | TaskLocked]:
    """Make parked tasks ready for any version. `False` for a task that is not parked."""

    async def process_round(batch: list[TaskId], locked: LockedTasks) -> list[bool]:
        parked = [
            task_id
            for task_id in batch
            if (row := _row_in_namespace(tx, task_id, locked)) is not None
            and row.status == TaskState.PARKED
        ]
        await tx.execute_many(
            sql.UPDATE_UNPARKED, [{"task_id": task_id, "now": locked.now} for task_id in parked]
        )
        return [task_id in parked for task_id in batch]

    return await run_in_rounds(tx, task_ids, lambda task_id: task_id, process_round)


async def suspend(tx: Transaction, task_ids: Sequence[TaskId]) -> list[SuspendResult | TaskLocked]:
    """Keep replicas from acquiring running, waiting and ready tasks. Their runs continue."""

    async def process_round(batch: list[TaskId], locked: LockedTasks) -> list[SuspendResult]:
        rows = {task_id: _row_in_namespace(tx, task_id, locked) for task_id in batch}
        results = {task_id: _suspend_result(row) for task_id, row in rows.items()}
        for is_repeated, transaction in ((False, tx), (True, tx.without_timelines())):
            await transaction.execute_many(
                sql.UPDATE_SUSPENDED,
                [
                    {"task_id": task_id, "now": locked.now, "far_future": FAR_FUTURE}
                    for task_id in batch
                    if isinstance(result := results[task_id], TaskSuspended)
                    and result.repeated is is_repeated
                ],
            )
        return [results[task_id] for task_id in batch]

    return await run_in_rounds(tx, task_ids, lambda task_id: task_id, process_round)


def _suspend_result(row: Row[Any] | None) -> SuspendResult:
    if row is None:
        return SuspendRefused(None)
    state, repeated = TaskState(row.status), is_suspended(row)
    if row.cancel_requested and not state.is_final:
        return SuspendRefused(state, is_cancelled=True)
    if not (state.can_be_suspended or repeated):
        return SuspendRefused(state)
    return TaskSuspended(state, repeated=repeated)


async def unsuspend(tx: Transaction, task_ids: Sequence[TaskId]) -> list[bool | TaskLocked]:
    """Let replicas acquire suspended tasks again. `False` for a task that is not suspended."""

    async def process_round(batch: list[TaskId], locked: LockedTasks) -> list[bool]:
        suspended = [
            task_id
            for task_id in batch
            if (row := _row_in_namespace(tx, task_id, locked)) is not None and is_suspended(row)
        ]
        await tx.execute_many(
            sql.UPDATE_UNSUSPENDED,
            [{"task_id": task_id, "now": locked.now} for task_id in suspended],
        )
        return [task_id in suspended for task_id in batch]

    return await run_in_rounds(tx, task_ids, lambda task_id: task_id, process_round)


def _row_in_namespace(tx: Transaction, task_id: TaskId, locked: LockedTasks) -> Row[Any] | None:
    """The locked row of a task, or `None` if it is missing or in another namespace."""
    row = locked.rows.get(task_id)
    prefix = tx.options.names.prefix
    return row if row is not None and row.agent_name.startswith(prefix) else None


async def cancel(
    tx: Transaction, cancels: Sequence[tuple[Cancel, Packed]]
) -> list[CancelResult | TaskLocked]:
    """Cancel tasks, each with its packed reply.

    Waiting, ready and parked tasks end at once. Running tasks are flagged for their owner. An
    unknown task gets a tombstone that its request will find.
    """

    async def process_round(
        batch: list[tuple[Cancel, Packed]], locked: LockedTasks
    ) -> list[CancelResult]:
        rows = {command.task_id: _row_of_agent(tx, command, locked) for command, _ in batch}
        refusals = {
            command.task_id: no
            for command, _ in batch
            if (no := _refusal(command, rows[command.task_id])) is not None
        }
        accepted = [
            (command, reply, row)
            for command, reply in batch
            if command.task_id not in refusals and (row := rows[command.task_id]) is not None
        ]
        notices = await _cancel_idle(
            tx, [each for each in accepted if each[2].status in _IDLE_STATES], locked.now
        )
        await tx.execute_many(
            sql.INSERT_EARLY_CANCEL,
            [
                _early_cancel_columns(tx, command, reply, locked.now)
                for command, reply in batch
                if command.task_id not in locked.rows
            ],
        )
        await tx.execute_many(
            sql.UPDATE_CANCELLERS,
            [
                {
                    "task_id": command.task_id,
                    "cancellers": add_canceller(row.requester_app_id, command.sender),
                }
                for command, _, row in accepted
                if is_early_cancel(row) and _adds_canceller(command, row)
            ],
        )
        running = [
            (command.task_id, row.cancel_requested)
            for command, _, row in accepted
            if row.status == TaskState.RUNNING
        ]
        for is_repeated, transaction in ((False, tx), (True, tx.without_timelines())):
            if ids := [task_id for task_id, known in running if bool(known) is is_repeated]:
                await transaction.execute(sql.SET_CANCEL_REQUESTED, ids=ids)
        ended = [command.task_id for command, _, row in accepted if TaskState(row.status).is_final]
        tombstones = await tx.fetch(sql.LOOKUP, ids=ended) if ended else []
        late = {row.logical_task_id: row for row in tombstones}
        return [
            refusals[command.task_id]
            if command.task_id in refusals
            else await _cancel_result(
                tx, command, rows[command.task_id], late, notices.get(command.task_id, ())
            )
            for command, _ in batch
        ]

    return await run_in_rounds(tx, cancels, lambda pair: pair[0].task_id, process_round)


async def _cancel_idle(
    tx: Transaction, idle: Sequence[tuple[Cancel, Packed, Row[Any]]], now: float
) -> dict[str, tuple[CancelNotice, ...]]:
    """End tasks that no run owns. Returns the cancels to send, by task."""
    notices = await close_pending(tx, [command.task_id for command, _, _ in idle], now)
    closings = [
        EndingOperation(row, TaskState.CANCELLED, "cancelled on request")
        for _, _, row in idle
        if row.checkpoint_seq is not None
    ]
    tombstones = [
        {
            **_tombstone_columns(tx, row, TaskState.CANCELLED, reply, now),
            "run_id": command.run_id,
            "dead_reason": None,
            "keep_request": False,
        }
        for command, reply, row in idle
    ]
    logged = [row.logical_task_id for _, _, row in idle if _ends_log(row, TaskState.CANCELLED)]
    await _write_tombstones(tx, tombstones, closings, logged, now)
    return notices


def _row_of_agent(tx: Transaction, command: Cancel, locked: LockedTasks) -> Row[Any] | None:
    """The task's row, or `None` if it is missing or belongs to another agent."""
    row = locked.rows.get(command.task_id)
    mine = row is not None and row.agent_name == tx.options.names.qualified(command.agent)
    return row if mine else None


def _refusal(
    command: Cancel, row: Row[Any] | None
) -> CancelStale | CancelRefused | CancelRequested | None:
    """The refusal of a cancel, or `None` if it applies.

    A cancel is refused if the task has another requester, or if another parent has requested the
    task since.
    """
    if row is None or is_early_cancel(row):
        return None
    if command.sender not in {None, command.agent} and not same_requester(
        row.requester_app_id, command.sender
    ):
        if row.status == TaskState.RUNNING and row.cancel_requested:  # the owner may not know yet
            return _cancel_requested(row)
        return None if row.status == TaskState.CANCELLED else CancelRefused()
    stale = command.parent is not None and row.parent_task_id not in {None, command.parent}
    return CancelStale() if stale else None


def _adds_canceller(command: Cancel, row: Row[Any]) -> bool:
    return bool(add_canceller(row.requester_app_id, command.sender) != row.requester_app_id)


def _cancel_requested(row: Row[Any]) -> CancelRequested:
    return CancelRequested(None if row.owner is None else ReplicaId(row.owner))


def _early_cancel_columns(tx: Transaction, command: Cancel, reply: Packed, now: float) -> Columns:
    return {
        "task_id": command.task_id,
        "agent": tx.options.names.qualified(command.agent),
        "run_id": command.run_id,
        "reply": reply,
        "now": now,
        "expires_at": now + tx.options.tombstone_ttl,
        "canceller": command.sender,
    }


async def _cancel_result(
    tx: Transaction,
    command: Cancel,
    row: Row[Any] | None,
    late: Mapping[str, Row[Any]],
    notices: tuple[CancelNotice, ...],
) -> CancelResult:
    if row is None:
        return CancelBeforeRequest()
    if row.status == TaskState.RUNNING:
        return _cancel_requested(row)
    if not TaskState(row.status).is_final:
        reply = _new_reply(tx, row, TaskState.CANCELLED, command.reply, timedelta())
        return CancelCommitted(reply, notices)
    if is_early_cancel(row) and (row.run_id == command.run_id or _adds_canceller(command, row)):
        return CancelBeforeRequest()  # a repeated cancel: its broadcast may not have been sent
    tombstone = late[command.task_id]
    names, codec = tx.options.names, tx.options.codec
    return CancelTooLate(await reply_from_row(tombstone, tombstone.now, names, codec))
