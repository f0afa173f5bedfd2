"""Find what is due next in a mesh, and move its clock there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime, timedelta
from typing import TypeVar

from meshpoint.model.tasks import DueCounts
from meshpoint.testing.activity import Activity
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.errors import MeshIdle
from meshpoint.testing.replica import OPTIONS, Replica, SharedStore

T = TypeVar("T")

HORIZON = timedelta(days=3 * 365)
"""How far ahead due work is found. The first keep-alive of a call without a timeout is later."""
_RESOLUTION = timedelta(microseconds=1)
_MAX_ROWS = 1_000_000
_STALLED_SWEEPS = 60
"""How often the mesh sweeps again for work that is due and not done yet, one second apart."""
_LAST_SWEEPS = 10
"""How often it sweeps before it decides that nothing is due: after a fault, the engine waits."""


class VirtualTime:
    """The clock of a mesh, which jumps from one due instant to the next.

    Args:
        clock: The clock.
        store: The store of all tasks.
        activity: Decides when the mesh is idle.
        replicas: Returns the living replicas.
        raise_failure: Raises the error that a replica or a check has reported, if any.
        check: Called before a wait moves the clock. Raises if moving it is pointless.
        describe: Returns what the tasks wait for, for the message of `MeshIdle`.
        auto_advance: Whether a wait moves the clock.
    """

    def __init__(
        self,
        clock: FakeClock,
        store: SharedStore,
        activity: Activity,
        *,
        replicas: Callable[[], Iterable[Replica]],
        raise_failure: Callable[[], None],
        check: Callable[[], Awaitable[None]],
        describe: Callable[[], Awaitable[str]],
        auto_advance: bool,
    ) -> None:
        self._clock, self._store, self._activity = clock, store, activity
        self._replicas, self._check, self._describe = replicas, check, describe
        self._raise_failure, self._auto_advance = raise_failure, auto_advance
        self._lock = asyncio.Lock()
        self._stalled_sweeps = 0
        self._progress_count = self._seen_progress = 0
        self._stalled_until: datetime | None = None

    def record_progress(self) -> None:
        """Record that a task has made progress. Keep-alives and sweeps do not count."""
        self._progress_count += 1

    async def advance(self, duration: timedelta) -> None:
        """Move the clock by `duration`, and stop at each instant at which something is due.

        Returns when what became due has settled.
        """
        async with self._lock:
            end = self._clock.now() + duration
            await self._activity.wait_until_idle()
            while (remaining := end - self._clock.now()) > timedelta():
                due_in = await self._find_next()
                await self._jump(remaining if due_in is None else min(due_in, remaining))
        self._raise_failure()

    async def wait(self, news: Awaitable[T]) -> T:
        """Await `news`, and move the clock while the mesh is idle.

        Raises:
            MeshIdle: Nothing is due that could lead to news, or the test moves the clock itself.
        """
        waiting = asyncio.ensure_future(news)
        try:
            while not waiting.done():
                step = asyncio.create_task(self._advance_to_next(waiting))
                try:
                    await asyncio.wait({waiting, step}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not step.done():
                        step.cancel()
                        await asyncio.wait({step})
                if not (waiting.done() or step.cancelled()):
                    step.result()
            self._raise_failure()
            return waiting.result()
        finally:
            waiting.cancel()

    async def _advance_to_next(self, waiting: asyncio.Future[T]) -> None:
        async with self._lock:
            await self._activity.wait_until_idle()
            if waiting.done():
                return
            self._raise_failure()
            await self._check()
            due_in = await self._find_next()
            if not self._auto_advance:
                raise MeshIdle(await self._describe_pending(due_in))
            if due_in is not None:
                await self._jump(due_in)
                return
            progress_count = self._progress_count
            for _ in range(_LAST_SWEEPS):
                await self._jump(OPTIONS.sweep_interval)
                if waiting.done() or self._progress_count != progress_count:
                    return
            raise MeshIdle(f"idle: {await self._describe()}")

    async def _describe_pending(self, due_in: timedelta | None) -> str:
        if due_in is None:
            return f"idle: {await self._describe()}"
        return f"idle: the next thing is due in {due_in}: await mesh.advance(…)"

    async def _jump(self, duration: timedelta) -> None:
        self._clock.advance(duration)
        for replica in self._replicas():
            replica.sweep()
        await self._activity.wait_until_idle()

    async def _find_next(self) -> timedelta | None:
        """Time until something is due, or `None` if nothing that makes progress ever is."""
        now, counts = self._clock.now(), await self._count_due(timedelta())
        if self._progress_count != self._seen_progress:
            self._seen_progress, self._stalled_sweeps = self._progress_count, 0
            self._stalled_until = None
        due_in = await self._find_change(counts, until=HORIZON)
        if self._is_waiting_to_act(counts) and self._stalled_sweeps < _STALLED_SWEEPS:
            self._stalled_sweeps += 1
            return min(due_in or HORIZON, OPTIONS.sweep_interval)
        if due_in is None:
            return None
        if self._stalled_until is None:
            self._stalled_until = now + await self._find_last_change()
        # Since the last progress, keep-alives alone have moved everything that was due.
        return None if now + due_in > self._stalled_until else due_in

    @staticmethod
    def _is_waiting_to_act(counts: list[DueCounts]) -> bool:
        """Whether work is due that no replica has done, because of a back-off for example."""
        return any(
            each.ready or each.lapsed or each.expired or each.unsent or each.overdue
            for each in counts
        )

    async def _find_change(self, counts: list[DueCounts], *, until: timedelta) -> timedelta | None:
        """Time until other work is due than `counts`."""
        unchanged, changed = timedelta(), timedelta(seconds=1)
        while await self._count_due(changed) == counts:
            if changed >= until:
                return None
            unchanged, changed = changed, min(2 * changed, until)
        return await self._bisect(unchanged, changed, counts)

    async def _find_last_change(self) -> timedelta:
        """Time until everything within the horizon is due, at most a second too long."""
        before, after = timedelta(), HORIZON
        final = await self._count_due(HORIZON)
        while after - before > timedelta(seconds=1):
            middle = (before + after) / 2
            if await self._count_due(middle) == final:
                after = middle
            else:
                before = middle
        return after

    async def _bisect(
        self, unchanged: timedelta, changed: timedelta, counts: list[DueCounts]
    ) -> timedelta:
        while changed - unchanged > _RESOLUTION:
            middle = (unchanged + changed) / 2
            if await self._count_due(middle) == counts:
                unchanged = middle
            else:
                changed = middle
        return changed

    async def _count_due(self, ahead: timedelta) -> list[DueCounts]:
        """Count what is due in `ahead`. The store awaits nothing, so no task sees it."""
        with self._clock.looking_ahead(ahead):
            return [
                await self._store.due(each.worker.runtime.replica, _MAX_ROWS)
                for each in self._replicas()
            ]
