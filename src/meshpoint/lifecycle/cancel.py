"""Room 8: end a task as cancelled, wherever it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshpoint.lifecycle.segment import Segment
from meshpoint.lifecycle.site import Site
from meshpoint.model.checkpoint import Cancel, CancelResult
from meshpoint.model.events import Step
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.letters import reply_bytes
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.ports.home import Home

CANCELLED = Failed(FailureKind.CANCELLED, "cancelled on request")


def cancelled(segment: Segment) -> Failed:
    """The outcome of a task that was stopped here, with what it had used by then."""
    return CANCELLED if segment.context is None else replace(CANCELLED, usage=segment.context.token_usage)


async def cancel(home: Home, task_ids: Sequence[TaskId], site: Site) -> list[CancelResult]:
    """Cancel tasks in `home`, however long the database is away."""
    wishes = [Cancel(id_, site.agent, RunId(new_id()), reply_bytes(id_, None, CANCELLED)) for id_ in task_ids]
    with site.steps.step(Step.CANCEL, task_ids):
        return await site.patience.until_answered(lambda: home.store.cancel(wishes))
