"""After every step, the visible state of each touched task must match its model."""

from __future__ import annotations

from datetime import datetime

from machines.story import CallStory, Story
from meshpoint.model.checkpoint import CallState, CallSummary, Known, TaskState, TaskSummary
from meshpoint.model.outcomes import Failed


def check_known(story: Story, known: Known | None, now: datetime) -> None:
    """A repeated request finds the task's current state, and an ended task's original reply."""
    reply = story.reply_at(now) if story.state.ended else None
    assert known == Known(story.task_id, story.agent, story.state, reply), f"{known}, but {story}"


def check_row(story: Story, row: tuple[TaskSummary, list[CallSummary]] | None) -> None:
    """State, owner, fence, counters and calls match the model."""
    assert row is not None, f"{story.task_id} has no row"
    summary, calls = row
    seen = (summary.state, summary.generation, summary.fence, summary.attempt, summary.rescues, summary.owner)
    told = (story.state, story.generation, story.fence, story.attempt, story.rescues, story.replica)
    assert seen == told, f"{summary}\n{story}"
    recorded = [call for call in story.current if call.outcome is not None]
    counted = (len(recorded), len(story.current))
    assert (summary.completed, summary.expected) == counted, f"{summary}\n{story}"
    assert [_shown(call) for call in calls] == [_expected(call, story) for call in story.rows]
    _check_reachable(story, summary)


def _check_reachable(story: Story, summary: TaskSummary) -> None:
    """The sweeper will find every task that is neither parked nor ended."""
    match story.state:
        case TaskState.WAITING:
            assert story.pending, f"{story.task_id} waits for nothing"
            deadlines = [call.due_at for call in story.pending]
            assert summary.wake_at <= min([*deadlines, story.join_deadline or deadlines[0]])
        case TaskState.RUNNING | TaskState.READY:
            assert summary.wake_at == story.due_at


def _shown(call: CallSummary) -> tuple[object, ...]:
    return call.sub_task_id, call.call_id, call.peer, call.generation, call.state, call.outcome


def _expected(call: CallStory, story: Story) -> tuple[object, ...]:
    state = CallState.PENDING if call.outcome is None else CallState.CANCELLING if call.cancelling else CallState.DONE
    outcome = call.outcome.kind.value if isinstance(call.outcome, Failed) else "ok" if call.outcome else None
    return call.id, call.planned.call_id, call.planned.peer, call.generation, state, outcome
