"""Saving and restoring a working memory: as a whole, or key by key as in the seed design."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import median

from pydantic import JsonValue
from redis.asyncio import Redis

from benchmarks.contenders.seed_memory import SeedMemory
from benchmarks.environment import BenchmarkServers
from benchmarks.measure import Medians, Sample, interleaved
from benchmarks.report import Cell, Report, Table
from meshpoint.adapters.redis import RedisSnapshotStore, RedisWorkingMemory
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.memory import Item, Kind, MemorySource, Owner, make_agent_id
from meshpoint.model.subtasks import AgentCheckpoint, Operation, SaveCommitted
from meshpoint.model.tasks import L1Snapshot, Requester, Run
from meshpoint.model.transitions import Begin, BeginCommitted, Save
from meshpoint.testing.conformance.build import AGENT, HERE
from meshpoint.working_memory.packing import to_bytes
from meshpoint.working_memory.recovery import DualRecoveryStrategy
from meshpoint.working_memory.snapshots import L1CacheSnapshotter
from servers import redis_data_key

NAMESPACE = "working"
SNAPSHOT, SEED_SNAPSHOT = "snapshot", "snapshot, seed"
REDIS, SQL, SEED_RESTORE = "restore from Redis", "restore from PostgreSQL", "restore, seed"
_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Size:
    """A memory with `keys` keys of `value` bytes each, and the number of rounds."""

    name: str
    keys: int
    value: int
    rounds: int
    seed_rounds: int


SIZES = (
    Size("10 keys", 10, 100, 100, 30),
    Size("1 000 keys", 1000, 100, 30, 10),
    Size("100 KB in 200 keys", 200, 500, 60, 10),
    Size("100 000 keys", 100_000, 100, 3, 1),
)


class MeasuredMemory:
    """One task with a memory of one size in L1, in the snapshot store and in the database."""

    def __init__(self, size: Size, redis_url: str, store: SqlStore) -> None:
        self.size, self._store = size, store
        self.l1 = RedisWorkingMemory(redis_url, namespace=NAMESPACE, timeout=_TIMEOUT)
        self.snapshots = RedisSnapshotStore(
            redis_url, namespace=NAMESPACE, secret=redis_data_key, timeout=_TIMEOUT
        )
        self.redis = Redis.from_url(redis_url)
        self._seed = SeedMemory(self.redis)
        self._snapshotter = L1CacheSnapshotter(self.l1, self.snapshots, 2**40, _ignore)
        self._run = Run(TaskId(new_id()), AGENT, RunId(new_id()))
        self._key_order = 0

    async def open(self) -> None:
        """Fill L1 and take the first snapshots."""
        [begin_result] = await self._store.begin(
            [Begin(self._run, HERE, Requester(), b"{}", Operation(type="bench", parameters=None))]
        )
        assert isinstance(begin_result, BeginCommitted)
        self._run = begin_result.run
        self.owner = Owner(make_agent_id(AGENT, self._run.task_id), self._run.id, self._run.fence)
        self._items = _items(self.size)
        await self.l1.replace(self.owner, self._items)
        self._digest = await self.snapshot()
        paused = await self._snapshotter.snapshot_on_checkpoint(self.owner, 1)
        checkpoint = AgentCheckpoint(
            operation_id=self._run.task_id,
            agent=AGENT,
            seq=1,
            l1_snapshot_hash=self._digest,
            l1_snapshot=to_bytes(paused.packed),
        )
        assert await self._store.save(Save(self._run, checkpoint)) == SaveCommitted()
        for key in self._items:
            await self.redis.set(f"L1:seed:working:{key.key}", key.content)  # type: ignore[arg-type]  # all items are strings
        await self._seed.snapshot("seed")

    async def close(self) -> None:
        """Delete everything in Redis and disconnect."""
        await self.redis.flushall()
        await self.l1.close()
        await self.snapshots.close()
        await self.redis.aclose()

    async def snapshot(self) -> str:
        """Copy L1 to the snapshot store, and return the digest."""
        self._key_order += 1
        packed = (
            await self._snapshotter.snapshot_on_checkpoint(self.owner, self._key_order)
        ).packed
        assert await self.snapshots.put(self.owner.agent_id, packed)
        return packed.digest

    async def seed_snapshot(self) -> None:
        """Take a snapshot as the seed design does."""
        await self._seed.snapshot("seed")

    async def restore(self, source: MemorySource) -> None:
        """Restore a lost L1 from the snapshot store or the database."""
        snapshots = self.snapshots if source is MemorySource.SNAPSHOT else None
        recovery = DualRecoveryStrategy(self.l1, snapshots, _ignore)
        recovered = await recovery.recover(self.owner, self._digest, self._from_sql)
        assert (recovered.recovery.source, recovered.recovery.verified) == (source, True)
        assert recovered.recovery.keys == self.size.keys

    async def seed_restore(self) -> None:
        """Restore as the seed design does, which clears the memory itself."""
        assert await self._seed.restore("seed") == self.size.keys

    async def lose_l1(self) -> None:
        """Empty L1, but keep the snapshot store."""
        await self.l1.forget(self.owner)

    async def _from_sql(self) -> L1Snapshot | None:
        return await self._store.l1_snapshot(self._run.task_id, AGENT)


async def run(stage: BenchmarkServers, *, quick: bool) -> Report:
    """Measure each size separately, with all ways in turn."""
    store = SqlStore(await stage.database(), namespace=NAMESPACE)
    await store.open()
    measured: dict[Size, Medians] = {}
    for size in SIZES[: 3 if quick else 4]:
        memory = MeasuredMemory(size, (await stage.redis()).url, store)
        await memory.open()
        try:
            measured[size] = await _measure(memory, quick=quick)
        finally:
            await memory.close()
    await store.close()
    return Report(
        "working",
        await stage.describe("redis", "msgpack", "zstandard"),
        [_table(measured)],
        _figures(measured),
    )


async def _measure(memory: MeasuredMemory, *, quick: bool) -> Medians:
    size = memory.size
    own_rounds: dict[str, tuple[Callable[[], Awaitable[object]], bool]] = {
        SNAPSHOT: (memory.snapshot, False),
        REDIS: (partial(memory.restore, MemorySource.SNAPSHOT), True),
        SQL: (partial(memory.restore, MemorySource.SQL), True),
    }
    seed_names: dict[str, tuple[Callable[[], Awaitable[object]], bool]] = {
        SEED_SNAPSHOT: (memory.seed_snapshot, False),
        SEED_RESTORE: (memory.seed_restore, False),
    }
    each = {
        name: partial(_time, memory, work, prepare=lost)
        for name, (work, lost) in (own_rounds | seed_names).items()
    }
    if size.keys <= 1000:
        await interleaved(each, 1, title=f"{size.name}, warm-up")
    both = await interleaved(
        each, max(1, size.seed_rounds // (3 if quick else 1)), title=size.name
    )
    only = {name: each[name] for name in own_rounds}
    more = await interleaved(
        only, max(1, size.rounds // (3 if quick else 1)), title=f"{size.name}, ours"
    )
    return Medians(
        {
            **both.samples,
            **{name: [*both.samples[name], *more.samples[name]] for name in own_rounds},
        }
    )


async def _time(
    memory: MeasuredMemory, action: Callable[[], Awaitable[object]], *, prepare: bool
) -> Sample:
    if prepare:
        await memory.lose_l1()
    started_at = time.perf_counter()
    await action()
    return Sample(1, time.perf_counter() - started_at)


def _items(size: Size) -> list[Item]:
    source = random.Random(7)
    words = [source.randbytes(8).hex().encode() for _ in range(500)]
    return [
        Item(
            f"page:{number}",
            Kind.STRING,
            b" ".join(source.choices(words, k=size.value // 17 + 1))[: size.value],
        )
        for number in range(size.keys)
    ]


def _ignore(*_: str) -> None:
    pass


def _milliseconds(medians: Medians, name: str) -> float:
    return 1000 * median(sample.seconds for sample in medians.samples[name])


def _ratio_to_seed(medians: Medians, name: str) -> float:
    """Speed relative to the seed's way, by medians because the seed takes part in fewer rounds."""
    seed = SEED_SNAPSHOT if name == SNAPSHOT else SEED_RESTORE
    return _milliseconds(medians, seed) / _milliseconds(medians, name)


def _table(measured: dict[Size, Medians]) -> Table:
    rows: list[list[Cell]] = []
    for size, medians in measured.items():
        for name in (SNAPSHOT, SEED_SNAPSHOT, REDIS, SQL, SEED_RESTORE):
            own_name = name in {SNAPSHOT, REDIS, SQL}
            rows.append(
                [
                    f"{size.name}: {name}",
                    _milliseconds(medians, name),
                    1000 * max(sample.seconds for sample in medians.samples[name]),
                    _ratio_to_seed(medians, name) if own_name else None,
                    len(medians.samples[name]),
                ]
            )
    return Table(
        "Working memories, kept and brought back",
        ["", "p50 ms", "longest ms", "times as fast as the seed's way", "times"],
        rows,
        "Snapshot: L1 is read, digested and written to the snapshot store, which is the same "
        "Redis. Restore: L1 is empty; the snapshot is read, verified, written to L1 and verified "
        "there. Values are words. The seed's way: a round trip each for the type, value and time "
        "to live of every key. Servers on the same machine.",
    )


def _figures(measured: dict[Size, Medians]) -> dict[str, JsonValue]:
    return {
        size.name: {
            name: {
                "p50_ms": round(_milliseconds(medians, name), 4),
                **(
                    {"times_as_fast": round(_ratio_to_seed(medians, name), 2)}
                    if "seed" not in name
                    else {}
                ),
            }
            for name in medians.samples
        }
        for size, medians in measured.items()
    }
