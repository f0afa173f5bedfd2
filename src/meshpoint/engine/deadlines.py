"""End tasks at their deadlines, even if their code does not stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from functools import partial

from meshpoint.engine.running import SegmentResult, Stopped
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import Segment, StopReason
from meshpoint.model.outcomes import OVERDUE, Failed, FailureKind
from meshpoint.model.tasks import Resumable

log = logging.getLogger("meshpoint.run")

_CLEANUP_TIME = timedelta(seconds=3)
"""How long code may still run after its cancellation before its task ends without it."""
_MAX_SLEEP = timedelta(minutes=1)
"""Maximum time until the clock is read again: it follows the clock of the database."""


def overdue_outcome(task: Resumable) -> Failed:
    """The outcome of a task whose code does not run because its deadline has passed."""
    silent = sorted(
        {
            str(peer)
            for _, peer, outcome in task.outcomes
            if isinstance(outcome, Failed) and outcome.kind is FailureKind.TIMEOUT
        }
    )
    if not silent:
        return OVERDUE
    peers = ", ".join(map(repr, silent))
    return Failed(OVERDUE.kind, f"{OVERDUE.message} while it waited for {peers}")


async def run_until_deadline(
    segment: Segment, code: Callable[[], Awaitable[SegmentResult]], runtime: ReplicaRuntime
) -> SegmentResult:
    """Run `code`, and cancel it at the deadline of the segment's task.

    If code ignores its cancellation, it keeps running, but its task ends and its result is
    discarded.
    """
    caller, is_given_up = asyncio.current_task(), False

    async def enforce() -> None:
        nonlocal is_given_up
        await _wait_until_overdue(segment, runtime)
        segment.stop(StopReason.OVERDUE)
        await runtime.clock.sleep(_CLEANUP_TIME)
        is_given_up = True
        if caller is not None:
            caller.cancel()

    watcher = runtime.background.spawn(enforce())
    try:
        return await code()
    except asyncio.CancelledError:
        if not is_given_up or caller is None or caller.uncancel():
            raise  # the replica ends
        log.warning(
            "task %s: its code ignores that the task's deadline has passed; the task ends "
            "without it",
            segment.run.task_id,
        )
        return Stopped(segment.stop_reason or StopReason.OVERDUE)
    finally:
        watcher.cancel()


async def _wait_until_overdue(segment: Segment, runtime: ReplicaRuntime) -> None:
    deadline = segment.requester.deadline
    while deadline is not None:
        remaining = deadline - runtime.clock.now()
        if remaining > timedelta():
            await runtime.clock.sleep(min(remaining, _MAX_SLEEP))
            continue
        current = await _read_deadline(segment, runtime)
        if current == deadline:
            return
        deadline = current
    await asyncio.Event().wait()  # it has no deadline any more


async def _read_deadline(segment: Segment, runtime: ReplicaRuntime) -> datetime | None:
    """The current deadline: a requester that was resumed may have asked again with a later one."""
    backend = segment.backend
    if backend is None:
        return segment.requester.deadline
    read = partial(backend.store.task, segment.run.task_id)
    found = await runtime.retry.until_available(read)
    return segment.requester.deadline if found is None else found[0].deadline
