"""What people do to tasks: answer, signal, cancel and resume them, in their database.

The command line and the dashboard share these functions. They need no running replica: replicas
find in the database what changed.
"""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pydantic_core import to_json

from meshpoint.engine.cancels import CANCELLED
from meshpoint.errors import AnswerRefused, MeshpointError, QuestionNotOpen, SignalRefused
from meshpoint.model.envelopes import encode_reply
from meshpoint.model.ids import AgentName, RunId, TaskId, new_id
from meshpoint.model.mailbox import (
    MAX_SIGNAL_BYTES,
    MailAccepted,
    MailRefused,
    RecordAnswer,
    SendSignal,
)
from meshpoint.model.messages import truncate_reason
from meshpoint.model.outcomes import Outcome
from meshpoint.model.questions import AskedQuestion, QuestionKey
from meshpoint.model.tasks import CallState, CallSummary, TaskSummary
from meshpoint.model.transitions import Cancel, CancelCommitted, CancelRequested, TaskLocked
from meshpoint.model.waits import QUESTION_PREFIX, display_name, is_question

if TYPE_CHECKING:
    from pydantic import JsonValue

    from meshpoint.model.operations import Revived
    from meshpoint.operations import Operations
    from meshpoint.ports.agent import ResumeFrom
    from meshpoint.ports.task_store import CheckpointStore

_PAST_TENSE = {"completed": "completed", "failed": "failed", "cancelled": "been cancelled"}


async def cancel(store: CheckpointStore, task_id: TaskId) -> AgentName | None:
    """End a task as cancelled, or mark it for the replica that runs it, and return its agent.

    Replicas send its reply, and the cancels of its open calls. `None` if there is no such task.

    Raises:
        MeshpointError: It has already ended.
    """
    found = await store.task(task_id)
    if found is None:
        return None
    task, _ = found
    if task.state.is_final:
        raise MeshpointError(f"task {task_id} has already {_PAST_TENSE[task.state]}")
    await cancel_all(store, [(task_id, task.agent)])
    return task.agent


async def cancel_all(store: CheckpointStore, tasks: Sequence[tuple[TaskId, AgentName]]) -> int:
    """Like `cancel`, for tasks of known agents. Ended tasks stay as they are.

    Returns the number of tasks that were cancelled or marked.
    """
    results = await store.cancel(
        [
            Cancel(task_id, agent, RunId(new_id()), encode_reply(task_id, None, CANCELLED))
            for task_id, agent in tasks
        ]
    )
    return sum(isinstance(each, CancelCommitted | CancelRequested) for each in results)


async def resume(
    operations: Operations, task_id: str, place: ResumeFrom | None
) -> tuple[str, Revived | None]:
    """Offer, continue or revive a task, and return which of them.

    Only a new attempt has a place to begin from.

    Raises:
        ResumeRefused: The task cannot be resumed; the subclass gives the reason.
    """
    if place is None and await operations.unpark([task_id]):
        return "offered", None
    if place is None and await operations.unsuspend([task_id]):
        return "continued", None
    return "resumed", await operations.resume(task_id, resume_from=place)


async def answer(
    store: CheckpointStore,
    task: TaskSummary,
    calls: list[CallSummary],
    name: str,
    value: JsonValue,
    *,
    rejection: str | None = None,
    by: str | None = None,
) -> QuestionKey:
    """Answer the only open question of `task` with this name, or with this id.

    With a reason in `rejection`, reject the question instead. A replica of the agent resumes the
    task in its next sweep. The answer is recorded as given `by` this person, by default the user
    of this process.

    Raises:
        QuestionNotOpen: No such question is open, or more than one is.
        AnswerRefused: It was answered before, or the value does not fit.
    """
    key = await _find_key(store, task, calls, name)
    asked = await _find(store, key, name)
    who, now = by or current_user(), datetime.now(UTC)
    outcome: Outcome = (
        asked.check(value, who, now)
        if rejection is None
        else asked.reject(truncate_reason(rejection), who, now)
    )
    (result,) = await store.answer([RecordAnswer(RunId(new_id()), key, outcome)])
    match result:
        case MailAccepted():
            return key
        case MailRefused(reason=reason):
            raise AnswerRefused(reason)
        case TaskLocked():
            raise AnswerRefused(f"another session has locked task {task.task_id}: try again")
        case _:
            raise QuestionNotOpen(f"task {task.task_id} no longer asks {name!r}")


async def signal(
    store: CheckpointStore, task: TaskSummary, name: str, value: JsonValue, signal_id: str
) -> None:
    """Send a signal to `task`, which receives it with `ctx.receive`.

    Raises:
        SignalRefused: The task has ended, has too many signals, or is locked by another session.
    """
    encoded = to_json(value)
    if len(encoded) > MAX_SIGNAL_BYTES:
        raise SignalRefused(
            f"the value has {len(encoded)} bytes; {MAX_SIGNAL_BYTES} is the maximum"
        )
    command = SendSignal(
        task.task_id, task.agent, signal_id, name, encoded, current_user(), is_trusted=True
    )
    (result,) = await store.signal([command])
    match result:
        case MailAccepted():
            return
        case MailRefused(reason=reason):
            raise SignalRefused(f"signal {name!r}: {reason}")
        case TaskLocked():
            raise SignalRefused(f"another session has locked task {task.task_id}: try again")
        case _:
            raise SignalRefused(f"task {task.task_id} no longer exists")


def current_user() -> str:
    """The user of this process."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may run under an id without a name
        return "unknown"


async def _find_key(
    store: CheckpointStore, task: TaskSummary, calls: list[CallSummary], name: str
) -> QuestionKey:
    keys = {
        QuestionKey(task.agent, task.task_id, TaskId(call.sub_task_id)): call
        for call in calls
        if call.generation == task.generation and call.peer.startswith(QUESTION_PREFIX)
    }
    by_id = [key for key in keys if key.to_id() == name]
    named = [key for key, call in keys.items() if call.peer == f"{QUESTION_PREFIX}{name}"]
    still_open = [key for key in named if keys[key].state is CallState.PENDING]
    found = by_id or still_open or named
    if not found:
        asked = (await store.mailbox(task.task_id)).questions
        earlier = [QuestionKey(task.agent, task.task_id, sub_task_id) for sub_task_id in asked]
        found = [key for key in earlier if name in {key.name, key.to_id()}]
    if not found:
        raise QuestionNotOpen(
            f"task {task.task_id} does not ask {name!r}: {_explain_unasked(task, calls)}"
        )
    if len(found) > 1:
        ids = ", ".join(key.to_id() for key in found)
        raise QuestionNotOpen(
            f"task {task.task_id} asks {name!r} more than once: give one of {ids}"
        )
    return found[0]


def _explain_unasked(task: TaskSummary, calls: list[CallSummary]) -> str:
    """What a task does instead of asking a question."""
    asked = {
        call.peer for call in calls if is_question(call.peer) and call.state is CallState.PENDING
    }
    if asked:
        return f"it asks {', '.join(repr(display_name(peer)) for peer in sorted(asked))}"
    return f"it {'has ended as' if task.state.is_final else 'is'} {task.state.value}"


async def _find(store: CheckpointStore, key: QuestionKey, name: str) -> AskedQuestion:
    (asked,) = await store.find_questions([key])
    if asked is None:
        raise QuestionNotOpen(f"task {key.task_id} no longer asks {name!r}")
    return asked
