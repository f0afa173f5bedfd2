"""A lower bound: Meshpoint's rows written with hand-written SQL on the bare driver.

It keeps the indispensable work: each answer is recorded once, the last one acquires the task, the
end is fenced, and everything is durable. It omits checks for existing, cancelled and late tasks,
senders, repeated writes, joins other than "all", retries and expiry. It knows every row in
advance.

Each kind of statement has one connection. Items that queue during a flush go into the next one.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import asyncpg
import zstandard
from pydantic_core import from_json, to_json

from benchmarks.contenders import job
from benchmarks.contenders import plain_sql_statements as sql
from benchmarks.contenders.job import Job, run_concurrently

Item = TypeVar("Item")
Result = TypeVar("Result")

_AGENT = f"{job.NAMESPACE}/{job.AGENT}"
_OWNER = "A"
_HEADERS = json.dumps({"x-call-depth": 2})
_RAW, _ZSTD = b"\x00", b"\x01"
_MAX_TASK_BATCH, _MAX_ANSWER_BATCH = 32, 1024
_compressor, _decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
_OWN_COLUMN_KEYS = (
    "a2a_context",
    "produced_artifacts",
    "artifact_signals_to_return",
    "response_buffer",
    "flags",
    "token_usage",
)
_COLUMN_KEYS = frozenset({*_OWN_COLUMN_KEYS, "security_context"})

Answer = tuple[Job, int]
"""The answer to one call: its job and the call's index."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A decoded task to resume."""

    task_id: str
    fence: int
    run_id: str
    state: bytes
    request: bytes
    context: list[Any]
    outcomes: list[tuple[str, str, Any]]


class Batcher(Generic[Item, Result]):
    """Flushes items on one connection, batching all that queued during the previous flush."""

    def __init__(self, flush: Callable[[list[Item]], Awaitable[Sequence[Result]]]) -> None:
        self._flush = flush
        self._queue: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._busy: asyncio.Task[None] | None = None

    def submit(self, item: Item) -> asyncio.Future[Result]:
        """Queue `item`; the future resolves with its result after the flush."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._queue.append((item, future))
        if self._busy is None:
            self._busy = asyncio.create_task(self._drain())
        return future

    async def _drain(self) -> None:
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(_MAX_TASK_BATCH, len(self._queue)))]
            try:
                results = await self._flush([item for item, _ in batch])
            except Exception as error:
                for _, future in batch:
                    future.set_exception(error)
            else:
                for (_, future), result in zip(batch, results, strict=True):
                    future.set_result(result)
        self._busy = None


class PlainSql:
    """An expert's program for exactly these jobs."""

    async def open(self, url: str) -> None:
        """Connect, and create the claim function if missing."""
        self._connections = [await asyncpg.connect(url) for _ in range(4)]
        pause_connection, claim_connection, end_connection, mark_connection = self._connections
        for connection in self._connections:
            await connection.execute(
                "SET plan_cache_mode TO force_generic_plan"
            )  # each statement has one good plan
        await claim_connection.execute(sql.CREATE_CLAIM)
        await mark_connection.execute(
            "SET synchronous_commit TO OFF"
        )  # as in Meshpoint: losing a mark only causes a re-send
        self._pause = await pause_connection.prepare(sql.PAUSE)
        self._claim = await claim_connection.prepare(sql.CLAIM)
        self._end = await end_connection.prepare(sql.END)
        self._mark_dispatched = await mark_connection.prepare(sql.MARK_DISPATCHED)
        self._mark_replied = await mark_connection.prepare(sql.MARK_REPLIED)
        self._pauses = Batcher(self._flush_pauses)
        self._ends = Batcher(self._flush_ends)
        self._marks = Batcher(self._flush_marks)
        self._arrived_answers: deque[Answer] = deque()
        self._resume_futures: dict[str, asyncio.Future[Resumed]] = {}
        self._claim_task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Disconnect."""
        for connection in self._connections:
            await connection.close()

    def prepared(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Return `jobs` unchanged."""
        return jobs

    async def run(self, prepared: Sequence[Job], in_flight: int) -> None:
        """Run all jobs."""
        await run_concurrently(in_flight, prepared, self._run_job)

    async def _run_job(self, job_: Job) -> None:
        await self.pause(job_)
        await self.end(job_, await self._answer_all(job_))

    async def pause(self, job_: Job) -> None:
        """Checkpoint the task, then mark its requests as sent."""
        await self._pauses.submit(job_)
        await self._marks.submit((False, job_.task_id))

    async def end(self, job_: Job, resumed: Resumed) -> None:
        """Turn the task into a tombstone, then mark its reply as sent."""
        await self.commit_end(job_, resumed)
        await self.mark_replied(job_)

    async def commit_end(self, job_: Job, resumed: Resumed) -> None:
        """Turn the task into a tombstone."""
        assert len(resumed.outcomes) == len(job_.calls)
        await self._ends.submit((job_, resumed))

    async def mark_replied(self, job_: Job) -> None:
        """Mark the reply as sent."""
        await self._marks.submit((True, job_.task_id))

    def _answer_all(self, job_: Job) -> asyncio.Future[Resumed]:
        waiting: asyncio.Future[Resumed] = asyncio.get_running_loop().create_future()
        self._resume_futures[job_.task_id] = waiting
        self._arrived_answers.extend((job_, index) for index in range(len(job_.calls)))
        if self._claim_task is None:
            self._claim_task = asyncio.create_task(self._claim_arrived())
        return waiting

    async def _claim_arrived(self) -> None:
        try:
            while self._arrived_answers:
                batch = [
                    self._arrived_answers.popleft()
                    for _ in range(min(_MAX_ANSWER_BATCH, len(self._arrived_answers)))
                ]
                for resumed in await self.claim(batch):
                    self._resume_futures.pop(resumed.task_id).set_result(resumed)
        except Exception as error:
            for waiting in self._resume_futures.values():
                waiting.set_exception(error)
        self._claim_task = None

    async def _flush_pauses(self, batch: list[Job]) -> Sequence[None]:
        calls = [
            (job_.task_id, index, call) for job_ in batch for index, call in enumerate(job_.calls)
        ]
        await self._pause.fetch(
            [each.task_id for each in batch],
            [len(each.calls) for each in batch],
            [each.run_id for each in batch],
            [each.parent_task_id for each in batch],
            [_RAW + each.request for each in batch],
            *zip(*[_context_columns(each.context) for each in batch], strict=True),
            [_ZSTD + _compressor.compress(each.state) for each in batch],
            [job.REPLY_TO] * len(batch),
            [job.REQUESTER] * len(batch),
            [task_id for task_id, _, _ in calls],
            [call.sub_task_id for _, _, call in calls],
            [place for _, place, _ in calls],
            [call.call_id for _, _, call in calls],
            [job.PEER] * len(calls),
            _AGENT,
            job.STATE_FORMAT,
            job.APP_VERSION,
            job.TIMEOUT,
            job.DISPATCH_LEASE,
            _HEADERS,
            [_RAW + call.body for _, _, call in calls],
        )
        return [None] * len(batch)

    async def claim(self, batch: Sequence[Answer]) -> list[Resumed]:
        """Record answers; return the tasks to resume."""
        rows = await self._claim.fetch(
            [job_.task_id for job_, _ in batch],
            [each.calls[index].sub_task_id for each, index in batch],
            [_RAW + to_json({"value": each.answer}) for each, _ in batch],
            [each.calls[place].claim_id for each, place in batch],
            _OWNER,
            job.LEASE,
        )
        return [_resumed(row) for row in rows]

    async def _flush_ends(self, batch: list[tuple[Job, Resumed]]) -> Sequence[None]:
        await self._end.fetch(
            [job_.task_id for job_, _ in batch],
            [resumed.fence for _, resumed in batch],
            [_RAW + each.reply for each, _ in batch],
            job.TOMBSTONE_TTL,
            job.DISPATCH_LEASE,
            [resumed.run_id for _, resumed in batch],
        )
        return [None] * len(batch)

    async def _flush_marks(self, batch: list[tuple[bool, str]]) -> Sequence[None]:
        for statement, replied in ((self._mark_dispatched, False), (self._mark_replied, True)):
            if task_ids := [task_id for is_reply, task_id in batch if is_reply is replied]:
                await statement.fetch(task_ids)
        return [None] * len(batch)


def _context_columns(context: dict[str, Any]) -> tuple[Any, ...]:
    origin = context["a2a_context"]
    rest = {key: value for key, value in context.items() if key not in _COLUMN_KEYS}
    own = {name: to_json(context[name]).decode() for name in _OWN_COLUMN_KEYS}
    return (
        own["a2a_context"],
        origin["session_id"],
        origin["user_id"],
        own["produced_artifacts"],
        own["artifact_signals_to_return"],
        own["response_buffer"],
        own["flags"],
        _RAW + to_json(context["security_context"]),
        own["token_usage"],
        to_json(rest).decode(),
    )


def _resumed(row: asyncpg.Record) -> Resumed:
    return Resumed(
        task_id=row[0],
        fence=row[1],
        run_id=row[2],
        state=_decompressor.decompress(row[3][1:]),
        request=row[4][1:],
        context=[from_json(row[5][1:]), *[from_json(text) for text in row[6]]],
        outcomes=[
            (call_id, peer, from_json(outcome[1:]))
            for call_id, peer, outcome in zip(row[7], row[8], row[9], strict=True)
        ],
    )
