"""Which tier a memory is restored from, and what the recovery reports."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import pytest

from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.errors import ConsistencyError, MemoryFenced, MemoryUnavailable, StoreUnavailable
from meshpoint.model.agent_memory import MemorySource
from meshpoint.model.checkpoint import L1Snapshot
from meshpoint.model.memory import Command, Held, Item, Kind, Owner, Packed
from meshpoint.working_memory import recovery
from meshpoint.working_memory.packing import pack, to_bytes, unpack
from meshpoint.working_memory.recovery import UNREADABLE_PREFIX, DualRecoveryStrategy, RecoveredMemory

from .items import AGENT_ID, ITEMS, held, owner

EARLIER, NEXT = owner("earlier", 1), owner("next", 2)
START = datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
"""One second after the epoch, and one second before the first of `ITEMS` expires."""


class L1(InProcessWorkingMemory):
    """An L1 that survives its process, and can change during reads, lose keys and count reads."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.restless = 0  # this many of the next reads are followed by a foreign write
        self.away = False
        self.evicted: tuple[str, ...] = ()
        # replaces the first key of each of the next restores
        self.garbled: list[str] = []
        self.reads = 0

    @property
    def survives(self) -> bool:
        return True

    async def read(self, agent_id: str) -> Held:
        self.reads += 1
        if self.away:
            raise MemoryUnavailable("L1 is unavailable")
        held = await super().read(agent_id)
        if self.restless:
            self.restless -= 1
            await self.execute(EARLIER, [Command("DEL", "what nobody has")])
        return replace(held, lost=self.evicted)

    async def replace(
        self, owner: Owner, items: Sequence[Item], *, seen: int | None = None, force: bool = False
    ) -> Held:
        if self.garbled and items:
            items = (Item(self.garbled.pop(), Kind.STRING, b"?"), *items[1:])
        self.evicted = ()
        return await super().replace(owner, items, seen=seen, force=force)


class SecondPlace:
    """Returns a snapshot or raises an error."""

    def __init__(self) -> None:
        self.has: Packed | Exception | None = None
        self.gets = 0

    async def get(self, agent_id: str) -> Packed | None:
        self.gets += 1
        if isinstance(self.has, Exception):
            raise self.has
        return self.has


class Unused:
    """A tier that must not be used."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name}: must not be called")


@dataclass
class Places:
    """Three tiers for one memory, and the problems reported."""

    clock: FakeClock = field(default_factory=lambda: FakeClock(START))
    row: L1Snapshot | Exception | None = None
    fetches: int = 0
    told: list[tuple[str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.l1, self.second = L1(self.clock), SecondPlace()
        self.strategy = self.over(self.l1, self.second)

    def over(self, l1: Any, second: Any) -> DualRecoveryStrategy:
        return DualRecoveryStrategy(l1, second, lambda *told: self.told.append(told))

    async def fetch(self) -> L1Snapshot | None:
        self.fetches += 1
        if isinstance(self.row, Exception):
            raise self.row
        return self.row

    async def recover(self, expected: str | None, by: Owner = NEXT) -> RecoveredMemory:
        return await self.strategy.recover(by, expected, self.fetch)

    async def keep_in_l1(self, *items: Item, by: Owner = EARLIER) -> Held:
        return await self.l1.replace(by, items)

    async def items(self) -> tuple[Item, ...]:
        """The contents of L1, regardless of its owner."""
        return (await InProcessWorkingMemory.read(self.l1, AGENT_ID)).items


@pytest.fixture
def places() -> Places:
    return Places()


def row(packed: Packed) -> L1Snapshot:
    return L1Snapshot(packed.order, packed.digest, to_bytes(packed))


def flipped(packed: Packed) -> Packed:
    """Damage the only chunk, and thereby all keys."""
    (chunk,) = packed.chunks
    return replace(packed, chunks=(chunk[:-1] + bytes([chunk[-1] ^ 1]),))


def text(value: str) -> Item:
    return Item("text", Kind.STRING, value.encode())


WHOLE = pack(held(*ITEMS), 5)
OLDER = pack(held(text("older")), 3)
OLDEST = pack(held(text("oldest")), 2)


async def test_a_task_without_memory_begins_with_an_empty_one_whatever_lies_about(places: Places) -> None:
    await places.keep_in_l1(*ITEMS)
    places.strategy = places.over(places.l1, Unused())
    found = await places.recover(None)
    how = found.recovery
    assert (how.source, how.keys, how.verified, how.behind) == (MemorySource.NONE, 0, True, False)
    assert await places.items() == ()
    assert places.fetches == 0
    assert places.told == []


async def test_what_is_whole_in_l1_serves_and_nothing_else_is_asked(places: Places) -> None:
    before = await places.keep_in_l1(*ITEMS)
    places.strategy = places.over(places.l1, Unused())
    found = await places.recover(WHOLE.digest)
    how = found.recovery
    assert (how.source, how.keys, how.verified, how.behind) == (MemorySource.L1, len(ITEMS), True, False)
    assert (how.problems, found.version, found.digest) == ((), before.version, WHOLE.digest)
    assert places.fetches == 0


Prepare = Callable[[Places], object]
OTHERWISE: dict[str, Prepare] = {
    "empty": lambda places: None,
    "changed": lambda places: places.l1.execute(EARLIER, [Command("SET", "text", (b"more",))]),
    "with one key more": lambda places: places.l1.execute(EARLIER, [Command("SET", "more", (b"1",))]),
    "evicted": lambda places: setattr(places.l1, "evicted", ("text",)),
}


@pytest.mark.parametrize("l1", OTHERWISE)
@pytest.mark.parametrize("source", [MemorySource.SNAPSHOT, MemorySource.SQL])
async def test_where_l1_has_something_else_the_next_place_serves(
    places: Places, l1: str, source: MemorySource
) -> None:
    if l1 != "empty":
        await places.keep_in_l1(*ITEMS)
        if (changing := OTHERWISE[l1](places)) is not None:
            await changing  # type: ignore[misc]
    if source is MemorySource.SNAPSHOT:
        places.second.has = WHOLE
    places.row = row(WHOLE)
    found = await places.recover(WHOLE.digest)
    how = found.recovery
    assert (how.source, how.keys, how.verified, how.behind) == (source, len(ITEMS), True, False)
    assert (found.digest, found.order) == (WHOLE.digest, WHOLE.order)
    assert await places.items() == ITEMS
    assert places.fetches == (source is MemorySource.SQL), "the database is asked last"
    assert [("'text'" in problem, "has changed" in problem) for problem in how.problems] == {
        "empty": [],
        "evicted": [(True, False)],
    }.get(l1, [(False, True)])
    assert places.told == []


@pytest.mark.parametrize("source", [MemorySource.L1, MemorySource.SNAPSHOT, MemorySource.SQL, MemorySource.NONE])
async def test_whoever_recovers_it_is_its_owner_and_knows_its_version(places: Places, source: MemorySource) -> None:
    await places.keep_in_l1(*(ITEMS if source is MemorySource.L1 else ()))
    places.second.has = WHOLE if source is MemorySource.SNAPSHOT else None
    places.row = row(WHOLE) if source is MemorySource.SQL else None
    found = await places.recover(WHOLE.digest)
    assert found.recovery.source is source
    version, _ = await places.l1.execute(NEXT, [Command("GET", "text")], seen=found.version)
    assert version == found.version
    with pytest.raises(MemoryFenced):
        await places.l1.execute(EARLIER, [Command("GET", "text")])


async def test_without_a_second_place_the_database_is_next(places: Places) -> None:
    places.strategy, places.row = places.over(places.l1, None), row(WHOLE)
    assert (await places.recover(WHOLE.digest)).recovery.source is MemorySource.SQL
    assert await places.items() == ITEMS


async def test_what_ends_with_its_process_is_not_looked_at(places: Places) -> None:
    """The task has run elsewhere since, so the memory of its earlier replica is outdated."""
    local = InProcessWorkingMemory(places.clock)
    await local.replace(EARLIER, ITEMS)
    places.strategy, places.row = places.over(local, None), row(WHOLE)
    assert (await places.recover(WHOLE.digest)).recovery.source is MemorySource.SQL


async def test_served_counts_the_sources_of_what_was_recovered(places: Places) -> None:
    await places.recover(None)
    places.row = row(WHOLE)
    await places.recover(WHOLE.digest)
    await places.recover(WHOLE.digest)
    await places.recover(WHOLE.digest)
    await places.keep_in_l1(by=NEXT)
    places.second.has = WHOLE
    await places.recover(WHOLE.digest)
    await places.keep_in_l1(by=NEXT)
    places.second.has, places.row = flipped(WHOLE), None
    with pytest.raises(ConsistencyError):
        await places.recover(WHOLE.digest)
    assert places.strategy.served == {
        MemorySource.NONE: 1,
        MemorySource.SQL: 1,
        MemorySource.L1: 2,
        MemorySource.SNAPSHOT: 1,
    }


async def test_an_absent_memory_is_that_of_its_version_and_nobody_can_verify_it(places: Places) -> None:
    version = (await places.keep_in_l1(*ITEMS)).version
    places.second.has = OLDER
    found = await places.recover(f"{UNREADABLE_PREFIX}{version}")
    how = found.recovery
    assert (how.source, how.keys, how.verified, how.behind) == (MemorySource.L1, len(ITEMS), False, False)
    assert found.digest == WHOLE.digest
    assert places.second.gets == 0


@pytest.mark.parametrize("since", ["written", "evicted", "emptied", "in doubt"])
async def test_an_absent_memory_that_is_not_of_its_version_is_behind(places: Places, since: str) -> None:
    version = (await places.keep_in_l1(*ITEMS)).version
    match since:
        case "written":
            await places.l1.execute(EARLIER, [Command("SET", "text", (b"more",))])
        case "evicted":
            places.l1.evicted = ("text",)
        case "emptied":
            await places.l1.forget(EARLIER)
        case _:
            version = 0
    places.second.has = OLDER
    found = await places.recover(f"{UNREADABLE_PREFIX}{version}")
    how = found.recovery
    assert (how.source, how.verified, how.behind) == (MemorySource.SNAPSHOT, False, True)
    assert (found.order, await places.items()) == (OLDER.order, (text("older"),))


@pytest.mark.parametrize("newer", [MemorySource.SNAPSHOT, MemorySource.SQL])
async def test_of_two_that_are_behind_the_newer_serves(places: Places, newer: MemorySource) -> None:
    in_redis, in_sql = (OLDER, OLDEST) if newer is MemorySource.SNAPSHOT else (OLDEST, OLDER)
    await places.keep_in_l1(text("of a run that died"))
    places.second.has, places.row = in_redis, row(in_sql)
    found = await places.recover(WHOLE.digest)
    how = found.recovery
    assert (how.source, how.keys, how.verified, how.behind) == (newer, 1, False, True)
    assert (found.order, found.digest) == (OLDER.order, OLDER.digest)
    assert await places.items() == (text("older"),)
    ((agent_id, what, why),) = places.told
    assert (agent_id, what) == (AGENT_ID, "behind")
    assert f"from {newer}" in why
    assert "L1 has changed since" in why
    assert places.strategy.served == {newer: 1}


@pytest.mark.parametrize("damaged", [MemorySource.SNAPSHOT, MemorySource.SQL])
async def test_where_the_newest_is_damaged_an_older_one_that_is_whole_serves(
    places: Places, damaged: MemorySource
) -> None:
    if damaged is MemorySource.SNAPSHOT:
        places.second.has, places.row = flipped(WHOLE), row(OLDER)
    else:
        places.second.has, places.row = OLDER, row(flipped(WHOLE))
    found = await places.recover(WHOLE.digest)
    how = found.recovery
    assert how.source in {MemorySource.SNAPSHOT, MemorySource.SQL} - {damaged}
    assert (how.verified, how.behind, found.order) == (False, True, OLDER.order)
    assert await places.items() == (text("older"),)
    (problem,) = how.problems
    assert all(repr(item.key) in problem for item in ITEMS)
    ((_, what, why),) = places.told
    assert (what, problem in why) == ("behind", True)


async def test_nothing_at_all_is_an_empty_memory_that_says_so(places: Places) -> None:
    await places.keep_in_l1(text("of a run that died"))
    found = await places.recover(WHOLE.digest)
    how = found.recovery
    assert (how.source, how.keys, how.verified, how.behind) == (MemorySource.NONE, 0, False, True)
    assert await places.items() == ()
    assert [what for _, what, _ in places.told] == ["nothing_found"]


ROWS: dict[str, L1Snapshot] = {
    "flipped": row(flipped(WHOLE)),
    "cut off": replace(row(WHOLE), content=to_bytes(WHOLE)[:-1]),
    "junk": replace(row(WHOLE), content=b"junk"),
    "of another digest": replace(row(WHOLE), digest=OLDER.digest),
}
SECONDS: dict[str, Packed | Exception] = {
    "flipped": flipped(WHOLE),
    "without chunks": replace(WHOLE, chunks=()),
    "no snapshot": ConsistencyError("what is in Redis is no snapshot", changed=["text"]),
}


@pytest.mark.parametrize("second", SECONDS)
async def test_a_damaged_snapshot_is_passed_over_and_named(places: Places, second: str) -> None:
    places.second.has, places.row = SECONDS[second], row(WHOLE)
    how = (await places.recover(WHOLE.digest)).recovery
    assert (how.source, how.verified, how.behind) == (MemorySource.SQL, True, False)
    (problem,) = how.problems
    assert "'text'" in problem


@pytest.mark.parametrize(("second", "in_sql"), list(product([*SECONDS, None], [*ROWS, None]))[:-1])
async def test_where_all_that_was_found_is_damaged_nobody_guesses(
    places: Places, second: str | None, in_sql: str | None
) -> None:
    await places.keep_in_l1(text("of a run that died"))
    places.second.has = SECONDS[second] if second else None
    places.row = ROWS[in_sql] if in_sql else None
    with pytest.raises(ConsistencyError) as refused:
        await places.recover(WHOLE.digest)
    whole = tuple(sorted(item.key for item in ITEMS))
    if in_sql == "flipped" or second in {"flipped", "without chunks"}:
        assert refused.value.missing == whole
    assert ("the snapshot in the database" in str(refused.value)) is (in_sql is not None)
    assert AGENT_ID in str(refused.value)
    assert places.strategy.served == {}
    assert await places.items() == (text("of a run that died"),), "L1 must not change"


@pytest.mark.parametrize("times", [1, 2])
async def test_what_arrives_damaged_in_l1_is_taken_from_the_next_place_or_refused(places: Places, times: int) -> None:
    places.l1.garbled = ["garbled"] * times
    places.second.has, places.row = WHOLE, row(WHOLE)
    if times == 1:
        how = (await places.recover(WHOLE.digest)).recovery
        assert (how.source, how.verified) == (MemorySource.SQL, True)
        assert "extra: 'garbled'" in how.problems[0]
        assert await places.items() == ITEMS
    else:
        with pytest.raises(ConsistencyError) as refused:
            await places.recover(WHOLE.digest)
        assert (refused.value.missing, refused.value.extra) == (("text",), ("garbled",))


@pytest.mark.parametrize("times", [1, 2])
async def test_l1_that_changes_while_it_is_looked_at_is_looked_at_again(places: Places, times: int) -> None:
    await places.keep_in_l1(*ITEMS)
    places.l1.restless, places.l1.reads = times, 0
    found = await places.recover(WHOLE.digest)
    assert (found.recovery.source, found.recovery.verified) == (MemorySource.L1, True)
    assert places.l1.reads == times + 1
    assert found.version == (await places.l1.read(AGENT_ID)).version


async def test_l1_that_changes_all_the_time_cannot_be_had_now(places: Places) -> None:
    await places.keep_in_l1(*ITEMS)
    places.l1.restless = 3
    places.second.has = WHOLE
    with pytest.raises(MemoryUnavailable, match="keeps changing while it is read"):
        await places.recover(WHOLE.digest)
    await places.l1.execute(EARLIER, [Command("GET", "text")])  # its owner is unchanged
    assert places.strategy.served == {}


@pytest.mark.parametrize(
    "expected",
    [WHOLE.digest, OLDER.digest, "1:of nothing", f"{UNREADABLE_PREFIX}0", None],
    ids=["in L1", "in the second place", "nowhere", "absent", "none"],
)
async def test_a_run_that_lost_the_task_is_fenced_whatever_it_looks_for(places: Places, expected: str | None) -> None:
    """L1 has it, another tier has it, no tier has it, and no memory is expected."""
    await places.keep_in_l1(*ITEMS, by=NEXT)
    places.second.has = OLDER if expected == OLDER.digest else None
    with pytest.raises(MemoryFenced):
        await places.recover(expected, by=EARLIER)
    await places.l1.execute(NEXT, [Command("GET", "text")])
    assert await places.items() == ITEMS
    assert places.strategy.served == {}


async def test_l1_that_does_not_answer_is_no_reason_to_look_elsewhere(places: Places) -> None:
    await places.keep_in_l1(*ITEMS)
    places.l1.away = True
    places.strategy = places.over(places.l1, Unused())
    with pytest.raises(MemoryUnavailable, match="L1 is unavailable"):
        await places.recover(WHOLE.digest)
    assert places.fetches == 0


async def test_a_second_place_that_is_away_is_passed_over_and_named(places: Places) -> None:
    places.second.has, places.row = MemoryUnavailable("the second place is unavailable"), row(WHOLE)
    how = (await places.recover(WHOLE.digest)).recovery
    assert (how.source, how.verified, how.behind) == (MemorySource.SQL, True, False)
    assert how.problems == ("the second place is unavailable",)


async def test_a_database_that_is_away_is_not_taken_for_one_that_has_nothing(places: Places) -> None:
    await places.keep_in_l1(text("of a run that died"))
    places.second.has, places.row = OLDER, StoreUnavailable("the database is unavailable")
    with pytest.raises(StoreUnavailable):
        await places.recover(WHOLE.digest)
    assert await places.items() == (text("of a run that died"),)


@pytest.mark.parametrize("source", [MemorySource.SNAPSHOT, MemorySource.SQL])
@pytest.mark.parametrize("in_l1", [True, False])
async def test_keys_whose_own_time_has_ended_meanwhile_are_left_out(
    places: Places, source: MemorySource, in_l1: bool
) -> None:
    """Even if L1 has exactly the remaining items, since its digest looks like a loss."""
    later = Item("later", Kind.STRING, b"1", 3_000)
    packed = pack(held(*ITEMS, later), 5)
    if in_l1:
        await places.keep_in_l1(*ITEMS, later)
    places.second.has = packed if source is MemorySource.SNAPSHOT else None
    places.row = row(packed)
    places.clock.advance(timedelta(seconds=1))
    found = await places.recover(packed.digest)
    left = pack(held(*ITEMS[1:], later), 5)
    how = found.recovery
    assert (how.source, how.keys, how.verified, how.behind) == (source, len(ITEMS), True, False)
    assert (found.digest, found.order) == (left.digest, 5)
    assert await places.items() == (*ITEMS[1:], later), "the other item must keep its expiry"


@pytest.mark.parametrize("source", [MemorySource.SNAPSHOT, MemorySource.SQL])
async def test_a_large_snapshot_is_read_beside_the_event_loop(
    places: Places, source: MemorySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(7)
    large = tuple(Item(f"page:{number}", Kind.STRING, rng.randbytes(100_000)) for number in range(100))
    packed, threads = pack(held(*large), 5), set()

    def noting(*args: Any) -> Any:
        threads.add(threading.current_thread())
        return unpack(*args)

    monkeypatch.setattr(recovery, "unpack", noting)
    places.second.has = packed if source is MemorySource.SNAPSHOT else None
    places.row = row(packed)
    found = await places.recover(packed.digest)
    assert (found.recovery.source, found.recovery.keys, found.recovery.verified) == (source, 100, True)
    assert await places.items() == large
    assert threads
    assert threading.current_thread() not in threads


async def test_a_large_memory_in_l1_is_looked_at_beside_the_event_loop(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = tuple(Item(f"page:{number}", Kind.STRING, b"x" * 10_000) for number in range(1_000))
    await places.keep_in_l1(*many)
    threads, fingerprint = [], recovery.fingerprint

    def noting(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return fingerprint(*args)

    monkeypatch.setattr(recovery, "fingerprint", noting)
    found = await places.recover(pack(held(*many), 5).digest)
    assert (found.recovery.source, found.recovery.keys, found.recovery.verified) == (MemorySource.L1, 1_000, True)
    assert threads[0] is not threading.current_thread()
