"""Checkpoint copies on a real Redis that holds garbage, loses everything, hangs or is down."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any

import pytest
import zstandard
from redis.asyncio import Redis
from redis_wire import NEVER, ManualTimeouts

from meshpoint.adapters.redis import RedisCheckpointCache
from meshpoint.adapters.redis.seal import CODE_BYTES, Seal
from meshpoint.errors import CheckpointError, ConfigurationError
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.subtasks import AgentCheckpoint, SubtaskRecord, SubtaskStatus
from meshpoint.ports.task_store import CacheUnavailable, LeftOut
from servers import Proxy, RedisServer, redis_client, redis_data_key

AGENT = AgentName("travel")
WEEK = timedelta(days=7)


class FakeMonotonic:
    """A clock in seconds that a test advances."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def now() -> FakeMonotonic:
    return FakeMonotonic()


@pytest.fixture
def limits() -> ManualTimeouts:
    return ManualTimeouts()


@pytest.fixture
async def cache(redis_url: str, namespace: str) -> AsyncIterator[RedisCheckpointCache]:
    cache = RedisCheckpointCache(
        redis_url, make_timeout=NEVER, namespace=namespace, secret=redis_data_key
    )
    yield cache
    await cache.close()


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[Proxy]:
    async with Proxy(redis_url) as proxy:
        yield proxy


@pytest.fixture
async def proxied_cache(
    proxy: Proxy, namespace: str, now: FakeMonotonic, limits: ManualTimeouts
) -> AsyncIterator[RedisCheckpointCache]:
    """A cache behind `proxy`, on the clock `now`, whose requests time out when `limits` pass."""
    cache = RedisCheckpointCache(
        proxy.url, namespace=namespace, secret=redis_data_key, clock=now, make_timeout=limits
    )
    yield cache
    await cache.close()


def create_checkpoint(
    seq: int = 1, *, size: int = 0, operation_id: str | None = None
) -> AgentCheckpoint:
    """A checkpoint with a deliverable of `size` bytes that compress a little."""
    record = a_record("flights", size, size)
    return AgentCheckpoint(
        operation_id=TaskId(operation_id or new_id()),
        agent=AGENT,
        seq=seq,
        subject="ACME ☃",
        planned=("flights", "hotel"),
        subtasks=(record,),
        saved_progress={"hotel": '{"page": 1E400, "z": 1, "a": "\\u0000"}'},
        agent_config={"depth": 3, "exact": 12345678901234567890, "share": 0.1},
        error_details={"type": "ValueError"},
        checkpoint_time=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
    )


def a_record(name: str, size: int, seed: int) -> SubtaskRecord:
    """A record with a deliverable of `size` bytes that compress a little."""
    return SubtaskRecord(
        name=name,
        status=SubtaskStatus.COMPLETED,
        function="f1",
        inputs={"to": "d"},
        seconds=0.1,
        result="".join(random.Random(seed).choices("abcdefghijklmnop", k=size)),
    )


def key_of(namespace: str, checkpoint: AgentCheckpoint) -> str:
    return f"{namespace}:checkpoint:{checkpoint.operation_id}:{checkpoint.agent}"


@pytest.mark.parametrize("size", [0, 5_000, 1_000_000])
async def test_a_copy_is_the_checkpoint(cache: RedisCheckpointCache, size: int) -> None:
    checkpoint = create_checkpoint(size=size)
    await cache.put(checkpoint)
    assert await cache.get(checkpoint.operation_id, AGENT) == checkpoint


async def test_a_copy_says_which_records_are_shared(cache: RedisCheckpointCache) -> None:
    checkpoint = create_checkpoint(seq=7).model_copy(update={"records_from": 3})
    await cache.put(checkpoint.model_copy(update={"changed": frozenset({"flights"})}))
    assert await cache.get(checkpoint.operation_id, AGENT) == checkpoint


async def test_a_large_copy_is_compressed(
    cache: RedisCheckpointCache, redis: Redis, namespace: str
) -> None:
    checkpoint = create_checkpoint(size=1_000_000)
    await cache.put(checkpoint)
    assert await redis.strlen(key_of(namespace, checkpoint)) < 600_000


async def test_large_records_are_not_sent_again_with_each_checkpoint(
    own_redis: RedisServer,
) -> None:
    cache = RedisCheckpointCache(
        own_redis.url, make_timeout=NEVER, namespace="mesh", secret=redis_data_key
    )
    records = [a_record(f"subtask {number}", 10_000, number) for number in range(100)]
    checkpoint, left_out = create_checkpoint(), set[int]()
    async with redis_client(own_redis.url) as redis:
        before = (await redis.info("stats"))["total_net_input_bytes"]
        for count in range(1, len(records) + 1):
            saved = checkpoint.model_copy(
                update={
                    "subtasks": tuple(records[:count]),
                    "changed": frozenset({records[count - 1].name}),
                }
            )
            await cache.put(saved)
            if await cache.get(checkpoint.operation_id, AGENT) == LeftOut():
                left_out.add(count)
        sent = (await redis.info("stats"))["total_net_input_bytes"] - before
    assert left_out == set(range(14, 101))
    assert sent < 2 * sum(len(record.result or "") for record in records)
    await cache.put(saved.model_copy(update={"changed": None}))  # all of them are new
    assert await cache.get(checkpoint.operation_id, AGENT) == saved.model_copy(
        update={"changed": None}
    )
    await cache.close()


async def test_a_checkpoint_that_was_never_put_has_no_copy(cache: RedisCheckpointCache) -> None:
    await cache.put(create_checkpoint())
    assert await cache.get(TaskId(new_id()), AGENT) is None


async def test_copies_are_separate_per_agent_and_mesh(
    cache: RedisCheckpointCache, redis_url: str
) -> None:
    checkpoint = create_checkpoint()
    await cache.put(checkpoint)
    assert await cache.get(checkpoint.operation_id, AgentName("hotel")) is None
    other = RedisCheckpointCache(
        redis_url, make_timeout=NEVER, namespace=new_id(), secret=redis_data_key
    )
    assert await other.get(checkpoint.operation_id, AGENT) is None
    await other.close()


async def test_a_later_copy_replaces_an_earlier_one(cache: RedisCheckpointCache) -> None:
    first = create_checkpoint(1)
    await cache.put(first)
    await cache.put(first.model_copy(update={"seq": 2}))
    found = await cache.get(first.operation_id, AGENT)
    assert isinstance(found, AgentCheckpoint)
    assert found.seq == 2


async def test_each_put_keeps_the_copy_for_a_week(
    cache: RedisCheckpointCache, redis: Redis, namespace: str
) -> None:
    checkpoint = create_checkpoint()
    await cache.put(checkpoint)
    key = key_of(namespace, checkpoint)
    assert WEEK - timedelta(minutes=5) < timedelta(milliseconds=await redis.pttl(key)) <= WEEK
    await redis.expire(key, 1000)
    await cache.put(checkpoint)
    assert WEEK - timedelta(minutes=5) < timedelta(milliseconds=await redis.pttl(key)) <= WEEK


async def test_a_forgotten_copy_is_deleted(
    cache: RedisCheckpointCache, redis: Redis, namespace: str
) -> None:
    checkpoint = create_checkpoint()
    await cache.put(checkpoint)
    await cache.forget(checkpoint.operation_id, AGENT)
    await cache.forget(checkpoint.operation_id, AGENT)
    assert await cache.get(checkpoint.operation_id, AGENT) is None
    assert not await redis.exists(key_of(namespace, checkpoint))


async def test_a_put_and_a_get_are_one_request_each(own_redis: RedisServer) -> None:
    cache, checkpoint = (
        RedisCheckpointCache(
            own_redis.url, make_timeout=NEVER, namespace="mesh", secret=redis_data_key
        ),
        create_checkpoint(size=10_000),
    )
    async with redis_client(own_redis.url) as redis:
        await cache.put(checkpoint)  # connects
        await redis.config_resetstat()
        await cache.put(checkpoint)
        await cache.get(checkpoint.operation_id, AGENT)
        commands = {
            name: seen["calls"] for name, seen in (await redis.info("commandstats")).items()
        }
    await cache.close()
    assert {
        name: calls
        for name, calls in commands.items()
        if "config" not in name and "info" not in name
    } == {
        "cmdstat_set": 1,
        "cmdstat_getrange": 1,
    }


async def test_many_at_once_share_a_few_connections(
    proxied_cache: RedisCheckpointCache, proxy: Proxy
) -> None:
    operation_id = new_id()
    same = [create_checkpoint(seq, size=2_000, operation_id=operation_id) for seq in range(1, 21)]
    others = [create_checkpoint(seq, size=2_000) for seq in range(1, 21)]
    await asyncio.gather(*[proxied_cache.put(name) for name in [*same, *others]])

    found = await asyncio.gather(*[proxied_cache.get(each.operation_id, AGENT) for each in others])
    assert found == others
    assert await proxied_cache.get(TaskId(operation_id), AGENT) in same
    assert proxy.connections <= 4


class Sealed(bytes):
    """Content written with the right key that is not a checkpoint."""


def without_key(copy: bytes) -> bytes:
    """`copy` with a digest that needs no key."""
    body = copy[CODE_BYTES:]
    return blake2b(body, digest_size=CODE_BYTES).digest() + body


def flip_byte(copy: bytes) -> bytes:
    index = len(copy) // 2
    return copy[:index] + bytes([copy[index] ^ 1]) + copy[index + 1 :]


@pytest.mark.parametrize("size", [0, 5_000])
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda copy: b"\xff\xfe\x00", id="no UTF-8"),
        pytest.param(lambda copy: b'{"operation_id": 1}', id="other JSON"),
        pytest.param(lambda copy: copy[:-1], id="truncated"),
        pytest.param(lambda copy: copy[: len(copy) // 2], id="half"),
        pytest.param(lambda copy: copy + b" ", id="longer"),
        pytest.param(flip_byte, id="a bit flipped"),
        pytest.param(lambda copy: copy[CODE_BYTES:], id="no code"),
        pytest.param(without_key, id="a digest without the key"),
        pytest.param(
            lambda copy: bytes(CODE_BYTES) + zstandard.compress(bytes(10_000_000)), id="a bomb"
        ),
        pytest.param(lambda copy: Sealed(b""), id="sealed: empty"),
        pytest.param(lambda copy: Sealed(b"\x02[]"), id="sealed: other JSON"),
        pytest.param(lambda copy: Sealed(b"\x02{}"), id="sealed: other object"),
        pytest.param(lambda copy: Sealed(b"\x02" + b"[" * 100_000), id="sealed: deep"),
        pytest.param(lambda copy: Sealed(b"\x02\xff\xfe"), id="sealed: no UTF-8"),
        pytest.param(lambda copy: Sealed(b"\x03not compressed"), id="sealed: no frame"),
        pytest.param(lambda copy: Sealed(b"\x03\x28\xb5\x2f\xfd"), id="sealed: half a frame"),
        pytest.param(
            lambda copy: Sealed(b"\x07" + copy[CODE_BYTES + 1 :]), id="sealed: unknown marker"
        ),
    ],
)
async def test_garbage_is_detected(
    cache: RedisCheckpointCache,
    redis: Redis,
    namespace: str,
    spoil: Callable[[bytes], bytes],
    size: int,
) -> None:
    checkpoint = create_checkpoint(size=size)
    key = key_of(namespace, checkpoint)
    await cache.put(checkpoint)
    copy = await redis.get(key)
    assert isinstance(copy, bytes)
    damaged = spoil(copy)
    await redis.set(
        key,
        await Seal(redis_data_key).seal(key, damaged) if isinstance(damaged, Sealed) else damaged,
    )
    await assert_garbage(cache, checkpoint, key)


async def test_an_empty_value_counts_as_missing(
    cache: RedisCheckpointCache, redis: Redis, namespace: str
) -> None:
    """Redis reads both alike, and telling them apart would cost each miss another request."""
    checkpoint = create_checkpoint()
    await cache.put(checkpoint)
    await redis.set(key_of(namespace, checkpoint), b"")
    assert await cache.get(checkpoint.operation_id, checkpoint.agent) is None
    await cache.put(checkpoint)
    assert await cache.get(checkpoint.operation_id, checkpoint.agent) == checkpoint


@pytest.mark.parametrize("kind", ["list", "hash", "set"])
async def test_a_value_of_another_redis_type_is_detected(
    cache: RedisCheckpointCache, redis: Redis, namespace: str, kind: str
) -> None:
    checkpoint = create_checkpoint()
    key = key_of(namespace, checkpoint)
    client: Any = redis
    match kind:
        case "list":
            await client.rpush(key, "a")
        case "hash":
            await client.hset(key, "a", "b")
        case "set":
            await client.sadd(key, "a")
    await assert_garbage(cache, checkpoint, key)


async def test_a_copy_of_another_operation_is_detected(
    cache: RedisCheckpointCache, redis: Redis, namespace: str
) -> None:
    own_checkpoint, other = create_checkpoint(), create_checkpoint()
    await cache.put(other)
    await redis.copy(key_of(namespace, other), key_of(namespace, own_checkpoint))
    await assert_garbage(cache, own_checkpoint, key_of(namespace, own_checkpoint))


async def test_a_copy_of_another_mesh_is_detected(
    cache: RedisCheckpointCache, redis: Redis, namespace: str
) -> None:
    async def other_key() -> bytes:
        return bytes(32)

    checkpoint = create_checkpoint()
    key = key_of(namespace, checkpoint)
    await cache.put(checkpoint)
    copy = await redis.get(key)
    assert isinstance(copy, bytes)
    await redis.set(key, await Seal(other_key).seal(key, copy[CODE_BYTES:]))
    await assert_garbage(cache, checkpoint, key)


async def assert_garbage(
    cache: RedisCheckpointCache, checkpoint: AgentCheckpoint, key: str
) -> None:
    """Expect one log line that names the key, and a `put` that repairs it."""
    with pytest.raises(CheckpointError) as caught:
        await cache.get(checkpoint.operation_id, AGENT)
    assert str(caught.value).startswith(f"{key}: ")
    assert "\n" not in str(caught.value)
    await cache.put(checkpoint)
    assert await cache.get(checkpoint.operation_id, AGENT) == checkpoint


async def test_a_checkpoint_that_is_not_json_is_refused(cache: RedisCheckpointCache) -> None:
    with pytest.raises(CheckpointError, match="surrogates"):
        await cache.put(create_checkpoint().model_copy(update={"subject": "\ud800"}))


async def test_a_redis_that_was_wiped_has_no_copies(own_redis: RedisServer) -> None:
    cache, checkpoint = (
        RedisCheckpointCache(
            own_redis.url, make_timeout=NEVER, namespace="mesh", secret=redis_data_key
        ),
        create_checkpoint(),
    )
    await cache.put(checkpoint)
    async with redis_client(own_redis.url) as redis:
        await redis.flushall()
    assert await cache.get(checkpoint.operation_id, AGENT) is None
    await cache.put(checkpoint)
    assert await cache.get(checkpoint.operation_id, AGENT) == checkpoint
    await cache.close()


async def test_the_cache_recovers_after_a_redis_outage(
    own_redis: RedisServer, now: FakeMonotonic
) -> None:
    cache, checkpoint = (
        RedisCheckpointCache(
            own_redis.url, make_timeout=NEVER, namespace="mesh", secret=redis_data_key, clock=now
        ),
        create_checkpoint(),
    )
    await cache.put(checkpoint)
    await own_redis.kill()
    with pytest.raises(CacheUnavailable, match="connecting"):
        await cache.get(checkpoint.operation_id, AGENT)

    await own_redis.start()
    with pytest.raises(CacheUnavailable, match="not asked"):
        await cache.put(checkpoint)
    now.seconds = 5.0
    await cache.put(checkpoint)
    assert await cache.get(checkpoint.operation_id, AGENT) == checkpoint
    await cache.close()


async def test_a_restart_between_two_requests_is_not_noticed(own_redis: RedisServer) -> None:
    cache, checkpoint = (
        RedisCheckpointCache(
            own_redis.url, make_timeout=NEVER, namespace="mesh", secret=redis_data_key
        ),
        create_checkpoint(),
    )
    await cache.put(checkpoint)
    await own_redis.restart()
    assert await cache.get(checkpoint.operation_id, AGENT) == checkpoint
    await cache.close()


async def test_a_silent_redis_costs_one_timeout(
    proxied_cache: RedisCheckpointCache, proxy: Proxy, now: FakeMonotonic, limits: ManualTimeouts
) -> None:
    checkpoint = create_checkpoint()
    await proxied_cache.put(checkpoint)
    proxy.silence()
    limits.expired = True
    with pytest.raises(CacheUnavailable, match=r"no answer within 0\.5 s"):
        await proxied_cache.get(checkpoint.operation_id, AGENT)
    connections = proxy.connections
    for _ in range(100):
        with pytest.raises(CacheUnavailable, match="not asked"):
            await proxied_cache.put(checkpoint)
        with pytest.raises(CacheUnavailable, match="not asked"):
            await proxied_cache.get(checkpoint.operation_id, AGENT)
        with pytest.raises(CacheUnavailable, match="not asked"):
            await proxied_cache.forget(checkpoint.operation_id, AGENT)
    assert proxy.connections == connections


async def test_after_a_delay_one_caller_retries_while_the_others_fail_fast(
    proxied_cache: RedisCheckpointCache, proxy: Proxy, now: FakeMonotonic, limits: ManualTimeouts
) -> None:
    checkpoint = create_checkpoint()
    await proxied_cache.put(checkpoint)
    proxy.silence()
    limits.expired = True
    with pytest.raises(CacheUnavailable):
        await proxied_cache.get(checkpoint.operation_id, AGENT)

    now.seconds = 5.0
    results = await asyncio.gather(
        *[proxied_cache.get(checkpoint.operation_id, AGENT) for _ in range(10)],
        return_exceptions=True,
    )
    assert sorted("not asked" in str(error) for error in results) == [False] + [True] * 9
    assert all(isinstance(error, CacheUnavailable) for error in results)

    proxy.resume()
    limits.expired = False
    now.seconds = 9.9
    with pytest.raises(CacheUnavailable, match="not asked"):
        await proxied_cache.get(checkpoint.operation_id, AGENT)
    now.seconds = 10.0
    assert await proxied_cache.get(checkpoint.operation_id, AGENT) == checkpoint


async def test_garbage_does_not_prevent_use_of_a_recovered_redis(
    proxied_cache: RedisCheckpointCache,
    proxy: Proxy,
    now: FakeMonotonic,
    limits: ManualTimeouts,
    redis: Redis,
    namespace: str,
) -> None:
    checkpoint = create_checkpoint()
    client: Any = redis
    await client.hset(key_of(namespace, checkpoint), "a", "b")
    proxy.silence()
    limits.expired = True
    with pytest.raises(CacheUnavailable):
        await proxied_cache.get(checkpoint.operation_id, AGENT)
    proxy.resume()
    limits.expired = False
    now.seconds = 5.0
    with pytest.raises(CheckpointError):
        await proxied_cache.get(checkpoint.operation_id, AGENT)
    await proxied_cache.put(checkpoint)


@pytest.mark.parametrize("steps", range(8))
async def test_a_cancelled_caller_does_not_affect_other_answers(
    proxied_cache: RedisCheckpointCache, proxy: Proxy, steps: int
) -> None:
    first, second = create_checkpoint(), create_checkpoint()
    await proxied_cache.put(first)
    await proxied_cache.put(second)
    proxy.silence()
    asking = asyncio.create_task(proxied_cache.get(first.operation_id, AGENT))
    for _ in range(steps):  # before the request, and after it
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    proxy.resume()
    assert await proxied_cache.get(second.operation_id, AGENT) == second


async def test_a_full_redis_is_unavailable(own_redis: RedisServer) -> None:
    cache = RedisCheckpointCache(
        own_redis.url, make_timeout=NEVER, namespace="mesh", secret=redis_data_key
    )
    async with redis_client(own_redis.url) as redis:
        await redis.config_set("maxmemory", "1")
        try:
            with pytest.raises(CacheUnavailable, match="maxmemory"):
                await cache.put(create_checkpoint())
        finally:
            await redis.config_set("maxmemory", "0")
    await cache.close()


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b":x\r\n", b"$-9\r\n", b"$5\r\nab", b""]
)
async def test_a_server_that_is_not_redis_is_unavailable(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    cache = RedisCheckpointCache(
        f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}",
        namespace="mesh",
        secret=redis_data_key,
    )
    with pytest.raises(CacheUnavailable):
        await cache.get(TaskId(new_id()), AGENT)
    await cache.close()
    server.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://:secret@localhost/0",
        "redis://user:sec/ret@localhost:6379/0",
        "redis://:secret@localhost:port/0",
        "redis://:secret@localhost/0?health_check_interval=often",
        "redis://:secret@localhost/0?secret=1",
        "redis://:secret@localhost/0?retry=3",
        "redis://:secret@localhost/0?redis_connect_func=x",
        "redis://:secret@localhost/0?event_dispatcher=1",
        "redis://:secret@localhost/0?credential_provider=x",
        "redis://:secret@localhost/0?parser_class=x",
    ],
)
def test_a_malformed_url_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RedisCheckpointCache(url, make_timeout=NEVER, namespace="mesh", secret=redis_data_key)
    assert caught.value.key == "agent.checkpoint_cache_url"
    assert "sec" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "option", ["", "?decode_responses=true", "?protocol=3", "?encoding=nope&encoding_errors=x"]
)
async def test_url_options_do_not_break_the_cache(
    redis_url: str, namespace: str, option: str
) -> None:
    cache, checkpoint = (
        RedisCheckpointCache(
            redis_url + option, make_timeout=NEVER, namespace=namespace, secret=redis_data_key
        ),
        create_checkpoint(size=2_000),
    )
    await cache.put(checkpoint)
    assert await cache.get(checkpoint.operation_id, AGENT) == checkpoint
    await cache.close()
