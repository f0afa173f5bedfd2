"""Write access to Redis cannot exhaust a replica's memory: oversized values are never loaded."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from redis.asyncio import Redis
from redis_wire import NEVER

from meshpoint.adapters.redis import RedisCheckpointCache, RedisSnapshotStore, RedisWorkingMemory, checkpoint_cache
from meshpoint.errors import CheckpointError, ConsistencyError, MemoryRefused, MemoryUnavailable
from meshpoint.model.agent_memory import MemorySource
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.memory import Command, Item, Kind, Owner, Packed
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.working_memory.recovery import DualRecoveryStrategy
from meshpoint.working_memory.snapshots import L1CacheSnapshotter
from servers import copy_key

pytestmark = pytest.mark.servers

A = "travel:task-1"
FIRST, SECOND = Owner(A, RunId("run-1"), 1), Owner(A, RunId("run-2"), 2)
LARGEST = 1_000_000
FORGED = 8 * LARGEST
ITEMS = (
    Item("text", Kind.STRING, b"x"),
    Item("list", Kind.LIST, (b"1", b"2")),
    Item("hash", Kind.HASH, {b"a": b"b"}),
    Item("set", Kind.SET, frozenset({b"a"})),
    Item("scores", Kind.ZSET, {b"a": 1.0}),
)


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[Any]:
    """A plain Redis client that forges values."""
    async with Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
async def memory(redis_url: str, namespace: str) -> AsyncIterator[RedisWorkingMemory]:
    memory = RedisWorkingMemory(redis_url, make_timeout=NEVER, namespace=namespace, max_bytes=LARGEST)
    await memory.replace(FIRST, ITEMS)
    yield memory
    await memory.close()


@pytest.fixture
async def snapshots(redis_url: str, namespace: str) -> AsyncIterator[RedisSnapshotStore]:
    snapshots = RedisSnapshotStore(
        redis_url, make_timeout=NEVER, namespace=namespace, secret=copy_key, max_bytes=LARGEST
    )
    yield snapshots
    await snapshots.close()


@contextmanager
def little() -> Iterator[None]:
    """Fail if the block allocates half the size of a forged value."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < FORGED / 2
    finally:
        tracemalloc.stop()


def l1(namespace: str, *rest: str) -> str:
    return ":".join([namespace, "L1", "{" + A + "}", *rest])


async def test_a_forged_copy_is_not_read_to_its_end(
    redis_url: str, namespace: str, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_cache, "MAX_COPY_BYTES", LARGEST)
    cache = RedisCheckpointCache(redis_url, make_timeout=NEVER, namespace=namespace, secret=copy_key)
    await raw.setrange(f"{namespace}:checkpoint:task-1:travel", FORGED, b"x")
    with little(), pytest.raises(CheckpointError, match="task-1:travel: larger than 1,000,000 bytes"):
        await cache.get(TaskId("task-1"), AgentName("travel"))
    await cache.close()


async def test_a_copy_that_nobody_would_read_is_not_written(
    redis_url: str, namespace: str, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_cache, "MAX_COPY_BYTES", 500)
    cache = RedisCheckpointCache(redis_url, make_timeout=NEVER, namespace=namespace, secret=copy_key)
    checkpoint = AgentCheckpoint(operation_id=TaskId("task-1"), agent=AgentName("travel"), seq=1, subject="x")
    text = "".join(map(chr, range(0x100, 0x400)))
    with pytest.raises(CheckpointError, match="exceed the limit of 500 for copies"):
        await cache.put(checkpoint.model_copy(update={"subject": text}))
    assert not await raw.exists(f"{namespace}:checkpoint:task-1:travel")
    await cache.close()


def a_snapshot(size: int = 10) -> Packed:
    return Packed("digest", 1, b"manifest", (bytes(size), b"2"))


@pytest.mark.parametrize("forged", ["a chunk", "chunks", "manifest", "digest", "order"])
async def test_a_forged_snapshot_is_not_read_to_its_end(
    snapshots: RedisSnapshotStore, raw: Any, namespace: str, forged: str
) -> None:
    await snapshots.put(A, a_snapshot())
    chunks, meta = f"{namespace}:l1_snapshot:{{{A}}}", f"{namespace}:l1_snapshot_meta:{{{A}}}"
    match forged:
        case "a chunk":
            await raw.lset(chunks, 1, bytes(FORGED))
        case "chunks":
            await raw.rpush(chunks, *[b""] * (LARGEST // 8))
        case field:
            await raw.hset(meta, field, b"1" * FORGED)
    with little(), pytest.raises(ConsistencyError, match="larger than 1,000,000 bytes"):
        await snapshots.get(A)
    assert await snapshots.digest(A) == (None if forged == "digest" else "digest")


async def test_a_snapshot_that_nobody_would_read_is_not_put(snapshots: RedisSnapshotStore) -> None:
    await snapshots.put(A, a_snapshot(1))
    with pytest.raises(ConsistencyError, match="exceed the limit of 1,000,000 for snapshots in Redis"):
        await snapshots.put(A, a_snapshot(LARGEST))
    assert await snapshots.get(A) == a_snapshot(1)


GROW: dict[str, tuple[str | int, ...]] = {
    "text": ("SET",),
    "list": ("RPUSH",),
    "hash": ("HSET", "b"),
    "set": ("SADD",),
    "scores": ("ZADD", 1),
}


async def grow(raw: Any, key: str, *by: str | int) -> None:
    """Append an oversized element to `key`, or replace a string."""
    command, *args = by
    await raw.execute_command(command, key, *args, bytes(FORGED))


READ = {
    "text": Command("GET", "text"),
    "list": Command("LRANGE", "list", (b"0", b"-1")),
    "hash": Command("HGETALL", "hash"),
    "set": Command("SMEMBERS", "set"),
    "scores": Command("ZRANGE", "scores", (b"0", b"-1", b"WITHSCORES")),
}


@pytest.mark.parametrize("key", GROW)
async def test_a_forged_value_is_not_read_to_its_end(
    memory: RedisWorkingMemory, raw: Any, namespace: str, key: str
) -> None:
    await grow(raw, l1(namespace, "working", key), *GROW[key])
    with little():
        held = await memory.read(A)
    assert held.large == (key,)
    assert {item.key for item in held.items} == {item.key for item in ITEMS} - {key}
    with (
        little(),
        pytest.raises(MemoryRefused, match=f"'{key}': {READ[key].name}: the answers exceed 1000000 bytes"),
    ):
        await memory.execute(FIRST, [READ[key]])


async def test_many_small_elements_count_too(memory: RedisWorkingMemory, raw: Any, namespace: str) -> None:
    await raw.rpush(l1(namespace, "working", "list"), *[b""] * (LARGEST // 8))
    assert (await memory.read(A)).large == ("list",)


@pytest.mark.parametrize("forged", ["names", "a name"])
async def test_forged_names_are_not_read_to_their_end(
    memory: RedisWorkingMemory, raw: Any, namespace: str, forged: str
) -> None:
    names = [bytes(FORGED)] if forged == "a name" else [b"%d" % number for number in range(LARGEST // 8)]
    await raw.zadd(l1(namespace, "index"), dict.fromkeys(names, math.inf))
    with little():
        held = await memory.read(A)
    assert held.large == ("",)
    assert held.items == ()
    with little(), pytest.raises(MemoryRefused, match="KEYS: the key names exceed 1000000 bytes"):
        await memory.keys(FIRST)


async def test_parts_of_a_memory_share_the_limit_as_they_need_it(
    memory: RedisWorkingMemory, raw: Any, namespace: str
) -> None:
    items = [Item(f"{number:04}", Kind.STRING, b"") for number in range(2000)]
    items[-1] = Item("1999", Kind.STRING, bytes(LARGEST // 2))
    await memory.replace(FIRST, items)
    assert {item.key for item in (await memory.read(A)).items} == {item.key for item in items}
    await grow(raw, l1(namespace, "working", "1998"), *GROW["text"])
    assert (await memory.read(A)).large == ("1998",)


async def test_what_was_kept_under_a_higher_limit_is_restored(memory: RedisWorkingMemory) -> None:
    items = (Item("a", Kind.STRING, bytes(2 * LARGEST)), Item("b", Kind.LIST, (b"",) * (LARGEST // 4)))
    held = await memory.replace(FIRST, items)
    assert held.large == ()
    assert held.items == items


@pytest.mark.parametrize("number", ["inf", "nan", "1e400", "1.5", "-1e300", ""])
@pytest.mark.parametrize("field", ["fence", "version"])
async def test_a_forged_number_in_the_head_is_told(
    memory: RedisWorkingMemory, raw: Any, namespace: str, field: str, number: str
) -> None:
    await raw.hset(l1(namespace, "head"), field, number)
    for attempt in (memory.read(A), memory.execute(FIRST, [READ["text"]]), memory.replace(SECOND, ITEMS)):
        with pytest.raises(MemoryUnavailable, match="head was not written by Meshpoint; delete it"):
            await attempt


@pytest.mark.parametrize("run", [b"\xff\xfe", b"", "☃".encode()])
async def test_a_forged_run_is_another_run(memory: RedisWorkingMemory, raw: Any, namespace: str, run: bytes) -> None:
    await raw.hset(l1(namespace, "head"), "run", run)
    assert (await memory.read(A)).run_id not in {FIRST.run_id, None}


async def test_a_forged_run_is_not_read_to_its_end(memory: RedisWorkingMemory, raw: Any, namespace: str) -> None:
    await raw.hset(l1(namespace, "head"), "run", bytes(FORGED))
    with little(), pytest.raises(MemoryUnavailable, match="head was not written by Meshpoint; delete it"):
        await memory.read(A)


async def taken(memory: RedisWorkingMemory, snapshots: RedisSnapshotStore) -> Packed:
    snapshotter = L1CacheSnapshotter(memory, snapshots, LARGEST, lambda *_: None)
    return (await snapshotter.snapshot_on_checkpoint(FIRST, 1)).packed


async def test_a_task_goes_on_from_its_snapshot(
    memory: RedisWorkingMemory, snapshots: RedisSnapshotStore, raw: Any, namespace: str
) -> None:
    packed = await taken(memory, snapshots)
    await snapshots.put(A, packed)
    await grow(raw, l1(namespace, "working", "hash"), *GROW["hash"])

    async def no_row() -> None:
        return None

    recovery = DualRecoveryStrategy(memory, snapshots, lambda *_: None)
    recovered = await recovery.recover(SECOND, packed.digest, no_row)
    assert (recovered.recovery.source, recovered.recovery.verified) == (MemorySource.SNAPSHOT, True)
    assert recovered.recovery.problems == ("L1 is too large to read; changed: 'hash'",)
    assert {item.key: item.content for item in (await memory.read(A)).items} == {
        item.key: item.content for item in ITEMS
    }


async def test_a_checkpoint_names_what_is_too_large(
    memory: RedisWorkingMemory, snapshots: RedisSnapshotStore, raw: Any, namespace: str
) -> None:
    await grow(raw, l1(namespace, "working", "hash"), *GROW["hash"])
    with pytest.raises(MemoryRefused, match=r"too large to read \(.* 1,000,000\); oversized keys: 'hash'"):
        await taken(memory, snapshots)
