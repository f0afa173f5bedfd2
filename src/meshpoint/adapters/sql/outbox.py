"""Unsent and mark sent: what was committed and is still to be told."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.locking import Terms, lock_tasks
from meshpoint.adapters.sql.rows import Columns, Names, dispatch_of, notice_of, reply_of
from meshpoint.model.checkpoint import (
    CallState,
    CancelNotice,
    Dispatch,
    Reply,
    Send,
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
        return await dispatch_of(row, names, attempt=row.send_attempts + 1)
    return notice_of(row, names)


async def unsent(tx: Transaction, agent: AgentName, limit: int, terms: Terms) -> Due:
    """Lease what is due to the caller, for longer each time."""
    name = terms.names.qualified(agent)
    replies = await tx.rows(sql.PICK_UNSENT_REPLIES, agent=name, limit=limit)
    await tx.each(sql.LEASE_REPLY, [_lease(row, row.reply_attempts + 1, terms) for row in replies])
    calls: Sequence[Row[Any]] = ()
    if len(replies) < limit:
        calls = await tx.rows(sql.PICK_UNSENT_CALLS, agent=name, limit=limit - len(replies))
        await tx.each(
            sql.LEASE_SEND,
            [{**_lease(row, row.send_attempts + 1, terms), "sub_task_id": row.sub_task_id} for row in calls],
        )
    return Due(replies, calls)


def _lease(row: Row[Any], attempts: int, terms: Terms) -> dict[str, Any]:
    return {"task_id": row.logical_task_id, "due_at": row.now + terms.backoff(attempts), "attempts": attempts}


async def mark_sent(tx: Transaction, sent: Sequence[Send]) -> None:
    """Mark what the broker has."""
    if not tx.dialect.is_sqlite:
        await tx.run(sql.COMMIT_LAZILY)
    await lock_tasks(tx, [send.task_id for send in sent])
    await tx.each(sql.MARK_REPLIED, [{"task_id": send.task_id} for send in sent if isinstance(send, Reply)])
    await tx.each(sql.MARK_DISPATCHED, _keys(send for send in sent if isinstance(send, Dispatch)))
    cancels = _keys(send for send in sent if isinstance(send, CancelNotice))
    await tx.each(sql.MARK_CANCEL_SENT, cancels)
    await tx.each(sql.DELETE_CANCELLED_CALL, cancels)


def _keys(sends: Iterable[Dispatch | CancelNotice]) -> list[Columns]:
    return [{"task_id": send.task_id, "sub_task_id": send.sub_task_id} for send in sends]
