"""The lists of columns that several statements share.

They are derived from the tables, in their order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sqlalchemy import LargeBinary, Table

from meshpoint.adapters.sql.tables import (
    JSON,
    calls,
    checkpoints,
    joins,
    operations,
    subtask_records,
    tasks,
)
from meshpoint.model.tasks import LOG_SUFFIX, SUSPECT_AFTER_RESCUES


def _names(table: Table, *, without: Collection[str] = ()) -> tuple[str, ...]:
    return tuple(column.name for column in table.columns if column.name not in without)


def _between(table: Table, first: str, last: str) -> tuple[str, ...]:
    names = _names(table)
    return names[names.index(first) : names.index(last) + 1]


def comma_separated(names: Iterable[str], prefix: str = "") -> str:
    """List columns: prefix ":" makes them parameters, and "t." qualifies them."""
    return ", ".join(f"{prefix}{name}" for name in names)


def assigned(names: Iterable[str]) -> str:
    """Assign to each column the parameter of the same name."""
    return ", ".join(f"{name} = :{name}" for name in names)


def emptied(names: Iterable[str]) -> str:
    """Set columns to NULL."""
    return ", ".join(f"{name} = NULL" for name in names)


def replaced(names: Iterable[str]) -> str:
    """Set columns to the values of a row that an insert could not add."""
    return ", ".join(f"{name} = excluded.{name}" for name in names)


REQUESTER = (*_between(tasks, "reply_to", "idle_timeout"), "result_ttl")
REPLY = (
    "logical_task_id",
    "agent_name",
    "status",
    "fence",
    "reply",
    *REQUESTER,
    "ended_at",
    "reply_attempts",
)

CONTEXT = _between(tasks, "a2a_context", "framework")
"""A task's context and state, which each pause writes."""
CONTEXT_TYPES = {
    name: "bytea" if isinstance(tasks.c[name].type, LargeBinary) else "text" for name in CONTEXT
}
PARKING = ("incompatible_since", "parked_reason", "tried_versions")
"""When and why the task was parked since its last pause, and which versions have tried it."""
WIPED_AT_END = _between(tasks, "a2a_context", "state")
KEPT_PAUSE = (
    "a2a_context",
    "produced_artifacts",
    "artifact_signals_to_return",
    "response_buffer",
    "flags",
    "token_usage",
    "context_rest",
    "state",
)
"""What an operation always keeps of its last pause when it ends without completing."""
_FOR_PEOPLE = {
    "effective_session_id",
    "user_id",
    "current_invocation_id",
    "app_version",
    "framework",
}
RESTORED = tuple(name for name in CONTEXT if name not in _FOR_PEOPLE)
"""The part of `CONTEXT` that the next segment needs."""

# The statements that insert them have their values in the order of the tables.
NEW_CALL = _names(
    calls, without={"claim_id", "dispatched_at", "send_due_at", "unroutable_since", "retry"}
)
NEW_JOIN = _names(joins, without={"dispatched_at"})
NEW_OPERATION = _names(operations)

CHECKPOINT_KEY = ("analysis_id", "agent_type", "seq")
CHECKPOINT_SNAPSHOT = ("l1_snapshot",)
"""Large values, which are read separately."""
CHECKPOINT_JSON = tuple(column.name for column in checkpoints.columns if column.type is JSON)
CHECKPOINT_PLAIN = _names(
    checkpoints, without={*CHECKPOINT_KEY, *CHECKPOINT_JSON, *CHECKPOINT_SNAPSHOT}
)
CHECKPOINT_VALUES = (*CHECKPOINT_PLAIN, *CHECKPOINT_JSON, *CHECKPOINT_SNAPSHOT)
CHECKPOINT = (*CHECKPOINT_KEY, *CHECKPOINT_VALUES)
CHECKPOINT_READ = (*CHECKPOINT_KEY, *CHECKPOINT_PLAIN, *CHECKPOINT_JSON)

RECORD_KEY = ("analysis_id", "agent_type", "name", "seq")
RECORD_VALUES = ("place", "record", "result")
RECORD = _names(subtask_records)
RECORDS_MARK = "+records"
"""Ends the `agent_version` of a checkpoint whose records are in `agent_subtask_records`.

An earlier release does not find them. It takes the version for another one and leaves the task to
others, instead of running its subtasks again.
"""

GENERATION = "CASE WHEN c.invocation_id < -1 THEN -2 - c.invocation_id ELSE c.invocation_id END"
"""The generation of a call `c`, also if it is an earlier attempt (`superseded`)."""

# `attempt` and `rescues` count as after a checkpoint with progress.
APPENDED = f"""attempt = 1, rescues = CASE WHEN rescues > {SUSPECT_AFTER_RESCUES}
                 THEN {SUSPECT_AFTER_RESCUES} ELSE rescues END,
  state_format = CASE WHEN generation > 0 AND state_format NOT LIKE '%{LOG_SUFFIX}'
                      THEN state_format || '{LOG_SUFFIX}' ELSE state_format END"""
"""Assignments for a running task whose run has appended to its log."""
