"""Room 5: record outcomes, each once. The claim that meets a join takes the task.

Whatever takes tasks here takes a slot first, so that no task is owned that cannot run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from meshpoint.lifecycle.site import Site
from meshpoint.model.checkpoint import AllArrived, Arrival, Claim, Expired, Replica, Resumable
from meshpoint.model.events import Step
from meshpoint.ports.home import Home


async def claim(home: Home, claims: Sequence[Claim], site: Site) -> list[Arrival]:
    """Record `claims`, however long the database is away. Each `AllArrived` holds a slot."""

    async def attempt() -> list[Arrival]:
        # Slots are taken for one attempt at a time: in an outage, tasks in memory need them.
        granted = site.slots.take(len(claims))
        used = 0
        try:
            arrivals = await home.store.claim(claims, site.replica, granted)
            used = sum(isinstance(arrival, AllArrived) for arrival in arrivals)
        finally:
            site.slots.give_back(granted - used)
        return arrivals

    with site.steps.step(Step.CLAIM, [claim.task_id for claim in claims]):
        return await site.patience.until_answered(attempt)


async def expire(home: Home, site: Site) -> list[Expired]:
    """End calls and joins whose deadline has passed. Each `AllArrived` holds a slot."""
    granted = site.slots.take(site.options.sweep_batch)
    used = 0
    try:
        with site.steps.look(Step.EXPIRE) as found:
            expired = await home.store.expire(site.replica, site.options.sweep_batch, granted)
            found.task_ids = tuple(each.task_id for each in expired)
        used = sum(isinstance(each.then, AllArrived) for each in expired)
    finally:
        site.slots.give_back(granted - used)
    return expired


async def take_ready(home: Home, site: Site) -> list[Resumable]:
    """Own ready tasks, one for each free slot. A suspect also holds `site.apart`."""
    return await _take(home.store.take, Step.TAKE, site)


async def take_over(home: Home, site: Site) -> list[Resumable]:
    """Own tasks whose replica let its lease expire, one for each free slot. A suspect also holds `site.apart`."""
    return await _take(home.store.take_over, Step.TAKE_OVER, site)


async def _take(
    take: Callable[[Replica, int, int], Awaitable[list[Resumable]]], step: Step, site: Site
) -> list[Resumable]:
    granted = site.slots.take(site.slots.free)
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
