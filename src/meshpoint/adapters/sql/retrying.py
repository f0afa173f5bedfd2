"""Retry calls: insert the attempt after a failed one, or let an earlier attempt's result win.

The rows of earlier attempts leave the generation of their pause (`superseded`). Everything
else treats the open attempt as the call.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

from sqlalchemy import Row

from meshpoint.adapters.sql import inventory, operation_statements
from meshpoint.adapters.sql import statements as sql
from meshpoint.adapters.sql.codec import RAW, Codec, Packed
from meshpoint.adapters.sql.database import Transaction
from meshpoint.adapters.sql.late_usage import add_usage
from meshpoint.adapters.sql.records import children_json, parse_children
from meshpoint.adapters.sql.rows import Columns, headers_from_row, unpack_request
from meshpoint.errors import PoisonMessage
from meshpoint.model.bodies import renamed_request
from meshpoint.model.call_attempts import (
    ANSWERED_EARLIER,
    CallAttempt,
    NextAttempt,
    children_of_attempts,
)
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import Header
from meshpoint.model.outcomes import Failed, encode_outcome
from meshpoint.model.tasks import NO_DEADLINE, CallState
from meshpoint.model.transitions import CallRetried

_log = logging.getLogger("meshpoint.store")

CallKey: TypeAlias = tuple[str, str]
"""The ids of a task and of an attempt at a call."""


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """The failure of an attempt at `now`, with its peer's advice about retries."""

    failed: Failed
    now: float
    retryable: bool = True
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class PlannedRetry:
    """A failed attempt and its successor. `request` is the successor's, packed."""

    row: Row[Any]
    failure: AttemptFailure
    next: NextAttempt
    request: Packed

    def to_result(self) -> CallRetried:
        """The result for the engine."""
        return CallRetried(
            TaskId(self.row.logical_task_id),
            TaskId(self.row.sub_task_id),
            self.next.sub_task_id,
            AgentName(self.row.peer_agent),
            self.next.attempt.number,
            timedelta(seconds=self.next.due_at - self.failure.now),
            self.failure.failed.kind,
        )

    def timeout_deadline(self) -> float:
        """When the next attempt times out, unless its peer sends a status update."""
        return self._deadlines()[1]

    def _deadlines(self) -> tuple[float, float]:
        row = self.row
        return self.next.deadlines(row.idle_timeout, row.task_deadline, NO_DEADLINE.timestamp())

    def to_columns(self, codec: Codec) -> Columns:
        """The columns of the next attempt."""
        absolute_deadline, timeout_deadline = self._deadlines()
        key = (inventory.HEADERS, self.row.agent_name, self.row.logical_task_id)
        headers = headers_from_row(self.row, codec)
        headers.pop(Header.RESUME.value, None)
        return {
            "task_id": self.row.logical_task_id,
            "sub_task_id": self.row.sub_task_id,
            "next_id": self.next.sub_task_id,
            "headers": codec.text(json.dumps(headers), *key),
            "request": self.request,
            "due_at": self.next.due_at,
            "timeout_deadline": timeout_deadline,
            "absolute_deadline": absolute_deadline,
            "now": self.failure.now,
            "retry": self.next.attempt.encode(),
        }


async def plan_retries(
    tx: Transaction, failures: Mapping[CallKey, AttemptFailure]
) -> dict[CallKey, PlannedRetry]:
    """Plan the attempts that follow failed open attempts of locked tasks.

    Final failures are left out.
    """
    if not failures:
        return {}
    planned: dict[CallKey, PlannedRetry] = {}
    for row in await tx.fetch(sql.READ_ATTEMPTS, pairs=json.dumps(sorted(failures))):
        key = (row.logical_task_id, row.sub_task_id)
        failure, attempt = failures[key], CallAttempt.decode(row.retry)
        following = None
        if attempt is not None:
            following = attempt.next(
                failure.failed.kind,
                failure.now,
                (row.task_deadline, row.join_deadline),
                retryable=failure.retryable,
                retry_after=failure.retry_after,
            )
        if following is None:
            continue
        try:
            body = renamed_request(
                await unpack_request(row, tx.options.codec), following.sub_task_id
            )
        except (PoisonMessage, ValueError) as error:
            _log.error("task %s: a call cannot be retried: %s", row.logical_task_id, error)
            continue
        place = (row.agent_name, row.logical_task_id, following.sub_task_id)
        request = await tx.options.codec.pack(body, inventory.CALL_REQUEST, *place)
        planned[key] = PlannedRetry(row, failure, following, request)
    return planned


async def write_retries(
    tx: Transaction,
    planned: Sequence[PlannedRetry],
    closed: Mapping[CallKey, Columns],
) -> None:
    """Write the next attempts, and close the failed ones with the columns `closed`, by key.

    The tokens of a failed attempt are added to the task's total.
    """
    if not planned:
        return
    codec = tx.options.codec
    await tx.execute_many(sql.INSERT_ATTEMPT, [each.to_columns(codec) for each in planned])
    keys = [(each.row.logical_task_id, each.row.sub_task_id) for each in planned]
    await tx.execute_many(
        sql.UPDATE_ATTEMPT,
        [
            {"claim_id": None, **closed[key], "task_id": key[0], "sub_task_id": key[1]}
            for key in keys
        ],
    )
    await _add_children(tx, planned)
    await add_usage(
        tx,
        [
            (each.row.logical_task_id, each.row.peer_agent, each.failure.failed.usage)
            for each in planned
        ],
    )


async def _add_children(tx: Transaction, planned: Iterable[PlannedRetry]) -> None:
    """Add the tasks of the next attempts to the children of operations."""
    by_task: dict[str, list[tuple[str, TaskId]]] = {}
    for each in planned:
        if each.row.checkpoint_seq is not None:
            ids = (each.row.sub_task_id, each.next.sub_task_id)
            by_task.setdefault(each.row.logical_task_id, []).append(ids)
    for task_id, attempts in by_task.items():
        for row in await tx.fetch(operation_statements.READ_CHILDREN, task_id=task_id):
            key = (tx.options.codec, row.agent_name, task_id)
            known = parse_children(row.children, *key)
            if added := children_of_attempts(known, attempts):
                await tx.execute(
                    operation_statements.ADD_CHILDREN,
                    task_id=task_id,
                    children=children_json(tuple(added), *key),
                )


async def supersede_open_attempt(
    tx: Transaction, winner: CallKey, open_attempt: Row[Any], now: float
) -> None:
    """Make an earlier attempt the open one.

    The cancel of the previous open attempt is due now, if that may have been sent.
    """
    task_id, sub_task_id = winner
    swapped: Columns = {"task_id": task_id, "outcome": None, "claim_id": None}
    await tx.execute_many(
        sql.UPDATE_ATTEMPT,
        [
            {
                **swapped,
                "sub_task_id": open_attempt.sub_task_id,
                "status": CallState.CANCELLING.value,
                "outcome": RAW + encode_outcome(ANSWERED_EARLIER),  # a constant: never sealed
                "send_due_at": now,
            },
            {
                **swapped,
                "sub_task_id": sub_task_id,
                "status": CallState.PENDING.value,  # its outcome is recorded next
                "send_due_at": None,
            },
        ],
    )
