"""What `tasks show` says about a task, for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from meshpoint.cli.output import format_age, format_due
from meshpoint.model.error_text import quantity
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.model.secrets import mask_secrets, remove_secrets
from meshpoint.model.tasks import SUSPECT_AFTER_RESCUES, CallState, CallSummary, TaskState

if TYPE_CHECKING:
    from meshpoint.model.outcomes import Outcome
    from meshpoint.model.tasks import TaskSummary
    from meshpoint.model.usage import TokenUsage

_MAX_SHOWN = 1_000
"""Maximum characters of an input, a result or a message in a table. JSON is not cut."""
_MAX_PEERS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class TaskDetails:
    """A task, its calls, its outcome once it has ended, and its input if it is still stored.

    Values of `secret_keys` are masked, like values of common secret names.
    """

    task: TaskSummary
    calls: list[CallSummary]
    outcome: Outcome | None
    input: JsonValue = None
    secret_keys: Sequence[str] = ()

    @property
    def usage(self) -> TokenUsage | None:
        """The tokens of an ended task, or up to the last pause."""
        if self.outcome is None or self.outcome.usage.is_empty:  # cancelled while it waited
            return self.task.usage
        return self.outcome.usage


def describe_state(task: TaskSummary) -> str:
    """Return the state of a task for people, such as "waiting 2 of 3" or "ready (suspended)"."""
    progress = f" {task.completed} of {task.expected}" if task.state == "waiting" else ""
    if task.suspended_at is None:
        return f"{task.state.value}{progress}"
    if task.state is TaskState.RUNNING:
        return "suspending"
    return f"{task.state.value}{progress} (suspended)"


def describe_due(task: TaskSummary) -> str:
    """Return when a task is due next, for people."""
    is_held = task.state is TaskState.READY and task.suspended_at is not None
    return "-" if task.state.is_final or is_held else format_due(task.wake_at)


def describe_peers(task: TaskSummary) -> str:
    """Return the peers that a task waits for, or "-"."""
    shown = ", ".join(task.waiting_for[:_MAX_PEERS_SHOWN])
    more = len(task.waiting_for) - _MAX_PEERS_SHOWN
    return (shown + f" and {more} more" * (more > 0)) or "-"


def to_json(details: TaskDetails) -> dict[str, object]:
    """Return the details of a task with the same keys for every task.

    Values under secret names are null, and messages are masked.
    """
    task, outcome, usage, keys = details.task, details.outcome, details.usage, details.secret_keys
    failed = outcome if isinstance(outcome, Failed) else None
    message = None if failed is None else mask_secrets(failed.message, keys)
    artifacts = list[JsonValue](outcome.artifacts) if isinstance(outcome, Ok) else []
    return {
        **summary_to_json(task),
        "parked_reason": _mask_optional(task.parked_reason, keys),
        "dead_reason": _mask_optional(task.dead_reason, keys),
        "input": remove_secrets(details.input, (), keys)[0],
        "failure": None if failed is None else {"kind": failed.kind.value, "message": message},
        "reason": message,
        "result": remove_secrets(outcome.value, (), keys)[0] if isinstance(outcome, Ok) else None,
        "artifacts": remove_secrets(artifacts, (), keys)[0],
        "usage": None if usage is None else usage.model_dump(mode="json"),
        "waits_for": _explain_wait(details),
        "calls": [
            {**asdict(call), "message": _mask_optional(call.message, keys)}
            for call in details.calls
        ],
    }


def summary_to_json(task: TaskSummary) -> dict[str, object]:
    """Return a listed task as JSON. Its `usage` is not part of listings."""
    fields: dict[str, Any] = {
        name: getattr(task, name) for name in task.__dataclass_fields__ if name != "usage"
    }
    return fields


def describe_task(details: TaskDetails) -> list[tuple[str, str]]:
    """Return the facts of a task as rows of a table."""
    task, outcome, keys = details.task, details.outcome, details.secret_keys
    facts = [
        ("agent", task.agent),
        ("state", describe_state(task)),
        *_outcome_facts(outcome, keys),
        ("waits for", _explain_wait(details)),
        ("suspended", _describe_suspension(task)),
        ("subject", task.subject),
        ("requester", _describe_requester(task)),
        ("parent task", task.parent_task_id),
        ("input", None if details.input is None else _shorten(details.input, keys)),
        ("generation", str(task.generation)),
        ("attempt", str(task.attempt)),
        ("resumed", quantity(task.retry_count, "time") if task.retry_count else None),
        ("rescues", str(task.rescues) if task.rescues else None),
        ("parked because", _describe_parking(task, keys)),
        (_label_of_reason(task), task.dead_reason and _shorten(task.dead_reason, keys)),
        ("age", format_age(task.checkpointed_at)),
        ("ended", None if task.ended_at is None else f"{format_age(task.ended_at)} ago"),
        ("due", describe_due(task)),
        ("deadline", _describe_deadline(task)),
        ("owner", task.owner or "-"),
        ("lease", _describe_lease(task)),
        ("tokens", describe_usage(details.usage)),
    ]
    return [(name, fact) for name, fact in facts if fact is not None]


def _outcome_facts(outcome: Outcome | None, keys: Sequence[str]) -> list[tuple[str, str | None]]:
    match outcome:
        case None:
            return []
        case Failed(kind=kind, message=message):
            return [("failure", f"{kind.value}: {_shorten(message, keys)}")]
        case Ok(value=value, artifacts=artifacts):
            count = quantity(len(artifacts), "artifact") if artifacts else None
            return [("result", _shorten(value, keys)), ("artifacts", count)]


def _explain_wait(details: TaskDetails) -> str | None:
    """What a task waits for that neither runs nor has ended."""
    task = details.task
    match task.state:
        case TaskState.WAITING:
            return _explain_join(task)
        case TaskState.READY:
            return _explain_ready(task)
        case TaskState.RUNNING if task.wake_at < datetime.now(UTC):
            return "a replica that rescues it: its lease has expired"
        case TaskState.PARKED:
            since = "" if task.incompatible_since is None else format_age(task.incompatible_since)
            tried = ", ".join(task.tried_versions) or "an earlier release"
            return f"a version other than {tried}" + (since and f", for {since}")
        case _:
            return None


def _explain_join(task: TaskSummary) -> str:
    missing = task.expected - task.completed
    what = f"{quantity(missing, 'outcome')} of {describe_peers(task)}"
    limit = "" if task.join_deadline is None else f", limit {format_due(task.join_deadline)}"
    return f"{what}, for {format_age(task.checkpointed_at)}{limit}"


def _explain_ready(task: TaskSummary) -> str:
    """Why no replica has acquired a ready task."""
    if task.suspended_at is not None:
        return f"a person: meshpoint tasks resume {task.task_id}"
    if task.wake_at > datetime.now(UTC):
        return f"its next attempt, {format_due(task.wake_at)}"
    if task.rescues >= SUSPECT_AFTER_RESCUES:
        return "a replica that is not running another suspect"
    reads = "" if not task.state_format else f" that reads {task.state_format}"
    return f"a replica{reads} with a free slot"


def _describe_suspension(task: TaskSummary) -> str | None:
    return None if task.suspended_at is None else f"{format_age(task.suspended_at)} ago"


def _describe_parking(task: TaskSummary, keys: Sequence[str]) -> str | None:
    is_parked = task.state is TaskState.PARKED and task.parked_reason is not None
    return _shorten(task.parked_reason, keys) if is_parked else None


def _label_of_reason(task: TaskSummary) -> str:
    return "dead" if task.state.is_final else "last death"


def _describe_requester(task: TaskSummary) -> str | None:
    identity = [
        f"{name} {value}"
        for name, value in (("user", task.user_id), ("session", task.session_id))
        if value
    ]
    suffix = f" ({', '.join(identity)})" if identity else ""
    return f"{task.requester or '-'}{suffix}"


def _describe_deadline(task: TaskSummary) -> str | None:
    return None if task.deadline is None else format_due(task.deadline)


def _describe_lease(task: TaskSummary) -> str | None:
    return f"ends {format_due(task.wake_at)}" if task.state is TaskState.RUNNING else None


def describe_usage(usage: TokenUsage | None) -> str | None:
    """Return token counts for people; `None` without any."""
    if usage is None or usage.is_empty:
        return None
    total = usage.total
    cached = f" ({total.cached} cached)" if total.cached else ""
    return f"{total.input} in{cached}, {total.output} out"


def _mask_optional(text: str | None, keys: Sequence[str]) -> str | None:
    return None if text is None else mask_secrets(text, keys)


def _shorten(value: object, keys: Sequence[str]) -> str:
    """Return a value or a text on one line, with secrets masked, cut if it is long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = mask_secrets(text[: 2 * _MAX_SHOWN], keys)
    if len(text) <= _MAX_SHOWN:
        return text
    return f"{text[:_MAX_SHOWN]}… (the rest with --json)"


CALL_COLUMNS = ("call", "peer", "state", "outcome", "since", "sent", "deadline", "peer's task")


def describe_call(call: CallSummary, secret_keys: Sequence[str]) -> tuple[str, ...]:
    """Return a call as a row of a table with `CALL_COLUMNS`."""
    sent = [] if call.dispatched_at is None else [f"{format_age(call.dispatched_at)} ago"]
    if call.attempts > 1:
        sent.append(quantity(call.attempts, "attempt"))
    outcome = call.outcome or "-"
    if call.message:
        outcome += f": {_shorten(call.message, secret_keys)}"
    is_open = call.state is CallState.PENDING
    return (
        call.call_id,
        call.peer,
        call.state.value,
        outcome,
        "-" if call.since is None else f"{format_age(call.since)} ago",
        ", ".join(sent) or "-",
        format_due(call.deadline) if is_open else "-",
        call.sub_task_id,
    )
