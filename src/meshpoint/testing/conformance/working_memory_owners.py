"""Ownership of working memories."""

from __future__ import annotations

import asyncio

import pytest

from meshpoint.errors import MemoryFenced, MemoryLost
from meshpoint.model.memory import Item, Kind
from meshpoint.ports.working_memory import WorkingMemory
from meshpoint.testing.conformance.working_memory_case import (
    HOUR,
    Hand,
    an_owner,
    contents,
    hand_of,
    own_times,
    plain,
)
from meshpoint.testing.conformance.working_memory_values import ONE_OF_EACH

ITEM = Item("k", Kind.STRING, b"mine")
OTHER = Item("k", Kind.STRING, b"other")


class OwnerSuite:
    """Only the owner can use a memory."""

    async def test_a_memory_that_nobody_began_is_lost(self, memory: WorkingMemory) -> None:
        do = Hand(memory, an_owner())
        for name, *args in (("GET",), ("SET", b"1"), ("DEL",)):
            with pytest.raises(MemoryLost):
                await do(name, "k", *args)
        with pytest.raises(MemoryLost):
            await do.all()
        with pytest.raises(MemoryLost):
            await memory.keys(do.owner)
        held = await do.held()
        assert (held.items, held.version, held.run_id, held.fence, held.lost) == ((), 0, None, 0, ())

    @pytest.mark.parametrize("fence", [1, 2])
    async def test_a_run_that_lost_its_memory_neither_reads_nor_writes(
        self, memory: WorkingMemory, other: WorkingMemory, fence: int
    ) -> None:
        zombie = await hand_of(memory, an_owner(1), [ITEM])
        owner = await hand_of(other, an_owner(fence, of=zombie.owner), [OTHER])
        before = await owner.held()
        for name, *args in (("GET",), ("SET", b"zombie"), ("DEL",), ("PEXPIRE", HOUR)):
            with pytest.raises(MemoryFenced):
                await zombie(name, "k", *args)
        with pytest.raises(MemoryFenced):
            await zombie.all()
        with pytest.raises(MemoryFenced):
            await memory.keys(zombie.owner)
        after = await owner.held()
        assert (plain(after.items), after.version) == (plain(before.items), before.version)
        assert (after.run_id, after.fence) == (owner.owner.run_id, fence)

    async def test_a_zombie_takes_no_memory_from_a_higher_fence(
        self, memory: WorkingMemory, other: WorkingMemory
    ) -> None:
        owner = await hand_of(other, an_owner(2), [ITEM])
        zombie = an_owner(1, of=owner.owner)
        before = await owner.held()
        for items in ([], [OTHER]):
            with pytest.raises(MemoryFenced):
                await memory.replace(zombie, items)
        for version in (before.version, before.version + 1):
            with pytest.raises(MemoryFenced):
                await memory.adopt(zombie, version)
        after = await owner.held()
        assert (after.items, after.version, after.run_id) == (before.items, before.version, owner.owner.run_id)
        assert await owner("GET", "k") == b"mine"

    async def test_of_two_runs_with_one_fence_the_last_has_it(
        self, memory: WorkingMemory, other: WorkingMemory
    ) -> None:
        first = await hand_of(memory, an_owner(1), [ITEM])
        second = await hand_of(other, an_owner(1, of=first.owner), [OTHER])
        with pytest.raises(MemoryFenced):
            await first("GET", "k")
        assert await second("GET", "k") == b"other"

    async def test_of_many_that_replace_at_once_one_has_it_whole(
        self, memory: WorkingMemory, other: WorkingMemory
    ) -> None:
        first = an_owner()
        owners = [first, *(an_owner(of=first) for _ in range(7))]
        items = [[Item(f"k{n}", Kind.STRING, owner.run_id.encode()) for n in range(20)] for owner in owners]
        places = [memory, other] * 4
        await asyncio.gather(*(p.replace(o, i) for p, o, i in zip(places, owners, items, strict=True)))
        held = await memory.read(first.agent_id)
        assert held.run_id in [owner.run_id for owner in owners]
        assert contents(held) == {f"k{n}": str(held.run_id).encode() for n in range(20)}
        for owner in owners:
            if owner.run_id == held.run_id:
                assert len(await memory.keys(owner)) == 20
            else:
                with pytest.raises(MemoryFenced):
                    await memory.keys(owner)

    async def test_memories_of_others_are_others(self, memory: WorkingMemory) -> None:
        mine, theirs = await hand_of(memory, an_owner()), await hand_of(memory, an_owner())
        await mine("SET", "k", b"mine")
        await theirs("SET", "k", b"theirs")
        await memory.forget(theirs.owner)
        assert contents(await mine.held()) == {"k": b"mine"}
        assert (await theirs.held()).items == ()

    async def test_a_memory_with_the_other_as_its_prefix_is_another(self, memory: WorkingMemory) -> None:
        mine = await hand_of(memory, an_owner())
        longer = an_owner()
        theirs = await hand_of(memory, type(longer)(f"{mine.owner.agent_id}:k", longer.run_id, 1))
        await mine("SET", "k:k", b"mine")
        await theirs("SET", "k", b"theirs")
        assert contents(await mine.held()) == {"k:k": b"mine"}
        await memory.forget(mine.owner)
        assert contents(await theirs.held()) == {"k": b"theirs"}


class AdoptSuite:
    """A new run continues with the existing memory."""

    async def test_what_is_there_is_taken_over_as_it_is(self, memory: WorkingMemory, other: WorkingMemory) -> None:
        first = await hand_of(memory, an_owner(1))
        await first.all(*ONE_OF_EACH, ("PEXPIRE", "list", HOUR))
        before = await first.held()
        owner = an_owner(2, of=first.owner)
        assert await other.adopt(owner, before.version) is True
        after = await other.read(owner.agent_id)
        assert plain(after.items) == plain(before.items)
        assert (after.version, after.run_id, after.fence, after.lost) == (before.version, owner.run_id, 2, ())
        assert own_times(after.items)["list"] is not None
        with pytest.raises(MemoryFenced):
            await first("SET", "string", b"zombie")
        version, _ = await Hand(other, owner).versioned(("SET", "string", b"new"))
        assert version > before.version

    @pytest.mark.parametrize("beside", [-1, 1])
    async def test_another_version_is_not_taken_over(self, memory: WorkingMemory, beside: int) -> None:
        first = await hand_of(memory, an_owner(1), [ITEM])
        version, _ = await first.versioned(("SET", "l", b"1"))
        assert await memory.adopt(an_owner(2, of=first.owner), version + beside) is False
        assert await first("GET", "k") == b"mine"
        assert (await first.held()).fence == 1

    async def test_what_was_written_to_meanwhile_is_not_taken_over(self, memory: WorkingMemory) -> None:
        first = await hand_of(memory, an_owner(1), [ITEM])
        seen = (await first.held()).version
        await first("PEXPIRE", "k", HOUR)
        assert await memory.adopt(an_owner(2, of=first.owner), seen) is False

    async def test_what_was_begun_anew_meanwhile_is_not_taken_over(self, memory: WorkingMemory) -> None:
        first = await hand_of(memory, an_owner(1), [ITEM])
        seen = (await first.held()).version
        await memory.forget(first.owner)
        again = await hand_of(memory, an_owner(1, of=first.owner), [OTHER])
        assert await memory.adopt(an_owner(2, of=first.owner), seen) is False
        assert await again("GET", "k") == b"other"

    async def test_the_owner_may_adopt_its_own(self, memory: WorkingMemory) -> None:
        do = await hand_of(memory, an_owner(), [ITEM])
        assert await memory.adopt(do.owner, (await do.held()).version) is True
        assert await do("GET", "k") == b"mine"

    @pytest.mark.parametrize("version", [0, 1])
    async def test_nothing_cannot_be_taken_over(self, memory: WorkingMemory, version: int) -> None:
        owner = an_owner()
        assert await memory.adopt(owner, version) is False
        with pytest.raises(MemoryLost):
            await memory.keys(owner)


class ForgetSuite:
    """The end of a memory, and its expiry."""

    async def test_a_forgotten_memory_is_as_if_it_had_never_been(self, memory: WorkingMemory) -> None:
        do = await hand_of(memory, an_owner(3))
        await do.all(*ONE_OF_EACH)
        await memory.forget(do.owner)
        held = await do.held()
        assert (held.items, held.version, held.run_id, held.fence, held.lost) == ((), 0, None, 0, ())
        with pytest.raises(MemoryLost):
            await do("GET", "string")
        again = await hand_of(memory, an_owner(1, of=do.owner))
        assert await again("TYPE", "string") == b"none"

    async def test_forgetting_twice_or_nothing_does_nothing(self, memory: WorkingMemory) -> None:
        do = await hand_of(memory, an_owner(), [ITEM])
        await memory.forget(do.owner)
        await memory.forget(do.owner)
        await memory.forget(an_owner())
        assert (await do.held()).items == ()

    @pytest.mark.parametrize("fence", [1, 2])
    async def test_a_zombie_forgets_and_retains_nothing_of_the_owner(
        self, memory: WorkingMemory, other: WorkingMemory, fence: int
    ) -> None:
        zombie = an_owner(1)
        await memory.replace(zombie, [ITEM])
        owner = await hand_of(other, an_owner(fence, of=zombie), [OTHER])
        await memory.forget(zombie)
        await memory.retain(zombie, paused=True)
        assert contents(await owner.held()) == {"k": b"other"}
        assert await owner("GET", "k") == b"other"

    @pytest.mark.parametrize("paused", [True, False])
    async def test_a_memory_that_is_retained_stays_as_it_is(self, memory: WorkingMemory, paused: bool) -> None:
        do = await hand_of(memory, an_owner())
        await do.all(*ONE_OF_EACH, ("PEXPIRE", "list", HOUR))
        before = await do.held()
        await memory.retain(do.owner, paused=paused)
        after = await do.held()
        assert plain(after.items) == plain(before.items)
        assert (after.version, after.run_id, after.lost) == (before.version, before.run_id, ())

    async def test_retaining_nothing_makes_nothing(self, memory: WorkingMemory) -> None:
        owner = an_owner()
        await memory.retain(owner, paused=True)
        assert (await memory.read(owner.agent_id)).run_id is None
