"""Revive and preserve: commands on operations that have ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import inventory, statements
from meshpoint.adapters.sql import operation_statements as sql
from meshpoint.adapters.sql.checkpointing import PackedPause, write_revived
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.locking import lock_task
from meshpoint.adapters.sql.rows import (
    epoch_seconds,
    input_digest,
    instant,
    is_early_cancel,
    keep_alive_at,
    requester_columns,
    requester_from_row,
)
from meshpoint.adapters.sql.subtasking import expiry
from meshpoint.model.ids import TaskId
from meshpoint.model.operations import (
    DIFFERENT_INPUT,
    DIFFERENT_REQUESTER,
    NO_REQUESTER,
    RESUMED_SINCE,
    Adopted,
    NotRevived,
    Refusal,
    Revive,
    Revived,
    ReviveResult,
)
from meshpoint.model.tasks import Requester, TaskState, parked_until, same_input


async def revive(tx: Transaction, command: Revive, pause: PackedPause | None) -> ReviveResult:
    """Make an ended task ready again. The request of `command` replaces the stored one if given.

    With `pause`, the task is resumed at its last pause.

    With `command.adopt`, a task that has not ended continues for the new requester.
    """
    row, now = await lock_task(tx, command.task_id)
    names = tx.options.names
    if row is None or not row.agent_name.startswith(names.prefix):
        return NotRevived(Refusal.NOT_FOUND)
    agent = names.plain(row.agent_name)
    if command.agent not in {None, agent}:
        return NotRevived(Refusal.NOT_FOUND)
    (details,) = await tx.fetch(sql.READ_REVIVABLE, task_id=command.task_id)
    codec, key = tx.options.codec, (row.agent_name, command.task_id)
    known_digest = input_digest(details, codec)
    if (refusal := _requester_refusal(command, row, details, known_digest)) is not None:
        return refusal
    if row.run_id == command.token or (
        command.order is not None and command.order == details.resume_token
    ):
        return Revived(command.task_id, agent, row.retry_count, repeated=True)
    if command.adopt and not TaskState(row.status).is_final:
        await tx.execute(
            sql.UPDATE_ADOPTED,
            task_id=command.task_id,
            order=command.order,
            digest=codec.text(command.digest, inventory.REQUEST_DIGEST, *key),
            keep_alive_at=keep_alive_at(command.requester, now),
            parked_until=_parked_until(tx, row, command.requester),
            **requester_columns(command.requester),
        )
        return Adopted()
    refusal = _refusal(command, row, details) or await _other_active(tx, command, row, details)
    if refusal is not None:
        return refusal
    if pause is not None and pause.pause.run.fence != row.fence:
        return NotRevived(Refusal.RUNNING, RESUMED_SINCE)
    requester = _requester(command, row, details)
    await tx.execute(
        sql.UPDATE_REVIVED,
        task_id=command.task_id,
        token=command.token,
        order=command.order,
        request=await codec.pack(command.request, inventory.REQUEST, *key),
        now=now,
        replaced=command.request is not None,
        digest=codec.text(command.digest, inventory.REQUEST_DIGEST, *key),
        keep_alive_at=keep_alive_at(requester, now),
        **requester_columns(requester),
    )
    await tx.execute(sql.DELETE_CALLS_NOT_CANCELLING, task_id=command.task_id)
    await tx.execute(sql.DETACH_CALLS, task_id=command.task_id)
    await tx.execute(statements.DELETE_JOINS, ids=[command.task_id])
    if pause is not None:
        await tx.execute(sql.CLEAR_CHILDREN, task_id=command.task_id)
        own = replace(pause.pause, requester=requester)
        await write_revived(tx, replace(pause, pause=own), row, now)
    return Revived(command.task_id, agent, row.retry_count + 1)


def _parked_until(tx: Transaction, row: Row[Any], requester: Requester) -> float | None:
    """When a parked task is due to be ended for `requester`, or `None` if it is not parked."""
    if row.status != TaskState.PARKED or row.incompatible_since is None:
        return None
    limit_at: float = row.incompatible_since + tx.options.parked_limit
    return parked_until(limit_at, epoch_seconds(requester.deadline))


def _requester(command: Revive, row: Row[Any], details: Row[Any]) -> Requester:
    if command.requester != NO_REQUESTER:
        return command.requester
    return command.kept_requester(requester_from_row(row), reply_sent=details.reply_sent)


def _requester_refusal(
    command: Revive, row: Row[Any], details: Row[Any], known_digest: str | None
) -> NotRevived | None:
    """The refusal of a request that asks for the task again, or `None` if it is accepted.

    It is refused if the task belongs to another requester, if the input differs, or if a newer
    request has arrived. A command by an operator has no order and is never refused here.
    """
    if command.order is None:
        return None
    if not is_early_cancel(row) and row.requester_app_id not in {None, command.requester.app_id}:
        return NotRevived(Refusal.NOT_FOUND, DIFFERENT_REQUESTER)
    if not same_input(known_digest, command.digest):
        return NotRevived(Refusal.NOT_FOUND, DIFFERENT_INPUT)
    if details.resume_token is not None and command.order < details.resume_token:
        return NotRevived(Refusal.RUNNING, "asked again since")
    return None


def _refusal(command: Revive, row: Row[Any], details: Row[Any]) -> NotRevived | None:
    state = TaskState(row.status)
    if not (state.is_final or command.abandoned):
        return NotRevived(Refusal.RUNNING, _describe_state(state, row, details))
    if state is TaskState.COMPLETED:
        return NotRevived(Refusal.COMPLETED)
    if not (row.checkpoint_seq or command.without_checkpoint):
        return NotRevived(Refusal.NO_CHECKPOINT)
    if not details.has_request and command.request is None:
        return NotRevived(Refusal.NO_CHECKPOINT, "its request was not kept")
    return None


def _describe_state(state: TaskState, row: Row[Any], details: Row[Any]) -> str:
    if state is TaskState.RUNNING:
        return f"running, owned by {row.owner} until {instant(details.wake_at).isoformat()}"
    return "pending" if state is TaskState.READY else state.value


async def _other_active(
    tx: Transaction, command: Revive, row: Row[Any], details: Row[Any]
) -> NotRevived | None:
    if not details.exclusive:
        return None
    if not tx.dialect.is_sqlite:
        await tx.execute(sql.LOCK_AGENT, agent=row.agent_name)
    others = await tx.fetch(sql.READ_OTHER_ACTIVE, agent=row.agent_name, task_id=command.task_id)
    return NotRevived(Refusal.OTHER_ACTIVE, others[0].logical_task_id) if others else None


async def preserve(tx: Transaction, task_id: TaskId, *, preserve: bool) -> bool:
    """Exempt an operation from deletion, or end the exemption.

    Returns `False` if the namespace has no such operation.
    """
    row, _ = await lock_task(tx, task_id)
    if (
        row is None
        or row.checkpoint_seq is None
        or not row.agent_name.startswith(tx.options.names.prefix)
    ):
        return False
    await tx.execute(sql.UPDATE_PRESERVE, task_id=task_id, preserve=preserve)
    if row.ended_at is not None:
        state = TaskState(row.status)
        expires_at = expiry(row, state, row.ended_at, tx.options, preserve=preserve)
        await tx.execute(sql.UPDATE_EXPIRY, task_id=task_id, expires_at=expires_at)
    return True
