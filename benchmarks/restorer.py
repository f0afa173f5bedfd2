"""Operations with checkpoints of one size, and timed ways to restore and save them."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from statistics import quantiles

from redis.asyncio import Redis

from benchmarks.measure import Sample
from benchmarks.postgres_counters import PostgresProbe
from meshpoint.adapters.redis import RedisCheckpointCache
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.subtasks import (
    AgentCheckpoint,
    Operation,
    SaveCommitted,
    SubtaskRecord,
    SubtaskStatus,
)
from meshpoint.model.tasks import Requester, Run
from meshpoint.model.transitions import Begin, BeginCommitted, Save
from meshpoint.subtasks.checkpointer import (
    AgentCheckpointer,
    CheckpointSource,
    FallbackReason,
    RestoredCheckpoint,
)
from meshpoint.testing.conformance.build import AGENT, HERE
from servers import redis_data_key

FROM_REDIS, FROM_POSTGRESQL, AFTER_FLUSH = "from Redis", "from PostgreSQL", "after FLUSHALL"
SAVE, SAVE_AND_CACHE = "save", "save and copy"
NAMESPACE = "restore"

_EXPECTED = {
    FROM_REDIS: (CheckpointSource.REDIS, None),
    FROM_POSTGRESQL: (CheckpointSource.SQL, None),
    AFTER_FLUSH: (CheckpointSource.SQL, FallbackReason.MISS),
}
_DELIVERABLES = 5


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests to the servers for one restore or save. `statements` is `None` if not counted."""

    redis: float
    statements: float | None


class Restorer:
    """Restores and saves checkpoints of about `size` bytes as JSON."""

    def __init__(self, database_url: str, redis_url: str, size: int) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.requests: dict[str, Requests] = {}
        self.saved_checkpoints: list[AgentCheckpoint] = []
        self._save_runs: list[tuple[Run, AgentCheckpoint]] = []  # saved repeatedly
        self._database_url, self._size = database_url, size
        self.store = SqlStore(database_url, namespace=NAMESPACE)
        self._cache = RedisCheckpointCache(redis_url, namespace=NAMESPACE, secret=redis_data_key)
        self._redis = Redis.from_url(redis_url)
        cached, uncached = (
            AgentCheckpointer(self.store, self._cache),
            AgentCheckpointer(self.store),
        )
        self._checkpointers = {
            FROM_REDIS: cached,
            AFTER_FLUSH: cached,
            SAVE_AND_CACHE: cached,
            FROM_POSTGRESQL: uncached,
            SAVE: uncached,
        }

    async def open(self, operations: int) -> None:
        """Create `operations` to restore, and as many to save repeatedly."""
        await self.store.open()
        self._probe = PostgresProbe()
        await self._probe.open(self._database_url)
        for _ in range(operations):
            self.saved_checkpoints.append((await self._create_operation(SAVE_AND_CACHE))[1])
            self._save_runs.append(await self._create_operation(SAVE))

    async def close(self) -> None:
        """Release all connections."""
        await self._redis.aclose()
        await self._cache.close()
        await self._probe.close()
        await self.store.close()

    def discard_timings(self) -> None:
        """Discard the timings of the warm-up."""
        self.seconds.clear()

    def percentile(self, name: str, percent: int) -> float:
        """The percentile of an action's duration, in milliseconds."""
        return 1000 * quantiles(self.seconds[name], n=100, method="inclusive")[percent - 1]

    async def flush(self) -> None:
        """Delete every cached copy."""
        await self._redis.flushall()

    async def run_round(self, name: str) -> Sample:
        """Restore or save each operation once, in the way called `name`."""
        if name == AFTER_FLUSH:
            await self.flush()
        durations = await (
            self._time_saves(name) if name in {SAVE, SAVE_AND_CACHE} else self._time_restores(name)
        )
        self.seconds.setdefault(name, []).extend(durations)
        return Sample(len(durations), sum(durations))

    async def count_requests(self) -> None:
        """Count the server requests of each way."""
        for name in self._checkpointers:
            before, idle = await self._request_counts(), await self._request_counts()
            count = (await self.run_round(name)).count
            after = await self._request_counts()
            redis_requests = idle.redis - before.redis  # commands used by the counting itself
            flushing = 1 if name == AFTER_FLUSH else 0
            statements = None
            if (
                after.statements is not None
                and idle.statements is not None
                and before.statements is not None
            ):
                statements = (after.statements - 2 * idle.statements + before.statements) / count
            self.requests[name] = Requests(
                (after.redis - idle.redis - redis_requests - flushing) / count, statements
            )

    async def _request_counts(self) -> Requests:
        commands = (await self._redis.info("stats"))["total_commands_processed"]
        return Requests(float(commands), (await self._probe.counters()).statements)

    async def _time_restores(self, name: str) -> list[float]:
        durations: list[float] = []
        for checkpoint in self.saved_checkpoints:
            started_at = time.perf_counter()
            restored = await self._checkpointers[name].restore(
                checkpoint.operation_id, AGENT, seq=checkpoint.seq
            )
            durations.append(time.perf_counter() - started_at)
            assert restored is not None
            assert (restored.source, restored.fallback) == _EXPECTED[name], restored.fallback
            assert is_same(restored, checkpoint)
        return durations

    async def _time_saves(self, name: str) -> list[float]:
        durations: list[float] = []
        for index, (run, final_checkpoint) in enumerate(self._save_runs):
            checkpoint = final_checkpoint.model_copy(update={"seq": final_checkpoint.seq + 1})
            self._save_runs[index] = run, checkpoint
            started_at = time.perf_counter()
            saved = await self._checkpointers[name].save(Save(run, checkpoint))
            durations.append(time.perf_counter() - started_at)
            assert saved == SaveCommitted(), saved
        return durations

    async def _create_operation(self, method: str) -> tuple[Run, AgentCheckpoint]:
        """Create an operation with its first checkpoint, saved as in `method`."""
        command = Begin(
            Run(TaskId(new_id()), AGENT, RunId(new_id())),
            HERE,
            Requester(),
            b"{}",
            Operation(type="agent", parameters=None),
        )
        (begin_result,) = await self.store.begin([command])
        assert isinstance(begin_result, BeginCommitted), begin_result
        checkpoint = make_checkpoint(command.run.task_id, self._size)
        saved = await self._checkpointers[method].save(Save(begin_result.run, checkpoint))
        assert saved == SaveCommitted(), saved
        return begin_result.run, checkpoint


def is_same(restored: RestoredCheckpoint, saved: AgentCheckpoint) -> bool:
    """Whether `restored` equals the saved checkpoint, apart from the time set by the database."""
    return restored.checkpoint.model_copy(update={"checkpoint_time": None}) == saved


def make_checkpoint(operation_id: TaskId, size: int) -> AgentCheckpoint:
    """An operation's first checkpoint, about `size` bytes as JSON.

    Its text is prose, which zstd compresses to less than half.
    """
    names = [f"step-{number}" for number in range(_DELIVERABLES)]
    records = [
        SubtaskRecord(
            name=name,
            status=SubtaskStatus.COMPLETED,
            function="1",
            inputs={"topic": f"{random.getrandbits(128):032x}"},
            seconds=random.random(),
            result=json.dumps(
                {"text": _make_text(size // _DELIVERABLES - 250), "score": random.random()}
            ),
        )
        for name in names
    ]
    return AgentCheckpoint(
        operation_id=operation_id,
        agent=AGENT,
        seq=1,
        subject="ACME",
        planned=tuple(names),
        subtasks=tuple(records),
        agent_config={"depth": 3},
        agent_version="1",
    )


def _make_text(size: int) -> str:
    return " ".join(random.choices(_WORDS, k=size // 6))[:size]


_WORDS = [
    "".join(random.Random(number).choices("aeiounrstlmd", k=2 + number % 8))
    for number in range(2_000)
]
