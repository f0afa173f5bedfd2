"""Conversion of rows to values of the model and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, TypeAlias

from pydantic_core import from_json, to_json
from sqlalchemy import Row

from meshpoint.adapters.encryption import is_envelope, is_text_envelope
from meshpoint.adapters.sql import inventory
from meshpoint.adapters.sql.codec import (
    RAW,
    Codec,
    Packed,
    pack_all,
    require_clear,
    unpack,
    unpack_entries,
    unpacked_size,
)
from meshpoint.adapters.sql.inventory import OUTCOME, Sealed
from meshpoint.errors import KeyMissing
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.messages import Address
from meshpoint.model.outcomes import Failed, FailureKind, Outcome, decode_outcome, encode_outcome
from meshpoint.model.tasks import (
    KEEP_ALIVES_PER_TIMEOUT,
    NO_DEADLINE,
    CancelNotice,
    CheckpointDict,
    Dispatch,
    Reply,
    Requester,
    Resumable,
    Run,
    TaskState,
    has_log,
)
from meshpoint.model.transitions import ExistingTask

FAR_FUTURE = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
"""Deletion time of a preserved operation, and due time of a suspended task."""

NOT_NEEDED = Failed(FailureKind.CANCELLED, "the join no longer needed it")

_EARLIEST = 0.0
_NO_DEADLINE = NO_DEADLINE.timestamp()
_MAX_TRIED_VERSIONS = 20  # an older version may try the task again
_YIELD_ABOVE_BYTES = 1_000_000

_JSON_COLUMNS = {
    each.column: each
    for each in (
        inventory.A2A_CONTEXT,
        inventory.ARTIFACTS,
        inventory.ARTIFACT_SIGNALS,
        inventory.RESPONSE_BUFFER,
        inventory.FLAGS,
        inventory.TOKEN_USAGE,
    )
}
_TEXT_COLUMNS = {**_JSON_COLUMNS, "context_rest": inventory.CONTEXT_REST}
_OWN_COLUMNS = frozenset({*_JSON_COLUMNS, "security_context"})


def instant(seconds: float) -> datetime:
    """Convert a database instant to a datetime, clamped to the latest representable one."""
    return datetime.fromtimestamp(min(max(seconds, _EARLIEST), FAR_FUTURE), UTC)


def wake_time(deadline: float, now: float) -> float:
    """When the sweeper checks a task whose first deadline is `deadline`.

    Tasks without a deadline differ by the time of their pause. With equal times, a listing in the
    order of the index would sort all of them for each page.
    """
    return deadline if deadline < _NO_DEADLINE else _NO_DEADLINE + now


def epoch_seconds(at: datetime | None) -> float | None:
    """Convert a datetime to a database instant."""
    return None if at is None else at.timestamp()


def duration_seconds(duration: timedelta | None) -> float | None:
    """Convert a duration to seconds, as the database stores it."""
    return None if duration is None else duration.total_seconds()


@dataclass(frozen=True, slots=True)
class AgentNames:
    """Conversion of agents' names to qualified names, `namespace/agent`, and back."""

    namespace: str

    @property
    def prefix(self) -> str:
        return f"{self.namespace}/"

    def qualified(self, agent: AgentName) -> str:
        """The agent's name as stored, with the namespace."""
        return f"{self.namespace}/{agent}"

    def plain(self, stored: str) -> AgentName:
        """The agent's name without this namespace.

        A name from another namespace stays qualified, so that it equals no agent of this one.
        """
        return AgentName(stored.removeprefix(self.prefix))


async def context_columns(
    context: CheckpointDict, codec: Codec, agent: str, task_id: TaskId, seq: int
) -> dict[str, Any]:
    """Encode a context as column values; keys without a column of their own share one."""
    columns: dict[str, Any] = {
        name: to_json(context[name]).decode() if name in context else None
        for name in _JSON_COLUMNS
    }
    rest = {key: value for key, value in context.items() if key not in _OWN_COLUMNS}
    columns["context_rest"] = to_json(rest).decode()
    if codec.seals(agent):
        for name, column in _TEXT_COLUMNS.items():
            columns[name] = codec.text(columns[name], column, agent, task_id, seq=seq)
    columns["security_context"] = None
    if "security_context" in context:
        columns["security_context"] = await codec.pack(
            to_json(context["security_context"]),
            inventory.SECURITY_CONTEXT,
            agent,
            task_id,
            seq=seq,
        )
    columns |= columns_for_people(context, codec, agent)
    columns["current_invocation_id"] = _text_copy(_sources(context), "current_invocation_id")
    return columns


def columns_for_people(context: CheckpointDict, codec: Codec, agent: str) -> dict[str, Any]:
    """Copies of the user and the session; keyed digests of them if `codec` seals."""
    sources = _sources(context)
    session = _text_copy(sources, "effective_session_id", "session_id")
    user = _text_copy(sources, "user_id")
    if codec.seals(agent):
        session = codec.digest(session, inventory.SESSION, agent)
        user = codec.digest(user, inventory.USER, agent)
    return {"effective_session_id": session, "user_id": user}


def _sources(context: CheckpointDict) -> Sequence[Mapping[str, object]]:
    """The context and its origin, where `columns_for_people` looks."""
    origin = context.get("a2a_context")
    return (context, origin) if isinstance(origin, dict) else (context,)


async def context_from_row(row: Any, codec: Codec) -> CheckpointDict:
    """Decode a context from the columns that `context_columns` returned.

    Raises:
        ValueError: A value is damaged.
        KeyMissing: A value is sealed with a key that `codec` lacks.
    """
    key = (row.agent_name, row.logical_task_id)
    if codec.sealer is not None:
        row = _opened(row, codec, key)
    try:
        context: CheckpointDict = from_json(row.context_rest or "{}")
        for name in _JSON_COLUMNS:
            if (text := getattr(row, name)) is not None:
                context[name] = from_json(text)
    except ValueError:
        for name in _TEXT_COLUMNS:
            require_clear(getattr(row, name))
        raise
    if row.security_context is not None:
        secret = await codec.unpack(row.security_context, inventory.SECURITY_CONTEXT, *key)
        if secret is not None:
            context["security_context"] = from_json(secret)
    return context


def _opened(row: Any, codec: Codec, key: tuple[str, str]) -> Any:
    texts = {
        name: codec.read_text(getattr(row, name), column, *key)
        for name, column in _TEXT_COLUMNS.items()
    }
    return SimpleNamespace(**texts, security_context=row.security_context)


def _text_copy(places: Sequence[Mapping[str, object]], *names: str) -> str | None:
    for name in names:
        for place in places:
            if name in place:
                value = place[name]
                # This is only a copy for people, so a character that PostgreSQL cannot store must
                # not fail the checkpoint.
                return value.replace("\0", "") if isinstance(value, str) else None
    return None


def requester_columns(requester: Requester) -> dict[str, Any]:
    """Encode a requester as column values of its task."""
    return {
        "reply_to": requester.reply_to,
        "requester_app_id": requester.app_id,
        "parent_task_id": requester.parent_task_id,
        "task_deadline": epoch_seconds(requester.deadline),
        "idle_timeout": duration_seconds(requester.idle_timeout),
        "result_ttl": duration_seconds(requester.result_ttl),
    }


def requester_from_row(row: Any) -> Requester:
    """Decode the requester from a task's row."""
    return Requester(
        reply_to=None if row.reply_to is None else Address(row.reply_to),
        app_id=row.requester_app_id,
        parent_task_id=row.parent_task_id,
        deadline=None if row.task_deadline is None else instant(row.task_deadline),
        idle_timeout=None if row.idle_timeout is None else timedelta(seconds=row.idle_timeout),
        result_ttl=None if row.result_ttl is None else timedelta(seconds=row.result_ttl),
    )


ADDRESS_SEPARATOR = "\n"  # cannot occur in an address, since addresses are printable


def followers_from_row(row: Any) -> tuple[Address, ...]:
    """Decode the addresses, other than the first, that get a task's reply."""
    if row.further_reply_to is None:
        return ()
    return tuple(Address(each) for each in row.further_reply_to.split(ADDRESS_SEPARATOR) if each)


def tombstone_expiry(row: Any, ended_at: float, tombstone_ttl: float) -> float:
    """When the row of a task that ended at `ended_at` may be deleted.

    Until then, a late duplicate of the request finds the tombstone; after that, it is past its
    deadline.
    """
    duplicates_until: float = max(ended_at, row.task_deadline or ended_at) + tombstone_ttl
    return max(duplicates_until, ended_at + (row.result_ttl or 0.0))


def keep_alive_at(requester: Requester, now: float) -> float | None:
    """When to send `requester` the next keep-alive of a task that began or paused at `now`."""
    idle = requester.idle_timeout
    return None if idle is None else now + idle.total_seconds() / KEEP_ALIVES_PER_TIMEOUT


async def reply_from_row(row: Any, now: float, names: AgentNames, codec: Codec) -> Reply:
    """Decode the reply from an ended task's row. `now` is database time."""
    return Reply(
        agent=names.plain(row.agent_name),
        task_id=TaskId(row.logical_task_id),
        state=TaskState(row.status),
        body=await codec.unpack(row.reply, inventory.REPLY, row.agent_name, row.logical_task_id)
        or b"",
        requester=requester_from_row(row),
        age=timedelta(seconds=max(0.0, now - row.ended_at)),
        fence=row.fence,
    )


async def existing_task_from_row(row: Any, names: AgentNames, codec: Codec) -> ExistingTask:
    """Decode the parts of a task's row that decide what to do with a repeated request."""
    state = TaskState(row.status)
    reply = await reply_from_row(row, row.now, names, codec) if state.is_final else None
    return ExistingTask(
        TaskId(row.logical_task_id),
        names.plain(row.agent_name),
        state,
        reply,
        requester=row.requester_app_id,
        digest=input_digest(row, codec),
        is_early_cancel=is_early_cancel(row),
        reply_to=None if row.reply_to is None else Address(row.reply_to),
        order=row.resume_token,
    )


def input_digest(row: Any, codec: Codec) -> str | None:
    """Decode the digest of a task's input; `None`, which matches any, without its key."""
    stored: str | None = row.request_digest
    if not is_text_envelope(stored):
        return stored
    key = (row.agent_name, row.logical_task_id)
    try:
        return codec.read_text(stored, inventory.REQUEST_DIGEST, *key)
    except KeyMissing:
        return None


def is_early_cancel(row: Any) -> bool:
    """Whether a row is the tombstone of a cancel that arrived before its request."""
    return bool(row.status == TaskState.CANCELLED and row.fence == 0 and row.reply_to is None)


def is_later_attempt(row: Row[Any]) -> bool:
    """Whether this is a later attempt at its call. The previous release sets its times alike."""
    return row.retry is not None and row.send_due_at is not None


async def dispatch_from_row(
    row: Row[Any], names: AgentNames, codec: Codec, attempt: int
) -> Dispatch:
    """Decode the request to send from a pending call's row."""
    return Dispatch(
        agent=names.plain(row.agent_name),
        task_id=TaskId(row.logical_task_id),
        generation=row.invocation_id,
        sub_task_id=TaskId(row.sub_task_id),
        peer=AgentName(row.peer_agent),
        body=await unpack_request(row, codec),
        headers=headers_from_row(row, codec),
        deadline=instant(row.absolute_deadline),
        attempt=attempt,
        is_retry=is_later_attempt(row),
        unroutable_for=None
        if row.unroutable_since is None
        else timedelta(seconds=max(row.now - row.unroutable_since, 0.0)),
    )


def cancel_notice_from_row(row: Row[Any], names: AgentNames) -> CancelNotice:
    """Decode the cancel to send from a closed call's row."""
    return CancelNotice(
        names.plain(row.agent_name),
        TaskId(row.logical_task_id),
        TaskId(row.sub_task_id),
        AgentName(row.peer_agent),
    )


async def unpack_request(row: Any, codec: Codec) -> bytes:
    """Decode the request in a call's row."""
    key = (row.agent_name, row.logical_task_id, row.sub_task_id)
    return await codec.unpack(row.request, inventory.CALL_REQUEST, *key) or b""


def headers_from_row(row: Any, codec: Codec) -> dict[str, Any]:
    """Decode the headers in a call's row."""
    key = (row.agent_name, row.logical_task_id)
    headers: dict[str, Any] = json.loads(
        codec.read_text(row.correlation_data, inventory.HEADERS, *key) or "{}"
    )
    return headers


async def outcome_columns(
    outcomes: Iterable[tuple[TaskId, TaskId, Outcome | None]],
    codec: Codec,
    agent: str,
    column: Sealed = OUTCOME,
) -> list[bytes | None]:
    """Encode outcomes, each given with its task and its call, in the same order.

    A missing outcome stays `None`.
    """
    given = list(outcomes)
    packed = await pack_all(
        None if outcome is None else encode_outcome(outcome) for _, _, outcome in given
    )
    if not codec.seals(agent):
        return packed
    return [
        codec.seal(each, column, agent, task_id, sub_task_id)
        for each, (task_id, sub_task_id, _) in zip(packed, given, strict=True)
    ]


async def outcome_column(outcome: Outcome, codec: Codec, call: Any, agent: str) -> Packed:
    """Encode the outcome of one call, given as its row."""
    key = (call.logical_task_id, call.sub_task_id)
    return await codec.pack(encode_outcome(outcome), OUTCOME, agent, *key)


StoredOutcome: TypeAlias = tuple[str, AgentName, bytes | Outcome | None, str]
"""A call's id, its peer, its outcome, packed or not yet encoded, and the id of its task."""


async def read_outcome(row: Any, codec: Codec) -> Outcome:
    """Decode the outcome in a call's row. A closed call without one counts as cancelled."""
    key = (row.agent_name, row.logical_task_id, row.sub_task_id)
    return await unpack_outcome(codec.open(row.outcome, OUTCOME, *key))


async def unpack_outcome(packed: bytes | None) -> Outcome:
    """Decode a packed outcome that is not sealed.

    Raises:
        ValueError: It is damaged.
        KeyMissing: It is sealed.
    """
    stored = packed[1:] if packed is not None and packed[:1] == RAW else await unpack(packed)
    if stored is None:
        return Failed(FailureKind.CANCELLED, "the call was closed")
    if len(stored) > _YIELD_ABOVE_BYTES:
        # Decoding takes milliseconds per outcome, and leases must be renewed in the meantime.
        await asyncio.sleep(0)
    return decode_outcome(stored)


def run_from_row(row: Any, names: AgentNames) -> Run:
    """Decode the run that owns a running task."""
    return Run(
        task_id=TaskId(row.logical_task_id),
        agent=names.plain(row.agent_name),
        id=RunId(row.run_id),
        fence=row.fence,
        generation=row.generation,
    )


async def resumable_from_row(
    row: Any,
    calls: Sequence[StoredOutcome] | None,
    log: Sequence[bytes] | None,
    names: AgentNames,
    codec: Codec,
    max_join_bytes: int,
) -> Resumable:
    """Build the input of a task's next segment from its row, its calls in call order, and its log.

    `calls` is `None` if their outcomes are too large to read. The result is then refused with the
    size in the message.

    Raises:
        ValueError: A value in the row is damaged, or `log` is `None` because entries are missing.
        KeyMissing: A value is sealed with a key that `codec` lacks.
    """
    if log is None:
        raise ValueError(f"entries of its log up to {row.log_seq} are missing")
    refused = None
    key = (row.agent_name, row.logical_task_id)
    if calls:
        calls = _open_outcomes(calls, codec, *key)
    size = (
        row.outcome_bytes
        if calls is None
        else sum(unpacked_size(found) for _, _, found, _ in calls if isinstance(found, bytes))
    )
    if calls is None or size > max_join_bytes:
        refused = (
            f"the outcomes of its peer calls have {size} bytes; max_join_bytes is {max_join_bytes}"
        )
        calls = ()
    outcomes = [
        (
            call_id,
            peer,
            await unpack_outcome(found) if found is None or isinstance(found, bytes) else found,
        )
        for call_id, peer, found, _ in calls
    ]
    return Resumable(
        run=run_from_row(row, names),
        requester=requester_from_row(row),
        context=await context_from_row(row, codec),
        state=await codec.unpack(row.state, inventory.STATE, *key) or b"",
        state_format=row.state_format or "",
        outcomes=tuple(outcomes),
        request=await codec.unpack(row.request, inventory.REQUEST, *key),
        attempt=row.attempt,
        cancel_requested=bool(row.cancel_requested),
        checkpoint=row.checkpoint_seq,
        retry_count=row.retry_count,
        rescues=row.rescues,
        crash_reason=None
        if row.dead_reason is None
        else codec.show_text(row.dead_reason, inventory.REASON, row.agent_name),
        refusal_reason=refused,
        digest=input_digest(row, codec),
        log=await unpack_entries(_open_log(row, log, codec)) if log else (),
        log_seq=row.log_seq,
        followers=followers_from_row(row),
    )


def _open_outcomes(
    calls: Sequence[StoredOutcome], codec: Codec, agent: str, task_id: str
) -> Sequence[StoredOutcome]:
    if codec.sealer is None:
        return calls
    return [
        (call_id, peer, codec.open(found, OUTCOME, agent, task_id, sub_task_id), sub_task_id)
        if isinstance(found, bytes)
        else (call_id, peer, found, sub_task_id)
        for call_id, peer, found, sub_task_id in calls
    ]


def _open_log(row: Any, log: Sequence[bytes], codec: Codec) -> Sequence[bytes]:
    """Open the entries of a task's log, which end with number `log_seq`."""
    if codec.sealer is None and not any(map(is_envelope, log)):
        return log
    if row.generation and not has_log(row.state_format or ""):  # it continues an older state
        return ()
    key = (row.agent_name, row.logical_task_id)
    return [
        codec.open(entry, inventory.LOG_ENTRY, *key, str(seq)) or b""
        for seq, entry in enumerate(log, row.log_seq - len(log) + 1)
    ]


def endable_from_row(row: Any, run: Run) -> Resumable:
    """Build a task that `run` only ends. Its content may be damaged, so it is not decoded."""
    return Resumable(
        run=run,
        requester=requester_from_row(row),
        context={},
        state=b"",
        state_format=row.state_format or "",
        outcomes=(),
        request=None,
        attempt=max(row.attempt, 1),
        cancel_requested=bool(row.cancel_requested),
        checkpoint=row.checkpoint_seq,
        retry_count=row.retry_count,
        rescues=row.rescues,
        digest=None if is_text_envelope(row.request_digest) else row.request_digest,
    )


def add_version(tried: str | None, version: str) -> str:
    """Add a version to the JSON list of versions that tried a parked task."""
    versions = [each for each in tried_versions(tried) if each != version]
    kept = [*versions, version][-_MAX_TRIED_VERSIONS:]
    return f"[{','.join(map(version_item, kept))}]"


def version_item(version: str) -> str:
    """Encode a version as an item of `tried_versions`. No part of another item looks like it.

    A quote after a space always begins an item, because quotes within items are escaped.
    """
    return f" {json.dumps(version)}"


def tried_versions(stored: str | None) -> tuple[str, ...]:
    """Decode the versions that tried a parked task, oldest first."""
    return () if stored is None else tuple(json.loads(stored))


def is_suspended(row: Any) -> bool:
    """Whether a person has suspended the row's task.

    A cancel and an end lift the suspension; an earlier release leaves it in the row then.
    """
    is_set = row.suspended_at is not None and not row.cancel_requested
    return is_set and not TaskState(row.status).is_final


def ready_at(row: Any, at: float) -> float:
    """When replicas may acquire the row's task if it becomes ready and may be acquired `at`."""
    return FAR_FUTURE if is_suspended(row) else at


def group_by_task(rows: Sequence[Row[Any]]) -> dict[str, list[Row[Any]]]:
    """Group rows of calls by task, keeping their order."""
    grouped: dict[str, list[Row[Any]]] = {}
    for row in rows:
        grouped.setdefault(row.logical_task_id, []).append(row)
    return grouped


Columns = Mapping[str, Any]
