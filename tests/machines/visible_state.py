"""After every step, the visible state of each touched task must match its model."""

from __future__ import annotations

from datetime import datetime

from machines.mail_checks import expected_questions, normalize_question
from machines.task_model import CallModel, TaskModel
from meshpoint.model.outcomes import Failed
from meshpoint.model.tasks import NO_DEADLINE, CallState, CallSummary, TaskState, TaskSummary
from meshpoint.model.transitions import ExistingTask
from meshpoint.ports.task_store import CheckpointStore


def check_known(model: TaskModel, known: ExistingTask | None, now: datetime) -> None:
    """A repeated request finds the task's current state, and an ended task's original reply."""
    reply = model.reply_at(now) if model.state.is_final else None
    assert known == ExistingTask(model.task_id, model.agent, model.state, reply), (
        f"{known}, but {model}"
    )


def check_row(model: TaskModel, row: tuple[TaskSummary, list[CallSummary]] | None) -> None:
    """State, owner, fence, counters and calls match the model."""
    assert row is not None, f"{model.task_id} has no row"
    summary, calls = row
    actual = (
        summary.state,
        summary.generation,
        summary.fence,
        summary.attempt,
        summary.rescues,
        summary.owner,
        summary.suspended_at,
        *((summary.parked_reason, summary.tried_versions) if not model.state.is_final else ()),
    )
    expected = (
        model.state,
        model.generation,
        model.fence,
        model.attempt,
        model.rescues,
        model.replica,
        model.suspended_at,
        *((model.parked_reason, model.tried_versions) if not model.state.is_final else ()),
    )
    assert actual == expected, f"{summary}\n{model}"
    recorded = [call for call in model.current_calls if call.outcome is not None]
    counts = (len(recorded), len(model.current_calls))
    assert (summary.completed, summary.expected) == counts, f"{summary}\n{model}"
    assert [_visible_call(call) for call in calls] == [
        _expected_call(call, model) for call in model.calls_with_row
    ]
    _check_reachable(model, summary)


async def check_mail(model: TaskModel, store: CheckpointStore) -> None:
    """Kept signals, questions, kept answers and values match the model."""
    mailbox, expected = await store.mailbox(model.task_id), model.mail.to_mailbox()
    assert mailbox == expected, f"{mailbox}\n{expected}"
    if questions := expected_questions(model):
        found = await store.find_questions([each.key for each in questions])
        assert [normalize_question(each) for each in found] == questions


def _check_reachable(model: TaskModel, summary: TaskSummary) -> None:
    """The sweeper will find every task that has not ended."""
    match model.state:
        case TaskState.WAITING:
            assert model.pending_calls, f"{model.task_id} waits for nothing"
            kept = {each.sent.peer for each in model.mail.signals if not each.received}
            awaited = {call.planned.peer for call in model.pending_calls}
            assert not kept & awaited, f"{model.task_id} waits for a signal that it has"
            deadlines = [call.due_at for call in model.pending_calls]
            first = min([*deadlines, model.join_deadline or deadlines[0]])
            assert summary.wake_at <= first or first >= NO_DEADLINE
        case TaskState.RUNNING | TaskState.READY | TaskState.PARKED:
            assert summary.wake_at == model.due_at


def _visible_call(call: CallSummary) -> tuple[object, ...]:
    return call.sub_task_id, call.call_id, call.peer, call.generation, call.state, call.outcome


def _expected_call(call: CallModel, model: TaskModel) -> tuple[object, ...]:
    state = (
        CallState.PENDING
        if call.outcome is None
        else CallState.CANCELLING
        if call.cancelling
        else CallState.DONE
    )
    outcome = (
        call.outcome.kind.value
        if isinstance(call.outcome, Failed)
        else "ok"
        if call.outcome
        else None
    )
    return call.id, call.planned.call_id, call.planned.peer, call.generation, state, outcome
