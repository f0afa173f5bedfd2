"""Find and handle work that is due by the clock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from meshpoint.engine import claim
from meshpoint.engine.backend import Backend
from meshpoint.engine.publisher import Publisher
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import Segment
from meshpoint.engine.segment_runner import SegmentRunner
from meshpoint.errors import NON_DEFECT_ERRORS, Unavailable
from meshpoint.model.envelopes import KEEP_ALIVE, status_envelope
from meshpoint.model.events import Step
from meshpoint.model.tasks import (
    KEEP_ALIVES_PER_TIMEOUT,
    DueCounts,
    KeepAlive,
    OutboxItem,
    Resumable,
)
from meshpoint.model.transitions import ClaimResult, StillWaiting

log = logging.getLogger("meshpoint.sweeper")

_SWEEPS_PER_PURGE = 60  # sweeps
_UNREAD_AGE = timedelta(minutes=1)
_MAX_PURGE_BATCHES = 10  # in one transaction: deleting is cheap
_PRUNED_ENTRIES = 5000  # in one transaction and sweep
_MAX_CONSECUTIVE_SWEEPS = 200
"""Maximum full batches before a pause of one interval: rows that stay due must not burn a core."""
_MAX_BATCHES_IN_FLIGHT = 8
"""Batches in flight to the broker, separately for due messages and keep-alives."""
_FEW_SLOTS = 2
_SWEEPS_PER_PARKED_SEARCH = 10
"""Sweeps from one search for parked tasks to the next. The first sweep searches as well.

A search reads all parked tasks.
"""


class Sweeper:
    """Sweeps each backend for due work."""

    def __init__(
        self, runtime: ReplicaRuntime, runner: SegmentRunner, publisher: Publisher
    ) -> None:
        self._runtime = runtime
        self._runner = runner
        self._tasks = runner.tasks
        self._settlement = runner.settlement
        self._publisher = publisher
        self._spawn = runtime.background.spawn
        self._sweeps = self._consecutive_sweeps = 0
        self._searches_parked = True
        self._has_old_entries = False
        self._reported_formats = set[str]()
        self._send_tasks: set[asyncio.Task[None]] = set()
        self._keep_alive_tasks: set[asyncio.Task[None]] = set()
        self.is_standalone = False
        """`True` if this process consumes no messages, so expiry need not wait for responses."""

    def begin_grace_periods(self) -> None:
        """Start both grace periods.

        Queued responses are handled before calls expire, and lease owners get one lease period to
        renew.
        """
        for backend in self._runtime.backends:
            backend.grace.restart_all()

    async def sweep(self, backends: Sequence[Backend]) -> bool:
        """Sweep each reachable backend once. Returns `True` if more is due right now."""
        self._sweeps += 1
        more = False
        for backend in backends:
            try:
                with self._runtime.steps.step(
                    Step.SWEEP, durable=backend.is_shared, broker=self._runtime.broker.connected
                ):
                    more |= await self.handle_due(backend)
            except Unavailable as error:
                self._runtime.retry.record_outage(error)
        is_up = self._runtime.broker.can_publish
        self._runtime.retry.observe_broker(is_up=is_up)
        if is_up:
            self._runtime.retry.record_broker_recovery()
        self._consecutive_sweeps = (
            (self._consecutive_sweeps + 1) % _MAX_CONSECUTIVE_SWEEPS if more else 0
        )
        return self._consecutive_sweeps > 0

    async def handle_due(self, backend: Backend) -> bool:
        """Handle one batch of each kind of due work. Returns `True` if any kind has more.

        A defect in one step does not stop the others.
        """
        due = await self._count_due(backend)
        limit = self._runtime.options.sweep_batch
        counts = due or DueCounts(limit, limit, limit, limit, limit, limit, 1, limit)
        is_search = self._searches_parked or self._sweeps % _SWEEPS_PER_PARKED_SEARCH == 0
        parked = counts.parked if is_search else 0
        more = False
        for step, count in (
            (self._end_overdue, max(counts.overdue, limit * parked)),
            (self._acquire_ready, counts.ready),
            (self._acquire_parked, parked),
            (self._expire, counts.expired),
            (self._rescue, counts.lapsed),
            (self._release_unread, counts.lost_unread),
            (self._send, counts.unsent),
            (self._send_keep_alives, counts.keep_alives),
            (self._send_first_keep_alives, 0),
            (self._purge_periodically, 0),
            (self._prune_periodically, 0),
            (self._report_unread, 0),
        ):
            try:
                more |= await step(backend, count)
            except NON_DEFECT_ERRORS:
                raise
            except Exception:
                log.exception("agent %s: a step of the sweeper failed", self._runtime.agent)
        return more and due is not None

    async def _count_due(self, backend: Backend) -> DueCounts | None:
        """Count due work by kind. Returns `None` after a defect; then each step queries alone."""
        try:
            due = await backend.store.due(self._runtime.replica, self._runtime.options.sweep_batch)
        except NON_DEFECT_ERRORS:
            raise
        except Exception:
            log.exception("agent %s: due work could not be counted", self._runtime.agent)
            return None
        backend.record_answer(self._runtime.retry)
        return due

    async def _end_overdue(self, backend: Backend, count: int) -> bool:
        """End ready tasks past their deadline, and parked tasks past their limit.

        They need no slot, since no code runs.
        """
        if not count:
            return False
        overdue = await claim.acquire_overdue(backend, self._runtime, count)
        for each in overdue:
            self._runner.end_overdue(backend, each)
        return self._is_full(len(overdue))

    async def _acquire_parked(self, backend: Backend, parked: int) -> bool:
        """Try parked tasks that no replica with this version has tried."""
        if not parked:
            return False
        count = min(self._runtime.options.sweep_batch, self._runtime.slots.free)
        acquired = await claim.acquire_parked(backend, self._runtime, count)
        self._searches_parked = len(acquired) >= count  # there may be more tasks than slots
        self._resume(backend, acquired)
        return False

    async def _rescue(self, backend: Backend, count: int) -> bool:
        if count and backend.may_rescue:
            rescued = await claim.rescue_expired(backend, self._runtime, count)
            self._resume(backend, rescued, rescued=True)
            return self._is_full(len(rescued))
        return False

    async def _release_unread(self, backend: Backend, count: int) -> bool:
        if count and backend.may_rescue:
            return self._is_full(await claim.release_unread(backend, self._runtime))
        return False

    async def _send(self, backend: Backend, count: int) -> bool:
        if not count or not self._runtime.broker.can_publish:
            return False  # a failed attempt would delay the next one, longer each time
        if len(self._send_tasks) >= _MAX_BATCHES_IN_FLIGHT:
            return False  # the next sweep is soon enough
        unsent = await backend.store.unsent(self._runtime.agent, self._runtime.options.sweep_batch)
        if unsent:
            task = self._spawn(self._send_all, backend, unsent)  # must not delay the rest
            self._send_tasks.add(task)
            task.add_done_callback(self._send_tasks.discard)
        return self._is_full(len(unsent))

    async def _send_all(self, backend: Backend, sends: Sequence[OutboxItem]) -> None:
        try:
            await self._settlement.send(backend, sends, overdue=True)
        except NON_DEFECT_ERRORS as error:
            self._report_error(error)
        except Exception:
            log.exception("agent %s: what was due is sent again later", self._runtime.agent)

    async def _send_keep_alives(self, backend: Backend, count: int) -> bool:
        if not count or not self._may_publish_keep_alives:
            return False
        keep_alives = await backend.store.keep_alives(
            self._runtime.replica, self._runtime.options.sweep_batch
        )
        self._publish_keep_alives(keep_alives)
        return self._is_full(len(keep_alives))

    async def _send_first_keep_alives(self, backend: Backend, _: int) -> bool:
        """Send the keep-alives of first segments, whose tasks have no row yet."""
        if not backend.is_shared and self._may_publish_keep_alives:
            now = self._runtime.clock.monotonic()
            self._publish_keep_alives(
                [
                    KeepAlive(segment.run.agent, segment.run.task_id, segment.requester)
                    for segment in self._tasks.segments.values()
                    if segment.backend is None and _is_keep_alive_due(segment, now)
                ]
            )
        return False

    @property
    def _may_publish_keep_alives(self) -> bool:
        is_free = len(self._keep_alive_tasks) < _MAX_BATCHES_IN_FLIGHT
        return is_free and self._runtime.broker.can_publish

    def _publish_keep_alives(self, keep_alives: Sequence[KeepAlive]) -> None:
        envelopes = [
            status_envelope(self._runtime.agent, each.task_id, each.requester, KEEP_ALIVE)
            for each in keep_alives
        ]
        if envelopes:
            task = self._spawn(self._publisher.publish_advisory, envelopes)
            self._keep_alive_tasks.add(task)
            task.add_done_callback(self._keep_alive_tasks.discard)

    async def _purge_periodically(self, backend: Backend, _: int) -> bool:
        if self._sweeps % _SWEEPS_PER_PURGE == 0:
            await self.purge(backend)
        return False

    async def _prune_periodically(self, backend: Backend, _: int) -> bool:
        """Delete old entries of timelines: one batch, and further ones in the next sweeps."""
        if backend.is_shared and (self._has_old_entries or self._sweeps % _SWEEPS_PER_PURGE == 0):
            store, agent = backend.store, self._runtime.agent
            pruned = await store.prune_timelines(agent, _PRUNED_ENTRIES)
            self._has_old_entries = pruned == _PRUNED_ENTRIES
        return False

    async def _report_unread(self, backend: Backend, _: int) -> bool:
        """Warn of ready tasks that only other versions of the agent can read, once per format."""
        if self._sweeps % _SWEEPS_PER_PURGE:
            return False
        unread = await backend.store.unread(self._runtime.replica, _UNREAD_AGE)
        for state_format in unread.keys() - self._reported_formats:
            self._runtime.steps.emit(Step.UNREAD, format=state_format, tasks=unread[state_format])
        if backend.is_shared:
            self._reported_formats = set(unread)
        return False

    async def purge(self, backend: Backend) -> None:
        """Delete all expired tombstones: as many again will have expired by the next purge."""
        limit = _MAX_PURGE_BATCHES * self._runtime.options.sweep_batch
        purged = limit
        while purged == limit:
            with self._runtime.steps.search(Step.PURGE) as result:
                purged = await backend.store.purge(self._runtime.agent, limit)
                result.detail = {"purged": purged} if purged else {}

    async def _expire(self, backend: Backend, count: int) -> bool:
        grace = backend.grace
        if not (self.is_standalone or self._runtime.broker.is_consuming(backend.reply_to)):
            grace.restart()
        if not count or not grace.may_expire:
            return False
        arrivals: list[ClaimResult] = []
        expired = await claim.expire_overdue(backend, self._runtime, count)
        for call in expired:
            for retried in call.retried:
                self._runner.report_retry(retried)
            if isinstance(call.join_result, StillWaiting):
                if call.cancels:
                    self._spawn(self._send_all, backend, call.cancels)
            else:
                arrivals.append(replace(call.join_result, cancels=call.cancels))
        self._runner.handle_arrivals(backend, arrivals)
        # More tasks may be due even if all calls in a full batch got extended meanwhile.
        return self._is_full(count)

    def _is_full(self, count: int) -> bool:
        return count >= self._runtime.options.sweep_batch

    def _report_error(self, error: Exception) -> None:
        if isinstance(error, Unavailable):
            self._runtime.retry.record_outage(error)
        else:
            log.error("agent %s: %s", self._runtime.agent, error)

    async def acquire_ready(self) -> None:
        """Resume tasks that wait for a slot, if there may be any."""
        if not self._tasks.tasks_ready.is_set():
            return
        self._tasks.tasks_ready.clear()
        for backend in self._runtime.backends:
            if backend.is_shared and self._runtime.retry.is_store_unavailable:
                continue  # left to the next sweep: tasks in this process must not wait for it
            try:
                await self._acquire_ready(backend, await self._count_ready(backend))
            except Unavailable as error:
                self._runtime.retry.record_outage(error)

    async def _count_ready(self, backend: Backend) -> int:
        """Slots to reserve for ready tasks. Skips the count if few slots are free."""
        free = self._runtime.slots.free
        return (
            free
            if free <= _FEW_SLOTS
            else (await backend.store.due(self._runtime.replica, free)).ready
        )

    async def _acquire_ready(self, backend: Backend, count: int) -> bool:
        count = min(count, self._runtime.slots.free)
        acquired = await claim.acquire_ready(backend, self._runtime, count)
        self._resume(backend, acquired)
        if count and len(acquired) >= count:  # there may be more tasks than slots
            self._tasks.tasks_ready.set()
        return False

    def _resume(
        self, backend: Backend, tasks: Sequence[Resumable], *, rescued: bool = False
    ) -> None:
        """Run the next segment of each task. After a defect, a task waits for its lease expiry."""
        for task in tasks:
            try:
                self._runner.resume(backend, task, rescued=rescued, isolated=task.is_suspect)
            except Exception:
                self._runtime.release_slots(is_suspect=task.is_suspect)
                log.exception("task %s: left to its lease", task.run.task_id)


def _is_keep_alive_due(segment: Segment, now: float) -> bool:
    """Whether to send a keep-alive for `segment` now. Schedules the next one."""
    idle_timeout = segment.requester.idle_timeout
    if idle_timeout is None or (segment.keep_alive_at is not None and segment.keep_alive_at > now):
        return False
    is_due = segment.keep_alive_at is not None
    segment.keep_alive_at = now + idle_timeout.total_seconds() / KEEP_ALIVES_PER_TIMEOUT
    return is_due
