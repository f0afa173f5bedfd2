"""The outbox: committed messages that still have to be sent, and confirmation of those sent."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from datetime import timedelta
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import inventory
from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.codec import Codec, Packed
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.due_rows import DueQuery
from meshpoint.adapters.sql.locking import LockedTasks, lock_tasks, run_in_rounds
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
from meshpoint.errors import KeyMissing
from meshpoint.model.tasks import (
    MAX_SWEEP_DELAY,
    CallState,
    CancelNotice,
    Dispatch,
    OutboxItem,
    Reply,
    TaskState,
)
from meshpoint.model.transitions import StoreReply, TaskLocked, UnroutableCall

_log = logging.getLogger("meshpoint.store")


async def unsent(
    tx: Transaction,
    due_replies: DueQuery,
    due_calls: DueQuery,
    due_joins: DueQuery,
    limit: int,
    only: str | None,
) -> list[Row[Any]]:
    """Lease due messages to the caller, with a longer lease at each attempt.

    Returns their rows: replies first, then calls, each most overdue first.
    """
    replies = await due_replies.fetch(tx, only, limit=limit)
    await tx.execute_many(
        sql.LEASE_REPLY, [_lease_columns(tx, row, row.reply_attempts + 1) for row in replies]
    )
    rows = list(replies)
    if len(rows) < limit:
        picked = await due_calls.fetch(tx, only, limit=limit - len(rows))
        calls = sorted(picked, key=lambda row: (row.send_due_at, row.logical_task_id, row.seq))
        await tx.execute_many(
            sql.LEASE_CALL,
            [
                {**_lease_columns(tx, row, row.send_attempts + 1), "sub_task_id": row.sub_task_id}
                for row in calls
            ],
        )
        rows += calls
    left = limit - len(rows)
    if left > 0:
        rows += await _lease_requests(tx, await due_joins.fetch(tx, only, limit=left), left)
    return rows


async def decode_unsent(
    rows: Iterable[Row[Any]], names: AgentNames, codec: Codec
) -> list[OutboxItem]:
    """Decode the messages to send in the rows that `unsent` returned."""
    sends: list[OutboxItem] = []
    for row in rows:
        try:
            if "reply" in row._fields:
                sends.append(await reply_from_row(row, row.now, names, codec))
            elif row.status == CallState.PENDING:
                dispatch = await dispatch_from_row(row, names, codec, attempt=row.attempts + 1)
                sends.append(replace(dispatch, unroutable_for=None) if _is_late(row) else dispatch)
            else:
                sends.append(cancel_notice_from_row(row, names))
        except KeyMissing as error:
            _log.warning("task %s: a message to send is %s", row.logical_task_id, error)
        except Exception:  # it stays due, and a replica of another release may decode it
            _log.exception("task %s: cannot decode a message to send", row.logical_task_id)
    return sends


def _is_late(call: Row[Any]) -> bool:
    """Whether a request is sent so late that no replica or no broker can have been there.

    The peer may have been unable to declare its queue then, so that time does not count.
    """
    due_at = call.join_due_at if "join_due_at" in call._fields else call.send_due_at
    return due_at is not None and call.now - due_at > MAX_SWEEP_DELAY.total_seconds()


async def _lease_requests(tx: Transaction, due: Sequence[Row[Any]], limit: int) -> list[Row[Any]]:
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
    unsent = group_by_task(
        [row for row in await tx.fetch(sql.READ_DISPATCHES, ids=ids) if row.send_due_at is None]
    )
    await tx.execute_many(
        sql.LEASE_JOIN,
        [_join_lease_columns(tx, join, join.logical_task_id in unsent) for join in joins],
    )
    # A request past its deadline is not sent: its call is about to expire.
    return [
        call
        for join in joins
        for call in unsent.get(join.logical_task_id, ())
        if call.timeout_deadline > join.now
    ]


def _join_lease_columns(tx: Transaction, join: Row[Any], unsent: bool) -> Columns:
    lease = _lease_columns(tx, join, join.send_attempts + 1)
    return {
        **lease,
        "generation": join.invocation_id,
        "due_at": lease["due_at"] if unsent else None,
    }


def _lease_columns(tx: Transaction, row: Row[Any], attempts: int) -> dict[str, Any]:
    return {
        "task_id": row.logical_task_id,
        "due_at": row.now + tx.options.backoff(attempts),
        "attempts": attempts,
    }


async def store_replies(
    tx: Transaction, commands: Sequence[tuple[StoreReply, Packed]]
) -> list[bool | TaskLocked]:
    """Insert tombstones with packed replies for tasks that have no row.

    Returns, for each reply, whether it will be sent from its row.
    """

    async def process_round(
        batch: list[tuple[StoreReply, Packed]], locked: LockedTasks
    ) -> list[bool]:
        # Tombstones of cancels that arrived while the task of a reply was running.
        await locked.delete(
            tx,
            [
                command.reply.task_id
                for command, _ in batch
                if not command.is_redelivery
                and (row := locked.rows.get(command.reply.task_id)) is not None
                and is_early_cancel(row)
            ],
        )
        absent = [pair for pair in batch if pair[0].reply.task_id not in locked.rows]
        absent.sort(
            key=lambda pair: pair[0].reply.task_id
        )  # an insert waits for a concurrent insert of the same key
        await tx.execute_many(
            sql.INSERT_STORED_REPLY,
            [_stored_reply_columns(tx, command, body, locked.now) for command, body in absent],
        )
        ended = {
            task_id: row for task_id, row in locked.rows.items() if TaskState(row.status).is_final
        }
        again = [
            command
            for command, _ in batch
            if command.is_redelivery
            and (row := ended.get(command.reply.task_id)) is not None
            and row.agent_name == tx.options.names.qualified(command.reply.agent)
        ]
        await tx.execute_many(
            sql.UPDATE_REPLY_DUE,
            [_reply_due_columns(tx, command, locked.now) for command in again],
        )
        return [
            command.reply.task_id not in locked.rows
            or command in again
            or (
                (row := ended.get(command.reply.task_id)) is not None
                and (row.run_id, row.fence) == (command.run_id, 0)
            )
            for command, _ in batch
        ]

    return await run_in_rounds(tx, commands, lambda pair: pair[0].reply.task_id, process_round)


def _stored_reply_columns(
    tx: Transaction, command: StoreReply, body: Packed, now: float
) -> Columns:
    reply, deadline = command.reply, command.reply.requester.deadline
    expires_at = max(now, deadline.timestamp() if deadline else now) + tx.options.tombstone_ttl
    if command.retention is not None:
        expires_at = now + command.retention.total_seconds()
    result_ttl = reply.requester.result_ttl or timedelta()
    agent = tx.options.names.qualified(reply.agent)
    return {
        **_reply_due_columns(tx, command, now),
        "agent": agent,
        "status": reply.state.value,
        "run_id": command.run_id,
        "reply": body,
        "digest": tx.options.codec.text(
            command.digest, inventory.REQUEST_DIGEST, agent, reply.task_id
        ),
        "now": now,
        "expires_at": max(expires_at, now + result_ttl.total_seconds()),
    }


def _reply_due_columns(tx: Transaction, command: StoreReply, now: float) -> Columns:
    requester = requester_columns(command.reply.requester)
    return {"task_id": command.reply.task_id, "wake_at": now + tx.options.backoff(1), **requester}


async def confirm_sent(tx: Transaction, sent: Sequence[OutboxItem]) -> None:
    """Record messages as sent. Skips tasks whose row another session has locked."""
    if not tx.dialect.is_sqlite:
        await tx.execute(sql.SET_ASYNC_COMMIT)
    locked = await lock_tasks(tx, [send.task_id for send in sent])
    # Without the record, a message is only sent again.
    sent = [send for send in sent if send.task_id not in locked.locked_elsewhere]
    replies = [
        {"task_id": send.task_id, "fence": send.fence, "reply_to": send.requester.reply_to or ""}
        for send in sent
        if isinstance(send, Reply)
    ]
    await tx.execute_many(sql.CONFIRM_REPLY_SENT, replies)
    await _confirm_dispatched(
        tx, {(send.task_id, send.sub_task_id) for send in sent if isinstance(send, Dispatch)}
    )
    cancels = [
        {"task_id": send.task_id, "sub_task_id": send.sub_task_id}
        for send in sent
        if isinstance(send, CancelNotice)
    ]
    await tx.execute_many(sql.CONFIRM_CANCEL_SENT, cancels)
    await tx.execute_many(sql.DELETE_CANCELLED_CALL, cancels)


async def record_unroutable(tx: Transaction, calls: Sequence[UnroutableCall]) -> None:
    """Record that the broker returned requests, and make them due earlier.

    Skips tasks with a row that another session has locked: their next attempt records it.
    """
    locked = await lock_tasks(tx, [call.task_id for call in calls])
    columns = [
        {
            "task_id": call.task_id,
            "sub_task_id": call.sub_task_id,
            "generation": call.generation,
            "due_at": locked.now + call.retry_after.total_seconds(),
            "starts": call.starts,
        }
        for call in calls
        if call.task_id in locked.rows
    ]
    await tx.execute_many(
        sql.UPDATE_UNROUTABLE,
        [
            {"task_id": row["task_id"], "sub_task_id": row["sub_task_id"], "now": locked.now}
            for row in columns
            if row["starts"]
        ],
    )
    for statement, key in ((sql.ADVANCE_JOIN, "generation"), (sql.ADVANCE_CALL, "sub_task_id")):
        await tx.execute_many(
            statement,
            [{name: row[name] for name in ("task_id", key, "due_at")} for row in columns],
        )


async def _confirm_dispatched(tx: Transaction, sent: AbstractSet[tuple[str, str]]) -> None:
    """Mark a pause as sent if `sent` has all its unsent requests, else mark each request.

    Later attempts have their own due time, and are marked one by one.
    """
    if not sent:
        return
    pauses, single_calls = list[Columns](), list[Columns]()
    rows = group_by_task(
        await tx.fetch(sql.READ_DISPATCHES, ids=sorted({task_id for task_id, _ in sent}))
    )
    for task_id, calls in rows.items():
        due = [call for call in calls if call.send_due_at is None and call.join_due_at is not None]
        confirmed = [call for call in due if (task_id, call.sub_task_id) in sent]
        if due and len(confirmed) == len(due):
            pauses.append({"task_id": task_id, "generation": due[0].invocation_id})
            confirmed = []
        confirmed += [
            call
            for call in calls
            if call.send_due_at is not None and (task_id, call.sub_task_id) in sent
        ]
        single_calls += [
            {"task_id": task_id, "sub_task_id": call.sub_task_id} for call in confirmed
        ]
    await tx.execute_many(sql.CONFIRM_JOIN_DISPATCHED, pauses)
    await tx.execute_many(sql.CONFIRM_CALL_DISPATCHED, single_calls)
