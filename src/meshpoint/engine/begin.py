"""Write a task as running, with its request. From then on its lease owns it, not the broker."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from meshpoint.engine.runtime import Site
from meshpoint.engine.segment import Segment
from meshpoint.errors import StoreUnavailable
from meshpoint.model.checkpoint import Begin, BeginResult, Begun
from meshpoint.model.envelopes import pack
from meshpoint.model.events import Step
from meshpoint.model.options import OnCheckpointFailure
from meshpoint.model.subtasks import Operation
from meshpoint.ports.backend import Home


async def begin(
    segment: Segment, site: Site, operation: Operation | None = None, *, order: str | None = None
) -> tuple[Home, BeginResult]:
    """Commit the first row of a task. Returns the home it was written to and the result.

    With an `operation`, code is waiting for the write. Like the first checkpoint of a pause, the
    row is then written to memory if it has definitely not committed in the database within
    `checkpoint_retry_time`.
    """
    assert segment.request is not None
    wish = Begin(
        segment.run,
        site.replica,
        segment.requester,
        pack(segment.request),
        operation,
        order=order,
        digest=segment.digest,
    )
    with site.steps.step(Step.BEGIN, [segment.run.task_id]):
        if site.durable is None:
            return site.memory, await _write(wish, site.memory, site)
        if operation is None or site.options.on_checkpoint_failure is OnCheckpointFailure.WAIT:
            return site.durable, await _write(wish, site.durable, site)
        try:
            attempt = partial(_attempt, wish, site.durable)
            return site.durable, await site.patience.unless_away(attempt, site.options.checkpoint_retry_time)
        except StoreUnavailable as error:
            site.steps.note(Step.DEGRADED, segment.run.task_id, error=str(error))
            return site.memory, await _write(wish, site.memory, site)


async def begin_redelivered(redelivered: Sequence[tuple[Segment, str | None]], site: Site) -> list[BeginResult]:
    """Insert rows for tasks without one, each with its order, in one transaction.

    Each task that is not `queued` is running and holds a slot, while slots are free. The other
    tasks are ready.
    """
    home = site.durable
    assert home is not None

    async def attempt() -> list[BeginResult]:
        # Hold slots for one attempt only: during an outage, in-memory tasks need them.
        granted = site.slots.take(len(redelivered))
        used = 0
        try:
            results = await home.store.begin(
                [_wish(each, order, site, queued=place >= granted) for place, (each, order) in enumerate(redelivered)]
            )
            used = sum(isinstance(result, Begun) and not result.queued for result in results)
        finally:
            site.slots.give_back(granted - used)
        return results

    with site.steps.step(Step.BEGIN, [segment.run.task_id for segment, _ in redelivered]):
        return await site.patience.until_answered(attempt)


def _wish(segment: Segment, order: str | None, site: Site, *, queued: bool) -> Begin:
    assert segment.request is not None
    request = pack(segment.request)
    digest = segment.digest
    return Begin(segment.run, site.replica, segment.requester, request, order=order, queued=queued, digest=digest)


async def _write(wish: Begin, home: Home, site: Site) -> BeginResult:
    return await site.patience.until_answered(partial(_attempt, wish, home))


async def _attempt(wish: Begin, home: Home) -> BeginResult:
    return (await home.store.begin([wish]))[0]
