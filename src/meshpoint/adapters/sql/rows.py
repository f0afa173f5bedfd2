"""Rows as values of the model, and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

from pydantic_core import from_json, to_json
from sqlalchemy import Row

from meshpoint.adapters.sql.codec import RAW, pack, pack_all, unpack, unpacked_size
from meshpoint.model.checkpoint import (
    CancelNotice,
    Checkpoint,
    Dispatch,
    Known,
    Reply,
    Requester,
    Resumable,
    Run,
    TaskState,
)
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.messages import Address
from meshpoint.model.outcomes import Failed, FailureKind, Outcome, decode_outcome, encode_outcome

FAR_FUTURE = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
"""When a parked task is due: it waits for a person, not for time."""

_EARLIEST = 0.0
_YIELD_ABOVE_BYTES = 1_000_000

_JSON_COLUMNS = (
    "a2a_context",
    "produced_artifacts",
    "artifact_signals_to_return",
    "response_buffer",
    "flags",
    "token_usage",
)


_OWN_COLUMNS = frozenset({*_JSON_COLUMNS, "security_context"})


def instant(seconds: float) -> datetime:
    """Convert a database instant to a datetime, clamped to the latest representable one."""
    return datetime.fromtimestamp(min(max(seconds, _EARLIEST), FAR_FUTURE), UTC)


def epoch_seconds(at: datetime | None) -> float | None:
    """An instant of the model as the database has it."""
    return None if at is None else at.timestamp()


def encode_pairs(keys: Sequence[tuple[str, str]]) -> str:
    """Keys of calls, as the `pairs` fragment takes them."""
    return json.dumps(keys)


@dataclass(frozen=True, slots=True)
class AgentNames:
    """Agents' names as they rest: behind the namespace."""

    namespace: str

    @property
    def prefix(self) -> str:
        return f"{self.namespace}/"

    def qualified(self, agent: AgentName) -> str:
        """The name that rests."""
        return self.prefix + agent

    def plain(self, stored: str) -> AgentName:
        """The agent's own name; that of another namespace's stays qualified, so that it equals none of ours."""
        return AgentName(stored.removeprefix(self.prefix))


# ── the context ────────────────────────────────────────────────────────────────────────────────────


async def context_columns(context: Checkpoint) -> dict[str, Any]:
    """`context` as the values of its columns."""
    columns: dict[str, Any] = {
        name: to_json(context[name]).decode() if name in context else None for name in _JSON_COLUMNS
    }
    rest = {key: value for key, value in context.items() if key not in _OWN_COLUMNS}
    columns["context_rest"] = to_json(rest).decode()
    secret = to_json(context["security_context"]) if "security_context" in context else None
    columns["security_context"] = await pack(secret)
    origin = context.get("a2a_context")
    sources = (context, origin) if isinstance(origin, dict) else (context,)
    columns["effective_session_id"] = _text_copy(sources, "effective_session_id", "session_id")
    columns["user_id"] = _text_copy(sources, "user_id")
    columns["current_invocation_id"] = _text_copy(sources, "current_invocation_id")
    return columns


async def context_from_row(row: Any) -> Checkpoint:
    """The context that `context_columns` took apart."""
    context: Checkpoint = from_json(row.context_rest) if row.context_rest else {}
    for name in _JSON_COLUMNS:
        if (column := getattr(row, name)) is not None:
            context[name] = from_json(column)
    secret = await unpack(row.security_context)
    if secret is not None:
        context["security_context"] = from_json(secret)
    return context


def _text_copy(places: Sequence[Mapping[str, object]], *names: str) -> str | None:
    value = next((place[name] for name in names for place in places if name in place), None)
    # A character that PostgreSQL cannot keep must not fail a checkpoint for the sake of a copy.
    return value.replace("\0", "") if isinstance(value, str) else None


# ── requesters, replies, calls ─────────────────────────────────────────────────────────────────────


def requester_columns(requester: Requester) -> dict[str, Any]:
    """`requester` as the values of its columns."""
    idle = requester.idle_timeout
    return {
        "reply_to": requester.reply_to,
        "requester_app_id": requester.app_id,
        "parent_task_id": requester.parent_task_id,
        "task_deadline": epoch_seconds(requester.deadline),
        "idle_timeout": None if idle is None else idle.total_seconds(),
    }


def requester_from_row(row: Any) -> Requester:
    """The requester that a task's row names."""
    return Requester(
        reply_to=None if row.reply_to is None else Address(row.reply_to),
        app_id=row.requester_app_id,
        parent_task_id=row.parent_task_id,
        deadline=None if row.task_deadline is None else instant(row.task_deadline),
        idle_timeout=None if row.idle_timeout is None else timedelta(seconds=row.idle_timeout),
    )


async def reply_from_row(row: Any, now: float, names: AgentNames) -> Reply:
    """The reply on an ended task's row."""
    return Reply(
        agent=names.plain(row.agent_name),
        task_id=TaskId(row.logical_task_id),
        state=TaskState(row.status),
        body=await unpack(row.reply) or b"",
        requester=requester_from_row(row),
        age=timedelta(seconds=max(0.0, now - row.ended_at)),
        fence=row.fence,
    )


async def existing_task_from_row(row: Any, names: AgentNames) -> Known:
    """A task's row as a repeated request needs it."""
    state = TaskState(row.status)
    reply = await reply_from_row(row, row.now, names) if state.ended else None
    return Known(
        TaskId(row.logical_task_id),
        names.plain(row.agent_name),
        state,
        reply,
        requester=row.requester_app_id,
        digest=row.request_digest,
        early=is_early_cancel(row),
    )


def is_early_cancel(row: Any) -> bool:
    """Whether a row is the tombstone of a cancel that arrived before its request."""
    return bool(row.status == TaskState.CANCELLED and row.fence == 0 and row.reply_to is None)


async def dispatch_from_row(row: Row[Any], names: AgentNames, attempt: int) -> Dispatch:
    """A pending call's row as a request to send."""
    return Dispatch(
        agent=names.plain(row.agent_name),
        task_id=TaskId(row.logical_task_id),
        generation=row.invocation_id,
        sub_task_id=TaskId(row.sub_task_id),
        peer=AgentName(row.peer_agent),
        body=await unpack(row.request) or b"",
        headers=json.loads(row.correlation_data),
        deadline=instant(row.absolute_deadline),
        attempt=attempt,
    )


def cancel_notice_from_row(row: Row[Any], names: AgentNames) -> CancelNotice:
    """A closed call's row as a cancel to send."""
    return CancelNotice(
        names.plain(row.agent_name), TaskId(row.logical_task_id), TaskId(row.sub_task_id), AgentName(row.peer_agent)
    )


# ── outcomes, tasks to resume ──────────────────────────────────────────────────────────────────────


async def outcome_column(outcome: Outcome) -> bytes | None:
    """`outcome` as it rests."""
    return await pack(encode_outcome(outcome))


async def outcome_columns(outcomes: Iterable[Outcome | None]) -> list[bytes | None]:
    """`outcomes` as they rest; that of a call without one is None."""
    return await pack_all(None if outcome is None else encode_outcome(outcome) for outcome in outcomes)


StoredOutcome: TypeAlias = tuple[str, AgentName, bytes | Outcome | None]
"""A call's id, its peer, and its outcome: as it rests, or as it was before it was stored."""


async def unpack_outcome(packed: bytes | None) -> Outcome:
    """The outcome that rests on a call's row."""
    return _decode_stored(await unpack(packed))


def _decode_stored(stored: bytes | None) -> Outcome:
    if stored is None:
        return Failed(FailureKind.CANCELLED, "the call was closed")
    return decode_outcome(stored)


def run_from_row(row: Any, names: AgentNames) -> Run:
    """The run that owns a running task."""
    return Run(
        task_id=TaskId(row.logical_task_id),
        agent=names.plain(row.agent_name),
        id=RunId(row.run_id),
        fence=row.fence,
        generation=row.generation,
    )


async def resumable_from_row(
    row: Any, calls: Sequence[StoredOutcome] | None, names: AgentNames, max_join_bytes: int
) -> Resumable:
    """Build the input of a task's next segment from its row and its calls, in call order.

    `calls` is missing if their outcomes are too large to read.
    """
    refused = None
    size = row.outcome_bytes if calls is None else _unpacked_size(calls)
    if calls is None or size > max_join_bytes:
        refused = f"the outcomes of its peer calls have {size} bytes; max_join_bytes is {max_join_bytes}"
        calls = ()
    outcomes = [
        (call_id, peer, await _unpack_yielding(found) if found is None or isinstance(found, bytes) else found)
        for call_id, peer, found in calls
    ]
    return Resumable(
        run=run_from_row(row, names),
        requester=requester_from_row(row),
        context=await context_from_row(row),
        state=await unpack(row.state) or b"",
        state_format=row.state_format or "",
        outcomes=tuple(outcomes),
        request=await unpack(row.request),
        attempt=row.attempt,
        cancel_requested=bool(row.cancel_requested),
        checkpoint=row.checkpoint_seq,
        retry_count=row.retry_count,
        rescues=row.rescues,
        death=row.dead_reason,
        refused=refused,
        digest=row.request_digest,
    )


async def _unpack_yielding(found: bytes | None) -> Outcome:
    stored = found[1:] if found is not None and found[:1] == RAW else await unpack(found)
    if stored is not None and len(stored) > _YIELD_ABOVE_BYTES:
        await asyncio.sleep(0)  # decoding one takes milliseconds, and leases must be renewed meanwhile
    return _decode_stored(stored)


def _unpacked_size(calls: Sequence[StoredOutcome]) -> int:
    return sum(unpacked_size(found) for _, _, found in calls if isinstance(found, bytes))


def group_by_task(rows: Sequence[Row[Any]]) -> dict[str, list[Row[Any]]]:
    """Rows of calls, by their task."""
    grouped: dict[str, list[Row[Any]]] = {}
    for row in rows:
        grouped.setdefault(row.logical_task_id, []).append(row)
    return grouped


Columns = Mapping[str, Any]
