"""A database with many paused tasks, and the timed steps of a task's life in it."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from datetime import timedelta
from statistics import quantiles
from typing import TypeVar

import asyncpg

from benchmarks.measure import Sample
from loading import multiply, standing_task
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.checkpoint import AllArrived, Claim, Committed, Ended, Expired, MadeReady, Pause, Resumable
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.outcomes import Ok
from meshpoint.testing.conformance.build import AGENT, HERE, HOUR, PEER, a_call, a_pause, an_end

NAMESPACE = "scale"
STATE_BYTES = 2048
RESULT = Ok("x" * 300)
DAY = 24 * HOUR
DUE = 100
"""Number of overdue tasks that `expire` finds per round."""

T = TypeVar("T")


def a_store(url: str) -> SqlStore:
    """A store that deletes ended tasks at once."""
    return SqlStore(url, namespace=NAMESPACE, tombstone_ttl=timedelta())


def a_fresh_pause() -> Pause:
    """The pause of a task with one peer call. Its state is random, so it does not compress."""
    return a_pause(a_call("a", timeout=10 * DAY), state=os.urandom(STATE_BYTES))


def a_response(pause: tuple[str, str]) -> Claim:
    """The response to the only call of a task."""
    task_id, sub_task_id = pause
    return Claim(RunId(new_id()), TaskId(task_id), TaskId(sub_task_id), RESULT, PEER)


class Crowd:
    """A store with `size` waiting tasks.

    Every task that ends is replaced, so the number stays constant.
    """

    def __init__(self, url: str, size: int) -> None:
        self.size = size
        self.seconds: dict[str, list[float]] = {}
        self._url = url
        self._store = a_store(url)
        self._waiting: deque[tuple[str, str]] = deque()

    async def gather(self, known: int) -> None:
        """Create the waiting tasks, and load the ids of `known` random ones."""
        await self._store.open()
        original = await standing_task(self._store, a_fresh_pause())
        await multiply(self._url, original, self.size - 1, over=7 * DAY)
        query = f"SELECT logical_task_id, sub_task_id FROM agent_peer_sub_tasks ORDER BY random() LIMIT {known}"
        connection = await asyncpg.connect(self._url)
        try:
            self._waiting.extend((row[0], row[1]) for row in await connection.fetch(query))
            await connection.execute("CHECKPOINT")
        finally:
            await connection.close()

    async def close(self) -> None:
        """Release all connections."""
        await self._store.close()

    def forget(self) -> None:
        """Discard the timings of the warm-up."""
        self.seconds.clear()

    def percentile(self, step: str, percent: int) -> float:
        """The percentile of a step's duration, in milliseconds."""
        return 1000 * quantiles(self.seconds[step], n=100, method="inclusive")[percent - 1]

    async def round(self, lives: int, looks: int) -> Sample:
        """Run one round of `lives` tasks and `looks` sweeps that find nothing, all in sequence.

        At the end, one sweep expires `DUE` tasks.
        """
        begun = time.perf_counter()
        for _ in range(lives):
            await self._live()
        await self._clean()
        for _ in range(looks):
            await self._time("look", self._look())
        await self._expire()
        await self._clean()
        return Sample(lives, time.perf_counter() - begun)

    async def _time(self, step: str, work: Awaitable[T]) -> T:
        begun = time.perf_counter()
        result = await work
        self.seconds.setdefault(step, []).append(time.perf_counter() - begun)
        return result

    async def _live(self) -> None:
        await self._arrive()
        old = self._waiting.popleft()
        assert await self._time("lookup", self._store.lookup([TaskId(old[0])]))
        (arrival,) = await self._time("claim", self._store.claim([a_response(old)], HERE, 1))
        assert isinstance(arrival, AllArrived)
        (ended,) = await self._time("end", self._store.end([an_end(arrival.task.run, reply=b"x" * 300)]))
        assert isinstance(ended, Ended)
        await self._store.mark_sent([ended.reply])

    async def _arrive(self) -> None:
        pause = a_fresh_pause()
        (paused,) = await self._time("pause", self._store.pause([pause]))
        assert isinstance(paused, Committed)
        await self._store.mark_sent(paused.dispatches)
        self._waiting.append((pause.run.task_id, pause.calls[0].sub_task_id))

    async def _look(self) -> None:
        """A sweep that finds nothing due."""
        found: list[Sequence[object]] = [
            await self._store.expire(HERE, 100, 10),
            await self._store.take(HERE, 10),
            await self._store.take_over(HERE, 10),
            await self._store.unsent(AGENT, 100),
            await self._store.keep_alives(HERE, 100),
        ]
        assert not any(found)
        assert await self._store.purge(AGENT, 1000) == 0

    async def _expire(self) -> None:
        late = [self._waiting.popleft()[0] for _ in range(DUE)]
        await self._make_late(late)
        expired: list[Expired] = await self._time(f"expire {DUE}", self._store.expire(HERE, DUE, 0))
        assert sum(isinstance(each.then, MadeReady) for each in expired) == DUE
        await self._store.mark_sent([notice for each in expired for notice in each.cancels])
        taken: list[Resumable] = await self._store.take(HERE, DUE)
        ends = await self._store.end([an_end(task.run) for task in taken])
        await self._store.mark_sent([end.reply for end in ends if isinstance(end, Ended)])
        for _ in late:
            await self._arrive()

    async def _make_late(self, task_ids: list[str]) -> None:
        connection = await asyncpg.connect(self._url)
        try:
            for change in (
                "UPDATE agent_peer_sub_tasks SET timeout_deadline = 0 WHERE logical_task_id = ANY($1)",
                "UPDATE agent_paused_tasks SET wake_at = 0 WHERE logical_task_id = ANY($1)",
            ):
                await connection.execute(change, task_ids)
        finally:
            await connection.close()

    async def _clean(self) -> None:
        while await self._store.purge(AGENT, 1000):
            pass
