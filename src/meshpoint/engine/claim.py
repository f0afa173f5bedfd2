"""Record each outcome once. The claim that completes a join acquires the task.

Every function here takes a slot before it acquires a task, so that each acquired task can run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from meshpoint.engine.runtime import Site
from meshpoint.model.checkpoint import AllArrived, Arrival, Claim, Expired, Replica, Resumable
from meshpoint.model.events import Step
from meshpoint.ports.backend import Home


async def claim(home: Home, claims: Sequence[Claim], site: Site) -> list[Arrival]:
    """Record `claims`, waiting while the database is unavailable.

    Each `AllArrived` holds a slot.
    """

    async def attempt() -> list[Arrival]:
        # Hold slots for one attempt only: during an outage, in-memory tasks need them. A task
        # takes one slot, regardless of how many of its responses are in the batch.
        granted = site.slots.take(len({claim.task_id for claim in claims}))
        used = 0
        try:
            arrivals = await home.store.claim(claims, site.replica, granted)
            used = sum(isinstance(arrival, AllArrived) for arrival in arrivals)
        finally:
            site.slots.give_back(granted - used)
        return arrivals

    with site.steps.step(Step.CLAIM, [claim.task_id for claim in claims]):
        return await site.patience.until_answered(attempt)


async def expire(home: Home, site: Site, count: int) -> list[Expired]:
    """End calls and joins whose deadline has passed. Each `AllArrived` holds a slot.

    `count`: the number of tasks known to be due. One slot is reserved for each.
    """
    granted = site.slots.take(count)
    used = 0
    try:
        with site.steps.look(Step.EXPIRE) as found:
            expired = await home.store.expire(site.replica, site.options.sweep_batch, granted)
            found.task_ids = tuple(each.task_id for each in expired)
        used = sum(isinstance(each.then, AllArrived) for each in expired)
    finally:
        site.slots.give_back(granted - used)
    return expired


async def take_ready(home: Home, site: Site, count: int) -> list[Resumable]:
    """Acquire up to `count` ready tasks, one per free slot.

    A suspect also holds `site.apart`.
    """
    return await _take(home.store.take, Step.TAKE, site, count)


async def take_over(home: Home, site: Site, count: int) -> list[Resumable]:
    """Rescue up to `count` tasks with an expired lease, one per free slot.

    A suspect also holds `site.apart`.
    """
    return await _take(home.store.take_over, Step.TAKE_OVER, site, count)


async def _take(
    take: Callable[[Replica, int, int], Awaitable[list[Resumable]]], step: Step, site: Site, count: int
) -> list[Resumable]:
    granted = site.slots.take(count)
    if not granted:
        return []
    apart = site.apart.take(1)
    taken: list[Resumable] = []
    try:
        with site.steps.look(step) as found:
            taken = await take(site.replica, granted, apart)
            found.task_ids = tuple(task.run.task_id for task in taken)
    finally:
        site.slots.give_back(granted - len(taken))
        site.apart.give_back(apart - sum(task.suspect for task in taken))
    return taken
