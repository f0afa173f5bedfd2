"""Attach: further addresses that get the reply of a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row

from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.locking import LockedTasks, run_in_rounds
from meshpoint.adapters.sql.rows import (
    ADDRESS_SEPARATOR,
    Columns,
    followers_from_row,
    is_early_cancel,
    reply_from_row,
)
from meshpoint.model.messages import Address
from meshpoint.model.tasks import (
    TaskState,
    add_reply_address,
    cancel_applies,
    dropped_address,
    same_requester,
)
from meshpoint.model.transitions import (
    Attach,
    Attached,
    AttachEnded,
    AttachRefused,
    AttachResult,
    AttachUnknown,
    TaskLocked,
)


async def attach(tx: Transaction, attaches: Sequence[Attach]) -> list[AttachResult | TaskLocked]:
    """Add reply addresses to tasks that have not ended, and read the replies of the others."""

    async def process_round(batch: list[Attach], locked: LockedTasks) -> list[AttachResult]:
        results = {command.task_id: _result(tx, command, locked) for command in batch}
        attached = [
            (command, locked.rows[command.task_id])
            for command in batch
            if isinstance(results[command.task_id], Attached)
        ]
        await tx.execute_many(
            sql.UPDATE_REPLY_ADDRESSES,
            [
                {"task_id": command.task_id, **_address_columns(addresses)}
                for command, row in attached
                if (addresses := _add_address(command, row)) != _addresses(row)
            ],
        )
        ended = [command.task_id for command in batch if results[command.task_id] is None]
        tombstones = await tx.fetch(sql.LOOKUP, ids=ended) if ended else []
        replies = {
            row.logical_task_id: await reply_from_row(
                row, row.now, tx.options.names, tx.options.codec
            )
            for row in tombstones
        }
        return [
            AttachEnded(replies[command.task_id])
            if (result := results[command.task_id]) is None
            else result
            for command in batch
        ]

    return await run_in_rounds(tx, attaches, lambda command: command.task_id, process_round)


def _result(
    tx: Transaction, command: Attach, locked: LockedTasks
) -> Attached | AttachRefused | AttachUnknown | None:
    """The result of an attach, or `None` if the task has ended."""
    row = locked.rows.get(command.task_id)
    if row is None or row.agent_name != tx.options.names.qualified(command.agent):
        return AttachUnknown()
    if is_early_cancel(row):
        return None if cancel_applies(row.requester_app_id, command.sender) else AttachUnknown()
    if not same_requester(row.requester_app_id, command.sender):
        return AttachRefused(row.requester_app_id)
    state = TaskState(row.status)
    if state.is_final:
        return None
    return Attached(state, dropped_address(_addresses(row), _add_address(command, row)))


def _addresses(row: Row[Any]) -> tuple[Address, ...]:
    first = (Address(row.reply_to),) if row.reply_to else ()
    return first + followers_from_row(row)


def _add_address(command: Attach, row: Row[Any]) -> tuple[Address, ...]:
    addresses = _addresses(row)
    if command.reply_to in addresses:
        return addresses
    return add_reply_address(
        addresses, command.reply_to, keeps_first=row.parent_task_id is not None
    )


def _address_columns(addresses: Sequence[Address]) -> Columns:
    first, *further = addresses
    return {"reply_to": first, "further_reply_to": ADDRESS_SEPARATOR.join(further) or None}
