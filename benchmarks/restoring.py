"""Operations with checkpoints of one size, and timed ways to restore and save them."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from statistics import quantiles

from redis.asyncio import Redis

from benchmarks.measure import Sample
from benchmarks.probe import Probe
from meshpoint.adapters.redis import RedisCheckpointCache
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.checkpoint import Begin, Begun, Requester, Run, Save
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.subtasks import AgentCheckpoint, Operation, Saved, SubtaskRecord, SubtaskStatus
from meshpoint.subtasks.checkpointer import AgentCheckpointer, CheckpointSource, FallbackReason, RestoredCheckpoint
from meshpoint.testing.conformance.build import AGENT, HERE
from servers import copy_key

COPY, SQL, FLUSHED = "from Redis", "from PostgreSQL", "after FLUSHALL"
SAVE, SAVE_COPIED = "save", "save and copy"
NAMESPACE = "restore"

_EXPECTED = {
    COPY: (CheckpointSource.REDIS, None),
    SQL: (CheckpointSource.SQL, None),
    FLUSHED: (CheckpointSource.SQL, FallbackReason.MISS),
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
        self.saved: list[AgentCheckpoint] = []
        self._growing: list[tuple[Run, AgentCheckpoint]] = []  # saved repeatedly
        self._database_url, self._size = database_url, size
        self.store = SqlStore(database_url, namespace=NAMESPACE)
        self._cache = RedisCheckpointCache(redis_url, namespace=NAMESPACE, secret=copy_key)
        self._redis = Redis.from_url(redis_url)
        cached, alone = AgentCheckpointer(self.store, self._cache), AgentCheckpointer(self.store)
        self._checkpointers = {COPY: cached, FLUSHED: cached, SAVE_COPIED: cached, SQL: alone, SAVE: alone}

    async def open(self, operations: int) -> None:
        """Create `operations` to restore, and as many to save repeatedly."""
        await self.store.open()
        self._probe = Probe()
        await self._probe.open(self._database_url)
        for _ in range(operations):
            self.saved.append((await self._first(SAVE_COPIED))[1])
            self._growing.append(await self._first(SAVE))

    async def close(self) -> None:
        """Release all connections."""
        await self._redis.aclose()
        await self._cache.close()
        await self._probe.close()
        await self.store.close()

    def forget(self) -> None:
        """Discard the timings of the warm-up."""
        self.seconds.clear()

    def percentile(self, name: str, percent: int) -> float:
        """The percentile of an action's duration, in milliseconds."""
        return 1000 * quantiles(self.seconds[name], n=100, method="inclusive")[percent - 1]

    async def flush(self) -> None:
        """Delete every cached copy."""
        await self._redis.flushall()

    async def round(self, name: str) -> Sample:
        """Restore or save each operation once, in the way called `name`."""
        if name == FLUSHED:
            await self.flush()
        took = await (self._saves(name) if name in {SAVE, SAVE_COPIED} else self._restores(name))
        self.seconds.setdefault(name, []).extend(took)
        return Sample(len(took), sum(took))

    async def count_requests(self) -> None:
        """Count the server requests of each way."""
        for name in self._checkpointers:
            before, idle = await self._requests(), await self._requests()
            count = (await self.round(name)).count
            after = await self._requests()
            asking = idle.redis - before.redis  # commands used by the counting itself
            flushing = 1 if name == FLUSHED else 0
            statements = None
            if after.statements is not None and idle.statements is not None and before.statements is not None:
                statements = (after.statements - 2 * idle.statements + before.statements) / count
            self.requests[name] = Requests((after.redis - idle.redis - asking - flushing) / count, statements)

    async def _requests(self) -> Requests:
        commands = (await self._redis.info("stats"))["total_commands_processed"]
        return Requests(float(commands), (await self._probe.counters()).statements)

    async def _restores(self, name: str) -> list[float]:
        took: list[float] = []
        for checkpoint in self.saved:
            begun = time.perf_counter()
            found = await self._checkpointers[name].restore(checkpoint.operation_id, AGENT, seq=checkpoint.seq)
            took.append(time.perf_counter() - begun)
            assert found is not None
            assert (found.source, found.fallback) == _EXPECTED[name], found.fallback
            assert same(found, checkpoint)
        return took

    async def _saves(self, name: str) -> list[float]:
        took: list[float] = []
        for place, (run, last) in enumerate(self._growing):
            checkpoint = last.model_copy(update={"seq": last.seq + 1})
            self._growing[place] = run, checkpoint
            begun = time.perf_counter()
            saved = await self._checkpointers[name].save(Save(run, checkpoint))
            took.append(time.perf_counter() - begun)
            assert saved == Saved(), saved
        return took

    async def _first(self, way: str) -> tuple[Run, AgentCheckpoint]:
        """Create an operation with its first checkpoint, saved as in `way`."""
        wish = Begin(
            Run(TaskId(new_id()), AGENT, RunId(new_id())),
            HERE,
            Requester(),
            b"{}",
            Operation(type="agent", parameters=None),
        )
        (begun,) = await self.store.begin([wish])
        assert isinstance(begun, Begun), begun
        checkpoint = a_checkpoint(wish.run.task_id, self._size)
        saved = await self._checkpointers[way].save(Save(begun.run, checkpoint))
        assert saved == Saved(), saved
        return begun.run, checkpoint


def same(found: RestoredCheckpoint, saved: AgentCheckpoint) -> bool:
    """Whether `found` equals the saved checkpoint, apart from the time set by the database."""
    return found.checkpoint.model_copy(update={"checkpoint_time": None}) == saved


def a_checkpoint(operation_id: TaskId, size: int) -> AgentCheckpoint:
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
            result=json.dumps({"text": _prose(size // _DELIVERABLES - 250), "score": random.random()}),
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


def _prose(size: int) -> str:
    return " ".join(random.choices(_WORDS, k=size // 6))[:size]


_WORDS = ["".join(random.Random(number).choices("aeiounrstlmd", k=2 + number % 8)) for number in range(2_000)]
