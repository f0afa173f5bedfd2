"""Memory snapshots on a real Redis, which may lose anything, break at any byte, or die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from redis_wire import NEVER, ManualTimeouts, RedisProxy

from meshpoint.adapters.redis import RedisSnapshotStore, script_calls
from meshpoint.errors import ConfigurationError, ConsistencyError, MemoryUnavailable
from meshpoint.model.memory import Item, Kind, MemoryContents, PackedSnapshot
from meshpoint.working_memory.packing import pack, unpack
from servers import Proxy, RedisServer, redis_client, redis_data_key

AGENT_ID = "travel:task-1"
TWO_WEEKS = 14 * 24 * 3600 * 1000


@pytest.fixture
async def snapshots(redis_url: str, namespace: str) -> AsyncIterator[RedisSnapshotStore]:
    snapshots = RedisSnapshotStore(
        redis_url, make_timeout=NEVER, namespace=namespace, secret=redis_data_key
    )
    yield snapshots
    await snapshots.close()


@pytest.fixture
async def wire(redis_url: str) -> AsyncIterator[RedisProxy]:
    async with RedisProxy(redis_url) as wire:
        yield wire


@pytest.fixture
async def proxied_snapshots(wire: RedisProxy, namespace: str) -> AsyncIterator[RedisSnapshotStore]:
    """A store behind `wire` that retries Redis immediately after a failure."""
    snapshots = RedisSnapshotStore(
        wire.url,
        make_timeout=NEVER,
        namespace=namespace,
        secret=redis_data_key,
        retry_after=timedelta(0),
    )
    yield snapshots
    await snapshots.close()


def chunks_key(namespace: str) -> str:
    return f"{namespace}:l1_snapshot:{{{AGENT_ID}}}"


def meta_key(namespace: str) -> str:
    return f"{namespace}:l1_snapshot_meta:{{{AGENT_ID}}}"


def create_snapshot(order: int = 1, *, chunks: int = 3, digest: str = "") -> PackedSnapshot:
    """A snapshot whose every part contains its order."""
    parts = tuple(b"\x00\xff%d of %d" % (number, order) for number in range(chunks))
    return PackedSnapshot(digest or f"1:{order}", order, b"\x28\xb5%d" % order, parts)


@pytest.mark.parametrize("chunks", [0, 1, 3, 9_000])
async def test_a_snapshot_is_read_as_it_was_put(
    snapshots: RedisSnapshotStore, chunks: int
) -> None:
    packed = create_snapshot(chunks=chunks)
    assert await snapshots.put(AGENT_ID, packed)
    assert await snapshots.get(AGENT_ID) == packed


async def test_large_chunks_are_sent_in_several_parts(
    proxied_snapshots: RedisSnapshotStore, wire: RedisProxy
) -> None:
    packed = PackedSnapshot(
        "1:x", 1, b"", tuple(bytes([number]) * 2_000_000 for number in range(5))
    )
    await proxied_snapshots.put(AGENT_ID, create_snapshot(0))
    assert await proxied_snapshots.put(AGENT_ID, packed)
    assert await proxied_snapshots.get(AGENT_ID) == packed


async def test_snapshots_are_separate_per_memory(
    snapshots: RedisSnapshotStore, redis_url: str
) -> None:
    await snapshots.put(AGENT_ID, create_snapshot())
    assert await snapshots.get("travel:task-2") is None
    other = RedisSnapshotStore(
        redis_url, make_timeout=NEVER, namespace="other", secret=redis_data_key
    )
    assert await other.get(AGENT_ID) is None
    await other.close()


async def test_the_snapshot_with_the_highest_order_is_kept(snapshots: RedisSnapshotStore) -> None:
    assert await snapshots.put(AGENT_ID, create_snapshot(9))
    assert await snapshots.put(
        AGENT_ID, create_snapshot(10, chunks=1)
    )  # compared as numbers, not as text
    assert not await snapshots.put(AGENT_ID, create_snapshot(9))
    assert await snapshots.get(AGENT_ID) == create_snapshot(10, chunks=1)
    assert await snapshots.put(AGENT_ID, create_snapshot(10, chunks=1))
    assert await snapshots.put(AGENT_ID, create_snapshot(10, chunks=2, digest="1:other"))
    assert await snapshots.get(AGENT_ID) == create_snapshot(10, chunks=2, digest="1:other")
    assert await snapshots.put(AGENT_ID, create_snapshot(11, chunks=0))
    assert await snapshots.get(AGENT_ID) == create_snapshot(11, chunks=0)


async def test_the_highest_of_many_concurrent_snapshots_is_kept_as_a_whole(
    snapshots: RedisSnapshotStore,
    redis: Any,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 20)
    snapshots_ = [create_snapshot(order, chunks=10 + order % 7) for order in range(40)]
    results = await asyncio.gather(
        *[snapshots.put(AGENT_ID, snapshot) for snapshot in reversed(snapshots_)]
    )
    assert results[0] is True
    assert await snapshots.get(AGENT_ID) == snapshots_[-1]
    assert len(await redis.keys(f"{namespace}:*")) == 2


async def test_a_snapshot_is_kept_for_two_weeks_after_each_put(
    snapshots: RedisSnapshotStore, redis: Any, namespace: str
) -> None:
    for _ in range(2):
        await snapshots.put(AGENT_ID, create_snapshot())
        for key in (chunks_key(namespace), meta_key(namespace)):
            assert TWO_WEEKS - 60_000 < await redis.pttl(key) <= TWO_WEEKS
            await redis.pexpire(key, 10_000)


async def test_a_forgotten_snapshot_leaves_no_key(
    snapshots: RedisSnapshotStore, redis: Any, namespace: str
) -> None:
    await snapshots.put(AGENT_ID, create_snapshot())
    await snapshots.forget(AGENT_ID)
    await snapshots.forget(AGENT_ID)
    assert await snapshots.get(AGENT_ID) is None
    assert await redis.keys(f"{namespace}:*") == []


async def test_its_metadata_has_time_and_number_of_keys(
    snapshots: RedisSnapshotStore, redis: Any, namespace: str
) -> None:
    items = (Item("a", Kind.STRING, b"1"), Item("b", Kind.STRING, b"2"))
    packed = pack(MemoryContents(items, version=1, now=1_700_000_000_123), 1)
    await snapshots.put(AGENT_ID, packed)
    found = await redis.hmget(meta_key(namespace), "timestamp", "key_count")
    assert found == [b"2023-11-14T22:13:20.123000+00:00", b"2"]
    read = await snapshots.get(AGENT_ID)
    assert read is not None
    assert (read.taken_at, read.key_count) == (1_700_000_000_123, 2)
    assert unpack(read, "the snapshot").items == items


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("timestamp", "2030-01-01T00:00:00+00:00", "its timestamp is not the one in its manifest"),
        ("key_count", "3", "its key_count is not the one in its manifest"),
        ("timestamp", "yesterday", "a field is damaged"),
        ("key_count", "two", "a field is damaged"),
    ],
)
async def test_forged_metadata_is_detected(
    snapshots: RedisSnapshotStore,
    redis: Any,
    namespace: str,
    field: str,
    value: str,
    problem: str,
) -> None:
    packed = pack(MemoryContents((Item("a", Kind.STRING, b"1"),), version=1, now=7), 1)
    await snapshots.put(AGENT_ID, packed)
    await redis.hset(meta_key(namespace), field, value)
    with pytest.raises(ConsistencyError, match=problem):
        unpack(await snapshots.get(AGENT_ID) or packed, "the snapshot")


async def test_the_previous_release_and_this_one_read_each_other(
    snapshots: RedisSnapshotStore, redis: Any, namespace: str
) -> None:
    """The previous release writes and reads four fields."""
    items = (Item("a", Kind.STRING, b"1"),)
    packed = pack(MemoryContents(items, version=1, now=7), 1)
    await snapshots.put(AGENT_ID, packed)
    assert await redis.hdel(meta_key(namespace), "timestamp", "key_count") == 2
    assert set(await redis.hkeys(meta_key(namespace))) == {
        *(b"digest", b"order", b"chunks", b"manifest")
    }
    read = await snapshots.get(AGENT_ID)
    assert read == packed
    assert unpack(read, "the snapshot").items == items


@pytest.mark.parametrize("field", ["manifest", "digest", "order"])
async def test_a_forged_snapshot_is_detected(
    snapshots: RedisSnapshotStore, redis: Any, namespace: str, field: str
) -> None:
    """Forgeries: a snapshot written without the key, or an authentic one with a changed field."""
    await snapshots.put(AGENT_ID, create_snapshot(1))
    old = await redis.hget(meta_key(namespace), "manifest")
    await snapshots.put(AGENT_ID, create_snapshot(2))
    forged = {"manifest": b"forged", "digest": b"1:forged", "order": b"3"}[field]
    await redis.hset(meta_key(namespace), field, forged)
    with pytest.raises(ConsistencyError, match="not authentic"):
        await snapshots.get(AGENT_ID)
    # authentic, but from another snapshot
    await redis.hset(meta_key(namespace), mapping={"manifest": old})
    with pytest.raises(ConsistencyError, match="not authentic"):
        await snapshots.get(AGENT_ID)


async def test_a_put_and_a_get_are_one_round_trip_each(
    proxied_snapshots: RedisSnapshotStore, wire: RedisProxy
) -> None:
    await proxied_snapshots.put(AGENT_ID, create_snapshot(1))
    await proxied_snapshots.get(AGENT_ID)
    wire.reset()
    await proxied_snapshots.put(AGENT_ID, create_snapshot(2))
    assert wire.round_trips == 1
    wire.reset()
    await proxied_snapshots.get(AGENT_ID)
    assert wire.round_trips == 1
    wire.reset()
    await proxied_snapshots.forget(AGENT_ID)
    assert wire.round_trips == 1


async def test_scripts_can_be_flushed_at_any_time(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 40)
    snapshots = RedisSnapshotStore(
        own_redis.url, make_timeout=NEVER, namespace="mesh", secret=redis_data_key
    )
    send, trips = script_calls._send, 0
    redis: Any
    async with redis_client(own_redis.url) as redis:

        async def forgetful(client: Any, calls: Any, known: bool) -> Any:
            nonlocal trips
            trips += 1
            if trips % 3 == 0:
                await redis.script_flush()
            return await send(client, calls, known)

        monkeypatch.setattr(script_calls, "_send", forgetful)
        for order in range(1, 20):
            assert await snapshots.put(AGENT_ID, create_snapshot(order, chunks=order))
            assert await snapshots.get(AGENT_ID) == create_snapshot(order, chunks=order)
    await snapshots.close()


async def test_damaged_chunks_are_returned_to_the_caller(
    snapshots: RedisSnapshotStore, redis: Any, namespace: str
) -> None:
    await snapshots.put(AGENT_ID, create_snapshot())
    await redis.lset(chunks_key(namespace), 1, b"garbage")
    found = await snapshots.get(AGENT_ID)
    assert found is not None
    assert found.chunks == (create_snapshot().chunks[0], b"garbage", create_snapshot().chunks[2])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("chunk", "2 chunks instead of 3"),
        ("chunks", "0 chunks instead of 3"),
        ("meta", "a field is missing"),
        ("field", "a field is missing"),
        ("number", "a field is damaged"),
        ("text", "a field is damaged"),
        ("meta type", "it has the wrong type"),
        ("chunks type", "it has the wrong type"),
    ],
)
async def test_an_invalid_snapshot_is_reported_and_replaced_by_the_next(
    snapshots: RedisSnapshotStore, redis: Any, namespace: str, damage: str, problem: str
) -> None:
    await snapshots.put(AGENT_ID, create_snapshot())
    chunks, meta = chunks_key(namespace), meta_key(namespace)
    match damage:
        case "chunk":
            await redis.lpop(chunks)
        case "chunks":
            await redis.delete(chunks)
        case "meta":
            await redis.delete(meta)
        case "field":
            await redis.hdel(meta, "manifest")
        case "number":
            await redis.hset(meta, "order", "x")
        case "text":
            await redis.hset(meta, "digest", b"\xff")
        case "meta type":
            await redis.set(meta, "x")
        case "chunks type":
            await redis.set(chunks, "x")
    with pytest.raises(ConsistencyError, match=problem) as caught:
        await snapshots.get(AGENT_ID)
    assert f"{namespace}:l1_snapshot" in str(caught.value)
    assert await snapshots.put(AGENT_ID, create_snapshot(2))
    assert await snapshots.get(AGENT_ID) == create_snapshot(2)


@pytest.mark.parametrize("pipeline", [100, 4_000_000])
async def test_a_put_cut_at_any_byte_leaves_the_old_or_the_new_snapshot(
    snapshots: RedisSnapshotStore,
    proxied_snapshots: RedisSnapshotStore,
    wire: RedisProxy,
    monkeypatch: pytest.MonkeyPatch,
    pipeline: int,
) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", pipeline)
    await proxied_snapshots.put(AGENT_ID, create_snapshot(99, chunks=40))
    await snapshots.forget(AGENT_ID)
    wire.reset()
    await proxied_snapshots.put(AGENT_ID, create_snapshot(50, chunks=40))
    size = wire.sent
    assert (wire.round_trips > 3) is (pipeline == 100)
    new, seen = create_snapshot(51, chunks=40), []
    for offset in [*range(0, size, size // 50), size - 1]:
        await snapshots.forget(AGENT_ID)
        await snapshots.put(AGENT_ID, create_snapshot(50))
        wire.cut_after(offset)
        with pytest.raises(MemoryUnavailable):
            await proxied_snapshots.put(AGENT_ID, new)
        wire.mend()
        found = await snapshots.get(AGENT_ID)
        assert found in [create_snapshot(50), new]
        seen.append(found == new)
    assert not any(seen)  # the swap is sent last
    assert await proxied_snapshots.put(AGENT_ID, create_snapshot(50))  # connects
    wire.lose_answers()
    with pytest.raises(MemoryUnavailable):
        await proxied_snapshots.put(AGENT_ID, new)
    wire.mend()
    if pipeline != 100:
        assert await snapshots.get(AGENT_ID) == new
    assert await proxied_snapshots.put(AGENT_ID, create_snapshot(52))
    assert await snapshots.get(AGENT_ID) == create_snapshot(52)


async def test_staged_data_expires(
    snapshots: RedisSnapshotStore,
    redis: Any,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 10)
    send, trips = script_calls._send, 0

    async def die(redis: Any, calls: Any, known: bool) -> Any:
        nonlocal trips
        trips += 1
        if trips > 4:
            raise asyncio.CancelledError
        return await send(redis, calls, known)

    monkeypatch.setattr(script_calls, "_send", die)
    with pytest.raises(asyncio.CancelledError):
        await snapshots.put(AGENT_ID, create_snapshot(chunks=20))
    [remaining_key] = await redis.keys(f"{namespace}:*")
    assert 0 < await redis.pttl(remaining_key) <= 3_600_000


async def test_a_put_that_lost_staged_data_is_not_applied(
    snapshots: RedisSnapshotStore,
    redis: Any,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 10)
    await snapshots.put(AGENT_ID, create_snapshot(1))
    send, trips = script_calls._send, 0

    async def evict(client: Any, calls: Any, known: bool) -> Any:
        nonlocal trips
        trips += 1
        if trips == 3:
            [staged] = await redis.keys(f"{chunks_key(namespace)}:*")
            await redis.delete(staged)
        return await send(client, calls, known)

    monkeypatch.setattr(script_calls, "_send", evict)
    with pytest.raises(MemoryUnavailable, match="lost part of the staged data"):
        await snapshots.put(AGENT_ID, create_snapshot(2, chunks=9))
    assert await snapshots.get(AGENT_ID) == create_snapshot(1)
    assert len(await redis.keys(f"{namespace}:*")) == 2


@pytest.mark.parametrize("quarter", range(5))
async def test_a_redis_killed_during_a_put_has_the_old_or_the_new_snapshot(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, quarter: int
) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 100)
    own_redis.sync_every_write()
    async with RedisProxy(own_redis.url) as wire:
        snapshots = RedisSnapshotStore(
            wire.url,
            make_timeout=NEVER,
            namespace="mesh",
            secret=redis_data_key,
            retry_after=timedelta(0),
        )
        await snapshots.forget(AGENT_ID)
        await snapshots.put(AGENT_ID, create_snapshot(10, chunks=40))
        wire.reset()
        await snapshots.put(AGENT_ID, create_snapshot(11, chunks=40))
        wire.cut_after(wire.sent * quarter // 4 - (quarter == 4), own_redis.kill)
        with pytest.raises(MemoryUnavailable):
            await snapshots.put(AGENT_ID, create_snapshot(12, chunks=40))
        wire.mend()
        await own_redis.start()
        assert await snapshots.get(AGENT_ID) in [
            create_snapshot(11, chunks=40),
            create_snapshot(12, chunks=40),
        ]
        await snapshots.forget(AGENT_ID)
        await snapshots.close()


async def test_a_silent_redis_costs_one_timeout(redis_url: str, namespace: str) -> None:
    async with Proxy(redis_url) as proxy:
        seconds, limits = 0.0, ManualTimeouts()
        snapshots = RedisSnapshotStore(
            proxy.url,
            namespace=namespace,
            secret=redis_data_key,
            make_timeout=limits,
            clock=lambda: seconds,
        )
        proxy.silence()
        limits.expired = True
        with pytest.raises(MemoryUnavailable, match=r"no answer within 5\.0 s"):
            await snapshots.get(AGENT_ID)
        for attempt in (
            snapshots.put(AGENT_ID, create_snapshot()),
            snapshots.get(AGENT_ID),
            snapshots.forget(AGENT_ID),
        ):
            with pytest.raises(MemoryUnavailable, match="not asked"):
                await attempt
        proxy.resume()
        seconds, limits.expired = 5.0, False
        assert await snapshots.get(AGENT_ID) is None
        await snapshots.close()


def test_a_malformed_url_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigurationError) as caught:
        RedisSnapshotStore("http://:secret@localhost/0", namespace="mesh", secret=redis_data_key)
    assert caught.value.key == "agent.memory_snapshot_url"
    assert "sec" not in str(caught.value)
