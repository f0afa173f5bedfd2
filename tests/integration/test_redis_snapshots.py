"""Memory snapshots on a real Redis, which may lose anything, break at any byte, or die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from redis.asyncio import Redis
from redis_wire import NEVER, Limits, Wire

from meshpoint.adapters.redis import RedisSnapshotStore, script_calls
from meshpoint.errors import ConfigurationError, ConsistencyError, MemoryUnavailable
from meshpoint.model.memory import Packed
from servers import Proxy, RedisServer, copy_key

A = "travel:task-1"
TWO_WEEKS = 14 * 24 * 3600 * 1000


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[Any]:
    """Direct connection to Redis."""
    async with Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
async def snapshots(redis_url: str, namespace: str) -> AsyncIterator[RedisSnapshotStore]:
    snapshots = RedisSnapshotStore(redis_url, make_timeout=NEVER, namespace=namespace, secret=copy_key)
    yield snapshots
    await snapshots.close()


@pytest.fixture
async def wire(redis_url: str) -> AsyncIterator[Wire]:
    async with Wire(redis_url) as wire:
        yield wire


@pytest.fixture
async def distant(wire: Wire, namespace: str) -> AsyncIterator[RedisSnapshotStore]:
    """A store behind `wire` that retries Redis immediately after a failure."""
    snapshots = RedisSnapshotStore(
        wire.url, make_timeout=NEVER, namespace=namespace, secret=copy_key, retry_after=timedelta(0)
    )
    yield snapshots
    await snapshots.close()


def chunks_of(namespace: str) -> str:
    return f"{namespace}:l1_snapshot:{{{A}}}"


def meta_of(namespace: str) -> str:
    return f"{namespace}:l1_snapshot_meta:{{{A}}}"


def a_snapshot(order: int = 1, *, chunks: int = 3, digest: str = "") -> Packed:
    """A snapshot whose every part contains its order."""
    parts = tuple(b"\x00\xff%d of %d" % (number, order) for number in range(chunks))
    return Packed(digest or f"1:{order}", order, b"\x28\xb5%d" % order, parts)


@pytest.mark.parametrize("chunks", [0, 1, 3, 9_000])
async def test_a_snapshot_is_what_was_put(snapshots: RedisSnapshotStore, chunks: int) -> None:
    packed = a_snapshot(chunks=chunks)
    assert await snapshots.put(A, packed)
    assert await snapshots.get(A) == packed


async def test_large_chunks_go_in_several_parts(distant: RedisSnapshotStore, wire: Wire) -> None:
    packed = Packed("1:x", 1, b"", tuple(bytes([number]) * 2_000_000 for number in range(5)))
    await distant.put(A, a_snapshot(0))
    assert await distant.put(A, packed)
    assert await distant.get(A) == packed


async def test_there_is_no_snapshot_of_another_memory(snapshots: RedisSnapshotStore, redis_url: str) -> None:
    await snapshots.put(A, a_snapshot())
    assert await snapshots.get("travel:task-2") is None
    other = RedisSnapshotStore(redis_url, make_timeout=NEVER, namespace="other", secret=copy_key)
    assert await other.get(A) is None
    await other.close()


async def test_the_highest_order_stays(snapshots: RedisSnapshotStore) -> None:
    assert await snapshots.put(A, a_snapshot(9))
    assert await snapshots.put(A, a_snapshot(10, chunks=1))  # compared as numbers, not as text
    assert not await snapshots.put(A, a_snapshot(9))
    assert await snapshots.get(A) == a_snapshot(10, chunks=1)
    assert await snapshots.put(A, a_snapshot(10, chunks=1))
    assert await snapshots.put(A, a_snapshot(10, chunks=2, digest="1:other"))
    assert await snapshots.get(A) == a_snapshot(10, chunks=2, digest="1:other")
    assert await snapshots.put(A, a_snapshot(11, chunks=0))
    assert await snapshots.get(A) == a_snapshot(11, chunks=0)


async def test_of_many_at_once_the_highest_stays_as_a_whole(
    snapshots: RedisSnapshotStore, raw: Any, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 20)
    every = [a_snapshot(order, chunks=10 + order % 7) for order in range(40)]
    kept = await asyncio.gather(*[snapshots.put(A, each) for each in reversed(every)])
    assert kept[0] is True
    assert await snapshots.get(A) == every[-1]
    assert len(await raw.keys(f"{namespace}:*")) == 2


async def test_it_lives_for_two_weeks_from_each_put(snapshots: RedisSnapshotStore, raw: Any, namespace: str) -> None:
    for _ in range(2):
        await snapshots.put(A, a_snapshot())
        for key in (chunks_of(namespace), meta_of(namespace)):
            assert TWO_WEEKS - 60_000 < await raw.pttl(key) <= TWO_WEEKS
            await raw.pexpire(key, 10_000)


async def test_a_forgotten_snapshot_leaves_no_key(snapshots: RedisSnapshotStore, raw: Any, namespace: str) -> None:
    await snapshots.put(A, a_snapshot())
    await snapshots.forget(A)
    await snapshots.forget(A)
    assert await snapshots.get(A) is None
    assert await raw.keys(f"{namespace}:*") == []


@pytest.mark.parametrize("field", ["manifest", "digest", "order"])
async def test_a_forged_snapshot_is_found(
    snapshots: RedisSnapshotStore, raw: Any, namespace: str, field: str
) -> None:
    """Forgeries: a snapshot written without the key, or an authentic one with a changed field."""
    await snapshots.put(A, a_snapshot(1))
    old = await raw.hget(meta_of(namespace), "manifest")
    await snapshots.put(A, a_snapshot(2))
    forged = {"manifest": b"forged", "digest": b"1:forged", "order": b"3"}[field]
    await raw.hset(meta_of(namespace), field, forged)
    with pytest.raises(ConsistencyError, match="not authentic"):
        await snapshots.get(A)
    # authentic, but from another snapshot
    await raw.hset(meta_of(namespace), mapping={"manifest": old})
    with pytest.raises(ConsistencyError, match="not authentic"):
        await snapshots.get(A)


async def test_a_put_and_a_get_are_one_round_trip_each(distant: RedisSnapshotStore, wire: Wire) -> None:
    await distant.put(A, a_snapshot(1))
    await distant.get(A)
    wire.reset()
    await distant.put(A, a_snapshot(2))
    assert wire.turns == 1
    wire.reset()
    await distant.get(A)
    assert wire.turns == 1
    wire.reset()
    await distant.forget(A)
    assert wire.turns == 1


async def test_scripts_may_be_forgotten_at_any_time(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 40)
    snapshots = RedisSnapshotStore(own_redis.url, make_timeout=NEVER, namespace="mesh", secret=copy_key)
    send, trips = script_calls._send, 0
    async with Redis.from_url(own_redis.url) as client:
        raw: Any = client

        async def forgetful(redis: Any, calls: Any, known: bool) -> Any:
            nonlocal trips
            trips += 1
            if trips % 3 == 0:
                await raw.script_flush()
            return await send(redis, calls, known)

        monkeypatch.setattr(script_calls, "_send", forgetful)
        for order in range(1, 20):
            assert await snapshots.put(A, a_snapshot(order, chunks=order))
            assert await snapshots.get(A) == a_snapshot(order, chunks=order)
    await snapshots.close()


async def test_chunks_with_damage_are_passed_on(snapshots: RedisSnapshotStore, raw: Any, namespace: str) -> None:
    await snapshots.put(A, a_snapshot())
    await raw.lset(chunks_of(namespace), 1, b"garbage")
    found = await snapshots.get(A)
    assert found is not None
    assert found.chunks == (a_snapshot().chunks[0], b"garbage", a_snapshot().chunks[2])


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
async def test_what_is_no_snapshot_is_told_and_healed_by_the_next(
    snapshots: RedisSnapshotStore, raw: Any, namespace: str, damage: str, problem: str
) -> None:
    await snapshots.put(A, a_snapshot())
    chunks, meta = chunks_of(namespace), meta_of(namespace)
    match damage:
        case "chunk":
            await raw.lpop(chunks)
        case "chunks":
            await raw.delete(chunks)
        case "meta":
            await raw.delete(meta)
        case "field":
            await raw.hdel(meta, "manifest")
        case "number":
            await raw.hset(meta, "order", "x")
        case "text":
            await raw.hset(meta, "digest", b"\xff")
        case "meta type":
            await raw.set(meta, "x")
        case "chunks type":
            await raw.set(chunks, "x")
    with pytest.raises(ConsistencyError, match=problem) as caught:
        await snapshots.get(A)
    assert f"{namespace}:l1_snapshot" in str(caught.value)
    assert await snapshots.put(A, a_snapshot(2))
    assert await snapshots.get(A) == a_snapshot(2)


@pytest.mark.parametrize("pipeline", [100, 4_000_000])
async def test_a_put_that_is_cut_at_any_byte_leaves_the_old_or_the_new(
    snapshots: RedisSnapshotStore,
    distant: RedisSnapshotStore,
    wire: Wire,
    monkeypatch: pytest.MonkeyPatch,
    pipeline: int,
) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", pipeline)
    await distant.put(A, a_snapshot(99, chunks=40))
    await snapshots.forget(A)
    wire.reset()
    await distant.put(A, a_snapshot(50, chunks=40))
    size = wire.sent
    assert (wire.turns > 3) is (pipeline == 100)
    new, seen = a_snapshot(51, chunks=40), []
    for at in [*range(0, size, size // 50), size - 1]:
        await snapshots.forget(A)
        await snapshots.put(A, a_snapshot(50))
        wire.cut_after(at)
        with pytest.raises(MemoryUnavailable):
            await distant.put(A, new)
        wire.mend()
        found = await snapshots.get(A)
        assert found in [a_snapshot(50), new]
        seen.append(found == new)
    assert not any(seen)  # the swap is sent last
    assert await distant.put(A, a_snapshot(50))  # connects
    wire.lose_answers()
    with pytest.raises(MemoryUnavailable):
        await distant.put(A, new)
    wire.mend()
    if pipeline != 100:
        assert await snapshots.get(A) == new
    assert await distant.put(A, a_snapshot(52))
    assert await snapshots.get(A) == a_snapshot(52)


async def test_what_was_staged_vanishes_by_itself(
    snapshots: RedisSnapshotStore, raw: Any, namespace: str, monkeypatch: pytest.MonkeyPatch
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
        await snapshots.put(A, a_snapshot(chunks=20))
    [left] = await raw.keys(f"{namespace}:*")
    assert 0 < await raw.pttl(left) <= 3_600_000


async def test_a_put_that_lost_some_of_what_it_staged_is_not_kept(
    snapshots: RedisSnapshotStore, raw: Any, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 10)
    await snapshots.put(A, a_snapshot(1))
    send, trips = script_calls._send, 0

    async def evict(redis: Any, calls: Any, known: bool) -> Any:
        nonlocal trips
        trips += 1
        if trips == 3:
            [staged] = await raw.keys(f"{chunks_of(namespace)}:*")
            await raw.delete(staged)
        return await send(redis, calls, known)

    monkeypatch.setattr(script_calls, "_send", evict)
    with pytest.raises(MemoryUnavailable, match="lost part of the staged data"):
        await snapshots.put(A, a_snapshot(2, chunks=9))
    assert await snapshots.get(A) == a_snapshot(1)
    assert len(await raw.keys(f"{namespace}:*")) == 2


@pytest.mark.parametrize("quarter", range(5))
async def test_a_redis_killed_at_any_step_of_a_put_has_the_old_or_the_new(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, quarter: int
) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 100)
    own_redis.append_before_answering()
    async with Wire(own_redis.url) as wire:
        snapshots = RedisSnapshotStore(
            wire.url, make_timeout=NEVER, namespace="mesh", secret=copy_key, retry_after=timedelta(0)
        )
        await snapshots.forget(A)
        await snapshots.put(A, a_snapshot(10, chunks=40))
        wire.reset()
        await snapshots.put(A, a_snapshot(11, chunks=40))
        wire.cut_after(wire.sent * quarter // 4 - (quarter == 4), own_redis.kill)
        with pytest.raises(MemoryUnavailable):
            await snapshots.put(A, a_snapshot(12, chunks=40))
        wire.mend()
        await own_redis.start()
        assert await snapshots.get(A) in [a_snapshot(11, chunks=40), a_snapshot(12, chunks=40)]
        await snapshots.forget(A)
        await snapshots.close()


async def test_a_silent_redis_costs_one_timeout(redis_url: str, namespace: str) -> None:
    async with Proxy(redis_url) as proxy:
        seconds, limits = 0.0, Limits()
        snapshots = RedisSnapshotStore(
            proxy.url, namespace=namespace, secret=copy_key, make_timeout=limits, clock=lambda: seconds
        )
        proxy.silence()
        limits.passed = True
        with pytest.raises(MemoryUnavailable, match=r"no answer within 5\.0 s"):
            await snapshots.get(A)
        for attempt in (snapshots.put(A, a_snapshot()), snapshots.get(A), snapshots.forget(A)):
            with pytest.raises(MemoryUnavailable, match="not asked"):
                await attempt
        proxy.resume()
        seconds, limits.passed = 5.0, False
        assert await snapshots.get(A) is None
        await snapshots.close()


def test_a_malformed_url_is_refused_without_telling_it() -> None:
    with pytest.raises(ConfigurationError) as caught:
        RedisSnapshotStore("http://:secret@localhost/0", namespace="mesh", secret=copy_key)
    assert caught.value.key == "agent.memory_snapshot_url"
    assert "sec" not in str(caught.value)
