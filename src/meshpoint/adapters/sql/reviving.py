"""Revive and preserve: what people do with an operation that has ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import operation_statements as sql
from meshpoint.adapters.sql import statements
from meshpoint.adapters.sql.checkpointing import keep_alive_at
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.locking import LockedTasks, Terms, lock_task
from meshpoint.adapters.sql.rows import instant, is_early, requester_columns, requester_of
from meshpoint.adapters.sql.subtasking import expiry
from meshpoint.model.checkpoint import Requester, TaskState
from meshpoint.model.ids import TaskId
from meshpoint.model.operations import (
    ASKED_BY_ANOTHER,
    ASKED_FOR_OTHERWISE,
    NOBODY,
    Adopted,
    NotRevived,
    Refusal,
    Revive,
    Revived,
    ReviveResult,
)
from meshpoint.model.requesters import same_input


async def revive(tx: Transaction, wish: Revive, request: bytes | None, terms: Terms) -> ReviveResult:
    """Make an ended task ready again, with its packed new request."""
    locked = await lock_task(tx, wish.task_id)
    row = _own_row(wish, locked, terms)
    if row is None:
        return NotRevived(Refusal.NOT_FOUND)
    (more,) = await tx.rows(sql.READ_REVIVABLE, task_id=wish.task_id)
    agent = terms.names.plain(row.agent_name)
    if (refused := _not_asked_for(wish, row, more)) is not None:
        return refused
    if row.run_id == wish.token or (wish.order is not None and wish.order == more.resume_token):
        return Revived(wish.task_id, agent, row.retry_count, again=True)
    if wish.adopt and not TaskState(row.status).ended:
        adopted = {**requester_columns(wish.requester), "keep_alive_at": keep_alive_at(wish.requester, locked.now)}
        await tx.run(sql.UPDATE_ADOPTED, task_id=wish.task_id, order=wish.order, digest=wish.digest, **adopted)
        return Adopted()
    refused = _refused(wish, row, more) or await _other_active(tx, wish, row, more)
    if refused is not None:
        return refused
    await _begin_again(tx, wish, request, _requester(wish, row, more), locked.now)
    return Revived(wish.task_id, agent, row.retry_count + 1)


async def _begin_again(
    tx: Transaction, wish: Revive, request: bytes | None, requester: Requester, now: float
) -> None:
    values = {"task_id": wish.task_id, "token": wish.token, "order": wish.order, "request": request, "now": now}
    asked = {"replaced": request is not None, "digest": wish.digest}
    await tx.run(sql.UPDATE_REVIVED, **values, **asked, **requester_columns(requester))
    await tx.run(sql.DELETE_SETTLED_CALLS, task_id=wish.task_id)
    await tx.run(sql.SET_CALLS_APART, task_id=wish.task_id)
    await tx.run(statements.DELETE_JOINS, ids=[wish.task_id])


def _requester(wish: Revive, row: Row[Any], more: Row[Any]) -> Requester:
    if wish.requester != NOBODY:
        return wish.requester
    waits = row.reply_to is not None and not more.reply_sent
    # No reply is expected, but the task still belongs to its requester.
    return replace(requester_of(row), deadline=None) if waits else Requester(app_id=row.requester_app_id)


def _own_row(wish: Revive, locked: LockedTasks, terms: Terms) -> Row[Any] | None:
    row = locked.rows.get(wish.task_id)
    if row is None or not row.agent_name.startswith(terms.names.prefix):
        return None
    return row if wish.agent in {None, terms.names.plain(row.agent_name)} else None


def _not_asked_for(wish: Revive, row: Row[Any], more: Row[Any]) -> NotRevived | None:
    """Why a requester that asks again has no say, or none any more; None: it has, or the wish is by hand."""
    if wish.order is None:
        return None
    if not is_early(row) and row.requester_app_id not in {None, wish.requester.app_id}:
        return NotRevived(Refusal.NOT_FOUND, ASKED_BY_ANOTHER)
    if not same_input(more.request_digest, wish.digest):
        return NotRevived(Refusal.NOT_FOUND, ASKED_FOR_OTHERWISE)
    if more.resume_token is not None and wish.order < more.resume_token:
        return NotRevived(Refusal.RUNNING, "asked again since")
    return None


def _refused(wish: Revive, row: Row[Any], more: Row[Any]) -> NotRevived | None:
    state = TaskState(row.status)
    if not (state.ended or wish.abandoned):
        return NotRevived(Refusal.RUNNING, _whereabouts(state, row, more))
    if state is TaskState.COMPLETED:
        return NotRevived(Refusal.COMPLETED)
    if not (row.checkpoint_seq or wish.without_checkpoint):
        return NotRevived(Refusal.NO_CHECKPOINT)
    if not more.has_request and wish.request is None:
        return NotRevived(Refusal.NO_CHECKPOINT, "its request was not kept")
    return None


def _whereabouts(state: TaskState, row: Row[Any], more: Row[Any]) -> str:
    if state is TaskState.RUNNING:
        return f"running, owned by {row.owner} until {instant(more.wake_at).isoformat()}"
    return "pending" if state is TaskState.READY else state.value


async def _other_active(tx: Transaction, wish: Revive, row: Row[Any], more: Row[Any]) -> NotRevived | None:
    if not more.exclusive:
        return None
    if not tx.dialect.is_sqlite:
        await tx.run(sql.LOCK_AGENT, agent=row.agent_name)
    others = await tx.rows(sql.READ_OTHER_ACTIVE, agent=row.agent_name, task_id=wish.task_id)
    return NotRevived(Refusal.OTHER_ACTIVE, others[0].logical_task_id) if others else None


async def preserve(tx: Transaction, task_id: TaskId, terms: Terms, *, preserve: bool) -> bool:
    """Exempt an operation from deletion, or stop that; whether there is such an operation."""
    row = (await lock_task(tx, task_id)).rows.get(task_id)
    if row is None or row.checkpoint_seq is None or not row.agent_name.startswith(terms.names.prefix):
        return False
    await tx.run(sql.UPDATE_PRESERVE, task_id=task_id, preserve=preserve)
    if row.ended_at is not None:
        expires_at = expiry(row, TaskState(row.status), row.ended_at, terms, preserve=preserve)
        await tx.run(sql.UPDATE_EXPIRY, task_id=task_id, expires_at=expires_at)
    return True
