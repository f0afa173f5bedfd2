"""Write access to Redis cannot exhaust a replica's memory: oversized values are never loaded."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from redis_wire import NEVER

from meshpoint.adapters.redis import (
    RedisCheckpointCache,
    RedisSnapshotStore,
    RedisWorkingMemory,
    checkpoint_cache,
)
from meshpoint.errors import CheckpointError, ConsistencyError, MemoryRefused, MemoryUnavailable
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.memory import Command, Item, Kind, MemorySource, Owner, PackedSnapshot
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.working_memory.recovery import DualRecoveryStrategy
from meshpoint.working_memory.snapshots import L1CacheSnapshotter
from servers import redis_data_key

pytestmark = pytest.mark.servers

AGENT_ID = "travel:task-1"
FIRST, SECOND = Owner(AGENT_ID, RunId("run-1"), 1), Owner(AGENT_ID, RunId("run-2"), 2)
MAX_BYTES = 1_000_000
FORGED = 8 * MAX_BYTES
ITEMS = (
    Item("text", Kind.STRING, b"x"),
    Item("list", Kind.LIST, (b"1", b"2")),
    Item("hash", Kind.HASH, {b"a": b"b"}),
    Item("set", Kind.SET, frozenset({b"a"})),
    Item("scores", Kind.ZSET, {b"a": 1.0}),
)


@pytest.fixture
async def memory(redis_url: str, namespace: str) -> AsyncIterator[RedisWorkingMemory]:
    memory = RedisWorkingMemory(
        redis_url, make_timeout=NEVER, namespace=namespace, max_bytes=MAX_BYTES
    )
    await memory.replace(FIRST, ITEMS)
    yield memory
    await memory.close()


@pytest.fixture
async def snapshots(redis_url: str, namespace: str) -> AsyncIterator[RedisSnapshotStore]:
    snapshots = RedisSnapshotStore(
        redis_url,
        make_timeout=NEVER,
        namespace=namespace,
        secret=redis_data_key,
        max_bytes=MAX_BYTES,
    )
    yield snapshots
    await snapshots.close()


@contextmanager
def small_limit() -> Iterator[None]:
    """Fail if the block allocates half the size of a forged value."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < FORGED / 2
    finally:
        tracemalloc.stop()


def l1_key(namespace: str, *rest: str) -> str:
    return ":".join([namespace, "L1", "{" + AGENT_ID + "}", *rest])


async def test_an_oversized_forged_copy_is_not_read_completely(
    redis_url: str, namespace: str, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_cache, "MAX_COPY_BYTES", MAX_BYTES)
    cache = RedisCheckpointCache(
        redis_url, make_timeout=NEVER, namespace=namespace, secret=redis_data_key
    )
    await redis.setrange(f"{namespace}:checkpoint:task-1:travel", FORGED, b"x")
    with (
        small_limit(),
        pytest.raises(CheckpointError, match="task-1:travel: larger than 1,000,000 bytes"),
    ):
        await cache.get(TaskId("task-1"), AgentName("travel"))
    await cache.close()


async def test_a_copy_too_large_to_read_is_not_written(
    redis_url: str, namespace: str, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_cache, "MAX_COPY_BYTES", 500)
    cache = RedisCheckpointCache(
        redis_url, make_timeout=NEVER, namespace=namespace, secret=redis_data_key
    )
    checkpoint = AgentCheckpoint(
        operation_id=TaskId("task-1"), agent=AgentName("travel"), seq=1, subject="x"
    )
    text = "".join(map(chr, range(0x100, 0x400)))
    with pytest.raises(CheckpointError, match="exceed the limit of 500 for copies"):
        await cache.put(checkpoint.model_copy(update={"subject": text}))
    assert not await redis.exists(f"{namespace}:checkpoint:task-1:travel")
    await cache.close()


def create_snapshot(size: int = 10) -> PackedSnapshot:
    return PackedSnapshot("digest", 1, b"manifest", (bytes(size), b"2"))


@pytest.mark.parametrize("forged", ["a chunk", "chunks", "manifest", "digest", "order"])
async def test_an_oversized_forged_snapshot_is_not_read_completely(
    snapshots: RedisSnapshotStore, redis: Any, namespace: str, forged: str
) -> None:
    await snapshots.put(AGENT_ID, create_snapshot())
    chunks, meta = (
        f"{namespace}:l1_snapshot:{{{AGENT_ID}}}",
        f"{namespace}:l1_snapshot_meta:{{{AGENT_ID}}}",
    )
    match forged:
        case "a chunk":
            await redis.lset(chunks, 1, bytes(FORGED))
        case "chunks":
            await redis.rpush(chunks, *[b""] * (MAX_BYTES // 8))
        case field:
            await redis.hset(meta, field, b"1" * FORGED)
    with small_limit(), pytest.raises(ConsistencyError, match="larger than 1,000,000 bytes"):
        await snapshots.get(AGENT_ID)
    assert await snapshots.digest(AGENT_ID) == (None if forged == "digest" else "digest")


async def test_a_snapshot_too_large_to_read_is_not_stored(snapshots: RedisSnapshotStore) -> None:
    await snapshots.put(AGENT_ID, create_snapshot(1))
    with pytest.raises(
        ConsistencyError, match="exceed the limit of 1,000,000 for snapshots in Redis"
    ):
        await snapshots.put(AGENT_ID, create_snapshot(MAX_BYTES))
    assert await snapshots.get(AGENT_ID) == create_snapshot(1)


GROW: dict[str, tuple[str | int, ...]] = {
    "text": ("SET",),
    "list": ("RPUSH",),
    "hash": ("HSET", "b"),
    "set": ("SADD",),
    "scores": ("ZADD", 1),
}


async def grow(redis: Any, key: str, *by: str | int) -> None:
    """Append an oversized element to `key`, or replace a string."""
    command, *args = by
    await redis.execute_command(command, key, *args, bytes(FORGED))


READ = {
    "text": Command("GET", "text"),
    "list": Command("LRANGE", "list", (b"0", b"-1")),
    "hash": Command("HGETALL", "hash"),
    "set": Command("SMEMBERS", "set"),
    "scores": Command("ZRANGE", "scores", (b"0", b"-1", b"WITHSCORES")),
}


@pytest.mark.parametrize("key", GROW)
async def test_an_oversized_forged_value_is_not_read_completely(
    memory: RedisWorkingMemory, redis: Any, namespace: str, key: str
) -> None:
    await grow(redis, l1_key(namespace, "working", key), *GROW[key])
    with small_limit():
        contents = await memory.read(AGENT_ID)
    assert contents.oversized_keys == (key,)
    assert {item.key for item in contents.items} == {item.key for item in ITEMS} - {key}
    with (
        small_limit(),
        pytest.raises(
            MemoryRefused, match=f"'{key}': {READ[key].name}: the answers exceed 1000000 bytes"
        ),
    ):
        await memory.execute(FIRST, [READ[key]])


async def test_many_small_elements_count_towards_the_limit(
    memory: RedisWorkingMemory, redis: Any, namespace: str
) -> None:
    await redis.rpush(l1_key(namespace, "working", "list"), *[b""] * (MAX_BYTES // 8))
    assert (await memory.read(AGENT_ID)).oversized_keys == ("list",)


@pytest.mark.parametrize("forged", ["names", "a name"])
async def test_oversized_forged_names_are_not_read_completely(
    memory: RedisWorkingMemory, redis: Any, namespace: str, forged: str
) -> None:
    names = (
        [bytes(FORGED)]
        if forged == "a name"
        else [b"%d" % number for number in range(MAX_BYTES // 8)]
    )
    await redis.zadd(l1_key(namespace, "index"), dict.fromkeys(names, math.inf))
    with small_limit():
        contents = await memory.read(AGENT_ID)
    assert contents.oversized_keys == ("",)
    assert contents.items == ()
    with (
        small_limit(),
        pytest.raises(MemoryRefused, match="KEYS: the key names exceed 1000000 bytes"),
    ):
        await memory.keys(FIRST)


async def test_parts_of_a_memory_share_the_size_limit(
    memory: RedisWorkingMemory, redis: Any, namespace: str
) -> None:
    items = [Item(f"{number:04}", Kind.STRING, b"") for number in range(2000)]
    items[-1] = Item("1999", Kind.STRING, bytes(MAX_BYTES // 2))
    await memory.replace(FIRST, items)
    assert {item.key for item in (await memory.read(AGENT_ID)).items} == {
        item.key for item in items
    }
    await grow(redis, l1_key(namespace, "working", "1998"), *GROW["text"])
    assert (await memory.read(AGENT_ID)).oversized_keys == ("1998",)


async def test_a_memory_stored_under_a_higher_limit_is_restored(
    memory: RedisWorkingMemory,
) -> None:
    items = (
        Item("a", Kind.STRING, bytes(2 * MAX_BYTES)),
        Item("b", Kind.LIST, (b"",) * (MAX_BYTES // 4)),
    )
    contents = await memory.replace(FIRST, items)
    assert contents.oversized_keys == ()
    assert contents.items == items


@pytest.mark.parametrize("number", ["inf", "nan", "1e400", "1.5", "-1e300", ""])
@pytest.mark.parametrize("field", ["fence", "version"])
async def test_a_forged_number_in_the_header_is_reported(
    memory: RedisWorkingMemory, redis: Any, namespace: str, field: str, number: str
) -> None:
    await redis.hset(l1_key(namespace, "head"), field, number)
    for attempt in (
        memory.read(AGENT_ID),
        memory.execute(FIRST, [READ["text"]]),
        memory.replace(SECOND, ITEMS),
    ):
        with pytest.raises(
            MemoryUnavailable, match="head was not written by Meshpoint; delete it"
        ):
            await attempt


@pytest.mark.parametrize("run", [b"\xff\xfe", b"", "☃".encode()])
async def test_a_forged_run_id_counts_as_another_run(
    memory: RedisWorkingMemory, redis: Any, namespace: str, run: bytes
) -> None:
    await redis.hset(l1_key(namespace, "head"), "run", run)
    assert (await memory.read(AGENT_ID)).run_id not in {FIRST.run_id, None}


async def test_an_oversized_forged_run_id_is_not_read_completely(
    memory: RedisWorkingMemory, redis: Any, namespace: str
) -> None:
    await redis.hset(l1_key(namespace, "head"), "run", bytes(FORGED))
    with (
        small_limit(),
        pytest.raises(MemoryUnavailable, match="head was not written by Meshpoint; delete it"),
    ):
        await memory.read(AGENT_ID)


async def take_snapshot(
    memory: RedisWorkingMemory, snapshots: RedisSnapshotStore
) -> PackedSnapshot:
    snapshotter = L1CacheSnapshotter(memory, snapshots, MAX_BYTES, lambda *_: None)
    return (await snapshotter.snapshot_on_checkpoint(FIRST, 1)).packed


async def test_a_task_continues_from_its_snapshot(
    memory: RedisWorkingMemory, snapshots: RedisSnapshotStore, redis: Any, namespace: str
) -> None:
    packed = await take_snapshot(memory, snapshots)
    await snapshots.put(AGENT_ID, packed)
    await grow(redis, l1_key(namespace, "working", "hash"), *GROW["hash"])

    async def no_row() -> None:
        return None

    recovery = DualRecoveryStrategy(memory, snapshots, lambda *_: None)
    recovered = await recovery.recover(SECOND, packed.digest, no_row)
    assert (recovered.recovery.source, recovered.recovery.verified) == (
        MemorySource.SNAPSHOT,
        True,
    )
    assert recovered.recovery.problems == ("L1 is too large to read; changed: 'hash'",)
    assert {item.key: item.content for item in (await memory.read(AGENT_ID)).items} == {
        item.key: item.content for item in ITEMS
    }


async def test_a_checkpoint_names_what_is_too_large(
    memory: RedisWorkingMemory, snapshots: RedisSnapshotStore, redis: Any, namespace: str
) -> None:
    await grow(redis, l1_key(namespace, "working", "hash"), *GROW["hash"])
    with pytest.raises(
        MemoryRefused, match=r"too large to read \(.* 1,000,000\); oversized keys: 'hash'"
    ):
        await take_snapshot(memory, snapshots)
