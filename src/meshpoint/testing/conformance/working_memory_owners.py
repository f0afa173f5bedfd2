"""The owner of a working memory, and the memory as a whole."""

from __future__ import annotations

import asyncio

import pytest

from meshpoint.errors import MemoryFenced, MemoryLost
from meshpoint.model.memory import Item, Kind
from meshpoint.ports.working_memory import WorkingMemory
from meshpoint.testing.conformance.working_memory_values import (
    BINARY,
    HOUR,
    ONE_OF_EACH,
    Hand,
    WorkingMemoryCase,
    an_owner,
    contents,
    hand_of,
    own_times,
    plain,
)

ITEM = Item("k", Kind.STRING, b"mine")
OTHER = Item("k", Kind.STRING, b"other")
ALL_KINDS = (
    Item("string", Kind.STRING, BINARY),
    Item("empty", Kind.STRING, b""),
    Item("list", Kind.LIST, (b"a", b"", BINARY, b"a")),
    Item("hash", Kind.HASH, {b"": BINARY, BINARY: b"", b"f": b"1"}),
    Item("set", Kind.SET, frozenset({b"", BINARY, b"1"})),
    Item("zset", Kind.ZSET, {b"": float("-inf"), BINARY: 1e-320, b"a": 0.1, b"b": float("inf")}),
    Item("☃", Kind.STRING, "☃".encode()),
)


class OwnerSuite(WorkingMemoryCase):
    """Only the owner uses a memory; it is read, replaced, adopted and forgotten at one instant."""

    async def test_a_memory_that_nobody_began_is_lost(self, memory: WorkingMemory) -> None:
        do = Hand(memory, an_owner())
        for name, *args in (("GET",), ("SET", b"1"), ("DEL",)):
            with pytest.raises(MemoryLost):
                await do(name, "k", *args)
        with pytest.raises(MemoryLost):
            await do.all()
        with pytest.raises(MemoryLost):
            await memory.keys(do.owner)
        stored = await do.read_all()
        assert (stored.items, stored.version, stored.run_id, stored.fence, stored.lost_keys) == (
            (),
            0,
            None,
            0,
            (),
        )

    @pytest.mark.parametrize("fence", [1, 2])
    async def test_fenced_run_neither_reads_nor_writes(
        self, memory: WorkingMemory, other: WorkingMemory, fence: int
    ) -> None:
        zombie = await hand_of(memory, an_owner(1), [ITEM])
        owner = await hand_of(other, an_owner(fence, of=zombie.owner), [OTHER])
        before = await owner.read_all()
        for name, *args in (("GET",), ("SET", b"zombie"), ("DEL",), ("PEXPIRE", HOUR)):
            with pytest.raises(MemoryFenced):
                await zombie(name, "k", *args)
        with pytest.raises(MemoryFenced):
            await zombie.all()
        with pytest.raises(MemoryFenced):
            await memory.keys(zombie.owner)
        after = await owner.read_all()
        assert (plain(after.items), after.version) == (plain(before.items), before.version)
        assert (after.run_id, after.fence) == (owner.owner.run_id, fence)

    async def test_lower_fence_refused(self, memory: WorkingMemory, other: WorkingMemory) -> None:
        owner = await hand_of(other, an_owner(2), [ITEM])
        zombie = an_owner(1, of=owner.owner)
        before = await owner.read_all()
        for items in ([], [OTHER]):
            with pytest.raises(MemoryFenced):
                await memory.replace(zombie, items)
        for version in (before.version, before.version + 1):
            with pytest.raises(MemoryFenced):
                await memory.adopt(zombie, version)
        after = await owner.read_all()
        assert (after.items, after.version, after.run_id) == (
            before.items,
            before.version,
            owner.owner.run_id,
        )
        assert await owner("GET", "k") == b"mine"

    async def test_same_fence_last_wins(self, memory: WorkingMemory, other: WorkingMemory) -> None:
        first = await hand_of(memory, an_owner(1), [ITEM])
        second = await hand_of(other, an_owner(1, of=first.owner), [OTHER])
        with pytest.raises(MemoryFenced):
            await first("GET", "k")
        assert await second("GET", "k") == b"other"

    async def test_one_replace_wins(self, memory: WorkingMemory, other: WorkingMemory) -> None:
        first = an_owner()
        owners = [first, *(an_owner(of=first) for _ in range(7))]
        items = [
            [Item(f"k{n}", Kind.STRING, owner.run_id.encode()) for n in range(20)]
            for owner in owners
        ]
        places = [memory, other] * 4
        await asyncio.gather(
            *(p.replace(o, i) for p, o, i in zip(places, owners, items, strict=True))
        )
        stored = await memory.read(first.agent_id)
        assert stored.run_id in [owner.run_id for owner in owners]
        assert contents(stored) == {f"k{n}": str(stored.run_id).encode() for n in range(20)}
        for owner in owners:
            if owner.run_id == stored.run_id:
                assert len(await memory.keys(owner)) == 20
            else:
                with pytest.raises(MemoryFenced):
                    await memory.keys(owner)

    async def test_memories_of_others_are_others(self, memory: WorkingMemory) -> None:
        mine, theirs = await hand_of(memory, an_owner()), await hand_of(memory, an_owner())
        await mine("SET", "k", b"mine")
        await theirs("SET", "k", b"theirs")
        await memory.forget(theirs.owner)
        assert contents(await mine.read_all()) == {"k": b"mine"}
        assert (await theirs.read_all()).items == ()

    async def test_agent_id_prefix_is_another_memory(self, memory: WorkingMemory) -> None:
        mine = await hand_of(memory, an_owner())
        longer = an_owner()
        theirs = await hand_of(memory, type(longer)(f"{mine.owner.agent_id}:k", longer.run_id, 1))
        await mine("SET", "k:k", b"mine")
        await theirs("SET", "k", b"theirs")
        assert contents(await mine.read_all()) == {"k:k": b"mine"}
        await memory.forget(mine.owner)
        assert contents(await theirs.read_all()) == {"k": b"theirs"}

    async def test_adopt_keeps_contents(self, memory: WorkingMemory, other: WorkingMemory) -> None:
        first = await hand_of(memory, an_owner(1))
        await first.all(*ONE_OF_EACH, ("PEXPIRE", "list", HOUR))
        before = await first.read_all()
        owner = an_owner(2, of=first.owner)
        assert await other.adopt(owner, before.version) is True
        after = await other.read(owner.agent_id)
        assert plain(after.items) == plain(before.items)
        assert (after.version, after.run_id, after.fence, after.lost_keys) == (
            before.version,
            owner.run_id,
            2,
            (),
        )
        assert own_times(after.items)["list"] is not None
        with pytest.raises(MemoryFenced):
            await first("SET", "string", b"zombie")
        version, _ = await Hand(other, owner).versioned(("SET", "string", b"new"))
        assert version > before.version

    @pytest.mark.parametrize("version_offset", [-1, 1])
    async def test_adopt_checks_version(self, memory: WorkingMemory, version_offset: int) -> None:
        first = await hand_of(memory, an_owner(1), [ITEM])
        version, _ = await first.versioned(("SET", "l", b"1"))
        assert await memory.adopt(an_owner(2, of=first.owner), version + version_offset) is False
        assert await first("GET", "k") == b"mine"
        assert (await first.read_all()).fence == 1

    async def test_adopt_after_write_is_refused(self, memory: WorkingMemory) -> None:
        first = await hand_of(memory, an_owner(1), [ITEM])
        seen = (await first.read_all()).version
        await first("PEXPIRE", "k", HOUR)
        assert await memory.adopt(an_owner(2, of=first.owner), seen) is False

    async def test_adopt_of_recreated_memory_is_refused(self, memory: WorkingMemory) -> None:
        first = await hand_of(memory, an_owner(1), [ITEM])
        seen = (await first.read_all()).version
        await memory.forget(first.owner)
        again = await hand_of(memory, an_owner(1, of=first.owner), [OTHER])
        assert await memory.adopt(an_owner(2, of=first.owner), seen) is False
        assert await again("GET", "k") == b"other"

    async def test_the_owner_may_adopt_its_own(self, memory: WorkingMemory) -> None:
        do = await hand_of(memory, an_owner(), [ITEM])
        assert await memory.adopt(do.owner, (await do.read_all()).version) is True
        assert await do("GET", "k") == b"mine"

    @pytest.mark.parametrize("version", [0, 1])
    async def test_nothing_cannot_be_taken_over(self, memory: WorkingMemory, version: int) -> None:
        owner = an_owner()
        assert await memory.adopt(owner, version) is False
        with pytest.raises(MemoryLost):
            await memory.keys(owner)

    async def test_forget_leaves_nothing(self, memory: WorkingMemory) -> None:
        do = await hand_of(memory, an_owner(3))
        await do.all(*ONE_OF_EACH)
        await memory.forget(do.owner)
        stored = await do.read_all()
        assert (stored.items, stored.version, stored.run_id, stored.fence, stored.lost_keys) == (
            (),
            0,
            None,
            0,
            (),
        )
        with pytest.raises(MemoryLost):
            await do("GET", "string")
        again = await hand_of(memory, an_owner(1, of=do.owner))
        assert await again("TYPE", "string") == b"none"

    async def test_forgetting_twice_or_nothing_does_nothing(self, memory: WorkingMemory) -> None:
        do = await hand_of(memory, an_owner(), [ITEM])
        await memory.forget(do.owner)
        await memory.forget(do.owner)
        await memory.forget(an_owner())
        assert (await do.read_all()).items == ()

    @pytest.mark.parametrize("fence", [1, 2])
    async def test_zombie_neither_forgets_nor_retains(
        self, memory: WorkingMemory, other: WorkingMemory, fence: int
    ) -> None:
        zombie = an_owner(1)
        await memory.replace(zombie, [ITEM])
        owner = await hand_of(other, an_owner(fence, of=zombie), [OTHER])
        await memory.forget(zombie)
        await memory.retain(zombie, paused=True)
        assert contents(await owner.read_all()) == {"k": b"other"}
        assert await owner("GET", "k") == b"other"

    @pytest.mark.parametrize("paused", [True, False])
    async def test_retain_keeps_contents(self, memory: WorkingMemory, paused: bool) -> None:
        do = await hand_of(memory, an_owner())
        await do.all(*ONE_OF_EACH, ("PEXPIRE", "list", HOUR))
        before = await do.read_all()
        await memory.retain(do.owner, paused=paused)
        after = await do.read_all()
        assert plain(after.items) == plain(before.items)
        assert (after.version, after.run_id, after.lost_keys) == (
            before.version,
            before.run_id,
            (),
        )

    async def test_retaining_nothing_makes_nothing(self, memory: WorkingMemory) -> None:
        owner = an_owner()
        await memory.retain(owner, paused=True)
        assert (await memory.read(owner.agent_id)).run_id is None

    async def test_all_that_is_there_is_read(self, do: Hand) -> None:
        await do.all(*ONE_OF_EACH)
        stored = await do.read_all()
        assert contents(stored) == {
            "string": b"a",
            "list": (b"a",),
            "hash": {b"f": b"a"},
            "set": frozenset({b"a"}),
            "zset": {b"a": 1.0},
        }
        assert (stored.run_id, stored.fence, stored.lost_keys) == (
            do.owner.run_id,
            do.owner.fence,
            (),
        )
        assert sorted(await do.memory.keys(do.owner)) == sorted(contents(stored))

    async def test_what_was_read_does_not_change(self, do: Hand) -> None:
        await do.all(*ONE_OF_EACH)
        stored = await do.read_all()
        same = {item.key: item for item in (await do.read_all()).items}
        await do.all(
            ("RPUSH", "list", b"b"),
            ("HSET", "hash", b"g", b"b"),
            ("SADD", "set", b"b"),
            ("DEL", "string"),
        )
        await do.all(("ZADD", "zset", b"2", b"a"), ("LPOP", "list"))
        assert {item.key: item for item in stored.items} == same

    async def test_reading_changes_nothing(self, do: Hand) -> None:
        await do.all(*ONE_OF_EACH)
        first = await do.read_all()
        second = await do.read_all()
        assert (plain(first.items), first.version) == (plain(second.items), second.version)

    async def test_read_is_atomic(self, memory: WorkingMemory, other: WorkingMemory) -> None:
        do = await hand_of(
            memory, an_owner(), [Item(f"k{n}", Kind.STRING, b"0") for n in range(1000)]
        )
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
                stored = contents(await other.read(do.owner.agent_id))
                assert len({stored["k0"], stored["k500"], stored["k999"]}) == 1
                assert len(stored) == 1000
                await asyncio.sleep(0)
        finally:
            enough.set()
            await writing

    async def test_a_memory_is_begun_with_nothing(self, memory: WorkingMemory) -> None:
        owner = an_owner(7)
        stored = await memory.replace(owner, ())
        assert (stored.items, stored.run_id, stored.fence) == ((), owner.run_id, 7)
        assert stored.version > 0
        assert await memory.keys(owner) == []
        assert (await memory.read(owner.agent_id)).version == stored.version

    async def test_what_is_put_is_there(self, memory: WorkingMemory) -> None:
        owner = an_owner()
        assert plain((await memory.replace(owner, ALL_KINDS)).items) == plain(ALL_KINDS)
        assert plain((await memory.read(owner.agent_id)).items) == plain(ALL_KINDS)
        assert sorted(await memory.keys(owner)) == sorted(item.key for item in ALL_KINDS)

    async def test_what_is_put_can_be_worked_with(self, do: Hand) -> None:
        await do.put(*ALL_KINDS)
        assert await do.all(
            ("RPUSH", "list", b"z"), ("LPOP", "list"), ("HLEN", "hash"), ("SCARD", "set")
        ) == [*(5, b"a", 3, 3)]
        assert await do.all(
            ("ZCARD", "zset"), ("GET", "empty"), ("TYPE", "zset"), ("DEL", "☃")
        ) == [*(4, b"", b"zset", 1)]

    async def test_nothing_of_what_was_there_stays(self, do: Hand) -> None:
        await do.all(*ONE_OF_EACH, ("SET", "old", b"1"), ("PEXPIRE", "string", b"100000"))
        stored = await do.put(
            Item("string", Kind.STRING, b"new"), Item("zset", Kind.LIST, (b"new",))
        )
        assert plain(stored.items) == {
            "string": (Kind.STRING, b"new", None),
            "zset": (Kind.LIST, (b"new",), None),
        }
        assert sorted(await do.memory.keys(do.owner)) == ["string", "zset"]
        assert await do.all(("TYPE", "old"), ("TYPE", "hash"), ("PTTL", "string")) == [
            b"none",
            b"none",
            -1,
        ]

    async def test_the_version_goes_on(self, do: Hand) -> None:
        version, _ = await do.versioned(("SET", "k", b"1"))
        stored = await do.put()
        assert stored.version > version
        other = an_owner(2, of=do.owner)
        assert (await do.memory.replace(other, ())).version > stored.version

    async def test_what_was_read_is_put_back_as_it_was(self, memory: WorkingMemory) -> None:
        first = await hand_of(memory, an_owner(), ALL_KINDS)
        before = await first.read_all()
        await memory.forget(first.owner)
        again = an_owner(2, of=first.owner)
        assert plain((await memory.replace(again, before.items)).items) == plain(before.items)

    async def test_what_was_put_is_a_copy(self, do: Hand) -> None:
        fields, scores = {b"f": b"1"}, {b"a": 1.0}
        stored = await do.put(Item("hash", Kind.HASH, fields), Item("zset", Kind.ZSET, scores))
        fields[b"f"], scores[b"a"] = b"changed", 2.0
        assert plain((await do.read_all()).items) == plain(stored.items)
        assert contents(stored) == {"hash": {b"f": b"1"}, "zset": {b"a": 1.0}}

    async def test_ten_thousand_keys_are_put_and_read(self, memory: WorkingMemory) -> None:
        values = {f"k{number}": b"%d" % number for number in range(10_000)}
        owner = an_owner()
        stored = await memory.replace(
            owner, [Item(key, Kind.STRING, value) for key, value in values.items()]
        )
        assert contents(stored) == values
        assert len(await memory.keys(owner)) == 10_000

    async def test_large_values_are_put_and_read(self, memory: WorkingMemory) -> None:
        large = [Item(f"k{n}", Kind.STRING, bytes([n]) * 3_000_000) for n in range(4)]
        many = Item("list", Kind.LIST, tuple(b"%d" % number for number in range(100_000)))
        assert plain((await memory.replace(an_owner(), [*large, many])).items) == plain(
            [*large, many]
        )
