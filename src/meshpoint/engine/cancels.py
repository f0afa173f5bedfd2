"""End a task as cancelled, wherever it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from meshpoint.engine.runtime import Site
from meshpoint.engine.segment import Segment
from meshpoint.model.checkpoint import Cancel, CancelResult
from meshpoint.model.envelopes import reply_bytes
from meshpoint.model.events import Step
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.ports.backend import Home

CANCELLED = Failed(FailureKind.CANCELLED, "cancelled on request")


def cancelled(segment: Segment) -> Failed:
    """Build the outcome of a task cancelled here, with its usage so far."""
    return CANCELLED if segment.context is None else replace(CANCELLED, usage=segment.context.token_usage)


class CancelCommand(NamedTuple):
    """A task to cancel, the sender's parent task, and the sender.

    The task may belong to a later attempt of the parent by now. The sender `None` may cancel every
    task.
    """

    task_id: TaskId
    parent: str | None
    sender: str | None


async def cancel_tasks(home: Home, wished: Sequence[CancelCommand], site: Site) -> list[CancelResult]:
    """Cancel tasks in `home`. Waits while the database is unavailable."""
    wishes = [
        Cancel(
            wish.task_id,
            site.agent,
            RunId(new_id()),
            reply_bytes(wish.task_id, None, CANCELLED),
            parent=wish.parent,
            sender=wish.sender,
        )
        for wish in wished
    ]
    with site.steps.step(Step.CANCEL, [wish.task_id for wish in wished]):
        return await site.patience.until_answered(lambda: home.store.cancel(wishes))
