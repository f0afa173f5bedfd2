"""Timelines: which statements of a general transaction change a task's state, and how.

A transaction collects its entries and writes them before it commits, in one statement. The fast
path writes them within its own statements: see `timeline_statements`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import Row

from meshpoint.adapters.sql import mailbox_statements, operation_statements
from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql import timeline_statements as timeline_sql
from meshpoint.adapters.sql.rows import AgentNames, Columns, instant
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.tasks import TaskState
from meshpoint.model.timeline import CHANGES_OF_CALLS, Change, TimelineEntry

if TYPE_CHECKING:
    from meshpoint.adapters.sql.database import Transaction

_Changes: TypeAlias = Sequence[tuple[Change, str | None]]
"""What a statement changes with one row of values, each with the id of its call or signal."""


def _always(change: Change, ref: str = "") -> Callable[[Columns], _Changes]:
    return lambda values: [(change, values.get(ref))]


def _paused(values: Columns) -> _Changes:
    is_met = values["status"] == TaskState.READY
    return [(Change.PAUSED, None), *([(Change.READY, None)] if is_met else ())]


def _by_status(**changes: Change) -> Callable[[Columns], _Changes]:
    return lambda values: [(changes[values["status"]], None)]


def _answered(values: Columns) -> _Changes:
    # Only the outcome of a wait past its deadline has no claim.
    change = Change.TIMED_OUT if values["claim_id"] is None else Change.ANSWERED
    return [(change, values["sub_task_id"])]


def _kept(values: Columns) -> _Changes:
    return [(Change.ANSWER_KEPT, values["sub_task_id"])] if values["is_kept"] else []


_BY_END = _by_status(completed=Change.COMPLETED, failed=Change.FAILED, cancelled=Change.CANCELLED)

RECORDED: Mapping[str, Callable[[Columns], _Changes]] = {
    sql.INSERT_TASK: _by_status(running=Change.BEGUN, ready=Change.QUEUED),
    sql.INSERT_PAUSED: _paused,
    sql.UPDATE_PAUSED: _paused,
    sql.UPDATE_OWNER: _by_status(running=Change.ACQUIRED, ready=Change.READY),
    sql.UPDATE_RESCUED: _by_status(
        running=Change.RESCUED, ready=Change.LOST, parked=Change.PARKED
    ),
    sql.UPDATE_RELEASED: _by_status(ready=Change.RELEASED, parked=Change.PARKED),
    sql.UPDATE_ENDED: _BY_END,
    sql.INSERT_STORED_REPLY: _BY_END,
    sql.INSERT_EARLY_CANCEL: _always(Change.CANCELLED),
    sql.SET_CANCEL_REQUESTED: _always(Change.CANCEL_REQUESTED),
    sql.UPDATE_SUSPENDED: _always(Change.SUSPENDED),
    sql.UPDATE_UNSUSPENDED: _always(Change.UNSUSPENDED),
    sql.UPDATE_UNPARKED: _always(Change.UNPARKED),
    sql.UPDATE_CALL_OUTCOME: _answered,
    sql.UPDATE_TIMED_OUT: _always(Change.TIMED_OUT, "sub_task_id"),
    sql.INSERT_ATTEMPT: _always(Change.RETRIED, "next_id"),
    mailbox_statements.INSERT_SIGNAL: _always(Change.SIGNALLED, "signal_id"),
    mailbox_statements.SET_ANSWER: _kept,
    operation_statements.UPDATE_REVIVED: _always(Change.REVIVED),
    operation_statements.UPDATE_ADOPTED: _always(Change.ADOPTED),
}
"""The statements that change a task's state, and what they change."""


class NewEntries:
    """The entries that a transaction will write."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, Change, str | None]] = []
        self._places: dict[tuple[str, Change], int] = {}
        self._counts: dict[int, int] = {}

    def add(self, template: str, rows: Iterable[Columns]) -> None:
        """Record that the statement `template` was executed with `rows`.

        Changes of several calls of one task become one entry.
        """
        changes = RECORDED.get(template)
        if changes is None:
            return
        for row in rows:
            for task_id in row.get("ids") or [row["task_id"]]:
                for change, ref in changes(row):
                    self._add(task_id, change, ref)

    def _add(self, task_id: str, change: Change, ref: str | None) -> None:
        if change not in CHANGES_OF_CALLS:
            self._entries.append((task_id, change, ref))
            return
        place = self._places.setdefault((task_id, change), len(self._entries))
        self._counts[place] = self._counts.get(place, 0) + 1
        if place == len(self._entries):
            self._entries.append((task_id, change, ref))
        else:
            self._entries[place] = (task_id, change, None)

    async def write(self, tx: Transaction) -> None:
        """Write the entries within the transaction."""
        timeline = tx.options.timeline
        if timeline is None or not self._entries:
            return
        entries = [
            {
                "place": place,
                "task_id": task_id,
                "change": change,
                "calls": self._counts.get(place),
                "ref": ref,
            }
            for place, (task_id, change, ref) in enumerate(self._entries)
        ]
        insert = (
            timeline_sql.INSERT_ENTRIES_OF_KNOWN
            if timeline.known_only
            else timeline_sql.INSERT_ENTRIES
        )
        await tx.execute(insert, entries=json.dumps(entries), replica=timeline.replica)


def entry_from_row(row: Row[Any], names: AgentNames) -> TimelineEntry:
    """Decode an entry."""
    at: datetime = instant(row.at)
    return TimelineEntry(
        id=row.id,
        task_id=TaskId(row.logical_task_id),
        agent=AgentName(names.plain(row.agent_name)),
        at=at,
        change=Change(row.change),
        replica=None if row.replica is None else ReplicaId(row.replica),
        generation=row.generation,
        fence=row.fence,
        attempt=row.attempt,
        calls=row.calls,
        completed=row.completed,
        total=row.total,
        peer=row.peer,
        ref=row.ref,
    )
