"""End and release, by the run that owns a task, and cancel, from outside the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.claiming import close_pending
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.locking import LockedTasks, StoreOptions, lock_tasks, run_in_rounds
from meshpoint.adapters.sql.rows import FAR_FUTURE, Columns, is_early_cancel, reply_from_row, requester_from_row
from meshpoint.adapters.sql.subtasking import EndingOperation, close_operations
from meshpoint.model.checkpoint import (
    Cancel,
    CancelBeforeRequest,
    CancelledNow,
    CancelNotice,
    CancelRefused,
    CancelRequested,
    CancelResult,
    CancelStale,
    CancelTooLate,
    End,
    Ended,
    EndResult,
    Fenced,
    Locked,
    Release,
    Reply,
    Run,
    TaskState,
)
from meshpoint.model.ids import ReplicaId
from meshpoint.model.requesters import same_requester, with_canceller

Packed = bytes | None


async def end(tx: Transaction, ends: Sequence[tuple[End, Packed]], options: StoreOptions) -> list[EndResult | Locked]:
    """Turn running tasks into tombstones, each with its packed reply.

    A repeated end finds its own tombstone and returns the same result.
    """

    async def process_round(batch: list[tuple[End, Packed]]) -> list[EndResult | Locked]:
        locked = await lock_tasks(tx, [wish.run.task_id for wish, _ in batch])
        owned = [pair for pair in batch if _owns(pair[0].run, locked)]
        closed = await close_operations(tx, _closings([wish for wish, _ in owned], locked), locked.now, options)
        await _write_tombstones(tx, [_end_columns(wish, reply, locked, options) for wish, reply in owned], closed)
        return [_end_result(command, locked, options) for command, _ in batch]

    return await run_in_rounds(ends, lambda pair: pair[0].run.task_id, process_round)


def _owns(run: Run, locked: LockedTasks) -> bool:
    row = locked.rows.get(run.task_id)
    return row is not None and row.status == TaskState.RUNNING and row.fence == run.fence


def _closings(ends: Sequence[End], locked: LockedTasks) -> list[EndingOperation]:
    rows = [locked.rows[command.run.task_id] for command in ends]
    return [
        EndingOperation(row, wish.state, wish.reason or wish.dead_reason, wish.checkpoint)
        for wish, row in zip(ends, rows, strict=True)
        if row.checkpoint_seq is not None
    ]


def _end_columns(command: End, reply: Packed, locked: LockedTasks, options: StoreOptions) -> Columns:
    row = locked.rows[command.run.task_id]
    return {
        **_tombstone_columns(row, command.state, reply, locked.now, options),
        "run_id": command.run.id,
        "dead_reason": command.dead_reason,
        "keep_request": command.dead_reason is not None,
    }


def _end_result(command: End, locked: LockedTasks, options: StoreOptions) -> EndResult | Locked:
    if command.run.task_id in locked.locked_elsewhere:
        return Locked(command.run.task_id)
    row = locked.rows.get(command.run.task_id)
    if row is None:
        return Fenced()
    is_repeat = TaskState(row.status).ended and (row.run_id, row.fence) == (command.run.id, command.run.fence)
    if not (_owns(command.run, locked) or is_repeat):
        return Fenced()
    ended_at = row.ended_at if is_repeat else locked.now
    return Ended(_new_reply(row, command.state, command.reply, timedelta(seconds=locked.now - ended_at), options))


def _tombstone_columns(row: Row[Any], state: TaskState, reply: Packed, now: float, options: StoreOptions) -> Columns:
    return {
        "task_id": row.logical_task_id,
        "status": state.value,
        "wake_at": now + options.backoff(1),
        "reply": reply,
        "now": now,
        # Until then, a late duplicate of the request finds the tombstone; after that, it is past
        # its deadline.
        "expires_at": max(now, row.task_deadline or now) + options.tombstone_ttl,
        "checkpoint_seq": None,
    }


def _new_reply(row: Row[Any], state: TaskState, body: bytes, age: timedelta, options: StoreOptions) -> Reply:
    agent = options.names.plain(row.agent_name)
    return Reply(agent, row.logical_task_id, state, body, requester_from_row(row), age, fence=row.fence)


async def _write_tombstones(tx: Transaction, tombstones: Sequence[Columns], closed: Mapping[str, Columns]) -> None:
    """Write tombstones. For operations, the columns in `closed` override the defaults."""
    if tombstones:
        ids = [columns["task_id"] for columns in tombstones]
        await tx.execute_many(
            sql.UPDATE_ENDED, [{**columns, **closed.get(columns["task_id"], {})} for columns in tombstones]
        )
        await tx.execute(sql.DELETE_DONE_CALLS, ids=ids)
        await tx.execute(sql.DELETE_JOINS, ids=ids)


async def release(tx: Transaction, releases: Sequence[Release], options: StoreOptions) -> list[bool | Locked]:
    """Make running tasks ready again, or park them if no replica could read them for too long.

    `False` means that the run no longer owns its task.
    """

    async def process_round(batch: list[Release]) -> list[bool | Locked]:
        locked = await lock_tasks(tx, [wish.run.task_id for wish in batch])
        owned = [command for command in batch if _owns(command.run, locked)]
        await tx.execute_many(sql.UPDATE_RELEASED, [_release_columns(wish, locked, options) for wish in owned])
        return [
            Locked(wish.run.task_id)
            if wish.run.task_id in locked.locked_elsewhere
            else wish in owned or _is_repeated_release(wish.run, locked)
            for wish in batch
        ]

    return await run_in_rounds(releases, lambda wish: wish.run.task_id, process_round)


def _is_repeated_release(run: Run, locked: LockedTasks) -> bool:
    row = locked.rows.get(run.task_id)
    # A pause by the same run also makes a task ready, but raises the generation.
    return (
        row is not None
        and row.status in {TaskState.READY, TaskState.PARKED}
        and (row.run_id, row.fence, row.generation) == (run.id, run.fence, run.generation)
    )


def _release_columns(command: Release, locked: LockedTasks, options: StoreOptions) -> Columns:
    row, now = locked.rows[command.run.task_id], locked.now
    since = row.incompatible_since
    if command.incompatible is not None and since is None:
        since = now
    parked = command.incompatible is not None and now - since >= options.incompatible_limit
    return {
        "task_id": command.run.task_id,
        "status": TaskState.PARKED.value if parked else TaskState.READY.value,
        "run_id": command.run.id,
        "wake_at": FAR_FUTURE if parked else now + command.not_before.total_seconds(),
        "attempt": row.attempt + command.counted,
        "incompatible_since": since,
        "death": command.incompatible if parked else command.death,
    }


async def cancel(
    tx: Transaction, cancels: Sequence[tuple[Cancel, Packed]], options: StoreOptions
) -> list[CancelResult]:
    """Cancel tasks, each with its packed reply.

    Waiting, ready and parked tasks end at once. Running tasks are flagged for their owner. An
    unknown task gets a tombstone that its request will find.
    """

    async def process_round(batch: list[tuple[Cancel, Packed]]) -> list[CancelResult]:
        locked = await lock_tasks(tx, [wish.task_id for wish, _ in batch])
        all_cancels, batch = batch, [pair for pair in batch if pair[0].task_id not in locked.locked_elsewhere]
        found = {command.task_id: _row_of_agent(command, locked, options) for command, _ in batch}
        refusals = {wish.task_id: no for wish, _ in batch if (no := _refusal(wish, found[wish.task_id])) is not None}
        rows = {task_id: row for task_id, row in found.items() if task_id not in refusals}
        idle = [(wish, reply) for wish, reply in batch if _has_state(rows.get(wish.task_id), _IDLE_STATES)]
        notices = await close_pending(tx, [wish.task_id for wish, _ in idle], locked.now, options)
        closed = await close_operations(tx, _cancel_closings([wish for wish, _ in idle], locked), locked.now, options)
        await _write_tombstones(tx, [_cancel_columns(wish, reply, locked, options) for wish, reply in idle], closed)
        unknown = [(wish, reply) for wish, reply in batch if wish.task_id not in locked.rows]
        await tx.execute_many(
            sql.INSERT_EARLY_CANCEL,
            [_early_cancel_columns(wish, reply, locked.now, options) for wish, reply in unknown],
        )
        cancellers = [
            columns for wish, _ in batch if (columns := _canceller_columns(wish, rows.get(wish.task_id))) is not None
        ]
        await tx.execute_many(sql.UPDATE_CANCELLERS, cancellers)
        running = [task_id for task_id, row in rows.items() if _has_state(row, {TaskState.RUNNING})]
        if running:
            await tx.execute(sql.SET_CANCEL_REQUESTED, ids=running)
        ended = [task_id for task_id, row in rows.items() if row is not None and TaskState(row.status).ended]
        late = {row.logical_task_id: row for row in await tx.fetch(sql.LOOKUP, ids=ended)} if ended else {}
        return [
            Locked(wish.task_id)
            if wish.task_id in locked.locked_elsewhere
            else refusals[wish.task_id]
            if wish.task_id in refusals
            else await _cancel_result(wish, rows[wish.task_id], late, notices.get(wish.task_id, ()), options)
            for wish, _ in all_cancels
        ]

    return await run_in_rounds(cancels, lambda pair: pair[0].task_id, process_round)


_IDLE_STATES = frozenset({TaskState.WAITING, TaskState.READY, TaskState.PARKED})


def _row_of_agent(command: Cancel, locked: LockedTasks, options: StoreOptions) -> Row[Any] | None:
    """The task's row, or `None` if it is missing or belongs to another agent."""
    row = locked.rows.get(command.task_id)
    return row if row is not None and row.agent_name == options.names.qualified(command.agent) else None


def _refusal(command: Cancel, row: Row[Any] | None) -> CancelStale | CancelRefused | CancelRequested | None:
    """The refusal of a cancel, or `None` if it applies.

    A cancel is refused if the task has another requester, or if another parent has requested the
    task since.
    """
    if row is None or is_early_cancel(row):
        return None
    if command.sender not in {None, command.agent} and not same_requester(row.requester_app_id, command.sender):
        if row.status == TaskState.RUNNING and row.cancel_requested:  # the owner may not know yet
            return _cancel_requested(row)
        return None if row.status == TaskState.CANCELLED else CancelRefused()
    stale = command.parent is not None and row.parent_task_id not in {None, command.parent}
    return CancelStale() if stale else None


def _canceller_columns(command: Cancel, row: Row[Any] | None) -> Columns | None:
    """The update that adds this sender to an early cancel's tombstone, or `None`."""
    if row is None or not is_early_cancel(row) or not _adds_canceller(command, row):
        return None
    return {"task_id": command.task_id, "cancellers": with_canceller(row.requester_app_id, command.sender)}


def _adds_canceller(command: Cancel, row: Row[Any]) -> bool:
    return bool(with_canceller(row.requester_app_id, command.sender) != row.requester_app_id)


def _cancel_requested(row: Row[Any]) -> CancelRequested:
    return CancelRequested(None if row.owner is None else ReplicaId(row.owner))


def _has_state(row: Row[Any] | None, states: AbstractSet[TaskState]) -> bool:
    return row is not None and row.status in states


def _cancel_closings(cancels: Sequence[Cancel], locked: LockedTasks) -> list[EndingOperation]:
    rows = [locked.rows[command.task_id] for command in cancels]
    return [
        EndingOperation(row, TaskState.CANCELLED, "cancelled on request")
        for row in rows
        if row.checkpoint_seq is not None
    ]


def _cancel_columns(command: Cancel, reply: Packed, locked: LockedTasks, options: StoreOptions) -> Columns:
    row = locked.rows[command.task_id]
    return {
        **_tombstone_columns(row, TaskState.CANCELLED, reply, locked.now, options),
        "run_id": command.run_id,
        "dead_reason": None,
        "keep_request": False,
    }


def _early_cancel_columns(command: Cancel, reply: Packed, now: float, options: StoreOptions) -> Columns:
    return {
        "task_id": command.task_id,
        "agent": options.names.qualified(command.agent),
        "run_id": command.run_id,
        "reply": reply,
        "now": now,
        "expires_at": now + options.tombstone_ttl,
        "canceller": command.sender,
    }


async def _cancel_result(
    command: Cancel,
    row: Row[Any] | None,
    late: dict[str, Row[Any]],
    notices: tuple[CancelNotice, ...],
    options: StoreOptions,
) -> CancelResult:
    if row is None:
        return CancelBeforeRequest()
    if row.status == TaskState.RUNNING:
        return _cancel_requested(row)
    if not TaskState(row.status).ended:
        return CancelledNow(_new_reply(row, TaskState.CANCELLED, command.reply, timedelta(), options), notices)
    if is_early_cancel(row) and (row.run_id == command.run_id or _adds_canceller(command, row)):
        return CancelBeforeRequest()  # a repeated cancel: its broadcast may not have been sent
    tombstone = late[command.task_id]
    return CancelTooLate(await reply_from_row(tombstone, tombstone.now, options.names))
