"""Tests that every working memory must pass: one per sentence of its port, and per command.

The port is `meshpoint.ports.working_memory`.

To test a working memory of your own with pytest (and pytest-asyncio, with `asyncio_mode = auto`):

    from meshpoint.testing.conformance.working_memory import WorkingMemorySuite

    class TestMyMemory(WorkingMemorySuite):
        @pytest.fixture
        async def memory(self, namespace: str) -> AsyncIterator[WorkingMemory]:
            memory = MyMemory(..., namespace=namespace)
            yield memory
            await memory.close()

        @pytest.fixture
        async def other(
            self, memory: WorkingMemory, namespace: str
        ) -> AsyncIterator[WorkingMemory]:
            # A second one on the same data. Leave it out if only one process can use yours.
            ...

        async def pass_time(self, memory: WorkingMemory, duration: timedelta) -> None:
            ...  # advance its clock; leave it out if the clock runs by itself

Every test uses a task of its own, and nothing else may write to its memory.
"""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import pytest

from meshpoint.errors import MemoryRefused
from meshpoint.model.memory import Item, Kind
from meshpoint.testing.conformance.working_memory_collections import CollectionSuite
from meshpoint.testing.conformance.working_memory_owners import OwnerSuite
from meshpoint.testing.conformance.working_memory_values import (
    HOUR,
    ONE_OF_EACH,
    Hand,
    ValueSuite,
    contents,
    own_times,
)

MOMENT = timedelta(milliseconds=5)
SHORT = b"5"


class WorkingMemorySuite(ValueSuite, CollectionSuite, OwnerSuite):
    """Conformance tests for a `WorkingMemory`. Subclass it in a test module."""

    async def test_a_key_has_no_time_of_its_own_until_it_is_given_one(self, do: Hand) -> None:
        await do.all(*ONE_OF_EACH)
        assert await do.all(*(("PTTL", kind) for kind in Kind), ("PTTL", "none")) == [
            *[-1] * 5,
            -2,
        ]
        assert own_times((await do.read_all()).items) == dict.fromkeys(Kind)

    async def test_a_key_of_any_kind_is_given_a_time(self, do: Hand) -> None:
        await do.all(*ONE_OF_EACH)
        earliest = (await do.read_all()).now + int(HOUR)
        assert await do.all(*(("PEXPIRE", kind, HOUR) for kind in Kind)) == [1] * 5
        left = await do.all(*(("PTTL", kind) for kind in Kind))
        stored = await do.read_all()
        gone = stored.now + int(HOUR) - earliest
        assert all(
            isinstance(each, int) and int(HOUR) - gone <= each <= int(HOUR) for each in left
        )
        for ends in own_times(stored.items).values():
            assert ends is not None
            assert earliest <= ends <= stored.now + int(HOUR)

    async def test_a_time_is_taken_away(self, do: Hand) -> None:
        assert await do.all(
            ("SET", "k", b"1"),
            ("PERSIST", "k"),
            ("PEXPIRE", "k", HOUR),
            ("PERSIST", "k"),
            ("PTTL", "k"),
        ) == [b"OK", 0, 1, 1, -1]
        assert own_times((await do.read_all()).items) == {"k": None}

    async def test_a_key_that_is_not_there_has_no_time(self, do: Hand) -> None:
        assert await do.all(("PEXPIRE", "k", HOUR), ("PERSIST", "k"), ("PTTL", "k")) == [0, 0, -2]
        assert await do.memory.keys(do.owner) == []

    async def test_set_takes_the_time_away(self, do: Hand) -> None:
        await do.all(("SET", "k", b"1"), ("PEXPIRE", "k", HOUR), ("SET", "k", b"2"))
        assert await do("PTTL", "k") == -1
        assert own_times((await do.read_all()).items) == {"k": None}

    async def test_a_new_key_of_the_name_has_no_time(self, do: Hand) -> None:
        await do.all(
            ("SET", "k", b"1"), ("PEXPIRE", "k", HOUR), ("DEL", "k"), ("RPUSH", "k", b"a")
        )
        await do.all(
            ("RPUSH", "l", b"1"), ("PEXPIRE", "l", HOUR), ("LPOP", "l"), ("RPUSH", "l", b"a")
        )
        assert await do.all(("PTTL", "k"), ("PTTL", "l")) == [-1, -1]

    async def test_other_writes_leave_the_time(self, do: Hand) -> None:
        await do.all(*ONE_OF_EACH, ("SET", "number", b"1"))
        await do.all(*(("PEXPIRE", key, HOUR) for key in (*Kind, "number")))
        before = own_times((await do.read_all()).items)
        await do.all(
            ("RPUSH", "list", b"b"), ("LTRIM", "list", b"0", b"0"), ("HSET", "hash", b"g", b"1")
        )
        await do.all(
            ("SADD", "set", b"b"), ("ZINCRBY", "zset", b"1", b"b"), ("INCRBY", "number", b"1")
        )
        await do.all(
            ("INCRBYFLOAT", "number", b"1.5"), ("HDEL", "hash", b"g"), ("LPUSH", "list", b"c")
        )
        assert own_times((await do.read_all()).items) == before

    @pytest.mark.parametrize("ttl", [b"0", b"-1"])
    async def test_a_time_that_is_over_at_once_deletes(self, do: Hand, ttl: bytes) -> None:
        assert await do.all(("SET", "k", b"1"), ("PEXPIRE", "k", ttl), ("GET", "k")) == [
            b"OK",
            1,
            None,
        ]
        assert await do.memory.keys(do.owner) == []

    @pytest.mark.parametrize("ttl", [b"", b"1.5", b"x", b"9223372036854775807"])
    async def test_a_time_that_is_none_is_refused(self, do: Hand, ttl: bytes) -> None:
        await do("SET", "k", b"1")
        with pytest.raises(MemoryRefused, match="'k'"):
            await do("PEXPIRE", "k", ttl)
        assert await do("PTTL", "k") == -1

    async def test_a_key_is_gone_when_its_time_is_over(self, do: Hand) -> None:
        await do.all(*ONE_OF_EACH, ("SET", "stays", b"1"))
        await do.all(*(("PEXPIRE", kind, SHORT) for kind in Kind))
        await self.pass_time(do.memory, MOMENT)
        # Read this first: other commands would remove expired keys.
        assert await do.memory.keys(do.owner) == ["stays"]
        assert contents(await do.read_all()) == {"stays": b"1"}
        assert await do.all(
            ("GET", "string"), ("LLEN", "list"), ("HLEN", "hash"), ("SCARD", "set")
        ) == [None, 0, 0, 0]
        assert await do.all(
            ("ZCARD", "zset"), ("TYPE", "zset"), ("PTTL", "set"), ("DEL", "list")
        ) == [*(0, b"none", -2, 0)]
        assert await do.all(("PEXPIRE", "hash", HOUR), ("PERSIST", "string")) == [0, 0]

    async def test_a_key_written_after_its_time_is_a_new_one(self, do: Hand) -> None:
        await do.all(*ONE_OF_EACH)
        await do.all(*(("PEXPIRE", kind, SHORT) for kind in Kind))
        await self.pass_time(do.memory, MOMENT)
        assert await do.all(
            ("INCRBY", "list", b"1"), ("RPUSH", "string", b"b"), ("SADD", "set", b"b")
        ) == [1, 1, 1]
        assert await do.all(("PTTL", "list"), ("PTTL", "string"), ("PTTL", "set")) == [-1, -1, -1]
        stored = await do.read_all()
        assert contents(stored) == {"list": b"1", "string": (b"b",), "set": frozenset({b"b"})}
        assert set(own_times(stored.items).values()) == {None}

    async def test_a_key_that_ends_changes_no_version(self, do: Hand) -> None:
        version, _ = await do.versioned(("SET", "k", b"1"), ("PEXPIRE", "k", SHORT))
        await self.pass_time(do.memory, MOMENT)
        assert (await do.read_all()).version == version

    async def test_what_is_put_back_ends_when_it_would_have(self, do: Hand) -> None:
        await do.all(*ONE_OF_EACH)
        await do.all(*(("PEXPIRE", kind, b"%d" % (int(HOUR) + n)) for n, kind in enumerate(Kind)))
        before = await do.read_all()
        await do.put()
        assert own_times((await do.put(*before.items)).items) == own_times(before.items)
        assert all(
            cast(int, left) > 0 for left in await do.all(*(("PTTL", kind) for kind in Kind))
        )

    async def test_what_ended_meanwhile_is_not_put_back(self, do: Hand) -> None:
        now = (await do.read_all()).now
        over = Item("over", Kind.LIST, (b"a",), now - 1)
        later = Item("later", Kind.LIST, (b"a",), now + int(HOUR))
        assert contents(await do.put(over, later)) == {"later": (b"a",)}
        assert await do.memory.keys(do.owner) == ["later"]

    async def test_the_clock_goes(self, do: Hand) -> None:
        before = (await do.read_all()).now
        await self.pass_time(do.memory, MOMENT)
        assert (await do.read_all()).now >= before + 5
