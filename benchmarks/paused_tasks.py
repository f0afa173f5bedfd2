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
from bulk_tasks import copy_task, write_waiting_task
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.outcomes import Ok
from meshpoint.model.tasks import Resumable
from meshpoint.model.transitions import (
    Claim,
    EndCommitted,
    ExpiryResult,
    JoinCompleted,
    Pause,
    PauseCommitted,
    TaskReady,
)
from meshpoint.testing.conformance.build import AGENT, HERE, HOUR, PEER, a_call, a_pause, an_end

NAMESPACE = "scale"
STATE_BYTES = 2048
RESULT = Ok("x" * 300)
DAY = 24 * HOUR
DUE_TASKS = 100
"""Number of overdue tasks that `expire` finds per round."""

T = TypeVar("T")


def make_store(url: str) -> SqlStore:
    """A store that deletes ended tasks at once."""
    return SqlStore(url, namespace=NAMESPACE, tombstone_ttl=timedelta())


def make_pause() -> Pause:
    """The pause of a task with one peer call. Its state is random, so it does not compress."""
    return a_pause(a_call("a", timeout=10 * DAY), state=os.urandom(STATE_BYTES))


def make_response(pause: tuple[str, str]) -> Claim:
    """The response to the only call of a task."""
    task_id, sub_task_id = pause
    return Claim(RunId(new_id()), TaskId(task_id), TaskId(sub_task_id), RESULT, PEER)


class PausedTasks:
    """A store with `size` waiting tasks.

    Every task that ends is replaced, so the number stays constant.
    """

    def __init__(self, url: str, size: int) -> None:
        self.size = size
        self.seconds: dict[str, list[float]] = {}
        self._url = url
        self._store = make_store(url)
        self._waiting_task_ids: deque[tuple[str, str]] = deque()

    async def create(self, sample_size: int) -> None:
        """Create the waiting tasks, and load the ids of `sample_size` random ones."""
        await self._store.open()
        template_id = await write_waiting_task(self._store, make_pause())
        await copy_task(self._url, template_id, self.size - 1, period=7 * DAY)
        query = (
            "SELECT logical_task_id, sub_task_id FROM agent_peer_sub_tasks ORDER BY random() "
            f"LIMIT {sample_size}"
        )
        connection = await asyncpg.connect(self._url)
        try:
            self._waiting_task_ids.extend(
                (row[0], row[1]) for row in await connection.fetch(query)
            )
            await connection.execute("CHECKPOINT")
        finally:
            await connection.close()

    async def close(self) -> None:
        """Release all connections."""
        await self._store.close()

    def discard_timings(self) -> None:
        """Discard the timings of the warm-up."""
        self.seconds.clear()

    def percentile(self, step: str, percent: int) -> float:
        """The percentile of a step's duration, in milliseconds."""
        return 1000 * quantiles(self.seconds[step], n=100, method="inclusive")[percent - 1]

    async def run_round(self, tasks: int, sweeps: int) -> Sample:
        """Run one round of `tasks` tasks and `sweeps` sweeps that find nothing, all in sequence.

        At the end, one sweep expires `DUE_TASKS` tasks.
        """
        started_at = time.perf_counter()
        for _ in range(tasks):
            await self._run_one_task()
        await self._purge()
        for _ in range(sweeps):
            await self._time("sweep", self._sweep())
        await self._expire()
        await self._purge()
        return Sample(tasks, time.perf_counter() - started_at)

    async def _time(self, step: str, step_: Awaitable[T]) -> T:
        started_at = time.perf_counter()
        result = await step_
        self.seconds.setdefault(step, []).append(time.perf_counter() - started_at)
        return result

    async def _run_one_task(self) -> None:
        await self._add_task()
        waiting = self._waiting_task_ids.popleft()
        assert await self._time("lookup", self._store.lookup([TaskId(waiting[0])]))
        (arrival,) = await self._time(
            "claim", self._store.claim([make_response(waiting)], HERE, 1)
        )
        assert isinstance(arrival, JoinCompleted)
        (ended,) = await self._time(
            "end", self._store.end([an_end(arrival.task.run, reply=b"x" * 300)])
        )
        assert isinstance(ended, EndCommitted)
        await self._store.confirm_sent([ended.reply])

    async def _add_task(self) -> None:
        pause = make_pause()
        (paused,) = await self._time("pause", self._store.pause([pause]))
        assert isinstance(paused, PauseCommitted)
        await self._store.confirm_sent(paused.dispatches)
        self._waiting_task_ids.append((pause.run.task_id, pause.calls[0].sub_task_id))

    async def _sweep(self) -> None:
        """A sweep that finds nothing due."""
        due: list[Sequence[object]] = [
            await self._store.expire(HERE, 100, 10),
            await self._store.acquire(HERE, 10),
            await self._store.rescue(HERE, 10),
            await self._store.unsent(AGENT, 100),
            await self._store.keep_alives(HERE, 100),
        ]
        assert not any(due)
        assert await self._store.purge(AGENT, 1000) == 0

    async def _expire(self) -> None:
        overdue = [self._waiting_task_ids.popleft()[0] for _ in range(DUE_TASKS)]
        await self._make_overdue(overdue)
        expired: list[ExpiryResult] = await self._time(
            f"expire {DUE_TASKS}", self._store.expire(HERE, DUE_TASKS, 0)
        )
        assert sum(isinstance(result.join_result, TaskReady) for result in expired) == DUE_TASKS
        await self._store.confirm_sent([notice for each in expired for notice in each.cancels])
        acquired: list[Resumable] = await self._store.acquire(HERE, DUE_TASKS)
        ends = await self._store.end([an_end(task.run) for task in acquired])
        await self._store.confirm_sent(
            [end.reply for end in ends if isinstance(end, EndCommitted)]
        )
        for _ in overdue:
            await self._add_task()

    async def _make_overdue(self, task_ids: list[str]) -> None:
        connection = await asyncpg.connect(self._url)
        try:
            for change in (
                "UPDATE agent_peer_sub_tasks SET timeout_deadline = 0 "
                "WHERE logical_task_id = ANY($1)",
                "UPDATE agent_paused_tasks SET wake_at = 0 WHERE logical_task_id = ANY($1)",
            ):
                await connection.execute(change, task_ids)
        finally:
            await connection.close()

    async def _purge(self) -> None:
        while await self._store.purge(AGENT, 1000):
            pass
