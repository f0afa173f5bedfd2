"""Progress: a peer's status update extends its call's idle deadline and is forwarded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.rows import Columns, encode_pairs, requester_from_row
from meshpoint.model.checkpoint import Progress, ProgressNoted

_MIN_EXTENSION = 0.1  # of the idle timeout


async def read_calls(tx: Transaction, updates: Sequence[Progress]) -> list[Row[Any] | None]:
    """Read the pending call of each update, with its task's requester.

    `None` if the call is not pending or was made to another peer than the sender.
    """
    keys = sorted({(update.task_id, update.sub_task_id) for update in updates})
    found = {
        (row.logical_task_id, row.sub_task_id, row.peer_agent): row
        for row in await tx.fetch(sql.READ_PROGRESS, pairs=encode_pairs(keys))
    }
    return [found.get((update.task_id, update.sub_task_id, update.sender)) for update in updates]


def extensions(calls: Sequence[Row[Any] | None]) -> list[Columns]:
    """New idle deadlines, where they are at least a tenth of the idle timeout later."""
    extended: dict[tuple[str, str], Columns] = {}
    for row in calls:
        if row is None or row.call_idle_timeout is None:
            continue
        deadline = min(row.now + row.call_idle_timeout, row.absolute_deadline)
        if deadline - row.timeout_deadline >= _MIN_EXTENSION * row.call_idle_timeout:
            key = row.logical_task_id, row.sub_task_id
            extended[key] = {"task_id": key[0], "sub_task_id": key[1], "timeout_deadline": deadline}
    return list(extended.values())


async def extend(tx: Transaction, deadlines: Sequence[Columns]) -> None:
    """Write extended deadlines.

    The task's `wake_at` keeps the old deadline, so the sweeper checks the task once in vain.
    """
    await tx.execute_many(sql.EXTEND_IDLE_DEADLINE, deadlines)


def progress_result(update: Progress, row: Row[Any] | None) -> ProgressNoted | None:
    """The requester to forward `update` to, or `None` if the update does not count."""
    return None if row is None else ProgressNoted(update.task_id, requester_from_row(row))
