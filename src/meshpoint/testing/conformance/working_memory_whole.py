"""Reading and replacing a whole memory at one instant."""

from __future__ import annotations

import asyncio

from meshpoint.model.memory import Item, Kind
from meshpoint.ports.working_memory import WorkingMemory
from meshpoint.testing.conformance.working_memory_case import BINARY, Hand, an_owner, contents, hand_of, plain
from meshpoint.testing.conformance.working_memory_values import ONE_OF_EACH

ALL_KINDS = (
    Item("string", Kind.STRING, BINARY),
    Item("empty", Kind.STRING, b""),
    Item("list", Kind.LIST, (b"a", b"", BINARY, b"a")),
    Item("hash", Kind.HASH, {b"": BINARY, BINARY: b"", b"f": b"1"}),
    Item("set", Kind.SET, frozenset({b"", BINARY, b"1"})),
    Item("zset", Kind.ZSET, {b"": float("-inf"), BINARY: 1e-320, b"a": 0.1, b"b": float("inf")}),
    Item("☃", Kind.STRING, "☃".encode()),
)


class ReadSuite:
    """`read` and `keys` return the memory at one instant."""

    async def test_all_that_is_there_is_read(self, do: Hand) -> None:
        await do.all(*ONE_OF_EACH)
        held = await do.held()
        assert contents(held) == {
            "string": b"a",
            "list": (b"a",),
            "hash": {b"f": b"a"},
            "set": frozenset({b"a"}),
            "zset": {b"a": 1.0},
        }
        assert (held.run_id, held.fence, held.lost) == (do.owner.run_id, do.owner.fence, ())
        assert sorted(await do.memory.keys(do.owner)) == sorted(contents(held))

    async def test_what_was_read_does_not_change(self, do: Hand) -> None:
        await do.all(*ONE_OF_EACH)
        held = await do.held()
        same = {item.key: item for item in (await do.held()).items}
        await do.all(("RPUSH", "list", b"b"), ("HSET", "hash", b"g", b"b"), ("SADD", "set", b"b"), ("DEL", "string"))
        await do.all(("ZADD", "zset", b"2", b"a"), ("LPOP", "list"))
        assert {item.key: item for item in held.items} == same

    async def test_reading_changes_nothing(self, do: Hand) -> None:
        await do.all(*ONE_OF_EACH)
        first = await do.held()
        second = await do.held()
        assert (plain(first.items), first.version) == (plain(second.items), second.version)

    async def test_what_is_read_was_there_at_one_instant(self, memory: WorkingMemory, other: WorkingMemory) -> None:
        do = await hand_of(memory, an_owner(), [Item(f"k{n}", Kind.STRING, b"0") for n in range(1000)])
        enough = asyncio.Event()

        async def write() -> None:
            number = 0
            while not enough.is_set():
                number += 1
                await do.all(*(("SET", key, b"%d" % number) for key in ("k0", "k500", "k999")))
                await asyncio.sleep(0)

        writing = asyncio.create_task(write())
        try:
            for _ in range(20):
                held = contents(await other.read(do.owner.agent_id))
                assert len({held["k0"], held["k500"], held["k999"]}) == 1
                assert len(held) == 1000
                await asyncio.sleep(0)
        finally:
            enough.set()
            await writing


class ReplaceSuite:
    """`replace` swaps the whole memory at one instant."""

    async def test_a_memory_is_begun_with_nothing(self, memory: WorkingMemory) -> None:
        owner = an_owner(7)
        held = await memory.replace(owner, ())
        assert (held.items, held.run_id, held.fence) == ((), owner.run_id, 7)
        assert held.version > 0
        assert await memory.keys(owner) == []
        assert (await memory.read(owner.agent_id)).version == held.version

    async def test_what_is_put_is_there(self, memory: WorkingMemory) -> None:
        owner = an_owner()
        assert plain((await memory.replace(owner, ALL_KINDS)).items) == plain(ALL_KINDS)
        assert plain((await memory.read(owner.agent_id)).items) == plain(ALL_KINDS)
        assert sorted(await memory.keys(owner)) == sorted(item.key for item in ALL_KINDS)

    async def test_what_is_put_can_be_worked_with(self, do: Hand) -> None:
        await do.put(*ALL_KINDS)
        assert await do.all(("RPUSH", "list", b"z"), ("LPOP", "list"), ("HLEN", "hash"), ("SCARD", "set")) == [
            *(5, b"a", 3, 3)
        ]
        assert await do.all(("ZCARD", "zset"), ("GET", "empty"), ("TYPE", "zset"), ("DEL", "☃")) == [
            *(4, b"", b"zset", 1)
        ]

    async def test_nothing_of_what_was_there_stays(self, do: Hand) -> None:
        await do.all(*ONE_OF_EACH, ("SET", "old", b"1"), ("PEXPIRE", "string", b"100000"))
        held = await do.put(Item("string", Kind.STRING, b"new"), Item("zset", Kind.LIST, (b"new",)))
        assert plain(held.items) == {"string": (Kind.STRING, b"new", None), "zset": (Kind.LIST, (b"new",), None)}
        assert sorted(await do.memory.keys(do.owner)) == ["string", "zset"]
        assert await do.all(("TYPE", "old"), ("TYPE", "hash"), ("PTTL", "string")) == [b"none", b"none", -1]

    async def test_the_version_goes_on(self, do: Hand) -> None:
        version, _ = await do.versioned(("SET", "k", b"1"))
        held = await do.put()
        assert held.version > version
        other = an_owner(2, of=do.owner)
        assert (await do.memory.replace(other, ())).version > held.version

    async def test_what_was_read_is_put_back_as_it_was(self, memory: WorkingMemory) -> None:
        first = await hand_of(memory, an_owner(), ALL_KINDS)
        before = await first.held()
        await memory.forget(first.owner)
        again = an_owner(2, of=first.owner)
        assert plain((await memory.replace(again, before.items)).items) == plain(before.items)

    async def test_what_was_put_is_a_copy(self, do: Hand) -> None:
        fields, scores = {b"f": b"1"}, {b"a": 1.0}
        held = await do.put(Item("hash", Kind.HASH, fields), Item("zset", Kind.ZSET, scores))
        fields[b"f"], scores[b"a"] = b"changed", 2.0
        assert plain((await do.held()).items) == plain(held.items)
        assert contents(held) == {"hash": {b"f": b"1"}, "zset": {b"a": 1.0}}

    async def test_ten_thousand_keys_are_put_and_read(self, memory: WorkingMemory) -> None:
        values = {f"k{number}": b"%d" % number for number in range(10_000)}
        owner = an_owner()
        held = await memory.replace(owner, [Item(key, Kind.STRING, value) for key, value in values.items()])
        assert contents(held) == values
        assert len(await memory.keys(owner)) == 10_000

    async def test_large_values_are_put_and_read(self, memory: WorkingMemory) -> None:
        large = [Item(f"k{n}", Kind.STRING, bytes([n]) * 3_000_000) for n in range(4)]
        many = Item("list", Kind.LIST, tuple(b"%d" % number for number in range(100_000)))
        assert plain((await memory.replace(an_owner(), [*large, many])).items) == plain([*large, many])
