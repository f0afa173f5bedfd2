"""What `tasks show` says about a task, for people and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue
from pydantic_core import from_json

from meshpoint.cli.output import format_age, format_due
from meshpoint.model.error_text import quantity
from meshpoint.model.mailbox import Mailbox
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.model.questions import QuestionKey
from meshpoint.model.secrets import mask_secrets, remove_secrets
from meshpoint.model.tasks import (
    NO_DEADLINE,
    SUSPECT_AFTER_RESCUES,
    CallState,
    CallSummary,
    TaskState,
)
from meshpoint.model.waits import SLEEP_PEER, display_name, is_question, is_signal, is_wait

if TYPE_CHECKING:
    from meshpoint.model.outcomes import Outcome
    from meshpoint.model.questions import AskedQuestion
    from meshpoint.model.tasks import TaskSummary
    from meshpoint.model.usage import TokenUsage

_MAX_SHOWN = 1_000
"""Maximum characters of an input, a result or a message in a table. JSON is not cut."""
_MAX_PEERS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class TaskDetails:
    """A task, its calls, its outcome once it has ended, and its input if it is still stored.

    `questions` are the open ones. Values of `secret_keys` are masked, like values of common secret
    names. Printed commands have `database_options`.
    """

    task: TaskSummary
    calls: list[CallSummary]
    outcome: Outcome | None
    input: JsonValue = None
    questions: Sequence[AskedQuestion] = ()
    secret_keys: Sequence[str] = ()
    mailbox: Mailbox = field(default_factory=Mailbox)
    database_options: str = "--db URL"

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
    is_timeless = task.wake_at >= NO_DEADLINE  # it waits for a person only
    return "-" if task.state.is_final or is_held or is_timeless else format_due(task.wake_at)


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
        "questions": [
            {
                "name": each.name,
                "id": each.key.to_id(),
                "prompt": _mask_optional(each.prompt, keys),
            }
            for each in details.questions
        ],
        "signals": [asdict(each) for each in details.mailbox.signals],
        "kept_answers": [
            QuestionKey(task.agent, task.task_id, each).to_id()
            for each in details.mailbox.answered
        ],
        "values": remove_secrets(_read_values(details.mailbox), (), keys)[0],
        "calls": [
            {**asdict(call), "message": _mask_optional(call.message, keys)}
            for call in details.calls
        ],
    }


def summary_to_json(task: TaskSummary) -> dict[str, object]:
    """Return a listed task as JSON, without `usage`, which listings lack, and `position`."""
    fields: dict[str, Any] = {
        name: getattr(task, name)
        for name in task.__dataclass_fields__
        if name not in {"usage", "position"}
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
        *[fact for each in details.questions for fact in _question_facts(each, keys)],
        *_mailbox_facts(details, keys),
        ("suspended", _describe_suspension(task)),
        ("subject", task.subject),
        ("requester", _describe_requester(task)),
        ("parent task", task.parent_task_id),
        ("input", None if details.input is None else shorten(details.input, keys)),
        ("pauses", str(task.generation)),
        ("resumed", quantity(task.retry_count, "time") if task.retry_count else None),
        ("replicas lost", _describe_losses(task)),
        ("parked because", _describe_parking(task, keys)),
        (_label_of_reason(task), task.dead_reason and shorten(task.dead_reason, keys)),
        ("paused" if task.generation else "began", f"{format_age(task.checkpointed_at)} ago"),
        ("ended", None if task.ended_at is None else f"{format_age(task.ended_at)} ago"),
        ("deadline", _describe_deadline(task)),
        ("fails", format_due(task.wake_at) if task.state is TaskState.PARKED else None),
        ("owner", task.owner),
        ("lease", _describe_lease(task)),
        ("tokens", describe_usage(details.usage)),
    ]
    return [(name, fact) for name, fact in facts if fact is not None]


def _question_facts(asked: AskedQuestion, keys: Sequence[str]) -> list[tuple[str, str | None]]:
    prompt = None if asked.prompt is None else shorten(asked.prompt, keys)
    return [(f"question {asked.name}", asked.key.to_id()), (f"prompt of {asked.name}", prompt)]


def _read_values(mailbox: Mailbox) -> dict[str, JsonValue]:
    return {key: from_json(value) for key, value in mailbox.values}


def _mailbox_facts(details: TaskDetails, keys: Sequence[str]) -> list[tuple[str, str]]:
    """The values of a task, its kept answers and its unreceived signals."""
    task, mailbox = details.task, details.mailbox
    shown = remove_secrets(_read_values(mailbox), (), keys)[0]
    facts = [
        (f"value {key}", shorten(value, keys))
        for key, value in (shown.items() if isinstance(shown, dict) else ())
    ]
    for name, number in Counter(each.name for each in mailbox.signals).items():
        age = next(format_age(each.sent_at) for each in mailbox.signals if each.name == name)
        facts.append((f"signal {name}", f"{number} unreceived, the oldest for {age}"))
    answered = [QuestionKey(task.agent, task.task_id, each) for each in mailbox.answered]
    return facts + [(f"answer {each.name}", "kept for its next wait") for each in answered]


def _outcome_facts(outcome: Outcome | None, keys: Sequence[str]) -> list[tuple[str, str | None]]:
    match outcome:
        case None:
            return []
        case Failed(kind=kind, message=message):
            return [("failure", f"{kind.value}: {shorten(message, keys)}")]
        case Ok(value=value, artifacts=artifacts):
            count = quantity(len(artifacts), "artifact") if artifacts else None
            return [("result", shorten(value, keys)), ("artifacts", count)]


def _explain_wait(details: TaskDetails) -> str | None:
    """What a task waits for that neither runs nor has ended."""
    task = details.task
    resume = f"meshpoint tasks resume {task.task_id} {details.database_options}"
    match task.state:
        case TaskState.WAITING:
            return _explain_join(details)
        case TaskState.READY if task.suspended_at is not None:
            return f"a person: {resume}"
        case TaskState.READY:
            return _explain_ready(task)
        case TaskState.RUNNING if task.wake_at < datetime.now(UTC):
            return "a replica that rescues it: its lease has expired"
        case TaskState.PARKED:
            since = "" if task.incompatible_since is None else format_age(task.incompatible_since)
            tried = ", ".join(task.tried_versions) or "an earlier release"
            fix = f"another version of the code, or: {resume}"
            return f"{fix} (tried by {tried}" + (since and f", for {since}") + ")"
        case _:
            return None


def _explain_join(details: TaskDetails) -> str:
    task = details.task
    is_open = task.expected - task.completed
    missing = (
        is_open if task.needed is None else min(task.needed - _count_results(details), is_open)
    )
    number = (
        quantity(is_open, "outcome") if missing == is_open else f"{missing} of {is_open} results"
    )
    what = f"{number} of {describe_peers(task)}"
    limit = "" if task.join_deadline is None else f", limit {format_due(task.join_deadline)}"
    return f"{what}, for {format_age(task.checkpointed_at)}{limit}"


def _count_results(details: TaskDetails) -> int:
    """The results, of the calls of the last pause, that count towards the join."""
    return sum(
        call.generation == details.task.generation
        and call.outcome == "ok"
        and not call.is_superseded
        for call in details.calls
    )


def _explain_ready(task: TaskSummary) -> str:
    """Why no replica has acquired a ready task."""
    if task.wake_at > datetime.now(UTC):
        is_new = task.generation == 0 and not (task.attempt or task.rescues or task.retry_count)
        return f"its {'start' if is_new else 'next attempt'}, {format_due(task.wake_at)}"
    if task.rescues >= SUSPECT_AFTER_RESCUES:
        return "a replica that is not running another suspect"
    reads = "" if not task.state_format else f" that reads {task.state_format}"
    return f"a replica{reads} with a free slot"


def _describe_suspension(task: TaskSummary) -> str | None:
    return None if task.suspended_at is None else f"{format_age(task.suspended_at)} ago"


def _describe_parking(task: TaskSummary, keys: Sequence[str]) -> str | None:
    is_parked = task.state is TaskState.PARKED and task.parked_reason is not None
    return shorten(task.parked_reason, keys) if is_parked else None


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


def _describe_losses(task: TaskSummary) -> str | None:
    """Replicas lost while they ran this segment, and how often the task killed its process."""
    if not task.rescues:
        return None
    deaths = task.attempt - (task.state is TaskState.RUNNING)
    return f"{task.rescues}" + (f"; this task killed its process {deaths} times" if deaths else "")


def _describe_deadline(task: TaskSummary) -> str | None:
    return None if task.deadline is None else format_due(task.deadline)


def _describe_lease(task: TaskSummary) -> str | None:
    if task.state is not TaskState.RUNNING:
        return None
    verb = "ends" if task.wake_at > datetime.now(UTC) else "ended"
    return f"{verb} {format_due(task.wake_at)}"


def describe_usage(usage: TokenUsage | None) -> str | None:
    """Return token counts for people; `None` without any."""
    if usage is None or usage.is_empty:
        return None
    total = usage.total
    cached = f" ({total.cached} cached)" if total.cached else ""
    return f"{total.input} in{cached}, {total.output} out"


def _mask_optional(text: str | None, keys: Sequence[str]) -> str | None:
    return None if text is None else mask_secrets(text, keys)


def shorten(value: object, keys: Sequence[str]) -> str:
    """Return a value or a text on one line, with secrets masked, cut if it is long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = mask_secrets(text[: 2 * _MAX_SHOWN], keys)
    if len(text) <= _MAX_SHOWN:
        return text
    return f"{text[:_MAX_SHOWN]}… (the rest with --json)"


CALL_COLUMNS = ("call", "peer", "outcome", "when", "peer's task")


def describe_call(call: CallSummary, secret_keys: Sequence[str]) -> tuple[str, ...]:
    """Return a call, or one attempt at it, as a row of a table with `CALL_COLUMNS`."""
    is_peer = not is_wait(call.peer)
    name = call.call_id if is_peer else display_name(call.call_id)
    if call.max_attempts is not None:
        name += f", attempt {call.attempt} of {call.max_attempts}"
    outcome = call.outcome or "-"
    if call.message:
        outcome += f": {shorten(call.message, secret_keys)}"
    if call.state is CallState.CANCELLING:
        outcome += " (its cancel is not sent yet)"
    return (
        name,
        _describe_peer(call.peer),
        outcome,
        ", ".join(_describe_times(call, is_peer=is_peer)) or "-",
        call.sub_task_id if is_peer else "-",
    )


def _describe_times(call: CallSummary, *, is_peer: bool) -> list[str]:
    """When a call was sent, and when it begins or times out."""
    if call.due_at is not None:
        verb = "begins" if call.due_at > datetime.now(UTC) else "due"
        return [f"{verb} {format_due(call.due_at)}"]
    times = []
    if is_peer and call.dispatched_at is not None:
        times.append(f"sent {format_age(call.dispatched_at)} ago")
    elif call.since is not None:
        times.append(f"{'called' if is_peer else 'began'} {format_age(call.since)} ago")
    if call.sends > 1:
        times.append(f"sent {quantity(call.sends, 'time')}")
    if call.state is CallState.PENDING and call.deadline < NO_DEADLINE:
        verb = "ends" if call.peer == SLEEP_PEER else "times out"
        times.append(f"{verb} {format_due(call.deadline)}")
    return times


def _describe_peer(peer: str) -> str:
    """The name of a peer, or the kind and name of a wait: "signal chat"."""
    kind = "question " if is_question(peer) else "signal " if is_signal(peer) else ""
    return f"{kind}{display_name(peer)}"
