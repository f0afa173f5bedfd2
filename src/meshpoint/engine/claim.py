"""Record each outcome once. The claim that completes a join acquires the task.

Every function here takes a slot before it acquires a task, so that each acquired task can run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from meshpoint.engine.backend import Backend
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.model.envelopes import describe_responses
from meshpoint.model.events import Step
from meshpoint.model.tasks import Replica, Resumable
from meshpoint.model.transitions import Claim, ClaimResult, ExpiryResult, JoinCompleted, Overdue


async def claim_responses(
    backend: Backend, claims: Sequence[Claim], runtime: ReplicaRuntime
) -> list[ClaimResult]:
    """Record `claims`. Each `JoinCompleted` holds a slot.

    Raises:
        StoreUnavailable: As for `ReplicaRuntime.ask_store`.
    """

    async def attempt() -> list[ClaimResult]:
        # Hold slots for one attempt only: during an outage, in-memory tasks need them. A task
        # takes one slot, regardless of how many of its responses are in the batch.
        granted = runtime.slots.acquire(len({claim.task_id for claim in claims}))
        used = 0
        try:
            arrivals = await backend.store.claim(claims, runtime.replica, granted)
            used = sum(isinstance(arrival, JoinCompleted) for arrival in arrivals)
        finally:
            runtime.slots.release(granted - used)
        return arrivals

    describe = partial(describe_responses, backend.reply_to, claims)
    with runtime.steps.step(Step.CLAIM, [claim.task_id for claim in claims], describe):
        return await runtime.ask_store(backend, attempt)


async def expire_overdue(
    backend: Backend, runtime: ReplicaRuntime, count: int
) -> list[ExpiryResult]:
    """End calls and joins whose deadline has passed. Each `JoinCompleted` holds a slot.

    `count`: the number of tasks known to be due. One slot is reserved for each.
    """
    granted = runtime.slots.acquire(count)
    used = 0
    try:
        with runtime.steps.search(Step.EXPIRE) as search_result:
            expired = await backend.store.expire(
                runtime.replica, runtime.options.sweep_batch, granted
            )
            search_result.task_ids = tuple(result.task_id for result in expired)
        used = sum(isinstance(each.join_result, JoinCompleted) for each in expired)
    finally:
        runtime.slots.release(granted - used)
    return expired


async def acquire_ready(backend: Backend, runtime: ReplicaRuntime, count: int) -> list[Resumable]:
    """Acquire up to `count` ready tasks, one per free slot.

    A suspect also holds a slot of `runtime.suspect_slots`.
    """
    return await _acquire(backend.store.acquire, Step.ACQUIRE, runtime, count)


async def acquire_parked(backend: Backend, runtime: ReplicaRuntime, count: int) -> list[Resumable]:
    """Acquire up to `count` parked tasks that this version has not tried, one per free slot.

    A suspect also holds a slot of `runtime.suspect_slots`.
    """
    return await _acquire(backend.store.acquire_parked, Step.ACQUIRE, runtime, count)


async def acquire_overdue(backend: Backend, runtime: ReplicaRuntime, count: int) -> list[Overdue]:
    """Acquire up to `count` ready and parked tasks that only need to be ended, without slots."""
    with runtime.steps.search(Step.EXPIRE) as search_result:
        overdue = await backend.store.acquire_overdue(runtime.replica, count)
        search_result.task_ids = tuple(each.task.run.task_id for each in overdue)
    return overdue


async def rescue_expired(backend: Backend, runtime: ReplicaRuntime, count: int) -> list[Resumable]:
    """Rescue up to `count` tasks with an expired lease, one per free slot.

    A suspect also holds a slot of `runtime.suspect_slots`.
    """
    return await _acquire(backend.store.rescue, Step.RESCUE, runtime, count)


async def release_unread(backend: Backend, runtime: ReplicaRuntime) -> int:
    """Release tasks with a lost owner in formats that this replica does not read."""
    with runtime.steps.search(Step.RESCUE) as search_result:
        released = await backend.store.release_unread(runtime.replica, runtime.options.sweep_batch)
        search_result.task_ids = tuple(released)
        if released:
            reason = "no replica that reads their format has rescued them"
            search_result.detail = {"reason": reason}
    return len(released)


async def _acquire(
    acquire: Callable[[Replica, int, int], Awaitable[list[Resumable]]],
    step: Step,
    runtime: ReplicaRuntime,
    count: int,
) -> list[Resumable]:
    granted = runtime.slots.acquire(count)
    if not granted:
        return []
    suspect_slots = runtime.suspect_slots.acquire(1)
    acquired: list[Resumable] = []
    try:
        with runtime.steps.search(step) as search_result:
            acquired = await acquire(runtime.replica, granted, suspect_slots)
            search_result.task_ids = tuple(task.run.task_id for task in acquired)
    finally:
        runtime.slots.release(granted - len(acquired))
        runtime.suspect_slots.release(suspect_slots - sum(task.is_suspect for task in acquired))
    return acquired
