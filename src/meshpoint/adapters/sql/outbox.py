"""The outbox: committed messages that still have to be sent, and confirmation of those sent."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.due_rows import DueQuery
from meshpoint.adapters.sql.locking import LockedTasks, StoreOptions, lock_tasks, run_in_rounds
from meshpoint.adapters.sql.rows import (
    AgentNames,
    Columns,
    cancel_notice_from_row,
    dispatch_from_row,
    group_by_task,
    is_early_cancel,
    reply_from_row,
    requester_columns,
)
from meshpoint.model.checkpoint import (
    CallState,
    CancelNotice,
    Dispatch,
    KeepReply,
    Reply,
    Send,
    TaskState,
)
from meshpoint.model.ids import AgentName

log = logging.getLogger("meshpoint.store")


@dataclass(frozen=True, slots=True)
class UnsentRows:
    """Rows with messages to send, leased to this caller."""

    replies: Sequence[Row[Any]]
    calls: Sequence[Row[Any]]

    async def decode(self, names: AgentNames) -> list[Send]:
        """Decode the messages to send: replies first, then calls, each most overdue first."""
        sends: list[Send] = []
        for row in (*self.replies, *self.calls):
            try:
                sends.append(await _send_from_row(row, names))
            except Exception:  # it stays due, and a replica of another release may decode it
                log.exception("task %s: cannot decode a message to send", row.logical_task_id)
        return sends


async def _send_from_row(row: Row[Any], names: AgentNames) -> Send:
    if "reply" in row._fields:
        return await reply_from_row(row, row.now, names)
    if row.status == CallState.PENDING:
        return await dispatch_from_row(row, names, attempt=row.attempts + 1)
    return cancel_notice_from_row(row, names)


def unsent_queries(agent: AgentName, limit: int, options: StoreOptions) -> tuple[DueQuery, DueQuery, DueQuery]:
    """The queries for replies, calls and joins with due messages."""
    values = {"agent": options.names.qualified(agent), "limit": limit}
    return (
        DueQuery(sql.PICK_UNSENT_REPLIES, values),
        DueQuery(sql.PICK_UNSENT_CALLS, values),
        DueQuery(sql.PICK_UNSENT_JOINS, values),
    )


async def unsent(
    tx: Transaction, agent: AgentName, limit: int, options: StoreOptions, only: str | None = None
) -> UnsentRows:
    """Lease due messages to the caller, with a longer lease at each attempt."""
    replies = await unsent_queries(agent, limit, options)[0].fetch(tx, only)
    await tx.execute_many(sql.LEASE_REPLY, [_lease_columns(row, row.reply_attempts + 1, options) for row in replies])
    calls: list[Row[Any]] = []
    if len(replies) < limit:
        picked = await unsent_queries(agent, limit - len(replies), options)[1].fetch(tx, only)
        calls += sorted(picked, key=lambda row: (row.send_due_at, row.logical_task_id, row.seq))
        await tx.execute_many(
            sql.LEASE_CALL,
            [
                {**_lease_columns(row, row.send_attempts + 1, options), "sub_task_id": row.sub_task_id}
                for row in calls
            ],
        )
    left = limit - len(replies) - len(calls)
    if left > 0:
        calls += await _lease_requests(
            tx, await unsent_queries(agent, left, options)[2].fetch(tx, only), left, options
        )
    return UnsentRows(replies, calls)


async def _lease_requests(
    tx: Transaction, due: Sequence[Row[Any]], limit: int, options: StoreOptions
) -> list[Row[Any]]:
    """Lease pauses with due requests, and return those requests.

    The requests of a pause stay together, so the result may exceed `limit`.
    """
    joins: list[Row[Any]] = []
    for join in due:
        if limit > 0:
            joins.append(join)
            limit -= join.unanswered
    if not joins:
        return []
    ids = sorted(join.logical_task_id for join in joins)
    unsent = group_by_task([row for row in await tx.fetch(sql.READ_DISPATCHES, ids=ids) if row.send_due_at is None])
    await tx.execute_many(
        sql.LEASE_JOIN, [_join_lease_columns(join, join.logical_task_id in unsent, options) for join in joins]
    )
    # A request past its deadline is not sent: its call is about to expire.
    return [
        call for join in joins for call in unsent.get(join.logical_task_id, ()) if call.timeout_deadline > join.now
    ]


def _join_lease_columns(join: Row[Any], unsent: bool, options: StoreOptions) -> Columns:
    lease = _lease_columns(join, join.send_attempts + 1, options)
    return {**lease, "generation": join.invocation_id, "due_at": lease["due_at"] if unsent else None}


def _lease_columns(row: Row[Any], attempts: int, options: StoreOptions) -> dict[str, Any]:
    return {"task_id": row.logical_task_id, "due_at": row.now + options.backoff(attempts), "attempts": attempts}


async def store_replies(
    tx: Transaction, commands: Sequence[tuple[KeepReply, bytes | None]], options: StoreOptions
) -> list[bool]:
    """Insert tombstones with packed replies for tasks that have no row.

    Returns, for each reply, whether it will be sent from its row.
    """

    async def process_round(batch: list[tuple[KeepReply, bytes | None]]) -> list[bool]:
        locked = await _delete_early_cancels(
            tx, await lock_tasks(tx, [wish.reply.task_id for wish, _ in batch]), batch
        )
        absent = [(command, body) for command, body in batch if command.reply.task_id not in locked.rows]
        absent.sort(key=lambda pair: pair[0].reply.task_id)  # an insert waits for a concurrent insert of the same key
        await tx.execute_many(
            sql.INSERT_STORED_REPLY, [_stored_reply_columns(wish, body, locked.now, options) for wish, body in absent]
        )
        again = [wish for wish, _ in batch if wish.again and _is_ended_for_agent(wish, locked, options)]
        await tx.execute_many(sql.UPDATE_REPLY_DUE, [_reply_due_columns(wish, locked.now, options) for wish in again])
        return [
            wish.reply.task_id not in locked.rows or wish in again or _is_repeated_store(wish, locked)
            for wish, _ in batch
        ]

    return await run_in_rounds(commands, lambda pair: pair[0].reply.task_id, process_round)


async def _delete_early_cancels(
    tx: Transaction, locked: LockedTasks, commands: Sequence[tuple[KeepReply, bytes | None]]
) -> LockedTasks:
    """Delete tombstones of cancels that arrived while the task of a reply was running.

    Returns `locked` without them.
    """
    first = {command.reply.task_id for command, _ in commands if not command.again}
    early = [task_id for task_id, row in locked.rows.items() if task_id in first and is_early_cancel(row)]
    if not early:
        return locked
    await tx.execute(sql.DELETE_TASKS, ids=early)
    return replace(locked, rows={id_: row for id_, row in locked.rows.items() if id_ not in early})


def _stored_reply_columns(command: KeepReply, body: bytes | None, now: float, options: StoreOptions) -> Columns:
    reply, deadline = command.reply, command.reply.requester.deadline
    default_expiry = max(now, deadline.timestamp() if deadline else now) + options.tombstone_ttl
    return {
        **_reply_due_columns(command, now, options),
        "agent": options.names.qualified(reply.agent),
        "status": reply.state.value,
        "run_id": command.run_id,
        "reply": body,
        "digest": command.digest,
        "now": now,
        "expires_at": default_expiry if command.keep is None else now + command.keep.total_seconds(),
    }


def _reply_due_columns(command: KeepReply, now: float, options: StoreOptions) -> Columns:
    requester = requester_columns(command.reply.requester)
    return {"task_id": command.reply.task_id, "wake_at": now + options.backoff(1), **requester}


def _is_ended_for_agent(command: KeepReply, locked: LockedTasks, options: StoreOptions) -> bool:
    row = locked.rows.get(command.reply.task_id)
    return (
        row is not None
        and TaskState(row.status).ended
        and row.agent_name == options.names.qualified(command.reply.agent)
    )


def _is_repeated_store(command: KeepReply, locked: LockedTasks) -> bool:
    row = locked.rows[command.reply.task_id]
    return row.run_id == command.run_id and row.fence == 0 and TaskState(row.status).ended


async def confirm_sent(tx: Transaction, sent: Sequence[Send]) -> None:
    """Mark messages as sent. Tasks with a row that another session holds are left unmarked."""
    if not tx.dialect.is_sqlite:
        await tx.execute(sql.SET_ASYNC_COMMIT)
    locked = await lock_tasks(tx, [send.task_id for send in sent])
    # Without its mark, a message is only sent again.
    sent = [send for send in sent if send.task_id not in locked.locked_elsewhere]
    replies = [
        {"task_id": send.task_id, "fence": send.fence, "reply_to": send.requester.reply_to or ""}
        for send in sent
        if isinstance(send, Reply)
    ]
    await tx.execute_many(sql.CONFIRM_REPLY_SENT, replies)
    await _confirm_dispatched(tx, {(send.task_id, send.sub_task_id) for send in sent if isinstance(send, Dispatch)})
    cancels = _call_keys(send for send in sent if isinstance(send, CancelNotice))
    await tx.execute_many(sql.CONFIRM_CANCEL_SENT, cancels)
    await tx.execute_many(sql.DELETE_CANCELLED_CALL, cancels)


async def _confirm_dispatched(tx: Transaction, sent: AbstractSet[tuple[str, str]]) -> None:
    """Mark a pause as sent if `sent` has all its unsent requests, else mark single requests."""
    if not sent:
        return
    pauses, single_calls = list[Columns](), list[Columns]()
    rows = group_by_task(await tx.fetch(sql.READ_DISPATCHES, ids=sorted({task_id for task_id, _ in sent})))
    for task_id, calls in rows.items():
        due = [call for call in calls if (call.send_due_at or call.join_due_at) is not None]
        confirmed = [call for call in due if (task_id, call.sub_task_id) in sent]
        if due and len(confirmed) == len(due) and all(call.send_due_at is None for call in due):
            pauses.append({"task_id": task_id, "generation": due[0].invocation_id})
        else:
            single_calls += [{"task_id": task_id, "sub_task_id": call.sub_task_id} for call in confirmed]
    await tx.execute_many(sql.CONFIRM_JOIN_DISPATCHED, pauses)
    await tx.execute_many(sql.CONFIRM_CALL_DISPATCHED, single_calls)


def _call_keys(sends: Iterable[CancelNotice]) -> list[Columns]:
    return [{"task_id": send.task_id, "sub_task_id": send.sub_task_id} for send in sends]
