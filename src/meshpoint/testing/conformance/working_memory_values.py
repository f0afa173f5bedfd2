"""Fixtures and helpers of the working-memory suite, and its tests of keys, numbers and batches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import timedelta

import pytest

from meshpoint.errors import MemoryRefused
from meshpoint.model.ids import RunId, new_id
from meshpoint.model.memory import Answer, Command, Content, Item, Kind, MemoryContents, Owner
from meshpoint.ports.working_memory import WorkingMemory

TEST_TIMEOUT = 30.0
"""Seconds to wait for an expected event. Only a failing test waits this long."""
BINARY = bytes(range(256)) + b"\r\n$-1\r\n\x00"
"""Every byte, protocol delimiters, and a trailing zero."""
HOUR = b"3600000"
"""An expiry in milliseconds that no test reaches."""
ONE_OF_EACH: tuple[tuple[str, str, *tuple[bytes, ...]], ...] = (
    ("SET", "string", b"a"),
    ("RPUSH", "list", b"a"),
    ("HSET", "hash", b"f", b"a"),
    ("SADD", "set", b"a"),
    ("ZADD", "zset", b"1", b"a"),
)
"""Commands that create a key of each kind, named after it."""
OF_KIND: dict[Kind, tuple[tuple[str, *tuple[bytes, ...]], ...]] = {
    Kind.STRING: (("GET",), ("INCRBY", b"1"), ("INCRBYFLOAT", b"1")),
    Kind.LIST: (
        *(("RPUSH", b"a"), ("LPUSH", b"a"), ("RPOP",), ("LPOP",), ("LTRIM", b"0", b"1")),
        *(("LRANGE", b"0", b"1"), ("LINDEX", b"0"), ("LLEN",)),
    ),
    Kind.HASH: (
        *(("HSET", b"f", b"a"), ("HDEL", b"f"), ("HINCRBY", b"f", b"1")),
        *(("HGET", b"f"), ("HGETALL",), ("HEXISTS", b"f"), ("HLEN",)),
    ),
    Kind.SET: (("SADD", b"a"), ("SREM", b"a"), ("SMEMBERS",), ("SISMEMBER", b"a"), ("SCARD",)),
    Kind.ZSET: (
        *(
            ("ZADD", b"1", b"a"),
            ("ZREM", b"a"),
            ("ZINCRBY", b"1", b"a"),
            ("ZSCORE", b"a"),
            ("ZCARD",),
        ),
        *(("ZRANGE", b"0", b"1", b"WITHSCORES"), ("ZRANGEBYSCORE", b"0", b"1", b"WITHSCORES")),
    ),
}
"""For each kind, the commands that require a key of that kind."""


def an_owner(fence: int = 1, *, of: Owner | None = None) -> Owner:
    """A new run that owns a new task's memory, or the memory of the owner `of`."""
    return Owner(f"travel:{new_id()}" if of is None else of.agent_id, RunId(new_id()), fence)


def contents(stored: MemoryContents) -> dict[str, Content]:
    """The contents of all keys. Asserts that no key is listed twice."""
    assert len({item.key for item in stored.items}) == len(stored.items)
    return {item.key: item.content for item in stored.items}


def own_times(items: Iterable[Item]) -> dict[str, int | None]:
    """The expiry of each key."""
    return {item.key: item.expires_at for item in items}


def plain(items: Iterable[Item]) -> dict[str, tuple[Kind, Content, int | None]]:
    """Items as a mapping, to compare them regardless of order."""
    return {item.key: (item.kind, item.content, item.expires_at) for item in items}


def floats(answer: Answer) -> list[float]:
    """The scores in a reply with scores, or its only number."""
    if isinstance(answer, bytes):
        return [float(answer)]
    assert isinstance(answer, list)
    return [float(score) for score in answer[1::2]]


class Hand:
    """Executes commands for one owner. Calling it executes one and returns its answer."""

    def __init__(self, memory: WorkingMemory, owner: Owner) -> None:
        self.memory, self.owner = memory, owner

    async def __call__(self, name: str, key: str, *args: bytes) -> Answer:
        _, [answer] = await self.memory.execute(self.owner, [Command(name, key, args)])
        return answer

    async def all(self, *commands: tuple[str, str, *tuple[bytes, ...]]) -> list[Answer]:
        """Execute commands in one batch and return their answers."""
        return (await self.versioned(*commands))[1]

    async def versioned(
        self, *commands: tuple[str, str, *tuple[bytes, ...]]
    ) -> tuple[int, list[Answer]]:
        """Execute commands in one batch and return the version and the answers."""
        batch = [
            Command(name, key, args) for name, key, *rest in commands for args in [tuple(rest)]
        ]
        return await self.memory.execute(self.owner, batch)

    async def read_all(self) -> MemoryContents:
        """Read the whole memory."""
        return await self.memory.read(self.owner.agent_id)

    async def put(self, *items: Item) -> MemoryContents:
        """Replace the whole memory with `items`."""
        return await self.memory.replace(self.owner, items)


class WorkingMemoryCase:
    """Fixtures and hooks of an adapter's test class; see `working_memory`."""

    @pytest.fixture
    def memory(self) -> WorkingMemory:
        """The working memory under test."""
        raise NotImplementedError("a working memory's suite provides the fixture `memory`")

    @pytest.fixture
    def other(self, memory: WorkingMemory) -> WorkingMemory:
        """The working memory that a second replica opens on the same data."""
        return memory

    @pytest.fixture
    async def do(self, memory: WorkingMemory) -> Hand:
        """A run that has begun an empty memory."""
        return await hand_of(memory, an_owner())

    async def pass_time(self, memory: WorkingMemory, duration: timedelta) -> None:
        """Wait until the memory's clock has advanced by `duration`. Override it for a fake clock.

        Tests pass a few milliseconds at most.
        """
        then = (await memory.read("clock")).now + duration // timedelta(milliseconds=1)
        async with asyncio.timeout(TEST_TIMEOUT):
            while (await memory.read("clock")).now <= then:  # noqa: ASYNC110  a server's clock has no event
                await asyncio.sleep(0)


class ValueSuite(WorkingMemoryCase):
    """Keys of all kinds, strings, numbers, and batches of commands."""

    async def test_a_key_that_is_not_there_reads_as_empty(self, do: Hand) -> None:
        assert await do.all(
            ("GET", "k"), ("TYPE", "k"), ("LLEN", "k"), ("HGETALL", "k"), ("SMEMBERS", "k")
        ) == [*(None, b"none", 0, [], [])]
        assert await do.all(
            ("LPOP", "k"), ("HGET", "k", b"f"), ("ZSCORE", "k", b"m"), ("DEL", "k")
        ) == [*(None, None, None, 0)]
        assert (await do.read_all()).items == ()

    async def test_a_key_has_the_kind_of_what_it_holds(self, do: Hand) -> None:
        await do.all(*ONE_OF_EACH)
        assert await do.all(*(("TYPE", kind) for kind in Kind)) == [kind.encode() for kind in Kind]
        assert {item.key: item.kind for item in (await do.read_all()).items} == {
            kind.value: kind for kind in Kind
        }

    @pytest.mark.parametrize("value", [b"", b"\x00", b"a", BINARY, "☃".encode(), bytes(1_000_000)])
    async def test_a_value_comes_back_byte_for_byte(self, do: Hand, value: bytes) -> None:
        assert await do("SET", "k", value) == b"OK"
        assert await do("GET", "k") == value
        assert contents(await do.read_all()) == {"k": value}

    async def test_set_replaces_a_value_of_any_kind(self, do: Hand) -> None:
        await do.all(*ONE_OF_EACH)
        await do.all(*(("SET", kind, b"new") for kind in Kind))
        assert contents(await do.read_all()) == {kind.value: b"new" for kind in Kind}

    async def test_delete_tells_whether_it_was_there(self, do: Hand) -> None:
        await do.all(*ONE_OF_EACH)
        assert await do.all(*(("DEL", kind) for kind in Kind)) == [1] * 5
        assert await do.all(*(("DEL", kind) for kind in Kind)) == [0] * 5
        assert await do.memory.keys(do.owner) == []

    @pytest.mark.parametrize(
        "key", [" ", "a:b", "{a}", "*", "☃", "\x00", "a\nb", "k" * 1024, "index", "head"]
    )
    async def test_a_key_is_any_text(self, do: Hand, key: str) -> None:
        await do("SET", key, b"mine")
        assert await do("GET", key) == b"mine"
        assert await do.memory.keys(do.owner) == [key]
        assert contents(await do.read_all()) == {key: b"mine"}

    @pytest.mark.parametrize("kind", Kind)
    async def test_command_on_wrong_kind_is_refused(self, do: Hand, kind: Kind) -> None:
        await do.all(*ONE_OF_EACH)
        before = contents(await do.read_all())
        for wanted, commands in OF_KIND.items():
            for name, *args in commands if wanted is not kind else []:
                with pytest.raises(MemoryRefused, match=f"'{kind}'"):
                    await do(name, kind, *args)
        assert contents(await do.read_all()) == before

    async def test_a_command_that_is_none_of_the_list_is_refused(self, do: Hand) -> None:
        for name in ("FLUSHALL", "EVAL", "get", ""):
            with pytest.raises(MemoryRefused, match="'k'"):
                await do(name, "k")

    @pytest.mark.parametrize(
        "command",
        [("SET", "k"), ("RPUSH", "k"), ("HSET", "k", b"f"), ("ZADD", "k", b"1"), ("LINDEX", "k")],
    )
    async def test_missing_argument_is_refused(self, do: Hand, command: tuple[str, str]) -> None:
        with pytest.raises(MemoryRefused, match="'k'"):
            await do(*command)
        assert await do.memory.keys(do.owner) == []

    async def test_a_counter_begins_at_nought(self, do: Hand) -> None:
        assert await do.all(("INCRBY", "k", b"5"), ("INCRBY", "k", b"-7"), ("GET", "k")) == [
            5,
            -2,
            b"-2",
        ]

    @pytest.mark.parametrize("number", [2**53 + 1, 2**62 + 1, 2**63 - 1, -(2**53) - 1, -(2**63)])
    async def test_a_counter_has_64_bits(self, do: Hand, number: int) -> None:
        assert await do("INCRBY", "k", b"%d" % number) == number
        assert await do("GET", "k") == b"%d" % number
        assert await do("HINCRBY", "h", b"f", b"%d" % number) == number
        assert await do("HGET", "h", b"f") == b"%d" % number

    @pytest.mark.parametrize(
        ("number", "by"), [(2**63 - 1, 1), (-(2**63), -1), (1, 2**63), (0, -(2**63) - 1)]
    )
    async def test_a_counter_does_not_run_over(self, do: Hand, number: int, by: int) -> None:
        await do.all(("SET", "k", b"%d" % number), ("HSET", "h", b"f", b"%d" % number))
        with pytest.raises(MemoryRefused, match="'k'"):
            await do("INCRBY", "k", b"%d" % by)
        with pytest.raises(MemoryRefused, match="'h'"):
            await do("HINCRBY", "h", b"f", b"%d" % by)
        assert contents(await do.read_all()) == {"k": b"%d" % number, "h": {b"f": b"%d" % number}}

    @pytest.mark.parametrize(
        "text", [b"", b"a", b"1.5", b" 1", b"1 ", b"+1", b"01", b"-0", b"1_0", b"1\x00"]
    )
    async def test_what_is_no_whole_number_is_not_counted(self, do: Hand, text: bytes) -> None:
        await do.all(("SET", "k", text), ("HSET", "h", b"f", text))
        for command in (("INCRBY", "k", b"1"), ("INCRBY", "n", text)):
            with pytest.raises(MemoryRefused, match=f"'{command[1]}'"):
                await do(*command)
        for hash_command in (("HINCRBY", "h", b"f", b"1"), ("HINCRBY", "n", b"f", text)):
            with pytest.raises(MemoryRefused, match=f"'{hash_command[1]}'"):
                await do(*hash_command)
        assert contents(await do.read_all()) == {"k": text, "h": {b"f": text}}

    async def test_floats_are_added_as_people_write_them(self, do: Hand) -> None:
        assert floats(await do("INCRBYFLOAT", "k", b"0.1")) == [0.1]
        assert floats(await do("INCRBYFLOAT", "k", b"0.2")) == [0.3]
        assert floats(await do("INCRBYFLOAT", "k", b"-1e3")) == [-999.7]
        assert floats(await do("GET", "k")) == [-999.7]
        assert floats(await do("INCRBYFLOAT", "k", b"1e-12")) == [-999.699999999999]
        assert floats(await do("INCRBYFLOAT", "tiny", b"1e-16")) == [1e-16]

    async def test_a_whole_number_is_a_float_too(self, do: Hand) -> None:
        await do("SET", "k", b"10")
        assert floats(await do("INCRBYFLOAT", "k", b"2.5")) == [12.5]
        assert floats(await do("INCRBYFLOAT", "k", b"0.5")) == [13.0]
        assert await do("INCRBY", "k", b"1") == 14

    @pytest.mark.parametrize(
        "text", [b"", b"a", b" 1", b"1 ", b"nan", b"1e", b"--1", b"1_0", b"1\x00"]
    )
    async def test_what_is_no_number_is_not_added_to(self, do: Hand, text: bytes) -> None:
        await do("SET", "k", text)
        for key, by in (("k", b"1"), ("n", text)):
            with pytest.raises(MemoryRefused, match=f"'{key}'"):
                await do("INCRBYFLOAT", key, by)
        assert contents(await do.read_all()) == {"k": text}

    async def test_a_float_does_not_become_infinite(self, do: Hand) -> None:
        for by in (b"inf", b"-inf"):
            with pytest.raises(MemoryRefused, match="'k'"):
                await do("INCRBYFLOAT", "k", by)
        assert await do.memory.keys(do.owner) == []

    async def test_no_commands_are_done(self, do: Hand) -> None:
        version, answers = await do.versioned()
        assert (version, answers) == ((await do.read_all()).version, [])

    async def test_each_command_sees_what_those_before_it_did(self, do: Hand) -> None:
        assert await do.all(
            ("RPUSH", "k", b"1"),
            ("LPOP", "k"),
            ("TYPE", "k"),
            ("SET", "k", b"2"),
            ("INCRBY", "k", b"3"),
            ("GET", "k"),
        ) == [1, b"1", b"none", b"OK", 5, b"5"]

    async def test_the_version_grows_with_every_write(self, do: Hand) -> None:
        versions = [(await do.read_all()).version]
        for batch in (
            [("SET", "k", b"1")],
            [("GET", "k"), ("INCRBY", "k", b"1")],
            [("PEXPIRE", "k", b"100000")],
        ):
            version, _ = await do.versioned(*batch)
            assert (await do.read_all()).version == version
            versions.append(version)
        assert versions == sorted(set(versions))

    async def test_reading_changes_no_version(self, do: Hand) -> None:
        await do.all(*ONE_OF_EACH)
        before = (await do.read_all()).version
        for kind, commands in OF_KIND.items():
            for name, *args in commands:
                if not Command(name, kind).is_write:
                    assert (await do.versioned((name, kind, *args)))[0] == before
        assert (await do.versioned(("TYPE", "string"), ("PTTL", "string")))[0] == before
        assert (await do.read_all()).version == before

    async def test_batch_stops_at_refused_command(self, do: Hand) -> None:
        before = (await do.read_all()).version
        with pytest.raises(MemoryRefused, match="'b'"):
            await do.all(
                ("SET", "a", b"1"), ("SET", "b", b"x"), ("INCRBY", "b", b"1"), ("SET", "c", b"1")
            )
        stored = await do.read_all()
        assert contents(stored) == {"a": b"1", "b": b"x"}
        assert stored.version > before
        assert sorted(await do.memory.keys(do.owner)) == ["a", "b"]

    async def test_a_thousand_keys_are_written_and_read_together(self, do: Hand) -> None:
        values = {f"k{number}": b"%d" % number for number in range(1000)}
        assert (
            await do.all(*(("SET", key, value) for key, value in values.items())) == [b"OK"] * 1000
        )
        assert await do.all(*(("GET", key) for key in values)) == list(values.values())
        assert contents(await do.read_all()) == values
        assert sorted(await do.memory.keys(do.owner)) == sorted(values)

    async def test_batches_of_many_at_once_come_one_after_the_other(self, do: Hand) -> None:
        async def both() -> None:
            a, b = await do.all(("INCRBY", "a", b"1"), ("INCRBY", "b", b"1"))
            assert a == b

        async def seen() -> None:
            stored = contents(await do.read_all())
            assert stored.get("a") == stored.get("b")

        await asyncio.gather(*(each() for _ in range(50) for each in (both, seen)))
        assert contents(await do.read_all()) == {"a": b"50", "b": b"50"}


async def hand_of(memory: WorkingMemory, owner: Owner, items: Sequence[Item] = ()) -> Hand:
    """Begin the memory of `owner` with `items`."""
    await memory.replace(owner, items)
    return Hand(memory, owner)
