"""Working memories on a real Redis, which may lose anything, break at any byte, or die."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from redis.asyncio import Redis
from redis_wire import NEVER, ManualTimeouts, RedisProxy

from meshpoint.adapters.redis import RedisWorkingMemory, script_calls, staging, working_memory
from meshpoint.adapters.redis.script_calls import (
    ScriptCall,
    ScriptReply,
    is_consistent,
    parse_contents,
)
from meshpoint.adapters.redis.scripts import READ, STAGE
from meshpoint.errors import (
    ConfigurationError,
    MemoryFenced,
    MemoryLost,
    MemoryRefused,
    MemoryUnavailable,
)
from meshpoint.model.ids import RunId
from meshpoint.model.memory import Answer, Command, Content, Item, Kind, MemoryContents, Owner
from servers import Proxy, RedisServer, redis_client

AGENT_ID = "travel:task-1"
DAY = 24 * 3600 * 1000
FIRST, SECOND = Owner(AGENT_ID, RunId("run-1"), 1), Owner(AGENT_ID, RunId("run-2"), 2)

EVERY_KIND = (
    Item("text", Kind.STRING, b"\x00\xff\r\n{}"),
    Item("empty", Kind.STRING, b""),
    Item("list", Kind.LIST, (b"", b"\xff\x00", b"a", b"a")),
    Item("hash", Kind.HASH, {b"": b"", b"\xfe": b"\x00"}),
    Item("set", Kind.SET, frozenset({b"", b"1", b"\x80"})),
    Item(
        "zset",
        Kind.ZSET,
        {b"": 1e-320, b"a": -0.0, b"\xff": math.inf, b"c": -math.inf, b"d": 0.1 + 0.2},
    ),
    Item("☃:{} *", Kind.STRING, b"snow"),
)


@pytest.fixture
async def memory(redis_url: str, namespace: str) -> AsyncIterator[RedisWorkingMemory]:
    memory = RedisWorkingMemory(redis_url, make_timeout=NEVER, namespace=namespace)
    yield memory
    await memory.close()


@pytest.fixture
async def wire(redis_url: str) -> AsyncIterator[RedisProxy]:
    async with RedisProxy(redis_url) as wire:
        yield wire


@pytest.fixture
async def proxied_memory(wire: RedisProxy, namespace: str) -> AsyncIterator[RedisWorkingMemory]:
    """A memory behind `wire` that retries Redis immediately after a failure."""
    memory = RedisWorkingMemory(
        wire.url, make_timeout=NEVER, namespace=namespace, retry_after=timedelta(0)
    )
    yield memory
    await memory.close()


def redis_key(namespace: str, *remaining_days: str) -> str:
    return ":".join([namespace, "L1", "{" + AGENT_ID + "}", *remaining_days])


def to_command(name: str, key: str, *args: bytes | str | int) -> Command:
    return Command(
        name, key, tuple(arg if isinstance(arg, bytes) else str(arg).encode() for arg in args)
    )


async def execute_all(
    memory: RedisWorkingMemory, *commands: Command, owner: Owner = FIRST
) -> list[Answer]:
    return (await memory.execute(owner, commands))[1]


def contents_of(current: MemoryContents) -> dict[str, tuple[Kind, Content]]:
    return {item.key: (item.kind, item.content) for item in current.items}


def contents_from_items(items: Sequence[Item]) -> dict[str, tuple[Kind, Content]]:
    return {item.key: (item.kind, item.content) for item in items}


def small_items(count: int) -> list[Item]:
    return [Item(f"key-{number:05}", Kind.STRING, b"%d" % number) for number in range(count)]


async def is_nothing_staged(redis: Any, namespace: str) -> bool:
    return not await redis.keys(redis_key(namespace, "restore", "*"))


async def test_a_memory_contains_what_was_written(memory: RedisWorkingMemory) -> None:
    current = await memory.replace(FIRST, EVERY_KIND)
    assert contents_of(current) == contents_from_items(EVERY_KIND)
    assert (current.run_id, current.fence, current.lost_keys) == (FIRST.run_id, 1, ())
    assert contents_of(await memory.read(AGENT_ID)) == contents_from_items(EVERY_KIND)
    assert set(await memory.keys(FIRST)) == set(contents_from_items(EVERY_KIND))


@pytest.mark.parametrize("size", [1, 1000])
async def test_a_zero_score_has_no_sign(memory: RedisWorkingMemory, size: int) -> None:
    scores = {b"%d" % number: -0.0 for number in range(size)}
    [item] = (await memory.replace(FIRST, [Item("zset", Kind.ZSET, scores)])).items
    assert isinstance(item.content, dict)
    assert {math.copysign(1, score) for score in item.content.values()} == {1.0}
    assert len(item.content) == size


async def test_a_memory_can_have_ten_thousand_keys(
    memory: RedisWorkingMemory, redis: Any, namespace: str
) -> None:
    items = small_items(10_000)
    assert contents_of(await memory.replace(FIRST, items)) == contents_from_items(items)
    assert contents_of(await memory.read(AGENT_ID)) == contents_from_items(items)
    assert sorted(await memory.keys(FIRST)) == sorted(contents_from_items(items))
    assert await memory.adopt(SECOND, (await memory.read(AGENT_ID)).version)
    await memory.retain(SECOND, paused=True)
    assert await redis.pttl(redis_key(namespace, "working", "key-09999")) > 13 * DAY
    await memory.forget(SECOND)
    assert await redis.keys(f"{namespace}:*") == []


async def test_a_key_can_have_a_hundred_thousand_elements(memory: RedisWorkingMemory) -> None:
    elements = [b"%d" % number for number in range(100_000)]
    pairs = [part for element in elements for part in (element, element)]
    await memory.replace(FIRST, [])
    assert (
        await execute_all(
            memory,
            to_command("RPUSH", "list", *elements),
            to_command("SADD", "set", *elements),
            to_command("HSET", "hash", *pairs),
            to_command("ZADD", "zset", *pairs),
        )
        == [100_000] * 4
    )
    current = await memory.read(AGENT_ID)
    expected = {
        "list": (Kind.LIST, tuple(elements)),
        "set": (Kind.SET, frozenset(elements)),
        "hash": (Kind.HASH, dict(zip(elements, elements, strict=True))),
        "zset": (Kind.ZSET, {each: float(each) for each in elements}),
    }
    assert contents_of(current) == expected
    assert contents_of(await memory.replace(SECOND, current.items)) == expected
    assert await execute_all(
        memory,
        to_command("LPUSH", "list", *elements),
        to_command("SREM", "set", *elements),
        to_command("HDEL", "hash", *elements),
        to_command("ZREM", "zset", *elements),
        owner=SECOND,
    ) == [200_000, 100_000, 100_000, 100_000]
    assert await memory.keys(SECOND) == ["list"]


async def test_an_invalid_score_among_many_changes_nothing(memory: RedisWorkingMemory) -> None:
    before = [Item("zset", Kind.ZSET, {b"m": 1.0}), Item("hash", Kind.HASH, {b"f": b"v"})]
    await memory.replace(FIRST, before)
    scores = [part for number in range(9_000) for part in (number, number)]
    for bad in ("nan", "x"):
        with pytest.raises(MemoryRefused, match="'zset'"):
            await execute_all(memory, to_command("ZADD", "zset", *scores, bad, "m"))
    with pytest.raises(MemoryRefused, match="'hash'"):
        await execute_all(memory, to_command("HSET", "hash", *scores, "odd"))
    assert contents_of(await memory.read(AGENT_ID)) == contents_from_items(before)


async def test_every_command_answers_as_redis_does(memory: RedisWorkingMemory) -> None:
    await memory.replace(FIRST, [])
    cases: list[tuple[Command, Answer]] = [
        (to_command("GET", "s"), None),
        (to_command("TYPE", "s"), b"none"),
        (to_command("SET", "s", "1"), b"OK"),
        (to_command("TYPE", "s"), b"string"),
        (to_command("INCRBY", "s", 2), 3),
        (to_command("INCRBY", "big", 2**53 + 1), 2**53 + 1),
        (to_command("HINCRBY", "h", "f", -(2**60) - 1), -(2**60) - 1),
        (to_command("INCRBYFLOAT", "f", "0.5"), b"0.5"),
        (to_command("RPUSH", "l", "a", "b", "c"), 3),
        (to_command("LPUSH", "l", "z"), 4),
        (to_command("LRANGE", "l", 0, -1), [b"z", b"a", b"b", b"c"]),
        (to_command("LTRIM", "l", 1, 2), b"OK"),
        (to_command("LINDEX", "l", 0), b"a"),
        (to_command("LINDEX", "l", 9), None),
        (to_command("LLEN", "l"), 2),
        (to_command("LPOP", "l"), b"a"),
        (to_command("RPOP", "l"), b"b"),
        (to_command("RPOP", "l"), None),
        (to_command("HSET", "h", "g", "1", "f", "2"), 1),
        (to_command("HGET", "h", "g"), b"1"),
        (to_command("HGETALL", "h"), [b"f", b"2", b"g", b"1"]),
        (to_command("HEXISTS", "h", "x"), 0),
        (to_command("HLEN", "h"), 2),
        (to_command("HDEL", "h", "f", "g"), 2),
        (to_command("SADD", "t", "1", "1"), 1),
        (to_command("SMEMBERS", "t"), [b"1"]),
        (to_command("SISMEMBER", "t", "1"), 1),
        (to_command("SCARD", "t"), 1),
        (to_command("SREM", "t", "1"), 1),
        (to_command("ZADD", "z", "1.5", "a", "inf", "b"), 2),
        (to_command("ZINCRBY", "z", "1", "a"), b"2.5"),
        (to_command("ZSCORE", "z", "a"), b"2.5"),
        (to_command("ZSCORE", "z", "x"), None),
        (to_command("ZRANGE", "z", 0, -1, "WITHSCORES"), [b"a", b"2.5", b"b", b"inf"]),
        (to_command("ZRANGEBYSCORE", "z", "-inf", "3", "WITHSCORES"), [b"a", b"2.5"]),
        (to_command("ZCARD", "z"), 2),
        (to_command("ZREM", "z", "a", "b"), 2),
        (to_command("DEL", "s"), 1),
        (to_command("DEL", "s"), 0),
    ]
    together = await execute_all(memory, *[command for command, _ in cases])
    for (command, expected), answer in zip(cases, together, strict=True):
        assert sort_hash_reply(command, answer) == expected, command
    assert sorted(await memory.keys(FIRST)) == ["big", "f"]


def sort_hash_reply(command: Command, answer: Answer) -> Answer:
    if command.name != "HGETALL" or not isinstance(answer, list):
        return answer
    return [part for pair in sorted(zip(answer[::2], answer[1::2], strict=True)) for part in pair]


async def test_only_a_batch_that_writes_increments_the_version(memory: RedisWorkingMemory) -> None:
    version = (await memory.replace(FIRST, [])).version
    assert (await memory.execute(FIRST, [to_command("GET", "a")]))[0] == version
    assert (await memory.execute(FIRST, [to_command("SET", "a", 1), to_command("SET", "b", 1)]))[
        0
    ] == version + 1
    assert (await memory.read(AGENT_ID)).version == version + 1
    assert (await memory.replace(FIRST, [])).version == version + 2


async def test_an_emptied_memory_is_empty_and_not_lost(memory: RedisWorkingMemory) -> None:
    await memory.replace(FIRST, EVERY_KIND)
    assert (await memory.replace(FIRST, [])).items == ()
    assert await memory.keys(FIRST) == []
    assert await execute_all(memory, to_command("SET", "a", 1), to_command("DEL", "a")) == [
        b"OK",
        1,
    ]
    current = await memory.read(AGENT_ID)
    assert (current.items, current.lost_keys, current.run_id) == ((), (), FIRST.run_id)


async def test_memories_are_separate_per_task_and_mesh(
    memory: RedisWorkingMemory, redis_url: str
) -> None:
    await memory.replace(FIRST, EVERY_KIND)
    assert (await memory.read("travel:task-2")).run_id is None
    other = RedisWorkingMemory(redis_url, make_timeout=NEVER, namespace="other")
    assert (await other.read(AGENT_ID)).items == ()
    await other.close()


async def test_foreign_keys_are_not_part_of_the_memory(
    memory: RedisWorkingMemory, redis: Any, namespace: str
) -> None:
    await memory.replace(FIRST, [])
    await redis.set(redis_key(namespace, "working", "stranger"), "x")
    assert (await memory.read(AGENT_ID)).items == ()
    assert await memory.keys(FIRST) == []
    assert await execute_all(
        memory, to_command("GET", "stranger"), to_command("RPUSH", "stranger", "a")
    ) == [None, 1]


async def test_a_refused_command_is_named_and_earlier_ones_are_executed(
    memory: RedisWorkingMemory,
) -> None:
    await memory.replace(
        FIRST, [Item("list", Kind.LIST, (b"a",)), Item("text", Kind.STRING, b"x")]
    )
    top = to_command("INCRBY", "n", 2**63 - 1)
    for bad in (
        to_command("GET", "list"),
        to_command("INCRBY", "text", 1),
        to_command("INCRBYFLOAT", "text", 1),
        to_command("LTRIM", "list", "a", "b"),
        to_command("RPUSH", "text", *["x"] * 9_000),
        to_command("FLUSHALL", "text"),
        to_command("GET", ""),
    ):
        with pytest.raises(MemoryRefused, match=f"memory key '{bad.key}'"):
            await execute_all(memory, bad)
    version = (await memory.read(AGENT_ID)).version
    with pytest.raises(MemoryRefused, match=r"'n': INCRBY: .*overflow"):
        await execute_all(
            memory,
            to_command("SET", "before", 1),
            top,
            to_command("INCRBY", "n", 1),
            to_command("SET", "after", 1),
        )
    current = await memory.read(AGENT_ID)
    assert set(contents_of(current)) == {"list", "text", "before", "n"}
    assert current.version == version + 1


async def test_a_key_has_its_own_expiry(
    memory: RedisWorkingMemory, redis: Any, namespace: str
) -> None:
    await memory.replace(FIRST, [])
    key = redis_key(namespace, "working", "k")
    assert await execute_all(
        memory, to_command("PTTL", "k"), to_command("PEXPIRE", "k", 1), to_command("PERSIST", "k")
    ) == [-2, 0, 0]
    assert await execute_all(memory, to_command("SET", "k", 1), to_command("PTTL", "k")) == [
        b"OK",
        -1,
    ]
    assert DAY - 60_000 < await redis.pttl(key) <= DAY
    assert await execute_all(
        memory, to_command("PEXPIRE", "k", 60_000), to_command("PTTL", "k")
    ) == [1, 60_000]
    assert 50_000 < await redis.pttl(key) <= 60_000
    assert await execute_all(
        memory, to_command("INCRBY", "k", 1), to_command("PERSIST", "k"), to_command("PTTL", "k")
    ) == [2, 1, -1]
    assert DAY - 60_000 < await redis.pttl(key) <= DAY
    assert await execute_all(
        memory,
        to_command("PEXPIRE", "k", 60_000),
        to_command("SET", "k", 1),
        to_command("PTTL", "k"),
    ) == [1, b"OK", -1]
    commands = [
        to_command("PEXPIRE", "k", 60_000),
        to_command("DEL", "k"),
        to_command("PTTL", "k"),
        to_command("RPUSH", "k", 1),
        to_command("PTTL", "k"),
    ]
    assert await execute_all(memory, *commands) == [1, 1, -2, 1, -1]
    popped = [
        to_command("PEXPIRE", "k", 60_000),
        to_command("LPOP", "k"),
        to_command("RPUSH", "k", 1),
        to_command("PTTL", "k"),
    ]
    assert await execute_all(memory, *popped) == [1, b"1", 1, -1]
    assert await execute_all(memory, to_command("PEXPIRE", "k", 0), to_command("TYPE", "k")) == [
        1,
        b"none",
    ]
    assert await memory.keys(FIRST) == []
    longest = [
        to_command("SET", "k", 1),
        to_command("PEXPIRE", "k", 30 * DAY),
        to_command("PTTL", "k"),
    ]
    assert await execute_all(memory, *longest) == [b"OK", 1, 30 * DAY]
    assert DAY - 60_000 < await redis.pttl(key) <= DAY


async def test_expiries_are_kept_when_the_memory_is_replaced(memory: RedisWorkingMemory) -> None:
    now = (await memory.read(AGENT_ID)).now
    items = [
        Item("soon", Kind.STRING, b"1", now + 60_000),
        Item("late", Kind.LIST, (b"1",), now + 30 * DAY),
        Item("over", Kind.STRING, b"1", now),
        Item("never", Kind.STRING, b"1"),
    ]
    current = await memory.replace(FIRST, items)
    assert {item.key: item.expires_at for item in current.items} == {
        "soon": now + 60_000,
        "late": now + 30 * DAY,
        "never": None,
    }
    soon, delayed, no_expiry = await execute_all(
        memory, to_command("PTTL", "soon"), to_command("PTTL", "late"), to_command("PTTL", "never")
    )
    assert isinstance(soon, int)
    assert isinstance(delayed, int)
    assert 59_000 < soon <= 60_000
    assert 30 * DAY - 1000 < delayed <= 30 * DAY
    assert no_expiry == -1


async def test_an_expired_key_is_gone_even_if_redis_still_has_it(
    memory: RedisWorkingMemory, redis: Any, namespace: str
) -> None:
    items = [Item(key, Kind.LIST, (b"1",)) for key in ("a", "b", "c")]
    await memory.replace(FIRST, items)
    await redis.zadd(redis_key(namespace, "index"), {"a": 1, "b": 1})
    assert [item.key for item in (await memory.read(AGENT_ID)).items] == ["c"]
    assert await memory.keys(FIRST) == ["c"]
    assert await execute_all(
        memory, to_command("LLEN", "a"), to_command("RPUSH", "b", "x"), to_command("PTTL", "b")
    ) == [0, 1, -1]
    assert set(contents_of(await memory.read(AGENT_ID))) == {"b", "c"}


async def test_the_memory_expires_after_its_last_write_and_later_once_paused(
    memory: RedisWorkingMemory, redis: Any, namespace: str
) -> None:
    now = (await memory.read(AGENT_ID)).now
    await memory.replace(
        FIRST, [Item("a", Kind.STRING, b"1"), Item("b", Kind.STRING, b"1", now + 3_600_000)]
    )
    key_by_name = {
        name: redis_key(namespace, *name.split(":"))
        for name in ("head", "index", "working:a", "working:b")
    }

    async def remaining_days() -> dict[str, float]:
        return {
            name: round(await redis.pttl(redis_key_) / DAY, 1)
            for name, redis_key_ in key_by_name.items()
        }

    active = {"head": 1, "index": 1, "working:a": 1, "working:b": 0}
    assert await remaining_days() == active
    for name in ("head", "index", "working:a"):
        await redis.pexpire(key_by_name[name], 3_600_000)
    await execute_all(memory, to_command("GET", "a"))
    assert (await remaining_days())["head"] == 0
    await execute_all(memory, to_command("SET", "a", 1))
    assert await remaining_days() == active
    await memory.retain(FIRST, paused=True)
    assert await remaining_days() == {"head": 14, "index": 14, "working:a": 14, "working:b": 0}
    assert await memory.adopt(SECOND, (await memory.read(AGENT_ID)).version)
    assert await remaining_days() == active
    await memory.retain(FIRST, paused=True)
    assert await remaining_days() == active


async def test_zombie_is_fenced(memory: RedisWorkingMemory, redis: Any, namespace: str) -> None:
    version = (await memory.replace(FIRST, EVERY_KIND)).version
    assert await memory.adopt(SECOND, version)
    before = await memory.read(AGENT_ID)
    remaining_days = await redis.pttl(redis_key(namespace, "head"))
    with pytest.raises(MemoryFenced, match="run-2 with fence 2"):
        await execute_all(memory, to_command("SET", "text", "zombie"))
    with pytest.raises(MemoryFenced):
        await execute_all(memory, to_command("GET", "text"))
    with pytest.raises(MemoryFenced):
        await memory.keys(FIRST)
    with pytest.raises(MemoryFenced):
        await memory.adopt(FIRST, version)
    with pytest.raises(MemoryFenced):
        await memory.replace(FIRST, small_items(3))
    await memory.retain(FIRST, paused=True)
    await memory.forget(FIRST)
    with pytest.raises(MemoryFenced):
        await memory.execute(
            Owner(AGENT_ID, SECOND.run_id, 1), [to_command("SET", "text", "older")]
        )
    after = await memory.read(AGENT_ID)
    assert (after.items, after.version, after.run_id, after.fence) == (
        before.items,
        version,
        "run-2",
        2,
    )
    assert await redis.pttl(redis_key(namespace, "head")) <= remaining_days
    assert await is_nothing_staged(redis, namespace)


async def test_an_owner_that_finds_an_earlier_one_has_lost_its_memory(
    memory: RedisWorkingMemory,
) -> None:
    await memory.replace(FIRST, EVERY_KIND)
    with pytest.raises(MemoryLost):
        await execute_all(memory, to_command("GET", "text"), owner=SECOND)
    with pytest.raises(MemoryLost):
        await memory.keys(SECOND)
    await memory.forget(SECOND)
    assert contents_of(await memory.read(AGENT_ID)) == {}


async def test_a_redis_restored_to_an_older_state_is_detected(memory: RedisWorkingMemory) -> None:
    await memory.replace(FIRST, [])
    seen, _ = await memory.execute(FIRST, [to_command("SET", "a", 1)])
    with pytest.raises(MemoryLost):
        await memory.execute(FIRST, [to_command("GET", "a")], expected_version=seen + 1)
    with pytest.raises(MemoryLost):
        await memory.keys(FIRST, expected_version=seen + 1)
    assert await memory.keys(FIRST, expected_version=seen) == ["a"]


async def test_another_run_with_the_same_fence_owns_nothing(memory: RedisWorkingMemory) -> None:
    await memory.replace(FIRST, EVERY_KIND)
    with pytest.raises(MemoryFenced):
        await execute_all(memory, to_command("GET", "text"), owner=SECOND_AS_FIRST)


async def test_replaced_and_expired_keys_are_deleted_from_redis(
    memory: RedisWorkingMemory, redis: Any, namespace: str
) -> None:
    await memory.replace(FIRST, OLD)
    await memory.replace(FIRST, [Item("a", Kind.STRING, b"1"), Item("over", Kind.STRING, b"1", 1)])
    remaining_keys = {key.decode() for key in await redis.keys(f"{namespace}:*")}
    assert remaining_keys == {
        redis_key(namespace, name) for name in ("head", "index", "working:a")
    }
    assert await redis.zrange(redis_key(namespace, "index"), 0, -1) == [b"", b"a"]


async def test_a_memory_that_changed_since_it_was_read_is_not_adopted(
    memory: RedisWorkingMemory,
) -> None:
    version = (await memory.replace(FIRST, [])).version
    await execute_all(memory, to_command("SET", "a", 1))
    assert not await memory.adopt(SECOND, version)
    await execute_all(memory, to_command("SET", "a", 2))
    assert await memory.adopt(SECOND, version + 2)


async def test_a_memory_lost_and_recreated_is_detected(
    memory: RedisWorkingMemory, redis: Any, namespace: str
) -> None:
    version = (await memory.replace(FIRST, EVERY_KIND)).version
    await redis.delete(redis_key(namespace, "head"))
    assert (await memory.replace(FIRST, [])).version > version
    assert not await memory.adopt(SECOND, version)


async def test_a_forgotten_memory_leaves_no_key(
    memory: RedisWorkingMemory, redis: Any, namespace: str
) -> None:
    await memory.replace(FIRST, EVERY_KIND)
    await memory.forget(FIRST)
    assert await redis.keys(f"{namespace}:*") == []
    await memory.forget(FIRST)
    assert (await memory.read(AGENT_ID)).run_id is None
    assert not await memory.adopt(FIRST, 0)


async def test_one_of_two_concurrent_restores_wins_as_a_whole(
    memory: RedisWorkingMemory, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 500)
    monkeypatch.setattr(staging, "STEP_BYTES", 100)
    other = RedisWorkingMemory(redis_url, make_timeout=NEVER, namespace=namespace)
    own_items = [Item(f"key-{number}", Kind.LIST, (b"mine",) * 30) for number in range(40)]
    its = [Item(f"key-{number}", Kind.LIST, (b"its",) * 30) for number in range(20, 60)]
    for _ in range(5):
        owners = Owner(AGENT_ID, RunId("r1"), 7), Owner(AGENT_ID, RunId("r2"), 7)
        done = await asyncio.gather(
            memory.replace(owners[0], own_items),
            other.replace(owners[1], its),
            return_exceptions=True,
        )
        assert all(isinstance(outcome, MemoryContents | MemoryFenced) for outcome in done), done
        current = await memory.read(AGENT_ID)
        assert contents_of(current) == contents_from_items(
            own_items if current.run_id == "r1" else its
        )
    await other.close()


async def test_a_staged_restore_of_a_zombie_is_not_applied(
    memory: RedisWorkingMemory, monkeypatch: pytest.MonkeyPatch, redis: Any, namespace: str
) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 1)
    monkeypatch.setattr(staging, "STEP_BYTES", 1)

    async def adopt() -> None:
        await memory.replace(SECOND, EVERY_KIND)

    with pytest.raises(MemoryFenced):
        await InterruptedCall(monkeypatch, offset=3, between_calls=adopt).run(
            memory.replace(FIRST, small_items(10))
        )
    current = await memory.read(AGENT_ID)
    assert (current.run_id, contents_of(current)) == ("run-2", contents_from_items(EVERY_KIND))
    assert await is_nothing_staged(redis, namespace)


@pytest.mark.parametrize(
    "command",
    [
        to_command("GET", "a"),
        to_command("SET", "a", 1),
        to_command("DEL", "a"),
        to_command("TYPE", "a"),
    ],
)
async def test_an_evicted_key_is_detected(
    memory: RedisWorkingMemory, redis: Any, namespace: str, command: Command
) -> None:
    await memory.replace(FIRST, [Item("a", Kind.STRING, b"1"), Item("b", Kind.STRING, b"1")])
    version = (await memory.read(AGENT_ID)).version
    await redis.delete(redis_key(namespace, "working", "a"))
    with pytest.raises(MemoryLost, match="'a'"):
        await execute_all(memory, to_command("SET", "b", 2), command)
    assert await execute_all(memory, to_command("GET", "b")) == [b"1"]
    with pytest.raises(MemoryLost, match="'a'"):
        await memory.keys(FIRST)
    current = await memory.read(AGENT_ID)
    assert (set(contents_of(current)), current.lost_keys, current.version) == (
        {"b"},
        ("a",),
        version,
    )


@pytest.mark.parametrize("missing", ["head", "index"])
async def test_evicted_metadata_is_detected(
    memory: RedisWorkingMemory, redis: Any, namespace: str, missing: str
) -> None:
    version = (await memory.replace(FIRST, EVERY_KIND)).version
    await redis.delete(redis_key(namespace, missing))
    await assert_all_lost(memory, version)


async def test_a_wiped_redis_is_detected(own_redis: RedisServer) -> None:
    memory = RedisWorkingMemory(own_redis.url, make_timeout=NEVER, namespace="mesh")
    version = (await memory.replace(FIRST, EVERY_KIND)).version
    async with redis_client(own_redis.url) as redis:
        await redis.flushall()
    await assert_all_lost(memory, version)
    await memory.close()


async def assert_all_lost(memory: RedisWorkingMemory, version: int) -> None:
    """Each method notices the loss; then the memory is restored."""
    for commands in ([to_command("GET", "text")], [to_command("SET", "text", 1)], []):
        with pytest.raises(MemoryLost, match="all of it"):
            await memory.execute(FIRST, commands)
    with pytest.raises(MemoryLost, match="all of it"):
        await memory.keys(FIRST)
    current = await memory.read(AGENT_ID)
    assert (current.items, current.run_id, current.fence) == ((), None, 0)
    assert not await memory.adopt(SECOND, version)
    await memory.retain(FIRST, paused=True)
    assert contents_of(await memory.replace(SECOND, EVERY_KIND)) == contents_from_items(EVERY_KIND)


async def test_a_lost_index_does_not_let_a_zombie_in(
    memory: RedisWorkingMemory, redis: Any, namespace: str
) -> None:
    await memory.replace(SECOND, EVERY_KIND)
    await redis.delete(redis_key(namespace, "index"))
    with pytest.raises(MemoryFenced):
        await memory.replace(FIRST, [])
    with pytest.raises(MemoryFenced):
        await memory.adopt(FIRST, 1)


@pytest.mark.parametrize("garbage", ["text", "fields", "list"])
@pytest.mark.parametrize("place", ["head", "index"])
async def test_garbage_in_the_metadata_is_reported(
    memory: RedisWorkingMemory, redis: Any, namespace: str, place: str, garbage: str
) -> None:
    await memory.replace(FIRST, EVERY_KIND)
    key = redis_key(namespace, place)
    await redis.delete(key)
    match garbage:
        case "text":
            await redis.set(key, "x")
        case "fields":
            await redis.hset(key, mapping={"run": "run-1", "fence": "x"})
        case "list":
            await redis.rpush(key, "x")
    for attempt in (
        memory.execute(FIRST, [to_command("GET", "text")]),
        memory.keys(FIRST),
        memory.read(AGENT_ID),
        memory.adopt(SECOND, 1),
        memory.replace(SECOND, small_items(3)),
        memory.retain(FIRST, paused=True),
        memory.forget(FIRST),
    ):
        with pytest.raises(
            MemoryUnavailable, match=f"{place} was not written by Meshpoint; delete it"
        ):
            await attempt
    await redis.delete(key)
    assert contents_of(await memory.replace(SECOND, EVERY_KIND)) == contents_from_items(EVERY_KIND)


async def test_a_value_of_an_unsupported_type_counts_as_lost(
    memory: RedisWorkingMemory, redis: Any, namespace: str
) -> None:
    await memory.replace(FIRST, [Item("a", Kind.STRING, b"1")])
    await redis.delete(redis_key(namespace, "working", "a"))
    await redis.xadd(redis_key(namespace, "working", "a"), {"x": "y"})
    assert (await memory.read(AGENT_ID)).lost_keys == ("a",)


class InterruptedCall:
    """Runs `between_calls` after `times` round trips of a call, from the `offset`-th on."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        *,
        offset: int,
        between_calls: Callable[[], Awaitable[None]],
        times: int = 1,
    ) -> None:
        self._patch, self._at, self._then, self._times = patch, offset, between_calls, times
        self.round_trips: list[Sequence[ScriptCall]] = []

    async def run(self, call: Awaitable[Any]) -> Any:
        send = script_calls._send
        inside = False

        async def counted(
            redis: Redis, calls: Sequence[ScriptCall], known: bool
        ) -> list[ScriptReply]:
            nonlocal inside
            replies = await send(redis, calls, known)
            if not inside:
                self.round_trips.append(calls)
                if self._at <= len(self.round_trips) < self._at + self._times:
                    inside = True
                    await self._then()
                    inside = False
            return replies

        self._patch.setattr(script_calls, "_send", counted)
        try:
            return await call
        finally:
            self._patch.setattr(script_calls, "_send", send)


@pytest.mark.parametrize(
    ("times", "trips", "whole"), [(0, 2, False), (1, 4, False), (4, 6, False), (9, 7, True)]
)
async def test_a_write_between_two_parts_of_a_read_restarts_the_read(
    memory: RedisWorkingMemory,
    monkeypatch: pytest.MonkeyPatch,
    times: int,
    trips: int,
    whole: bool,
) -> None:
    items = [Item("a", Kind.STRING, b"0"), *small_items(1200), Item("z", Kind.STRING, b"0")]
    await memory.replace(FIRST, items)

    async def write() -> None:
        await execute_all(memory, to_command("INCRBY", "a", 1), to_command("INCRBY", "z", 1))

    interruption = InterruptedCall(monkeypatch, offset=1, between_calls=write, times=times)
    current = await interruption.run(memory.read(AGENT_ID))
    found = contents_of(current)
    assert found["a"] == found["z"]
    assert len(found) == 1202
    assert len(interruption.round_trips) == trips
    assert (interruption.round_trips[-1][0].args[-1] == -1) is whole


@pytest.mark.parametrize("change", ["delete", "owner", "restore"])
async def test_any_change_between_two_parts_of_a_read_restarts_the_read(
    memory: RedisWorkingMemory, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    items = small_items(1200)
    version = (await memory.replace(FIRST, items)).version

    async def write() -> None:
        match change:
            case "delete":
                await execute_all(memory, to_command("DEL", "key-00001"))
            case "owner":
                await memory.adopt(SECOND, version)
            case "restore":
                await memory.replace(SECOND, items[:600])

    current = await InterruptedCall(monkeypatch, offset=1, between_calls=write).run(
        memory.read(AGENT_ID)
    )
    after = await memory.read(AGENT_ID)
    assert (current.items, current.run_id, current.version) == (
        after.items,
        after.run_id,
        after.version,
    )


async def test_a_key_that_expires_between_two_parts_is_expired_in_both(
    memory: RedisWorkingMemory, monkeypatch: pytest.MonkeyPatch, redis: Any, namespace: str
) -> None:
    now = (await memory.read(AGENT_ID)).now
    await memory.replace(
        FIRST, [Item("short", Kind.STRING, b"1", now + 3_600_000), *small_items(1200)]
    )
    await redis.zadd(
        redis_key(namespace, "index"), {"short": (await memory.read(AGENT_ID)).now + 300}
    )

    async def wait() -> None:
        while "short" in contents_of(await memory.read(AGENT_ID)):  # noqa: ASYNC110  no event
            await asyncio.sleep(0.01)

    interruption = InterruptedCall(monkeypatch, offset=1, between_calls=wait)
    current = await interruption.run(memory.read(AGENT_ID))
    assert contents_of(current) == contents_from_items(small_items(1200))
    assert current.lost_keys == ()
    assert len(interruption.round_trips) == 2


@pytest.mark.parametrize("tries", [3, 0])
async def test_a_read_during_writes_returns_a_consistent_state(
    memory: RedisWorkingMemory,
    redis_url: str,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    tries: int,
) -> None:
    monkeypatch.setattr(working_memory, "READ_ATTEMPTS", tries)
    items = [Item("a", Kind.STRING, b"0"), *small_items(2_000), Item("z", Kind.STRING, b"0")]
    await memory.replace(FIRST, items)
    writer = RedisWorkingMemory(redis_url, make_timeout=NEVER, namespace=namespace)
    seen: set[Any] = set()

    async def write() -> None:
        for _ in range(40):
            batch = [to_command("INCRBY", "a", 1), to_command("INCRBY", "z", 1)]
            await asyncio.gather(*[execute_all(writer, *batch) for _ in range(50)])

    writing = asyncio.create_task(write())
    while not writing.done():
        found = contents_of(await memory.read(AGENT_ID))
        assert found["a"] == found["z"]
        seen.add(found["a"])
    await writing
    assert len(seen) > 3
    assert contents_of(await memory.read(AGENT_ID))["z"] == (Kind.STRING, b"2000")
    await writer.close()


async def test_batches_are_executed_one_after_the_other(memory: RedisWorkingMemory) -> None:
    await memory.replace(FIRST, [])
    batch = [
        to_command("INCRBY", "a", 1),
        to_command("RPUSH", "l", "x"),
        to_command("GET", "a"),
        to_command("LLEN", "l"),
    ]
    done: list[Any] = await asyncio.gather(*[execute_all(memory, *batch) for _ in range(200)])
    assert sorted(outcome[0] for outcome in done) == list(range(1, 201))
    assert all(each == [each[0], each[0], b"%d" % each[0], each[0]] for each in done)


async def test_documented_single_round_trips_are_single(
    proxied_memory: RedisWorkingMemory, wire: RedisProxy
) -> None:
    await proxied_memory.replace(FIRST, EVERY_KIND)  # connects, and loads the scripts
    version = (await proxied_memory.read(AGENT_ID)).version
    await execute_all(proxied_memory, to_command("GET", "text"))
    await proxied_memory.keys(FIRST)
    await proxied_memory.retain(FIRST, paused=False)
    await proxied_memory.adopt(FIRST, version)
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: proxied_memory.execute(
            FIRST, [to_command("SET", str(number), number) for number in range(300)]
        ),
        lambda: proxied_memory.keys(FIRST),
        lambda: proxied_memory.read(AGENT_ID),
        lambda: proxied_memory.adopt(SECOND, version + 1),
        lambda: proxied_memory.retain(SECOND, paused=True),
        lambda: proxied_memory.replace(SECOND, EVERY_KIND),
    ]
    for call in calls:
        wire.reset()
        assert await call() is not False
        assert wire.round_trips == 1
    await proxied_memory.replace(SECOND, small_items(1200))
    wire.reset()
    await proxied_memory.read(AGENT_ID)
    assert wire.round_trips == 2


@pytest.mark.parametrize("at", range(6))
async def test_scripts_can_be_flushed_at_any_time(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 2_000)
    monkeypatch.setattr(staging, "STEP_BYTES", 300)
    memory = RedisWorkingMemory(own_redis.url, make_timeout=NEVER, namespace="mesh")
    items = [
        *small_items(600),
        Item("list", Kind.LIST, tuple(b"%d" % number for number in range(600))),
    ]
    async with redis_client(own_redis.url) as redis:
        await redis.flushall()

        async def forget() -> None:
            await redis.script_flush()

        await forget()
        for _ in range(2):
            current = await InterruptedCall(monkeypatch, offset=at, between_calls=forget).run(
                memory.replace(FIRST, items)
            )
            assert contents_of(current) == contents_from_items(items)
        await forget()
        assert contents_of(
            await InterruptedCall(monkeypatch, offset=1, between_calls=forget).run(
                memory.read(AGENT_ID)
            )
        ) == contents_from_items(items)
        await forget()
        assert await execute_all(memory, to_command("INCRBY", "n", 1)) == [1]
        await forget()
        assert len(await memory.keys(FIRST)) == 602
        await forget()
        assert await InterruptedCall(monkeypatch, offset=1, between_calls=forget).run(
            memory.adopt(SECOND, (await memory.read(AGENT_ID)).version)
        )
        await forget()
        await InterruptedCall(monkeypatch, offset=1, between_calls=forget).run(
            memory.retain(SECOND, paused=True)
        )
        assert await redis.pttl("mesh:L1:{" + AGENT_ID + "}:working:list") > 13 * DAY
        await forget()
        await memory.forget(SECOND)
        assert not await redis.keys("mesh:L1:{" + AGENT_ID + "}:working:*")
    await memory.close()


OLD = (
    Item("a", Kind.STRING, b"old"),
    Item("l", Kind.LIST, (b"old",) * 3),
    Item("missing", Kind.STRING, b"old"),
)
NEW = (
    Item("a", Kind.STRING, b"new"),
    Item("l", Kind.LIST, tuple(b"new %d" % number for number in range(12))),
    Item("h", Kind.HASH, {b"%d" % number: b"new" for number in range(12)}),
    Item("z", Kind.ZSET, {b"%d" % number: 1.0 for number in range(12)}),
    Item("s", Kind.SET, frozenset(b"%d" % number for number in range(12))),
)


@pytest.mark.parametrize("small_steps", [False, True])
async def test_a_restore_cut_at_any_byte_leaves_the_old_or_the_new_memory(
    memory: RedisWorkingMemory,
    proxied_memory: RedisWorkingMemory,
    wire: RedisProxy,
    monkeypatch: pytest.MonkeyPatch,
    small_steps: bool,
) -> None:
    if small_steps:
        monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 150)
        monkeypatch.setattr(staging, "STEP_BYTES", 40)
    await proxied_memory.replace(FIRST, NEW)
    wire.reset()
    await proxied_memory.replace(FIRST, NEW)
    size = wire.sent
    assert (wire.round_trips > 5) is small_steps
    seen = []
    for offset in range(0, size, max(1, size // 60)):
        await memory.replace(FIRST, OLD)
        wire.cut_after(offset)
        with pytest.raises(MemoryUnavailable):
            await proxied_memory.replace(SECOND_AS_FIRST, NEW)
        wire.mend()
        current = await memory.read(AGENT_ID)
        assert (contents_of(current), current.run_id) in [
            (contents_from_items(OLD), "run-1"),
            (contents_from_items(NEW), "run-1b"),
        ]
        assert current.lost_keys == ()
        seen.append(str(current.run_id))
    assert seen == sorted(seen)  # old before the swap, new after it
    assert set(seen) == {"run-1", "run-1b"}
    assert contents_of(await proxied_memory.replace(SECOND, NEW)) == contents_from_items(NEW)


SECOND_AS_FIRST = Owner(AGENT_ID, RunId("run-1b"), 1)


async def test_a_restore_whose_response_is_lost_is_applied(
    memory: RedisWorkingMemory, proxied_memory: RedisWorkingMemory, wire: RedisProxy
) -> None:
    await proxied_memory.replace(FIRST, NEW)  # connects, and loads the scripts
    await memory.replace(FIRST, OLD)
    wire.lose_answers()
    with pytest.raises(MemoryUnavailable):
        await proxied_memory.replace(SECOND, NEW)
    current = await memory.read(AGENT_ID)
    assert (contents_of(current), current.run_id) == (contents_from_items(NEW), "run-2")


async def test_a_write_whose_response_is_lost_is_applied_once(
    memory: RedisWorkingMemory, proxied_memory: RedisWorkingMemory, wire: RedisProxy
) -> None:
    await proxied_memory.replace(FIRST, [])
    await execute_all(proxied_memory, to_command("SET", "n", 0))  # loads the script
    wire.lose_answers()
    with pytest.raises(MemoryUnavailable):
        await execute_all(proxied_memory, to_command("INCRBY", "n", 1))
    wire.mend()
    assert await execute_all(memory, to_command("GET", "n")) == [b"1"]


async def test_staged_data_expires(
    memory: RedisWorkingMemory, monkeypatch: pytest.MonkeyPatch, redis: Any, namespace: str
) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 1)
    monkeypatch.setattr(staging, "STEP_BYTES", 1)

    async def die() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await InterruptedCall(monkeypatch, offset=20, between_calls=die).run(
            memory.replace(FIRST, NEW)
        )
    remaining_keys = await redis.keys(redis_key(namespace, "restore", "*"))
    assert len(remaining_keys) > 2
    for key in remaining_keys:
        assert 0 < await redis.pttl(key) <= 3_600_000


@pytest.mark.parametrize("lost", ["value", "index", "values again"])
async def test_a_restore_that_lost_staged_data_is_not_applied(
    memory: RedisWorkingMemory,
    monkeypatch: pytest.MonkeyPatch,
    redis: Any,
    namespace: str,
    lost: str,
) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 1)
    monkeypatch.setattr(staging, "STEP_BYTES", 10)
    await memory.replace(FIRST, OLD)

    async def evict() -> None:
        name = {"value": "working:a", "index": "index", "values again": "working:l"}[lost]
        [key] = await redis.keys(redis_key(namespace, "restore", "*", name))
        await redis.delete(key)

    with pytest.raises(MemoryUnavailable, match="lost part of the staged data"):
        await InterruptedCall(monkeypatch, offset=3, between_calls=evict).run(
            memory.replace(SECOND, NEW)
        )
    current = await memory.read(AGENT_ID)
    assert (contents_of(current), current.run_id) == (contents_from_items(OLD), "run-1")


async def test_a_restore_that_lost_its_last_step_is_not_applied(
    memory: RedisWorkingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "STEP_BYTES", 30)
    await memory.replace(FIRST, OLD)
    send = script_calls._send

    nothing = ScriptCall(READ, (b"none:head", b"none:index"), (b"", 0, 0))

    async def without_last(
        redis: Redis, calls: Sequence[ScriptCall], known: bool
    ) -> list[ScriptReply]:
        last = max(index for index, call in enumerate(calls) if call.script is STAGE)
        return await send(redis, [*calls[:last], nothing, *calls[last + 1 :]], known)

    monkeypatch.setattr(script_calls, "_send", without_last)
    items = [
        Item("x", Kind.STRING, b"1" * 40),
        Item("l", Kind.LIST, tuple(b"%d" % number for number in range(40))),
    ]
    with pytest.raises(MemoryUnavailable, match="lost part of the staged data"):
        await memory.replace(SECOND, items)
    monkeypatch.setattr(script_calls, "_send", send)
    current = await memory.read(AGENT_ID)
    assert (contents_of(current), current.run_id) == (contents_from_items(OLD), "run-1")


class DelayedCall:
    """Holds back the next requests, which fail for the caller, until `deliver` sends them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch, self._send = patch, script_calls._send
        self._delayed: list[tuple[Redis, Sequence[ScriptCall]]] = []

    async def delay(self, call: Awaitable[Any]) -> None:
        async def delayed(
            redis: Redis, calls: Sequence[ScriptCall], known: bool
        ) -> list[ScriptReply]:
            self._delayed.append((redis, calls))
            raise TimeoutError

        self._patch.setattr(script_calls, "_send", delayed)
        with pytest.raises(MemoryUnavailable):
            await call
        self._patch.setattr(script_calls, "_send", self._send)

    async def deliver(self) -> list[ScriptReply]:
        [(redis, calls)] = self._delayed
        return await self._send(redis, calls, False)


@pytest.mark.parametrize("before", ["nothing", "another run's", "its own"])
@pytest.mark.parametrize("items", [(), NEW], ids=["empty", "restored"])
async def test_a_late_replace_is_fenced(
    proxied_memory: RedisWorkingMemory,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    items: Sequence[Item],
) -> None:
    """The same run has retried and written since."""
    delayed, seen = DelayedCall(monkeypatch), 0
    if before != "nothing":
        seen = (
            await proxied_memory.replace(FIRST if before == "another run's" else SECOND, OLD)
        ).version
    await delayed.delay(proxied_memory.replace(SECOND, items, expected_version=seen))
    version = (await proxied_memory.replace(SECOND, items, expected_version=seen)).version
    version, _ = await proxied_memory.execute(
        SECOND, [to_command("SET", "a", "newer")], expected_version=version
    )
    expected = contents_from_items(items) | {"a": (Kind.STRING, b"newer")}
    await delayed.deliver()
    found = await proxied_memory.read(AGENT_ID)
    assert (contents_of(found), found.version, found.run_id) == (expected, version, SECOND.run_id)
    assert (
        await proxied_memory.execute(SECOND, [to_command("GET", "a")], expected_version=version)
    )[1] == [b"newer"]


async def test_a_late_write_is_fenced(
    proxied_memory: RedisWorkingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    delayed = DelayedCall(monkeypatch)
    seen = (await proxied_memory.replace(FIRST, [], expected_version=0)).version
    await delayed.delay(
        proxied_memory.execute(
            FIRST,
            [to_command("SET", "a", "old"), to_command("INCRBY", "n", 1)],
            expected_version=seen,
        )
    )
    version, _ = await proxied_memory.execute(
        FIRST, [to_command("SET", "a", "new"), to_command("INCRBY", "n", 1)], expected_version=seen
    )
    assert await delayed.deliver() == [[b"stale"]]
    assert (
        await proxied_memory.execute(
            FIRST, [to_command("GET", "a"), to_command("GET", "n")], expected_version=version
        )
    )[1] == [b"new", b"1"]
    assert (await proxied_memory.read(AGENT_ID)).version == version


async def test_an_old_version_is_refused_for_writes_but_not_for_reads(
    memory: RedisWorkingMemory,
) -> None:
    old = (await memory.replace(FIRST, [], expected_version=0)).version
    new, _ = await memory.execute(FIRST, [to_command("SET", "a", "new")], expected_version=old)
    with pytest.raises(MemoryUnavailable):
        await memory.execute(FIRST, [to_command("SET", "a", "old")], expected_version=old)
    for seen in (0, old):
        with pytest.raises(MemoryUnavailable):
            await memory.replace(FIRST, OLD, expected_version=seen)
    assert await memory.execute(FIRST, [to_command("GET", "a")], expected_version=old) == (
        new,
        [b"new"],
    )


async def test_the_owning_run_gets_the_memory_whatever_fence_it_finds(
    memory: RedisWorkingMemory,
) -> None:
    await memory.replace(SECOND, OLD)
    with pytest.raises(MemoryFenced):
        await memory.replace(FIRST, [])
    found = await memory.replace(FIRST, [], force=True)
    assert (contents_of(found), found.run_id, found.fence) == ({}, FIRST.run_id, FIRST.fence)
    with pytest.raises(MemoryLost):
        await memory.execute(SECOND, [to_command("SET", "a", 1)])


def test_replies_for_only_some_keys_are_rejected() -> None:
    reply = [b"ok", 1000, b"run-1", b"1", 7, 3, [[b"a", b"inf", b"string", b"1"]]]
    assert not is_consistent([reply])
    assert parse_contents([[*reply[:5], 2, reply[6]]]) == MemoryContents(
        (Item("a", Kind.STRING, b"1"),), 7, 1000, RunId("run-1"), 1
    )


@pytest.mark.parametrize("tenth", range(11))
async def test_a_redis_killed_during_a_restore_has_the_old_or_the_new_memory(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, tenth: int
) -> None:
    own_redis.sync_every_write()
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 300)
    monkeypatch.setattr(staging, "STEP_BYTES", 40)
    async with RedisProxy(own_redis.url) as wire:
        memory = RedisWorkingMemory(
            wire.url, make_timeout=NEVER, namespace="mesh", retry_after=timedelta(0)
        )
        await memory.replace(Owner(AGENT_ID, RunId("run-0"), 9), NEW)
        await memory.forget(Owner(AGENT_ID, RunId("run-0"), 9))
        await memory.replace(FIRST, [])
        wire.reset()
        await memory.replace(FIRST, NEW)
        size = wire.sent
        await memory.replace(FIRST, OLD)
        wire.cut_after(size * tenth // 10 - (tenth == 10), own_redis.kill)
        with pytest.raises(MemoryUnavailable):
            await memory.replace(SECOND, NEW)
        wire.mend()
        await own_redis.start()
        current = await memory.read(AGENT_ID)
        assert (contents_of(current), current.run_id) in [
            (contents_from_items(OLD), "run-1"),
            (contents_from_items(NEW), "run-2"),
        ]
        assert current.lost_keys == ()
        await memory.forget(FIRST if current.run_id == "run-1" else SECOND)
        await memory.close()


async def test_a_silent_redis_costs_one_timeout(redis_url: str, namespace: str) -> None:
    async with Proxy(redis_url) as proxy:
        seconds, limits = 0.0, ManualTimeouts()
        memory = RedisWorkingMemory(
            proxy.url, namespace=namespace, make_timeout=limits, clock=lambda: seconds
        )
        proxy.silence()
        limits.expired = True
        with pytest.raises(MemoryUnavailable, match=r"no answer within 5\.0 s"):
            await memory.read(AGENT_ID)
        for attempt in (
            memory.execute(FIRST, [to_command("GET", "a")]),
            memory.keys(FIRST),
            memory.read(AGENT_ID),
            memory.adopt(FIRST, 1),
            memory.replace(FIRST, []),
            memory.retain(FIRST, paused=True),
            memory.forget(FIRST),
        ):
            with pytest.raises(MemoryUnavailable, match="not asked"):
                await attempt
        proxy.resume()
        seconds, limits.expired = 5.0, False
        assert (await memory.read(AGENT_ID)).items == ()
        await memory.close()


async def test_a_full_redis_is_unavailable_and_loses_nothing(own_redis: RedisServer) -> None:
    memory = RedisWorkingMemory(
        own_redis.url, make_timeout=NEVER, namespace="mesh", retry_after=timedelta(0)
    )
    await memory.replace(FIRST, OLD)
    async with redis_client(own_redis.url) as redis:
        await redis.config_set("maxmemory", "1")
        try:
            with pytest.raises(MemoryUnavailable, match="maxmemory"):
                await execute_all(memory, to_command("SET", "n", 1))
            with pytest.raises(MemoryUnavailable):
                await memory.replace(SECOND, NEW)
            current = await memory.read(AGENT_ID)
            assert await execute_all(memory, to_command("GET", "a")) == [b"old"]
        finally:
            await redis.config_set("maxmemory", "0")
    assert (contents_of(current), current.run_id) == (contents_from_items(OLD), "run-1")
    await memory.forget(FIRST)
    await memory.close()


@pytest.mark.parametrize("steps", range(12))
async def test_a_cancelled_caller_does_not_affect_other_answers(
    memory: RedisWorkingMemory, steps: int
) -> None:
    await memory.replace(FIRST, EVERY_KIND)
    asking = asyncio.create_task(memory.read(AGENT_ID))
    for _ in range(steps):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert await execute_all(memory, to_command("GET", "☃:{} *")) == [b"snow"]


@pytest.mark.parametrize(
    "option", ["", "?decode_responses=true", "?protocol=3", "?retry_on_timeout=true"]
)
async def test_url_options_do_not_break_the_memory(
    redis_url: str, namespace: str, option: str
) -> None:
    memory = RedisWorkingMemory(redis_url + option, make_timeout=NEVER, namespace=namespace)
    assert contents_of(await memory.replace(FIRST, EVERY_KIND)) == contents_from_items(EVERY_KIND)
    assert await execute_all(
        memory, to_command("ZSCORE", "zset", "a"), to_command("GET", "none")
    ) == [b"0", None]
    await memory.close()


def test_a_malformed_url_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigurationError) as caught:
        RedisWorkingMemory("http://:secret@localhost/0", namespace="mesh")
    assert caught.value.key == "agent.memory_url"
    assert "sec" not in str(caught.value)


def test_a_redis_memory_outlives_the_process(redis_url: str) -> None:
    assert RedisWorkingMemory(redis_url, make_timeout=NEVER, namespace="mesh").durable
