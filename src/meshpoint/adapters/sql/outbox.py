"""Unsent and mark sent: what was committed and is still to be told."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.due_rows import Pick
from meshpoint.adapters.sql.locking import LockedTasks, Terms, in_rounds, lock_tasks
from meshpoint.adapters.sql.rows import (
    Columns,
    Names,
    by_task,
    dispatch_of,
    is_early,
    notice_of,
    reply_of,
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
class Due:
    """Rows of what is to be sent, leased to this caller."""

    replies: Sequence[Row[Any]]
    calls: Sequence[Row[Any]]

    async def decoded(self, names: Names) -> list[Send]:
        """What to send, most overdue first among replies, then among calls."""
        sends: list[Send] = []
        for row in (*self.replies, *self.calls):
            try:
                sends.append(await _send_of(row, names))
            except Exception:  # it stays due; another release may read it
                log.exception("task %s: what it has to send cannot be read here", row.logical_task_id)
        return sends


async def _send_of(row: Row[Any], names: Names) -> Send:
    if "reply" in row._fields:
        return await reply_of(row, row.now, names)
    if row.status == CallState.PENDING:
        return await dispatch_of(row, names, attempt=row.attempts + 1)
    return notice_of(row, names)


def unsent_picks(agent: AgentName, limit: int, terms: Terms) -> tuple[Pick, Pick, Pick]:
    """Replies, calls and joins of which something is due."""
    values = {"agent": terms.names.qualified(agent), "limit": limit}
    return (
        Pick(sql.PICK_UNSENT_REPLIES, values),
        Pick(sql.PICK_UNSENT_CALLS, values),
        Pick(sql.PICK_UNSENT_JOINS, values),
    )


async def unsent(tx: Transaction, agent: AgentName, limit: int, terms: Terms, only: str | None = None) -> Due:
    """Lease what is due to the caller, for longer each time."""
    replies = await unsent_picks(agent, limit, terms)[0].rows(tx, only)
    await tx.each(sql.LEASE_REPLY, [_lease(row, row.reply_attempts + 1, terms) for row in replies])
    calls: list[Row[Any]] = []
    if len(replies) < limit:
        picked = await unsent_picks(agent, limit - len(replies), terms)[1].rows(tx, only)
        calls += sorted(picked, key=lambda row: (row.send_due_at, row.logical_task_id, row.seq))
        await tx.each(
            sql.LEASE_SEND,
            [{**_lease(row, row.send_attempts + 1, terms), "sub_task_id": row.sub_task_id} for row in calls],
        )
    left = limit - len(replies) - len(calls)
    if left > 0:
        calls += await _requests(tx, await unsent_picks(agent, left, terms)[2].rows(tx, only), left, terms)
    return Due(replies, calls)


async def _requests(tx: Transaction, due: Sequence[Row[Any]], limit: int, terms: Terms) -> list[Row[Any]]:
    """Lease pauses whose requests are due; these. Those of one pause come together, if need be past `limit`."""
    joins: list[Row[Any]] = []
    for join in due:
        if limit > 0:
            joins.append(join)
            limit -= join.unanswered
    if not joins:
        return []
    ids = sorted(join.logical_task_id for join in joins)
    unsent = by_task([row for row in await tx.rows(sql.READ_DISPATCHES, ids=ids) if row.send_due_at is None])
    await tx.each(sql.LEASE_JOIN, [_join_lease(join, join.logical_task_id in unsent, terms) for join in joins])
    # A request past its deadline is not worth sending: it is about to expire.
    return [
        call for join in joins for call in unsent.get(join.logical_task_id, ()) if call.timeout_deadline > join.now
    ]


def _join_lease(join: Row[Any], unsent: bool, terms: Terms) -> Columns:
    lease = _lease(join, join.send_attempts + 1, terms)
    return {**lease, "generation": join.invocation_id, "due_at": lease["due_at"] if unsent else None}


def _lease(row: Row[Any], attempts: int, terms: Terms) -> dict[str, Any]:
    return {"task_id": row.logical_task_id, "due_at": row.now + terms.backoff(attempts), "attempts": attempts}


async def keep_replies(tx: Transaction, wishes: Sequence[tuple[KeepReply, bytes | None]], terms: Terms) -> list[bool]:
    """Insert tombstones with packed replies for tasks that have no row."""

    async def turn(each: list[tuple[KeepReply, bytes | None]]) -> list[bool]:
        locked = await _without_early_cancels(
            tx, await lock_tasks(tx, [wish.reply.task_id for wish, _ in each]), each
        )
        absent = [(wish, body) for wish, body in each if wish.reply.task_id not in locked.rows]
        absent.sort(key=lambda pair: pair[0].reply.task_id)  # an insert waits for a concurrent insert of the same key
        await tx.each(sql.INSERT_KEPT_REPLY, [_kept(wish, body, locked.now, terms) for wish, body in absent])
        again = [wish for wish, _ in each if wish.again and _ended_here(wish, locked, terms)]
        await tx.each(sql.UPDATE_REPLY_DUE, [_due_again(wish, locked.now, terms) for wish in again])
        return [
            wish.reply.task_id not in locked.rows or wish in again or _found_itself(wish, locked) for wish, _ in each
        ]

    return await in_rounds(wishes, lambda pair: pair[0].reply.task_id, turn)


async def _without_early_cancels(
    tx: Transaction, locked: LockedTasks, wishes: Sequence[tuple[KeepReply, bytes | None]]
) -> LockedTasks:
    """`locked` without the rows of cancels that came while the task of a reply ran, which are deleted."""
    first = {wish.reply.task_id for wish, _ in wishes if not wish.again}
    early = [task_id for task_id, row in locked.rows.items() if task_id in first and is_early(row)]
    if not early:
        return locked
    await tx.run(sql.DELETE_TASKS, ids=early)
    return replace(locked, rows={id_: row for id_, row in locked.rows.items() if id_ not in early})


def _kept(wish: KeepReply, body: bytes | None, now: float, terms: Terms) -> Columns:
    reply, deadline = wish.reply, wish.reply.requester.deadline
    as_others = max(now, deadline.timestamp() if deadline else now) + terms.tombstone_ttl
    return {
        **_due_again(wish, now, terms),
        "agent": terms.names.qualified(reply.agent),
        "status": reply.state.value,
        "run_id": wish.run_id,
        "reply": body,
        "digest": wish.digest,
        "now": now,
        "expires_at": as_others if wish.keep is None else now + wish.keep.total_seconds(),
    }


def _due_again(wish: KeepReply, now: float, terms: Terms) -> Columns:
    requester = requester_columns(wish.reply.requester)
    return {"task_id": wish.reply.task_id, "wake_at": now + terms.backoff(1), **requester}


def _ended_here(wish: KeepReply, locked: LockedTasks, terms: Terms) -> bool:
    row = locked.rows.get(wish.reply.task_id)
    return (
        row is not None and TaskState(row.status).ended and row.agent_name == terms.names.qualified(wish.reply.agent)
    )


def _found_itself(wish: KeepReply, locked: LockedTasks) -> bool:
    row = locked.rows[wish.reply.task_id]
    return row.run_id == wish.run_id and row.fence == 0 and TaskState(row.status).ended


async def mark_sent(tx: Transaction, sent: Sequence[Send]) -> None:
    """Mark what the broker has."""
    if not tx.dialect.is_sqlite:
        await tx.run(sql.COMMIT_LAZILY)
    locked = await lock_tasks(tx, [send.task_id for send in sent])
    sent = [send for send in sent if send.task_id not in locked.held]  # a lost mark only causes a resend
    replies = [
        {"task_id": send.task_id, "fence": send.fence, "reply_to": send.requester.reply_to or ""}
        for send in sent
        if isinstance(send, Reply)
    ]
    await tx.each(sql.MARK_REPLIED, replies)
    await _mark_dispatched(tx, {(send.task_id, send.sub_task_id) for send in sent if isinstance(send, Dispatch)})
    cancels = _keys(send for send in sent if isinstance(send, CancelNotice))
    await tx.each(sql.MARK_CANCEL_SENT, cancels)
    await tx.each(sql.DELETE_CANCELLED_CALL, cancels)


async def _mark_dispatched(tx: Transaction, sent: AbstractSet[tuple[str, str]]) -> None:
    """Mark a pause when all requests that it has still to send are among `sent`; otherwise those that are."""
    if not sent:
        return
    pauses, alone = list[Columns](), list[Columns]()
    rows = by_task(await tx.rows(sql.READ_DISPATCHES, ids=sorted({task_id for task_id, _ in sent})))
    for task_id, calls in rows.items():
        due = [call for call in calls if (call.send_due_at or call.join_due_at) is not None]
        settled = [call for call in due if (task_id, call.sub_task_id) in sent]
        if due and len(settled) == len(due) and all(call.send_due_at is None for call in due):
            pauses.append({"task_id": task_id, "generation": due[0].invocation_id})
        else:
            alone += [{"task_id": task_id, "sub_task_id": call.sub_task_id} for call in settled]
    await tx.each(sql.MARK_JOIN_DISPATCHED, pauses)
    await tx.each(sql.MARK_DISPATCHED, alone)


def _keys(sends: Iterable[CancelNotice]) -> list[Columns]:
    return [{"task_id": send.task_id, "sub_task_id": send.sub_task_id} for send in sends]
