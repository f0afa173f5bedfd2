"""Find the rows that the tasks of new requests already have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from meshpoint.engine.backend import Backend
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import RequestedSegment
from meshpoint.errors import Unavailable
from meshpoint.model.events import Step
from meshpoint.model.ids import TaskId
from meshpoint.model.tasks import cancel_applies
from meshpoint.model.transitions import ExistingTask


async def find_existing(
    segments: Mapping[TaskId, RequestedSegment], runtime: ReplicaRuntime
) -> tuple[dict[TaskId, tuple[Backend, ExistingTask]], bool]:
    """Look up the rows of these tasks in every backend, without unrelated early cancels.

    The database wins if another replica ran a task that this process also has in memory.

    Returns:
        The rows, and `False` if the database is unavailable and was not asked: tasks that pause in
        this process do not wait for it.
    """
    found: dict[TaskId, tuple[Backend, ExistingTask]] = {}
    is_complete = True
    if not segments:
        return found, is_complete
    task_ids = list(segments)
    with runtime.steps.step(Step.RECEIVE, task_ids):
        for backend in runtime.backends:
            rows = await _look_up(backend, task_ids, runtime)
            is_complete = is_complete and rows is not None
            for task_id, row in (rows or {}).items():
                if task_id not in found or found[task_id][1].is_early_cancel:
                    found[task_id] = backend, row
    for task_id, (_, row) in list(found.items()):
        if _is_unrelated_cancel(segments[task_id], row):
            del found[task_id]
    return found, is_complete


async def _look_up(
    backend: Backend, task_ids: Sequence[TaskId], runtime: ReplicaRuntime
) -> Mapping[TaskId, ExistingTask] | None:
    """Look up rows. Returns `None` if the database is unavailable and need not be awaited."""
    look_up = partial(backend.store.lookup, task_ids)
    if not backend.is_shared or runtime.new_task_backend.is_shared:
        return await runtime.retry.until_available(look_up)
    if runtime.runs_without_database:
        return None
    try:
        return await look_up()
    except Unavailable as error:
        runtime.retry.record_outage(error)
        return None


def _is_unrelated_cancel(segment: RequestedSegment, existing: ExistingTask) -> bool:
    """Whether a row is only an early cancel from another sender or for another agent."""
    return existing.is_early_cancel and not (
        existing.agent == segment.run.agent
        and cancel_applies(existing.requester, segment.requester.app_id)
    )
