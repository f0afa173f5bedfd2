"""End, release and cancel: a run gives its task up, or somebody else ends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.claiming import close_pending
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.locking import LockedTasks, Terms, in_rounds, lock_tasks
from meshpoint.adapters.sql.rows import FAR_FUTURE, Columns, is_early, reply_of, requester_of
from meshpoint.adapters.sql.subtasking import Closing, close
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


async def end(tx: Transaction, ends: Sequence[tuple[End, Packed]], terms: Terms) -> list[EndResult | Locked]:
    """Turn tasks into tombstones, each with its packed reply."""

    async def turn(each: list[tuple[End, Packed]]) -> list[EndResult | Locked]:
        locked = await lock_tasks(tx, [wish.run.task_id for wish, _ in each])
        owned = [pair for pair in each if _owns(pair[0].run, locked)]
        closed = await close(tx, _closings([wish for wish, _ in owned], locked), locked.now, terms)
        await _bury(tx, [_end_columns(wish, reply, locked, terms) for wish, reply in owned], closed)
        return [_end_result(wish, locked, terms) for wish, _ in each]

    return await in_rounds(ends, lambda pair: pair[0].run.task_id, turn)


def _owns(run: Run, locked: LockedTasks) -> bool:
    row = locked.rows.get(run.task_id)
    return row is not None and row.status == TaskState.RUNNING and row.fence == run.fence


def _closings(ends: Sequence[End], locked: LockedTasks) -> list[Closing]:
    rows = [locked.rows[wish.run.task_id] for wish in ends]
    return [
        Closing(row, wish.state, wish.reason or wish.dead_reason, wish.checkpoint)
        for wish, row in zip(ends, rows, strict=True)
        if row.checkpoint_seq is not None
    ]


def _end_columns(wish: End, reply: Packed, locked: LockedTasks, terms: Terms) -> Columns:
    row = locked.rows[wish.run.task_id]
    return {
        **_tombstone(row, wish.state, reply, locked.now, terms),
        "run_id": wish.run.id,
        "dead_reason": wish.dead_reason,
        "keep_request": wish.dead_reason is not None,
    }


def _end_result(wish: End, locked: LockedTasks, terms: Terms) -> EndResult | Locked:
    if wish.run.task_id in locked.held:
        return Locked(wish.run.task_id)
    row = locked.rows.get(wish.run.task_id)
    if row is None:
        return Fenced()
    found_itself = TaskState(row.status).ended and (row.run_id, row.fence) == (wish.run.id, wish.run.fence)
    if not (_owns(wish.run, locked) or found_itself):
        return Fenced()
    ended_at = row.ended_at if found_itself else locked.now
    return Ended(_new_reply(row, wish.state, wish.reply, timedelta(seconds=locked.now - ended_at), terms))


def _tombstone(row: Row[Any], state: TaskState, reply: Packed, now: float, terms: Terms) -> Columns:
    return {
        "task_id": row.logical_task_id,
        "status": state.value,
        "wake_at": now + terms.backoff(1),
        "reply": reply,
        "now": now,
        # An old duplicate of the request finds the tombstone, or is past its deadline.
        "expires_at": max(now, row.task_deadline or now) + terms.tombstone_ttl,
        "checkpoint_seq": None,
    }


def _new_reply(row: Row[Any], state: TaskState, body: bytes, age: timedelta, terms: Terms) -> Reply:
    agent = terms.names.plain(row.agent_name)
    return Reply(agent, row.logical_task_id, state, body, requester_of(row), age, fence=row.fence)


async def _bury(tx: Transaction, tombstones: Sequence[Columns], closed: Mapping[str, Columns]) -> None:
    """Write tombstones; those of operations with what `closed` says."""
    if tombstones:
        ids = [columns["task_id"] for columns in tombstones]
        await tx.each(sql.UPDATE_ENDED, [{**columns, **closed.get(columns["task_id"], {})} for columns in tombstones])
        await tx.run(sql.DELETE_DONE_CALLS, ids=ids)
        await tx.run(sql.DELETE_JOINS, ids=ids)


# ── release ────────────────────────────────────────────────────────────────────────────────────────


async def release(tx: Transaction, releases: Sequence[Release], terms: Terms) -> list[bool | Locked]:
    """Make running tasks ready again, or park those that nobody could read for too long."""

    async def turn(each: list[Release]) -> list[bool | Locked]:
        locked = await lock_tasks(tx, [wish.run.task_id for wish in each])
        owned = [wish for wish in each if _owns(wish.run, locked)]
        await tx.each(sql.UPDATE_RELEASED, [_released(wish, locked, terms) for wish in owned])
        return [
            Locked(wish.run.task_id)
            if wish.run.task_id in locked.held
            else wish in owned or _found_released(wish.run, locked)
            for wish in each
        ]

    return await in_rounds(releases, lambda wish: wish.run.task_id, turn)


def _found_released(run: Run, locked: LockedTasks) -> bool:
    row = locked.rows.get(run.task_id)
    # A pause of the same run would have raised the generation.
    return (
        row is not None
        and row.status in {TaskState.READY, TaskState.PARKED}
        and (row.run_id, row.fence, row.generation) == (run.id, run.fence, run.generation)
    )


def _released(wish: Release, locked: LockedTasks, terms: Terms) -> Columns:
    row, now = locked.rows[wish.run.task_id], locked.now
    since = row.incompatible_since
    if wish.incompatible is not None and since is None:
        since = now
    parked = wish.incompatible is not None and now - since >= terms.incompatible_limit
    return {
        "task_id": wish.run.task_id,
        "status": TaskState.PARKED.value if parked else TaskState.READY.value,
        "run_id": wish.run.id,
        "wake_at": FAR_FUTURE if parked else now + wish.not_before.total_seconds(),
        "attempt": row.attempt + wish.counted,
        "incompatible_since": since,
        "death": wish.incompatible if parked else wish.death,
    }


# ── cancel ─────────────────────────────────────────────────────────────────────────────────────────


async def cancel(tx: Transaction, cancels: Sequence[tuple[Cancel, Packed]], terms: Terms) -> list[CancelResult]:
    """Cancel tasks, each with its packed reply."""

    async def turn(each: list[tuple[Cancel, Packed]]) -> list[CancelResult]:
        locked = await lock_tasks(tx, [wish.task_id for wish, _ in each])
        wished, each = each, [pair for pair in each if pair[0].task_id not in locked.held]
        found = {wish.task_id: _own_row(wish, locked, terms) for wish, _ in each}
        refused = {wish.task_id: no for wish, _ in each if (no := _refused(wish, found[wish.task_id])) is not None}
        rows = {task_id: row for task_id, row in found.items() if task_id not in refused}
        idle = [(wish, reply) for wish, reply in each if _is_in(rows.get(wish.task_id), _IDLE)]
        notices = await close_pending(tx, [wish.task_id for wish, _ in idle], locked.now, terms)
        closed = await close(tx, _cancelled([wish for wish, _ in idle], locked), locked.now, terms)
        await _bury(tx, [_cancel_columns(wish, reply, locked, terms) for wish, reply in idle], closed)
        unknown = [(wish, reply) for wish, reply in each if wish.task_id not in locked.rows]
        await tx.each(sql.INSERT_TOMBSTONE, [_early(wish, reply, locked.now, terms) for wish, reply in unknown])
        further = [columns for wish, _ in each if (columns := _further(wish, rows.get(wish.task_id))) is not None]
        await tx.each(sql.UPDATE_CANCELLERS, further)
        running = [task_id for task_id, row in rows.items() if _is_in(row, {TaskState.RUNNING})]
        if running:
            await tx.run(sql.RAISE_CANCEL_FLAG, ids=running)
        ended = [task_id for task_id, row in rows.items() if row is not None and TaskState(row.status).ended]
        late = {row.logical_task_id: row for row in await tx.rows(sql.LOOKUP, ids=ended)} if ended else {}
        return [
            Locked(wish.task_id)
            if wish.task_id in locked.held
            else refused[wish.task_id]
            if wish.task_id in refused
            else await _cancel_result(wish, rows[wish.task_id], late, notices.get(wish.task_id, ()), terms)
            for wish, _ in wished
        ]

    return await in_rounds(cancels, lambda pair: pair[0].task_id, turn)


_IDLE = frozenset({TaskState.WAITING, TaskState.READY, TaskState.PARKED})


def _own_row(wish: Cancel, locked: LockedTasks, terms: Terms) -> Row[Any] | None:
    """The task's row. That of another agent is not touched: this agent knows no such task."""
    row = locked.rows.get(wish.task_id)
    return row if row is not None and row.agent_name == terms.names.qualified(wish.agent) else None


def _refused(wish: Cancel, row: Row[Any] | None) -> CancelStale | CancelRefused | CancelRequested | None:
    """Why the cancel is refused: the task has another requester, or was requested again since."""
    if row is None or is_early(row):
        return None
    if wish.sender not in {None, wish.agent} and not same_requester(row.requester_app_id, wish.sender):
        if row.status == TaskState.RUNNING and row.cancel_requested:  # its owner may not know yet
            return _requested(row)
        return None if row.status == TaskState.CANCELLED else CancelRefused()
    stale = wish.parent is not None and row.parent_task_id not in {None, wish.parent}
    return CancelStale() if stale else None


def _further(wish: Cancel, row: Row[Any] | None) -> Columns | None:
    """An early cancel's tombstone, with one more sender to add."""
    if row is None or not is_early(row) or not _is_further(wish, row):
        return None
    return {"task_id": wish.task_id, "cancellers": with_canceller(row.requester_app_id, wish.sender)}


def _is_further(wish: Cancel, row: Row[Any]) -> bool:
    return bool(with_canceller(row.requester_app_id, wish.sender) != row.requester_app_id)


def _requested(row: Row[Any]) -> CancelRequested:
    return CancelRequested(None if row.owner is None else ReplicaId(row.owner))


def _is_in(row: Row[Any] | None, states: AbstractSet[TaskState]) -> bool:
    return row is not None and row.status in states


def _cancelled(cancels: Sequence[Cancel], locked: LockedTasks) -> list[Closing]:
    rows = [locked.rows[wish.task_id] for wish in cancels]
    return [
        Closing(row, TaskState.CANCELLED, "cancelled on request") for row in rows if row.checkpoint_seq is not None
    ]


def _cancel_columns(wish: Cancel, reply: Packed, locked: LockedTasks, terms: Terms) -> Columns:
    row = locked.rows[wish.task_id]
    return {
        **_tombstone(row, TaskState.CANCELLED, reply, locked.now, terms),
        "run_id": wish.run_id,
        "dead_reason": None,
        "keep_request": False,
    }


def _early(wish: Cancel, reply: Packed, now: float, terms: Terms) -> Columns:
    return {
        "task_id": wish.task_id,
        "agent": terms.names.qualified(wish.agent),
        "run_id": wish.run_id,
        "reply": reply,
        "now": now,
        "expires_at": now + terms.tombstone_ttl,
        "canceller": wish.sender,
    }


async def _cancel_result(
    wish: Cancel,
    row: Row[Any] | None,
    late: dict[str, Row[Any]],
    notices: tuple[CancelNotice, ...],
    terms: Terms,
) -> CancelResult:
    if row is None:
        return CancelBeforeRequest()
    if row.status == TaskState.RUNNING:
        return _requested(row)
    if not TaskState(row.status).ended:
        return CancelledNow(_new_reply(row, TaskState.CANCELLED, wish.reply, timedelta(), terms), notices)
    if is_early(row) and (row.run_id == wish.run_id or _is_further(wish, row)):
        return CancelBeforeRequest()  # the same cancel again: its broadcast may not have been sent
    tombstone = late[wish.task_id]
    return CancelTooLate(await reply_of(tombstone, tombstone.now, terms.names))
