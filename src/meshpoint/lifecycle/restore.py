"""Room 6: rebuild what agent code needs from a task's rows."""

from __future__ import annotations

from meshpoint.model.checkpoint import Resumable
from meshpoint.model.context import Report, TaskExecutionContext
from meshpoint.model.outcomes import Outcomes


def restore(task: Resumable, report: Report) -> tuple[TaskExecutionContext, Outcomes]:
    """The context of a task that goes on, and the outcomes it waited for, in call order.

    What the peers used is counted into the task's token usage, once per pause: the kept context does not have
    it yet, and the next checkpoint will.

    Raises:
        IncompatibleState: a later version of Meshpoint wrote the context.
    """
    context = TaskExecutionContext.from_checkpoint_dict(task.context, report=report)
    for _, peer, outcome in task.outcomes:
        context.token_usage.merge(outcome.usage, source=peer)
    return context, Outcomes({call_id: outcome for call_id, _, outcome in task.outcomes})
