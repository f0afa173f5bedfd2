"""Write a task as running, with its request. From then on its lease owns it, not the broker."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from meshpoint.engine.backend import Backend
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import RequestedSegment, Segment
from meshpoint.model.envelopes import encode_request
from meshpoint.model.events import Step
from meshpoint.model.subtasks import Operation
from meshpoint.model.transitions import Begin, BeginCommitted, BeginResult


async def commit_begin(
    segment: RequestedSegment,
    runtime: ReplicaRuntime,
    operation: Operation | None = None,
    *,
    order: str | None = None,
    may_degrade: bool = False,
) -> tuple[Backend, BeginResult]:
    """Commit the first row of a task. Returns the backend it was written to and the result.

    If the task's code is waiting for the write, it `may_degrade` and go to memory, like the first
    checkpoint of a pause.
    """
    command = _build_begin(segment, runtime, operation, order=order)

    async def write(backend: Backend) -> BeginResult:
        return (await backend.store.begin([command]))[0]

    task_id = segment.run.task_id
    with runtime.steps.step(Step.BEGIN, [task_id]):
        return await runtime.write_first(task_id, write, may_degrade=may_degrade)


async def commit_operation(
    segment: Segment, backend: Backend, runtime: ReplicaRuntime, operation: Operation
) -> BeginResult:
    """Make a running task with a row an operation."""
    with runtime.steps.step(Step.SAVE, [segment.run.task_id]):
        return await runtime.retry.until_available(
            lambda: backend.store.track(segment.run, operation)
        )


async def commit_redelivered(
    redelivered: Sequence[tuple[RequestedSegment, str | None]],
    database: Backend,
    runtime: ReplicaRuntime,
) -> list[BeginResult]:
    """Insert rows for tasks without one, each with its order, in one transaction.

    Each task that is not `queued` is running and holds a slot, while slots are free. The other
    tasks are ready.
    """

    async def attempt() -> list[BeginResult]:
        # Hold slots for one attempt only: during an outage, in-memory tasks need them.
        granted = runtime.slots.acquire(len(redelivered))
        used = 0
        try:
            results = await database.store.begin(
                [
                    _build_begin(segment, runtime, order=order, queued=index >= granted)
                    for index, (segment, order) in enumerate(redelivered)
                ]
            )
            used = sum(
                isinstance(result, BeginCommitted) and not result.queued for result in results
            )
        finally:
            runtime.slots.release(granted - used)
        return results

    with runtime.steps.step(Step.BEGIN, [segment.run.task_id for segment, _ in redelivered]):
        return await runtime.retry.until_available(attempt)


async def commit_delayed(
    delayed: Sequence[tuple[RequestedSegment, str | None, datetime]],
    backend: Backend,
    runtime: ReplicaRuntime,
) -> list[BeginResult]:
    """Insert rows for tasks that begin later, each with its order and its start."""
    begins = [
        _build_begin(segment, runtime, order=order, queued=True, start_at=start_at)
        for segment, order, start_at in delayed
    ]
    with runtime.steps.step(Step.BEGIN, [segment.run.task_id for segment, _, _ in delayed]):
        return await runtime.retry.until_available(lambda: backend.store.begin(begins))


def _build_begin(
    segment: RequestedSegment,
    runtime: ReplicaRuntime,
    operation: Operation | None = None,
    *,
    order: str | None = None,
    queued: bool = False,
    start_at: datetime | None = None,
) -> Begin:
    return Begin(
        segment.run,
        runtime.replica,
        segment.requester,
        encode_request(segment.message),
        operation,
        order=order,
        queued=queued,
        start_at=start_at,
        digest=segment.digest,
        state_format=runtime.state_format,
    )
