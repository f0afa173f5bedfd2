"""Working memories on a real Redis, which may lose anything, break at any byte, or die."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from redis.asyncio import Redis
from redis_wire import NEVER, Limits, Wire

from meshpoint.adapters.redis import RedisWorkingMemory, script_calls, staging, working_memory
from meshpoint.adapters.redis.holding import parse_contents
from meshpoint.adapters.redis.script_calls import ScriptCall, ScriptReply
from meshpoint.adapters.redis.scripts import READ, STAGE
from meshpoint.errors import ConfigurationError, MemoryFenced, MemoryLost, MemoryRefused, MemoryUnavailable
from meshpoint.model.ids import RunId
from meshpoint.model.memory import Answer, Command, Content, Held, Item, Kind, Owner
from servers import Proxy, RedisServer

A = "travel:task-1"
DAY = 24 * 3600 * 1000
FIRST, SECOND = Owner(A, RunId("run-1"), 1), Owner(A, RunId("run-2"), 2)

EVERY_KIND = (
    Item("text", Kind.STRING, b"\x00\xff\r\n{}"),
    Item("empty", Kind.STRING, b""),
    Item("list", Kind.LIST, (b"", b"\xff\x00", b"a", b"a")),
    Item("hash", Kind.HASH, {b"": b"", b"\xfe": b"\x00"}),
    Item("set", Kind.SET, frozenset({b"", b"1", b"\x80"})),
    Item("zset", Kind.ZSET, {b"": 1e-320, b"a": -0.0, b"\xff": math.inf, b"c": -math.inf, b"d": 0.1 + 0.2}),
    Item("☃:{} *", Kind.STRING, b"snow"),
)


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[Any]:
    """Direct connection to Redis."""
    async with Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
async def memory(redis_url: str, namespace: str) -> AsyncIterator[RedisWorkingMemory]:
    memory = RedisWorkingMemory(redis_url, make_timeout=NEVER, namespace=namespace)
    yield memory
    await memory.close()


@pytest.fixture
async def wire(redis_url: str) -> AsyncIterator[Wire]:
    async with Wire(redis_url) as wire:
        yield wire


@pytest.fixture
async def distant(wire: Wire, namespace: str) -> AsyncIterator[RedisWorkingMemory]:
    """A memory behind `wire` that retries Redis immediately after a failure."""
    memory = RedisWorkingMemory(wire.url, make_timeout=NEVER, namespace=namespace, retry_after=timedelta(0))
    yield memory
    await memory.close()


def path(namespace: str, *rest: str) -> str:
    return ":".join([namespace, "L1", "{" + A + "}", *rest])


def do(name: str, key: str, *args: bytes | str | int) -> Command:
    return Command(name, key, tuple(arg if isinstance(arg, bytes) else str(arg).encode() for arg in args))


async def answers(memory: RedisWorkingMemory, *commands: Command, owner: Owner = FIRST) -> list[Answer]:
    return (await memory.execute(owner, commands))[1]


def contents(held: Held) -> dict[str, tuple[Kind, Content]]:
    return {item.key: (item.kind, item.content) for item in held.items}


def given(items: Sequence[Item]) -> dict[str, tuple[Kind, Content]]:
    return {item.key: (item.kind, item.content) for item in items}


def small(count: int) -> list[Item]:
    return [Item(f"key-{number:05}", Kind.STRING, b"%d" % number) for number in range(count)]


async def nothing_staged(raw: Any, namespace: str) -> bool:
    return not await raw.keys(path(namespace, "restore", "*"))


async def test_a_memory_is_what_was_put_in_it(memory: RedisWorkingMemory) -> None:
    held = await memory.replace(FIRST, EVERY_KIND)
    assert contents(held) == given(EVERY_KIND)
    assert (held.run_id, held.fence, held.lost) == (FIRST.run_id, 1, ())
    assert contents(await memory.read(A)) == given(EVERY_KIND)
    assert set(await memory.keys(FIRST)) == set(given(EVERY_KIND))


@pytest.mark.parametrize("size", [1, 1000])
async def test_a_zero_in_a_sorted_set_has_no_sign(memory: RedisWorkingMemory, size: int) -> None:
    scores = {b"%d" % number: -0.0 for number in range(size)}
    [item] = (await memory.replace(FIRST, [Item("zset", Kind.ZSET, scores)])).items
    assert isinstance(item.content, dict)
    assert {math.copysign(1, score) for score in item.content.values()} == {1.0}
    assert len(item.content) == size


async def test_ten_thousand_keys(memory: RedisWorkingMemory, raw: Any, namespace: str) -> None:
    items = small(10_000)
    assert contents(await memory.replace(FIRST, items)) == given(items)
    assert contents(await memory.read(A)) == given(items)
    assert sorted(await memory.keys(FIRST)) == sorted(given(items))
    assert await memory.adopt(SECOND, (await memory.read(A)).version)
    await memory.retain(SECOND, paused=True)
    assert await raw.pttl(path(namespace, "working", "key-09999")) > 13 * DAY
    await memory.forget(SECOND)
    assert await raw.keys(f"{namespace}:*") == []


async def test_a_hundred_thousand_elements(memory: RedisWorkingMemory) -> None:
    many = [b"%d" % number for number in range(100_000)]
    pairs = [part for each in many for part in (each, each)]
    await memory.replace(FIRST, [])
    assert (
        await answers(
            memory,
            do("RPUSH", "list", *many),
            do("SADD", "set", *many),
            do("HSET", "hash", *pairs),
            do("ZADD", "zset", *pairs),
        )
        == [100_000] * 4
    )
    held = await memory.read(A)
    expected = {
        "list": (Kind.LIST, tuple(many)),
        "set": (Kind.SET, frozenset(many)),
        "hash": (Kind.HASH, dict(zip(many, many, strict=True))),
        "zset": (Kind.ZSET, {each: float(each) for each in many}),
    }
    assert contents(held) == expected
    assert contents(await memory.replace(SECOND, held.items)) == expected
    assert await answers(
        memory,
        do("LPUSH", "list", *many),
        do("SREM", "set", *many),
        do("HDEL", "hash", *many),
        do("ZREM", "zset", *many),
        owner=SECOND,
    ) == [200_000, 100_000, 100_000, 100_000]
    assert await memory.keys(SECOND) == ["list"]


async def test_a_bad_score_among_many_changes_nothing(memory: RedisWorkingMemory) -> None:
    before = [Item("zset", Kind.ZSET, {b"m": 1.0}), Item("hash", Kind.HASH, {b"f": b"v"})]
    await memory.replace(FIRST, before)
    scores = [part for number in range(9_000) for part in (number, number)]
    for bad in ("nan", "x"):
        with pytest.raises(MemoryRefused, match="'zset'"):
            await answers(memory, do("ZADD", "zset", *scores, bad, "m"))
    with pytest.raises(MemoryRefused, match="'hash'"):
        await answers(memory, do("HSET", "hash", *scores, "odd"))
    assert contents(await memory.read(A)) == given(before)


async def test_every_command_answers_as_redis_does(memory: RedisWorkingMemory) -> None:
    await memory.replace(FIRST, [])
    asked: list[tuple[Command, Answer]] = [
        (do("GET", "s"), None),
        (do("TYPE", "s"), b"none"),
        (do("SET", "s", "1"), b"OK"),
        (do("TYPE", "s"), b"string"),
        (do("INCRBY", "s", 2), 3),
        (do("INCRBY", "big", 2**53 + 1), 2**53 + 1),
        (do("HINCRBY", "h", "f", -(2**60) - 1), -(2**60) - 1),
        (do("INCRBYFLOAT", "f", "0.5"), b"0.5"),
        (do("RPUSH", "l", "a", "b", "c"), 3),
        (do("LPUSH", "l", "z"), 4),
        (do("LRANGE", "l", 0, -1), [b"z", b"a", b"b", b"c"]),
        (do("LTRIM", "l", 1, 2), b"OK"),
        (do("LINDEX", "l", 0), b"a"),
        (do("LINDEX", "l", 9), None),
        (do("LLEN", "l"), 2),
        (do("LPOP", "l"), b"a"),
        (do("RPOP", "l"), b"b"),
        (do("RPOP", "l"), None),
        (do("HSET", "h", "g", "1", "f", "2"), 1),
        (do("HGET", "h", "g"), b"1"),
        (do("HGETALL", "h"), [b"f", b"2", b"g", b"1"]),
        (do("HEXISTS", "h", "x"), 0),
        (do("HLEN", "h"), 2),
        (do("HDEL", "h", "f", "g"), 2),
        (do("SADD", "t", "1", "1"), 1),
        (do("SMEMBERS", "t"), [b"1"]),
        (do("SISMEMBER", "t", "1"), 1),
        (do("SCARD", "t"), 1),
        (do("SREM", "t", "1"), 1),
        (do("ZADD", "z", "1.5", "a", "inf", "b"), 2),
        (do("ZINCRBY", "z", "1", "a"), b"2.5"),
        (do("ZSCORE", "z", "a"), b"2.5"),
        (do("ZSCORE", "z", "x"), None),
        (do("ZRANGE", "z", 0, -1, "WITHSCORES"), [b"a", b"2.5", b"b", b"inf"]),
        (do("ZRANGEBYSCORE", "z", "-inf", "3", "WITHSCORES"), [b"a", b"2.5"]),
        (do("ZCARD", "z"), 2),
        (do("ZREM", "z", "a", "b"), 2),
        (do("DEL", "s"), 1),
        (do("DEL", "s"), 0),
    ]
    together = await answers(memory, *[command for command, _ in asked])
    for (command, expected), answer in zip(asked, together, strict=True):
        assert sorted_hash(command, answer) == expected, command
    assert sorted(await memory.keys(FIRST)) == ["big", "f"]


def sorted_hash(command: Command, answer: Answer) -> Answer:
    if command.name != "HGETALL" or not isinstance(answer, list):
        return answer
    return [part for pair in sorted(zip(answer[::2], answer[1::2], strict=True)) for part in pair]


async def test_a_read_leaves_the_version_and_a_batch_that_writes_raises_it_by_one(memory: RedisWorkingMemory) -> None:
    begun = (await memory.replace(FIRST, [])).version
    assert (await memory.execute(FIRST, [do("GET", "a")]))[0] == begun
    assert (await memory.execute(FIRST, [do("SET", "a", 1), do("SET", "b", 1)]))[0] == begun + 1
    assert (await memory.read(A)).version == begun + 1
    assert (await memory.replace(FIRST, [])).version == begun + 2


async def test_an_emptied_memory_is_empty_and_not_lost(memory: RedisWorkingMemory) -> None:
    await memory.replace(FIRST, EVERY_KIND)
    assert (await memory.replace(FIRST, [])).items == ()
    assert await memory.keys(FIRST) == []
    assert await answers(memory, do("SET", "a", 1), do("DEL", "a")) == [b"OK", 1]
    held = await memory.read(A)
    assert (held.items, held.lost, held.run_id) == ((), (), FIRST.run_id)


async def test_memories_of_other_tasks_and_meshes_are_others(memory: RedisWorkingMemory, redis_url: str) -> None:
    await memory.replace(FIRST, EVERY_KIND)
    assert (await memory.read("travel:task-2")).run_id is None
    other = RedisWorkingMemory(redis_url, make_timeout=NEVER, namespace="other")
    assert (await other.read(A)).items == ()
    await other.close()


async def test_what_others_put_there_is_no_part_of_it(memory: RedisWorkingMemory, raw: Any, namespace: str) -> None:
    await memory.replace(FIRST, [])
    await raw.set(path(namespace, "working", "stranger"), "x")
    assert (await memory.read(A)).items == ()
    assert await memory.keys(FIRST) == []
    assert await answers(memory, do("GET", "stranger"), do("RPUSH", "stranger", "a")) == [None, 1]


async def test_a_refused_command_is_named_and_those_before_it_are_done(memory: RedisWorkingMemory) -> None:
    await memory.replace(FIRST, [Item("list", Kind.LIST, (b"a",)), Item("text", Kind.STRING, b"x")])
    top = do("INCRBY", "n", 2**63 - 1)
    for bad in (
        do("GET", "list"),
        do("INCRBY", "text", 1),
        do("INCRBYFLOAT", "text", 1),
        do("LTRIM", "list", "a", "b"),
        do("RPUSH", "text", *["x"] * 9_000),
        do("FLUSHALL", "text"),
        do("GET", ""),
    ):
        with pytest.raises(MemoryRefused, match=f"memory key '{bad.key}'"):
            await answers(memory, bad)
    version = (await memory.read(A)).version
    with pytest.raises(MemoryRefused, match=r"'n': INCRBY: .*overflow"):
        await answers(memory, do("SET", "before", 1), top, do("INCRBY", "n", 1), do("SET", "after", 1))
    held = await memory.read(A)
    assert set(contents(held)) == {"list", "text", "before", "n"}
    assert held.version == version + 1


async def test_a_key_has_a_time_of_its_own(memory: RedisWorkingMemory, raw: Any, namespace: str) -> None:
    await memory.replace(FIRST, [])
    key = path(namespace, "working", "k")
    assert await answers(memory, do("PTTL", "k"), do("PEXPIRE", "k", 1), do("PERSIST", "k")) == [-2, 0, 0]
    assert await answers(memory, do("SET", "k", 1), do("PTTL", "k")) == [b"OK", -1]
    assert DAY - 60_000 < await raw.pttl(key) <= DAY
    assert await answers(memory, do("PEXPIRE", "k", 60_000), do("PTTL", "k")) == [1, 60_000]
    assert 50_000 < await raw.pttl(key) <= 60_000
    assert await answers(memory, do("INCRBY", "k", 1), do("PERSIST", "k"), do("PTTL", "k")) == [2, 1, -1]
    assert DAY - 60_000 < await raw.pttl(key) <= DAY
    assert await answers(memory, do("PEXPIRE", "k", 60_000), do("SET", "k", 1), do("PTTL", "k")) == [1, b"OK", -1]
    again = [do("PEXPIRE", "k", 60_000), do("DEL", "k"), do("PTTL", "k"), do("RPUSH", "k", 1), do("PTTL", "k")]
    assert await answers(memory, *again) == [1, 1, -2, 1, -1]
    popped = [do("PEXPIRE", "k", 60_000), do("LPOP", "k"), do("RPUSH", "k", 1), do("PTTL", "k")]
    assert await answers(memory, *popped) == [1, b"1", 1, -1]
    assert await answers(memory, do("PEXPIRE", "k", 0), do("TYPE", "k")) == [1, b"none"]
    assert await memory.keys(FIRST) == []
    longest = [do("SET", "k", 1), do("PEXPIRE", "k", 30 * DAY), do("PTTL", "k")]
    assert await answers(memory, *longest) == [b"OK", 1, 30 * DAY]
    assert DAY - 60_000 < await raw.pttl(key) <= DAY


async def test_own_times_are_kept_when_it_is_replaced(memory: RedisWorkingMemory) -> None:
    now = (await memory.read(A)).now
    items = [
        Item("soon", Kind.STRING, b"1", now + 60_000),
        Item("late", Kind.LIST, (b"1",), now + 30 * DAY),
        Item("over", Kind.STRING, b"1", now),
        Item("never", Kind.STRING, b"1"),
    ]
    held = await memory.replace(FIRST, items)
    assert {item.key: item.expires_at for item in held.items} == {
        "soon": now + 60_000,
        "late": now + 30 * DAY,
        "never": None,
    }
    soon, late, never = await answers(memory, do("PTTL", "soon"), do("PTTL", "late"), do("PTTL", "never"))
    assert isinstance(soon, int)
    assert isinstance(late, int)
    assert 59_000 < soon <= 60_000
    assert 30 * DAY - 1000 < late <= 30 * DAY
    assert never == -1


async def test_a_key_whose_own_time_is_over_is_gone_though_redis_has_it(
    memory: RedisWorkingMemory, raw: Any, namespace: str
) -> None:
    items = [Item(key, Kind.LIST, (b"1",)) for key in ("a", "b", "c")]
    await memory.replace(FIRST, items)
    await raw.zadd(path(namespace, "index"), {"a": 1, "b": 1})
    assert [item.key for item in (await memory.read(A)).items] == ["c"]
    assert await memory.keys(FIRST) == ["c"]
    assert await answers(memory, do("LLEN", "a"), do("RPUSH", "b", "x"), do("PTTL", "b")) == [0, 1, -1]
    assert set(contents(await memory.read(A))) == {"b", "c"}


async def test_the_memory_lives_from_its_last_write_and_longer_once_paused(
    memory: RedisWorkingMemory, raw: Any, namespace: str
) -> None:
    now = (await memory.read(A)).now
    await memory.replace(FIRST, [Item("a", Kind.STRING, b"1"), Item("b", Kind.STRING, b"1", now + 3_600_000)])
    places = {name: path(namespace, *name.split(":")) for name in ("head", "index", "working:a", "working:b")}

    async def rest() -> dict[str, float]:
        return {name: round(await raw.pttl(place) / DAY, 1) for name, place in places.items()}

    active = {"head": 1, "index": 1, "working:a": 1, "working:b": 0}
    assert await rest() == active
    for name in ("head", "index", "working:a"):
        await raw.pexpire(places[name], 3_600_000)
    await answers(memory, do("GET", "a"))
    assert (await rest())["head"] == 0
    await answers(memory, do("SET", "a", 1))
    assert await rest() == active
    await memory.retain(FIRST, paused=True)
    assert await rest() == {"head": 14, "index": 14, "working:a": 14, "working:b": 0}
    assert await memory.adopt(SECOND, (await memory.read(A)).version)
    assert await rest() == active
    await memory.retain(FIRST, paused=True)
    assert await rest() == active


async def test_a_zombie_changes_nothing(memory: RedisWorkingMemory, raw: Any, namespace: str) -> None:
    version = (await memory.replace(FIRST, EVERY_KIND)).version
    assert await memory.adopt(SECOND, version)
    before = await memory.read(A)
    rest = await raw.pttl(path(namespace, "head"))
    with pytest.raises(MemoryFenced, match="run-2 with fence 2"):
        await answers(memory, do("SET", "text", "zombie"))
    with pytest.raises(MemoryFenced):
        await answers(memory, do("GET", "text"))
    with pytest.raises(MemoryFenced):
        await memory.keys(FIRST)
    with pytest.raises(MemoryFenced):
        await memory.adopt(FIRST, version)
    with pytest.raises(MemoryFenced):
        await memory.replace(FIRST, small(3))
    await memory.retain(FIRST, paused=True)
    await memory.forget(FIRST)
    with pytest.raises(MemoryFenced):
        await memory.execute(Owner(A, SECOND.run_id, 1), [do("SET", "text", "older")])
    after = await memory.read(A)
    assert (after.items, after.version, after.run_id, after.fence) == (before.items, version, "run-2", 2)
    assert await raw.pttl(path(namespace, "head")) <= rest
    assert await nothing_staged(raw, namespace)


async def test_an_owner_that_finds_an_earlier_one_has_lost_its_own(memory: RedisWorkingMemory) -> None:
    await memory.replace(FIRST, EVERY_KIND)
    with pytest.raises(MemoryLost):
        await answers(memory, do("GET", "text"), owner=SECOND)
    with pytest.raises(MemoryLost):
        await memory.keys(SECOND)
    await memory.forget(SECOND)
    assert contents(await memory.read(A)) == {}


async def test_a_redis_that_came_back_older_than_it_was_is_not_taken_for_the_same(memory: RedisWorkingMemory) -> None:
    await memory.replace(FIRST, [])
    seen, _ = await memory.execute(FIRST, [do("SET", "a", 1)])
    with pytest.raises(MemoryLost):
        await memory.execute(FIRST, [do("GET", "a")], seen=seen + 1)
    with pytest.raises(MemoryLost):
        await memory.keys(FIRST, seen=seen + 1)
    assert await memory.keys(FIRST, seen=seen) == ["a"]


async def test_another_run_with_the_same_fence_owns_nothing(memory: RedisWorkingMemory) -> None:
    await memory.replace(FIRST, EVERY_KIND)
    with pytest.raises(MemoryFenced):
        await answers(memory, do("GET", "text"), owner=SECOND_AS_FIRST)


async def test_nothing_of_the_old_memory_and_nothing_that_ended_is_left_in_redis(
    memory: RedisWorkingMemory, raw: Any, namespace: str
) -> None:
    await memory.replace(FIRST, OLD)
    await memory.replace(FIRST, [Item("a", Kind.STRING, b"1"), Item("over", Kind.STRING, b"1", 1)])
    left = {key.decode() for key in await raw.keys(f"{namespace}:*")}
    assert left == {path(namespace, name) for name in ("head", "index", "working:a")}
    assert await raw.zrange(path(namespace, "index"), 0, -1) == [b"", b"a"]


async def test_a_memory_that_changed_since_it_was_read_is_not_adopted(memory: RedisWorkingMemory) -> None:
    version = (await memory.replace(FIRST, [])).version
    await answers(memory, do("SET", "a", 1))
    assert not await memory.adopt(SECOND, version)
    await answers(memory, do("SET", "a", 2))
    assert await memory.adopt(SECOND, version + 2)


async def test_a_memory_that_was_lost_and_begun_again_is_not_taken_for_the_same(
    memory: RedisWorkingMemory, raw: Any, namespace: str
) -> None:
    version = (await memory.replace(FIRST, EVERY_KIND)).version
    await raw.delete(path(namespace, "head"))
    assert (await memory.replace(FIRST, [])).version > version
    assert not await memory.adopt(SECOND, version)


async def test_a_forgotten_memory_leaves_no_key(memory: RedisWorkingMemory, raw: Any, namespace: str) -> None:
    await memory.replace(FIRST, EVERY_KIND)
    await memory.forget(FIRST)
    assert await raw.keys(f"{namespace}:*") == []
    await memory.forget(FIRST)
    assert (await memory.read(A)).run_id is None
    assert not await memory.adopt(FIRST, 0)


async def test_one_of_two_restores_at_once_stands_as_a_whole(
    memory: RedisWorkingMemory, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 500)
    monkeypatch.setattr(staging, "STEP_BYTES", 100)
    other = RedisWorkingMemory(redis_url, make_timeout=NEVER, namespace=namespace)
    mine = [Item(f"key-{number}", Kind.LIST, (b"mine",) * 30) for number in range(40)]
    its = [Item(f"key-{number}", Kind.LIST, (b"its",) * 30) for number in range(20, 60)]
    for _ in range(5):
        owners = Owner(A, RunId("r1"), 7), Owner(A, RunId("r2"), 7)
        done = await asyncio.gather(
            memory.replace(owners[0], mine), other.replace(owners[1], its), return_exceptions=True
        )
        assert all(isinstance(each, Held | MemoryFenced) for each in done), done
        held = await memory.read(A)
        assert contents(held) == given(mine if held.run_id == "r1" else its)
    await other.close()


async def test_a_zombies_restore_that_was_staged_does_not_come_through(
    memory: RedisWorkingMemory, monkeypatch: pytest.MonkeyPatch, raw: Any, namespace: str
) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 1)
    monkeypatch.setattr(staging, "STEP_BYTES", 1)

    async def adopt() -> None:
        await memory.replace(SECOND, EVERY_KIND)

    with pytest.raises(MemoryFenced):
        await Gap(monkeypatch, at=3, then=adopt).within(memory.replace(FIRST, small(10)))
    held = await memory.read(A)
    assert (held.run_id, contents(held)) == ("run-2", given(EVERY_KIND))
    assert await nothing_staged(raw, namespace)


@pytest.mark.parametrize("command", [do("GET", "a"), do("SET", "a", 1), do("DEL", "a"), do("TYPE", "a")])
async def test_an_evicted_key_is_noticed(
    memory: RedisWorkingMemory, raw: Any, namespace: str, command: Command
) -> None:
    await memory.replace(FIRST, [Item("a", Kind.STRING, b"1"), Item("b", Kind.STRING, b"1")])
    version = (await memory.read(A)).version
    await raw.delete(path(namespace, "working", "a"))
    with pytest.raises(MemoryLost, match="'a'"):
        await answers(memory, do("SET", "b", 2), command)
    assert await answers(memory, do("GET", "b")) == [b"1"]
    with pytest.raises(MemoryLost, match="'a'"):
        await memory.keys(FIRST)
    held = await memory.read(A)
    assert (set(contents(held)), held.lost, held.version) == ({"b"}, ("a",), version)


@pytest.mark.parametrize("gone", ["head", "index"])
async def test_evicted_books_are_noticed(memory: RedisWorkingMemory, raw: Any, namespace: str, gone: str) -> None:
    version = (await memory.replace(FIRST, EVERY_KIND)).version
    await raw.delete(path(namespace, gone))
    await expect_all_lost(memory, version)


async def test_a_wiped_redis_is_noticed(own_redis: RedisServer) -> None:
    memory = RedisWorkingMemory(own_redis.url, make_timeout=NEVER, namespace="mesh")
    version = (await memory.replace(FIRST, EVERY_KIND)).version
    async with Redis.from_url(own_redis.url) as raw:
        await raw.flushall()
    await expect_all_lost(memory, version)
    await memory.close()


async def expect_all_lost(memory: RedisWorkingMemory, version: int) -> None:
    """Each method notices the loss; then the memory is restored."""
    for commands in ([do("GET", "text")], [do("SET", "text", 1)], []):
        with pytest.raises(MemoryLost, match="all of it"):
            await memory.execute(FIRST, commands)
    with pytest.raises(MemoryLost, match="all of it"):
        await memory.keys(FIRST)
    held = await memory.read(A)
    assert (held.items, held.run_id, held.fence) == ((), None, 0)
    assert not await memory.adopt(SECOND, version)
    await memory.retain(FIRST, paused=True)
    assert contents(await memory.replace(SECOND, EVERY_KIND)) == given(EVERY_KIND)


async def test_a_lost_index_does_not_let_a_zombie_in(memory: RedisWorkingMemory, raw: Any, namespace: str) -> None:
    await memory.replace(SECOND, EVERY_KIND)
    await raw.delete(path(namespace, "index"))
    with pytest.raises(MemoryFenced):
        await memory.replace(FIRST, [])
    with pytest.raises(MemoryFenced):
        await memory.adopt(FIRST, 1)


@pytest.mark.parametrize("garbage", ["text", "fields", "list"])
@pytest.mark.parametrize("place", ["head", "index"])
async def test_garbage_in_the_books_is_told(
    memory: RedisWorkingMemory, raw: Any, namespace: str, place: str, garbage: str
) -> None:
    await memory.replace(FIRST, EVERY_KIND)
    key = path(namespace, place)
    await raw.delete(key)
    match garbage:
        case "text":
            await raw.set(key, "x")
        case "fields":
            await raw.hset(key, mapping={"run": "run-1", "fence": "x"})
        case "list":
            await raw.rpush(key, "x")
    for attempt in (
        memory.execute(FIRST, [do("GET", "text")]),
        memory.keys(FIRST),
        memory.read(A),
        memory.adopt(SECOND, 1),
        memory.replace(SECOND, small(3)),
        memory.retain(FIRST, paused=True),
        memory.forget(FIRST),
    ):
        with pytest.raises(MemoryUnavailable, match=f"{place} was not written by Meshpoint; delete it"):
            await attempt
    await raw.delete(key)
    assert contents(await memory.replace(SECOND, EVERY_KIND)) == given(EVERY_KIND)


async def test_a_value_of_a_kind_that_no_memory_has_is_lost(
    memory: RedisWorkingMemory, raw: Any, namespace: str
) -> None:
    await memory.replace(FIRST, [Item("a", Kind.STRING, b"1")])
    await raw.delete(path(namespace, "working", "a"))
    await raw.xadd(path(namespace, "working", "a"), {"x": "y"})
    assert (await memory.read(A)).lost == ("a",)


class Gap:
    """Runs `then` after the `at`-th round trip of a call, and after later ones, `times` in all."""

    def __init__(
        self, patch: pytest.MonkeyPatch, *, at: int, then: Callable[[], Awaitable[None]], times: int = 1
    ) -> None:
        self._patch, self._at, self._then, self._times = patch, at, then, times
        self.trips: list[Sequence[ScriptCall]] = []

    async def within(self, call: Awaitable[Any]) -> Any:
        send = script_calls._send
        inside = False

        async def counted(redis: Redis, calls: Sequence[ScriptCall], known: bool) -> list[ScriptReply]:
            nonlocal inside
            replies = await send(redis, calls, known)
            if not inside:
                self.trips.append(calls)
                if self._at <= len(self.trips) < self._at + self._times:
                    inside = True
                    await self._then()
                    inside = False
            return replies

        self._patch.setattr(script_calls, "_send", counted)
        try:
            return await call
        finally:
            self._patch.setattr(script_calls, "_send", send)


@pytest.mark.parametrize(("times", "trips", "whole"), [(0, 2, False), (1, 4, False), (4, 6, False), (9, 7, True)])
async def test_a_write_between_two_parts_of_a_read_has_it_read_again(
    memory: RedisWorkingMemory, monkeypatch: pytest.MonkeyPatch, times: int, trips: int, whole: bool
) -> None:
    items = [Item("a", Kind.STRING, b"0"), *small(1200), Item("z", Kind.STRING, b"0")]
    await memory.replace(FIRST, items)

    async def write() -> None:
        await answers(memory, do("INCRBY", "a", 1), do("INCRBY", "z", 1))

    gap = Gap(monkeypatch, at=1, then=write, times=times)
    held = await gap.within(memory.read(A))
    found = contents(held)
    assert found["a"] == found["z"]
    assert len(found) == 1202
    assert len(gap.trips) == trips
    assert (gap.trips[-1][0].args[-1] == -1) is whole


@pytest.mark.parametrize("change", ["delete", "owner", "restore"])
async def test_a_change_of_any_kind_between_two_parts_has_it_read_again(
    memory: RedisWorkingMemory, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    items = small(1200)
    version = (await memory.replace(FIRST, items)).version

    async def write() -> None:
        match change:
            case "delete":
                await answers(memory, do("DEL", "key-00001"))
            case "owner":
                await memory.adopt(SECOND, version)
            case "restore":
                await memory.replace(SECOND, items[:600])

    held = await Gap(monkeypatch, at=1, then=write).within(memory.read(A))
    after = await memory.read(A)
    assert (held.items, held.run_id, held.version) == (after.items, after.run_id, after.version)


async def test_an_own_time_that_ends_between_two_parts_has_ended_in_both(
    memory: RedisWorkingMemory, monkeypatch: pytest.MonkeyPatch, raw: Any, namespace: str
) -> None:
    now = (await memory.read(A)).now
    await memory.replace(FIRST, [Item("short", Kind.STRING, b"1", now + 3_600_000), *small(1200)])
    await raw.zadd(path(namespace, "index"), {"short": (await memory.read(A)).now + 300})

    async def wait() -> None:
        while "short" in contents(await memory.read(A)):
            await asyncio.sleep(0)

    gap = Gap(monkeypatch, at=1, then=wait)
    held = await gap.within(memory.read(A))
    assert contents(held) == given(small(1200))
    assert held.lost == ()
    assert len(gap.trips) == 2


@pytest.mark.parametrize("tries", [3, 0])
async def test_a_read_is_a_state_that_was_there_while_another_writes(
    memory: RedisWorkingMemory, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    monkeypatch.setattr(working_memory, "READ_ATTEMPTS", tries)
    items = [Item("a", Kind.STRING, b"0"), *small(2_000), Item("z", Kind.STRING, b"0")]
    await memory.replace(FIRST, items)
    writer = RedisWorkingMemory(redis_url, make_timeout=NEVER, namespace=namespace)
    seen: set[Any] = set()

    async def write() -> None:
        for _ in range(100):
            batch = [do("INCRBY", "a", 1), do("INCRBY", "z", 1)]
            await asyncio.gather(*[answers(writer, *batch) for _ in range(50)])

    writing = asyncio.create_task(write())
    while not writing.done():
        found = contents(await memory.read(A))
        assert found["a"] == found["z"]
        seen.add(found["a"])
    await writing
    assert len(seen) > 3
    assert contents(await memory.read(A))["z"] == (Kind.STRING, b"5000")
    await writer.close()


async def test_batches_are_done_one_after_the_other(memory: RedisWorkingMemory) -> None:
    await memory.replace(FIRST, [])
    batch = [do("INCRBY", "a", 1), do("RPUSH", "l", "x"), do("GET", "a"), do("LLEN", "l")]
    done = await asyncio.gather(*[answers(memory, *batch) for _ in range(200)])
    assert sorted(each[0] for each in done) == list(range(1, 201))  # type: ignore[type-var]
    assert all(each == [each[0], each[0], b"%d" % each[0], each[0]] for each in done)


async def test_what_is_said_to_be_one_round_trip_is_one(distant: RedisWorkingMemory, wire: Wire) -> None:
    await distant.replace(FIRST, EVERY_KIND)  # connects, and loads the scripts
    version = (await distant.read(A)).version
    await answers(distant, do("GET", "text"))
    await distant.keys(FIRST)
    await distant.retain(FIRST, paused=False)
    await distant.adopt(FIRST, version)
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: distant.execute(FIRST, [do("SET", str(number), number) for number in range(300)]),
        lambda: distant.keys(FIRST),
        lambda: distant.read(A),
        lambda: distant.adopt(SECOND, version + 1),
        lambda: distant.retain(SECOND, paused=True),
        lambda: distant.replace(SECOND, EVERY_KIND),
    ]
    for call in calls:
        wire.reset()
        assert await call() is not False
        assert wire.turns == 1
    await distant.replace(SECOND, small(1200))
    wire.reset()
    await distant.read(A)
    assert wire.turns == 2


@pytest.mark.parametrize("at", range(6))
async def test_scripts_may_be_forgotten_at_any_time(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 2_000)
    monkeypatch.setattr(staging, "STEP_BYTES", 300)
    memory = RedisWorkingMemory(own_redis.url, make_timeout=NEVER, namespace="mesh")
    items = [*small(600), Item("list", Kind.LIST, tuple(b"%d" % number for number in range(600)))]
    async with Redis.from_url(own_redis.url) as raw:
        await raw.flushall()

        async def forget() -> None:
            await raw.script_flush()

        await forget()
        for _ in range(2):
            held = await Gap(monkeypatch, at=at, then=forget).within(memory.replace(FIRST, items))
            assert contents(held) == given(items)
        await forget()
        assert contents(await Gap(monkeypatch, at=1, then=forget).within(memory.read(A))) == given(items)
        await forget()
        assert await answers(memory, do("INCRBY", "n", 1)) == [1]
        await forget()
        assert len(await memory.keys(FIRST)) == 602
        await forget()
        assert await Gap(monkeypatch, at=1, then=forget).within(memory.adopt(SECOND, (await memory.read(A)).version))
        await forget()
        await Gap(monkeypatch, at=1, then=forget).within(memory.retain(SECOND, paused=True))
        assert await raw.pttl("mesh:L1:{" + A + "}:working:list") > 13 * DAY
        await forget()
        await memory.forget(SECOND)
        assert not await raw.keys("mesh:L1:{" + A + "}:working:*")
    await memory.close()


OLD = (Item("a", Kind.STRING, b"old"), Item("l", Kind.LIST, (b"old",) * 3), Item("gone", Kind.STRING, b"old"))
NEW = (
    Item("a", Kind.STRING, b"new"),
    Item("l", Kind.LIST, tuple(b"new %d" % number for number in range(12))),
    Item("h", Kind.HASH, {b"%d" % number: b"new" for number in range(12)}),
    Item("z", Kind.ZSET, {b"%d" % number: 1.0 for number in range(12)}),
    Item("s", Kind.SET, frozenset(b"%d" % number for number in range(12))),
)


@pytest.mark.parametrize("small_steps", [False, True])
async def test_a_restore_that_is_cut_at_any_byte_leaves_the_old_or_the_new(
    memory: RedisWorkingMemory,
    distant: RedisWorkingMemory,
    wire: Wire,
    monkeypatch: pytest.MonkeyPatch,
    small_steps: bool,
) -> None:
    if small_steps:
        monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 150)
        monkeypatch.setattr(staging, "STEP_BYTES", 40)
    await distant.replace(FIRST, NEW)
    wire.reset()
    await distant.replace(FIRST, NEW)
    size = wire.sent
    assert (wire.turns > 5) is small_steps
    seen = []
    for at in range(0, size, max(1, size // 60)):
        await memory.replace(FIRST, OLD)
        wire.cut_after(at)
        with pytest.raises(MemoryUnavailable):
            await distant.replace(SECOND_AS_FIRST, NEW)
        wire.mend()
        held = await memory.read(A)
        assert (contents(held), held.run_id) in [(given(OLD), "run-1"), (given(NEW), "run-1b")]
        assert held.lost == ()
        seen.append(held.run_id)
    assert seen == sorted(seen)  # old before the swap, new after it
    assert set(seen) == {"run-1", "run-1b"}
    assert contents(await distant.replace(SECOND, NEW)) == given(NEW)


SECOND_AS_FIRST = Owner(A, RunId("run-1b"), 1)


async def test_a_restore_whose_answer_is_lost_is_done(
    memory: RedisWorkingMemory, distant: RedisWorkingMemory, wire: Wire
) -> None:
    await distant.replace(FIRST, NEW)  # connects, and loads the scripts
    await memory.replace(FIRST, OLD)
    wire.lose_answers()
    with pytest.raises(MemoryUnavailable):
        await distant.replace(SECOND, NEW)
    held = await memory.read(A)
    assert (contents(held), held.run_id) == (given(NEW), "run-2")


async def test_a_write_whose_answer_is_lost_is_done_once(
    memory: RedisWorkingMemory, distant: RedisWorkingMemory, wire: Wire
) -> None:
    await distant.replace(FIRST, [])
    await answers(distant, do("SET", "n", 0))  # loads the script
    wire.lose_answers()
    with pytest.raises(MemoryUnavailable):
        await answers(distant, do("INCRBY", "n", 1))
    wire.mend()
    assert await answers(memory, do("GET", "n")) == [b"1"]


async def test_what_was_staged_vanishes_by_itself(
    memory: RedisWorkingMemory, monkeypatch: pytest.MonkeyPatch, raw: Any, namespace: str
) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 1)
    monkeypatch.setattr(staging, "STEP_BYTES", 1)

    async def die() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await Gap(monkeypatch, at=20, then=die).within(memory.replace(FIRST, NEW))
    left = await raw.keys(path(namespace, "restore", "*"))
    assert len(left) > 2
    for key in left:
        assert 0 < await raw.pttl(key) <= 3_600_000


@pytest.mark.parametrize("lost", ["value", "index", "values again"])
async def test_a_restore_that_lost_some_of_what_it_staged_is_not_swapped_in(
    memory: RedisWorkingMemory, monkeypatch: pytest.MonkeyPatch, raw: Any, namespace: str, lost: str
) -> None:
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 1)
    monkeypatch.setattr(staging, "STEP_BYTES", 10)
    await memory.replace(FIRST, OLD)

    async def evict() -> None:
        name = {"value": "working:a", "index": "index", "values again": "working:l"}[lost]
        [key] = await raw.keys(path(namespace, "restore", "*", name))
        await raw.delete(key)

    with pytest.raises(MemoryUnavailable, match="lost part of the staged data"):
        await Gap(monkeypatch, at=3, then=evict).within(memory.replace(SECOND, NEW))
    held = await memory.read(A)
    assert (contents(held), held.run_id) == (given(OLD), "run-1")


async def test_a_restore_that_lost_its_last_step_is_not_swapped_in(
    memory: RedisWorkingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "STEP_BYTES", 30)
    await memory.replace(FIRST, OLD)
    send = script_calls._send

    nothing = ScriptCall(READ, (b"none:head", b"none:index"), (b"", 0, 0))

    async def without_last(redis: Redis, calls: Sequence[ScriptCall], known: bool) -> list[ScriptReply]:
        last = max(place for place, call in enumerate(calls) if call.script is STAGE)
        return await send(redis, [*calls[:last], nothing, *calls[last + 1 :]], known)

    monkeypatch.setattr(script_calls, "_send", without_last)
    items = [Item("x", Kind.STRING, b"1" * 40), Item("l", Kind.LIST, tuple(b"%d" % number for number in range(40)))]
    with pytest.raises(MemoryUnavailable, match="lost part of the staged data"):
        await memory.replace(SECOND, items)
    monkeypatch.setattr(script_calls, "_send", send)
    held = await memory.read(A)
    assert (contents(held), held.run_id) == (given(OLD), "run-1")


class Late:
    """Holds back the next requests, which fail for the caller, until `lands` sends them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch, self._send = patch, script_calls._send
        self._held: list[tuple[Redis, Sequence[ScriptCall]]] = []

    async def hold(self, call: Awaitable[Any]) -> None:
        async def held_back(redis: Redis, calls: Sequence[ScriptCall], known: bool) -> list[ScriptReply]:
            self._held.append((redis, calls))
            raise TimeoutError

        self._patch.setattr(script_calls, "_send", held_back)
        with pytest.raises(MemoryUnavailable):
            await call
        self._patch.setattr(script_calls, "_send", self._send)

    async def lands(self) -> list[ScriptReply]:
        [(redis, calls)] = self._held
        return await self._send(redis, calls, False)


@pytest.mark.parametrize("before", ["nothing", "another run's", "its own"])
@pytest.mark.parametrize("items", [(), NEW], ids=["empty", "restored"])
async def test_a_replace_that_comes_late_undoes_nothing(
    distant: RedisWorkingMemory, monkeypatch: pytest.MonkeyPatch, before: str, items: Sequence[Item]
) -> None:
    """The same run has retried and written since."""
    late, seen = Late(monkeypatch), 0
    if before != "nothing":
        seen = (await distant.replace(FIRST if before == "another run's" else SECOND, OLD)).version
    await late.hold(distant.replace(SECOND, items, seen=seen))
    version = (await distant.replace(SECOND, items, seen=seen)).version
    version, _ = await distant.execute(SECOND, [do("SET", "a", "newer")], seen=version)
    expected = given(items) | {"a": (Kind.STRING, b"newer")}
    await late.lands()
    found = await distant.read(A)
    assert (contents(found), found.version, found.run_id) == (expected, version, SECOND.run_id)
    assert (await distant.execute(SECOND, [do("GET", "a")], seen=version))[1] == [b"newer"]


async def test_a_write_that_comes_late_undoes_nothing(
    distant: RedisWorkingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Late(monkeypatch)
    seen = (await distant.replace(FIRST, [], seen=0)).version
    await late.hold(distant.execute(FIRST, [do("SET", "a", "old"), do("INCRBY", "n", 1)], seen=seen))
    version, _ = await distant.execute(FIRST, [do("SET", "a", "new"), do("INCRBY", "n", 1)], seen=seen)
    assert await late.lands() == [[b"stale"]]
    assert (await distant.execute(FIRST, [do("GET", "a"), do("GET", "n")], seen=version))[1] == [b"new", b"1"]
    assert (await distant.read(A)).version == version


async def test_a_write_with_an_old_version_is_refused_and_a_read_is_not(memory: RedisWorkingMemory) -> None:
    old = (await memory.replace(FIRST, [], seen=0)).version
    new, _ = await memory.execute(FIRST, [do("SET", "a", "new")], seen=old)
    with pytest.raises(MemoryUnavailable):
        await memory.execute(FIRST, [do("SET", "a", "old")], seen=old)
    for seen in (0, old):
        with pytest.raises(MemoryUnavailable):
            await memory.replace(FIRST, OLD, seen=seen)
    assert await memory.execute(FIRST, [do("GET", "a")], seen=old) == (new, [b"new"])


async def test_a_run_that_owns_the_task_has_the_memory_whatever_fence_it_finds(memory: RedisWorkingMemory) -> None:
    await memory.replace(SECOND, OLD)
    with pytest.raises(MemoryFenced):
        await memory.replace(FIRST, [])
    found = await memory.replace(FIRST, [], force=True)
    assert (contents(found), found.run_id, found.fence) == ({}, FIRST.run_id, FIRST.fence)
    with pytest.raises(MemoryLost):
        await memory.execute(SECOND, [do("SET", "a", 1)])


def test_replies_for_some_of_the_keys_are_no_memory() -> None:
    reply = [b"ok", 1000, b"run-1", b"1", 7, 3, [[b"a", b"inf", b"string", b"1"]]]
    assert parse_contents([reply]) is None
    assert parse_contents([[*reply[:5], 2, reply[6]]]) == Held(
        (Item("a", Kind.STRING, b"1"),), 7, 1000, RunId("run-1"), 1
    )


@pytest.mark.parametrize("tenth", range(11))
async def test_a_redis_killed_at_any_step_of_a_restore_has_the_old_or_the_new(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, tenth: int
) -> None:
    own_redis.append_before_answering()
    monkeypatch.setattr(script_calls, "PIPELINE_BYTES", 300)
    monkeypatch.setattr(staging, "STEP_BYTES", 40)
    async with Wire(own_redis.url) as wire:
        memory = RedisWorkingMemory(wire.url, make_timeout=NEVER, namespace="mesh", retry_after=timedelta(0))
        await memory.replace(Owner(A, RunId("run-0"), 9), NEW)
        await memory.forget(Owner(A, RunId("run-0"), 9))
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
        held = await memory.read(A)
        assert (contents(held), held.run_id) in [(given(OLD), "run-1"), (given(NEW), "run-2")]
        assert held.lost == ()
        await memory.forget(FIRST if held.run_id == "run-1" else SECOND)
        await memory.close()


async def test_a_silent_redis_costs_one_timeout(redis_url: str, namespace: str) -> None:
    async with Proxy(redis_url) as proxy:
        seconds, limits = 0.0, Limits()
        memory = RedisWorkingMemory(proxy.url, namespace=namespace, make_timeout=limits, clock=lambda: seconds)
        proxy.silence()
        limits.passed = True
        with pytest.raises(MemoryUnavailable, match=r"no answer within 5\.0 s"):
            await memory.read(A)
        for attempt in (
            memory.execute(FIRST, [do("GET", "a")]),
            memory.keys(FIRST),
            memory.read(A),
            memory.adopt(FIRST, 1),
            memory.replace(FIRST, []),
            memory.retain(FIRST, paused=True),
            memory.forget(FIRST),
        ):
            with pytest.raises(MemoryUnavailable, match="not asked"):
                await attempt
        proxy.resume()
        seconds, limits.passed = 5.0, False
        assert (await memory.read(A)).items == ()
        await memory.close()


async def test_a_full_redis_is_unavailable_and_loses_nothing(own_redis: RedisServer) -> None:
    memory = RedisWorkingMemory(own_redis.url, make_timeout=NEVER, namespace="mesh", retry_after=timedelta(0))
    await memory.replace(FIRST, OLD)
    async with Redis.from_url(own_redis.url) as raw:
        await raw.config_set("maxmemory", "1")
        try:
            with pytest.raises(MemoryUnavailable, match="maxmemory"):
                await answers(memory, do("SET", "n", 1))
            with pytest.raises(MemoryUnavailable):
                await memory.replace(SECOND, NEW)
            held = await memory.read(A)
            assert await answers(memory, do("GET", "a")) == [b"old"]
        finally:
            await raw.config_set("maxmemory", "0")
    assert (contents(held), held.run_id) == (given(OLD), "run-1")
    await memory.forget(FIRST)
    await memory.close()


@pytest.mark.parametrize("steps", range(12))
async def test_whoever_is_cancelled_takes_no_answer_of_others_along(memory: RedisWorkingMemory, steps: int) -> None:
    await memory.replace(FIRST, EVERY_KIND)
    asking = asyncio.create_task(memory.read(A))
    for _ in range(steps):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert await answers(memory, do("GET", "☃:{} *")) == [b"snow"]


@pytest.mark.parametrize("option", ["", "?decode_responses=true", "?protocol=3", "?retry_on_timeout=true"])
async def test_the_options_of_a_url_break_nothing(redis_url: str, namespace: str, option: str) -> None:
    memory = RedisWorkingMemory(redis_url + option, make_timeout=NEVER, namespace=namespace)
    assert contents(await memory.replace(FIRST, EVERY_KIND)) == given(EVERY_KIND)
    assert await answers(memory, do("ZSCORE", "zset", "a"), do("GET", "none")) == [b"0", None]
    await memory.close()


def test_a_malformed_url_is_refused_without_telling_it() -> None:
    with pytest.raises(ConfigurationError) as caught:
        RedisWorkingMemory("http://:secret@localhost/0", namespace="mesh")
    assert caught.value.key == "agent.memory_url"
    assert "sec" not in str(caught.value)


def test_it_outlives_the_process(redis_url: str) -> None:
    assert RedisWorkingMemory(redis_url, make_timeout=NEVER, namespace="mesh").survives
