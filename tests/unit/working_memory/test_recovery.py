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

from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.errors import ConsistencyError, MemoryFenced, MemoryUnavailable, StoreUnavailable
from meshpoint.model.memory import (
    Command,
    Item,
    Kind,
    MemoryContents,
    MemoryRecovery,
    MemorySource,
    Owner,
    PackedSnapshot,
)
from meshpoint.model.tasks import L1Snapshot
from meshpoint.testing.clock import FakeClock
from meshpoint.working_memory import recovery
from meshpoint.working_memory.digests import fingerprint
from meshpoint.working_memory.packing import pack, to_bytes, unpack
from meshpoint.working_memory.recovery import (
    UNREADABLE_PREFIX,
    DualRecoveryStrategy,
    RecoveredMemory,
)

from .items import AGENT_ID, ITEMS, create_owner, memory_contents

EARLIER, NEXT = create_owner("earlier", 1), create_owner("next", 2)
START = datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
"""One second after the epoch, and one second before the first of `ITEMS` expires."""


class FaultyL1(InProcessWorkingMemory):
    """An L1 that survives its process, and can change during reads, lose keys and count reads."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.foreign_writes = 0  # this many of the next reads are followed by a foreign write
        self.unavailable = False
        self.evicted: tuple[str, ...] = ()
        # replaces the first key of each of the next restores
        self.garbled: list[str] = []
        self.reads = 0

    @property
    def durable(self) -> bool:
        return True

    async def read(self, agent_id: str) -> MemoryContents:
        self.reads += 1
        if self.unavailable:
            raise MemoryUnavailable("L1 is unavailable")
        contents = await super().read(agent_id)
        if self.foreign_writes:
            self.foreign_writes -= 1
            await self.execute(EARLIER, [Command("DEL", "what nobody has")])
        return replace(contents, lost_keys=self.evicted)

    async def replace(
        self,
        owner: Owner,
        items: Sequence[Item],
        *,
        expected_version: int | None = None,
        force: bool = False,
    ) -> MemoryContents:
        if self.garbled and items:
            items = (Item(self.garbled.pop(), Kind.STRING, b"?"), *items[1:])
        self.evicted = ()
        return await super().replace(owner, items, expected_version=expected_version, force=force)


class SecondTier:
    """Returns a snapshot or raises an error."""

    def __init__(self) -> None:
        self.response: PackedSnapshot | Exception | None = None
        self.get_count = 0

    async def get(self, agent_id: str) -> PackedSnapshot | None:
        self.get_count += 1
        if isinstance(self.response, Exception):
            raise self.response
        return self.response


class UnusedTier:
    """A tier that must not be used."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name}: must not be called")


@dataclass
class Tiers:
    """Three tiers for one memory, and the problems reported."""

    clock: FakeClock = field(default_factory=lambda: FakeClock(START))
    row: L1Snapshot | Exception | None = None
    fetches: int = 0
    problems: list[tuple[str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.l1, self.second = FaultyL1(self.clock), SecondTier()
        self.strategy = self.create_strategy(self.l1, self.second)

    def create_strategy(self, l1: Any, second: Any) -> DualRecoveryStrategy:
        return DualRecoveryStrategy(l1, second, lambda *problem: self.problems.append(problem))

    async def fetch(self) -> L1Snapshot | None:
        self.fetches += 1
        if isinstance(self.row, Exception):
            raise self.row
        return self.row

    async def recover(self, expected: str | None, by: Owner = NEXT) -> RecoveredMemory:
        return await self.strategy.recover(by, expected, self.fetch)

    async def keep_in_l1(self, *items: Item, by: Owner = EARLIER) -> MemoryContents:
        return await self.l1.replace(by, items)

    async def items(self) -> tuple[Item, ...]:
        """The contents of L1, regardless of its owner."""
        return (await InProcessWorkingMemory.read(self.l1, AGENT_ID)).items


@pytest.fixture
def tiers() -> Tiers:
    return Tiers()


def source_and_quality(recovery: MemoryRecovery) -> tuple[MemorySource, int, bool, bool]:
    """The source, the number of keys, whether they are verified, and whether they are behind."""
    return recovery.source, recovery.keys, recovery.verified, recovery.behind


def to_row(packed: PackedSnapshot) -> L1Snapshot:
    return L1Snapshot(packed.order, packed.digest, to_bytes(packed))


def flip_byte(packed: PackedSnapshot) -> PackedSnapshot:
    """Damage the only chunk, and thereby all keys."""
    (chunk,) = packed.chunks
    return replace(packed, chunks=(chunk[:-1] + bytes([chunk[-1] ^ 1]),))


def to_text(value: str) -> Item:
    return Item("text", Kind.STRING, value.encode())


COMPLETE = pack(memory_contents(*ITEMS), 5)
OLDER = pack(memory_contents(to_text("older")), 3)
OLDEST = pack(memory_contents(to_text("oldest")), 2)


async def test_a_task_without_memory_begins_empty_whatever_the_tiers_hold(tiers: Tiers) -> None:
    await tiers.keep_in_l1(*ITEMS)
    tiers.strategy = tiers.create_strategy(tiers.l1, UnusedTier())
    found = await tiers.recover(None)
    assert source_and_quality(found.recovery) == (MemorySource.NONE, 0, True, False)
    assert await tiers.items() == ()
    assert tiers.fetches == 0
    assert tiers.problems == []


async def test_an_intact_l1_is_used_without_reading_other_tiers(tiers: Tiers) -> None:
    before = await tiers.keep_in_l1(*ITEMS)
    tiers.strategy = tiers.create_strategy(tiers.l1, UnusedTier())
    found = await tiers.recover(COMPLETE.digest)
    result = found.recovery
    assert source_and_quality(result) == (MemorySource.L1, len(ITEMS), True, False)
    assert (result.problems, found.version, found.digest) == (
        (),
        before.version,
        COMPLETE.digest,
    )
    assert tiers.fetches == 0


Prepare = Callable[[Tiers], object]
L1_DIFFERENCES: dict[str, Prepare] = {
    "empty": lambda tiers: None,
    "changed": lambda tiers: tiers.l1.execute(EARLIER, [Command("SET", "text", (b"more",))]),
    "with one key more": lambda tiers: tiers.l1.execute(
        EARLIER, [Command("SET", "more", (b"1",))]
    ),
    "evicted": lambda tiers: setattr(tiers.l1, "evicted", ("text",)),
}


@pytest.mark.parametrize("l1", L1_DIFFERENCES)
@pytest.mark.parametrize("source", [MemorySource.SNAPSHOT, MemorySource.SQL])
async def test_the_next_tier_is_used_if_l1_differs(
    tiers: Tiers, l1: str, source: MemorySource
) -> None:
    if l1 != "empty":
        await tiers.keep_in_l1(*ITEMS)
        if (changing := L1_DIFFERENCES[l1](tiers)) is not None:
            await changing  # type: ignore[misc]  # the others are functions that return None
    if source is MemorySource.SNAPSHOT:
        tiers.second.response = COMPLETE
    tiers.row = to_row(COMPLETE)
    found = await tiers.recover(COMPLETE.digest)
    result = found.recovery
    assert source_and_quality(result) == (source, len(ITEMS), True, False)
    assert (found.digest, found.order) == (COMPLETE.digest, COMPLETE.order)
    assert await tiers.items() == ITEMS
    assert tiers.fetches == (source is MemorySource.SQL), "the database is asked last"
    assert [("'text'" in problem, "has changed" in problem) for problem in result.problems] == {
        "empty": [],
        "evicted": [(True, False)],
    }.get(l1, [(False, True)])
    assert tiers.problems == []


@pytest.mark.parametrize(
    "source", [MemorySource.L1, MemorySource.SNAPSHOT, MemorySource.SQL, MemorySource.NONE]
)
async def test_a_recovery_takes_ownership_and_knows_the_version(
    tiers: Tiers, source: MemorySource
) -> None:
    await tiers.keep_in_l1(*(ITEMS if source is MemorySource.L1 else ()))
    tiers.second.response = COMPLETE if source is MemorySource.SNAPSHOT else None
    tiers.row = to_row(COMPLETE) if source is MemorySource.SQL else None
    found = await tiers.recover(COMPLETE.digest)
    assert found.recovery.source is source
    version, _ = await tiers.l1.execute(
        NEXT, [Command("GET", "text")], expected_version=found.version
    )
    assert version == found.version
    with pytest.raises(MemoryFenced):
        await tiers.l1.execute(EARLIER, [Command("GET", "text")])


async def test_without_a_second_tier_the_database_is_next(tiers: Tiers) -> None:
    tiers.strategy, tiers.row = tiers.create_strategy(tiers.l1, None), to_row(COMPLETE)
    assert (await tiers.recover(COMPLETE.digest)).recovery.source is MemorySource.SQL
    assert await tiers.items() == ITEMS


async def test_an_l1_that_ends_with_its_process_is_not_read(tiers: Tiers) -> None:
    """The task has run elsewhere since, so the memory of its earlier replica is outdated."""
    local = InProcessWorkingMemory(tiers.clock)
    await local.replace(EARLIER, ITEMS)
    tiers.strategy, tiers.row = tiers.create_strategy(local, None), to_row(COMPLETE)
    assert (await tiers.recover(COMPLETE.digest)).recovery.source is MemorySource.SQL


async def test_served_counts_the_sources_of_what_was_recovered(tiers: Tiers) -> None:
    await tiers.recover(None)
    tiers.row = to_row(COMPLETE)
    await tiers.recover(COMPLETE.digest)
    await tiers.recover(COMPLETE.digest)
    await tiers.recover(COMPLETE.digest)
    await tiers.keep_in_l1(by=NEXT)
    tiers.second.response = COMPLETE
    await tiers.recover(COMPLETE.digest)
    await tiers.keep_in_l1(by=NEXT)
    tiers.second.response, tiers.row = flip_byte(COMPLETE), None
    with pytest.raises(ConsistencyError):
        await tiers.recover(COMPLETE.digest)
    assert tiers.strategy.served == {
        MemorySource.NONE: 1,
        MemorySource.SQL: 1,
        MemorySource.L1: 2,
        MemorySource.SNAPSHOT: 1,
    }


async def test_a_memory_without_a_digest_is_matched_by_version_and_unverified(
    tiers: Tiers,
) -> None:
    version = (await tiers.keep_in_l1(*ITEMS)).version
    tiers.second.response = OLDER
    found = await tiers.recover(f"{UNREADABLE_PREFIX}{version}")
    assert source_and_quality(found.recovery) == (MemorySource.L1, len(ITEMS), False, False)
    assert found.digest == COMPLETE.digest
    assert tiers.second.get_count == 0


@pytest.mark.parametrize("since", ["written", "evicted", "emptied", "in doubt"])
async def test_a_memory_without_a_digest_of_another_version_is_behind(
    tiers: Tiers, since: str
) -> None:
    version = (await tiers.keep_in_l1(*ITEMS)).version
    match since:
        case "written":
            await tiers.l1.execute(EARLIER, [Command("SET", "text", (b"more",))])
        case "evicted":
            tiers.l1.evicted = ("text",)
        case "emptied":
            await tiers.l1.forget(EARLIER)
        case _:
            version = 0
    tiers.second.response = OLDER
    found = await tiers.recover(f"{UNREADABLE_PREFIX}{version}")
    result = found.recovery
    assert (result.source, result.verified, result.behind) == (
        MemorySource.SNAPSHOT,
        False,
        True,
    )
    assert (found.order, await tiers.items()) == (OLDER.order, (to_text("older"),))


@pytest.mark.parametrize("newer", [MemorySource.SNAPSHOT, MemorySource.SQL])
async def test_the_newer_of_two_outdated_snapshots_is_used(
    tiers: Tiers, newer: MemorySource
) -> None:
    in_redis, in_sql = (OLDER, OLDEST) if newer is MemorySource.SNAPSHOT else (OLDEST, OLDER)
    await tiers.keep_in_l1(to_text("of a run that died"))
    tiers.second.response, tiers.row = in_redis, to_row(in_sql)
    found = await tiers.recover(COMPLETE.digest)
    assert source_and_quality(found.recovery) == (newer, 1, False, True)
    assert (found.order, found.digest) == (OLDER.order, OLDER.digest)
    assert await tiers.items() == (to_text("older"),)
    ((agent_id, problem_kind, reason),) = tiers.problems
    assert (agent_id, problem_kind) == (AGENT_ID, "behind")
    assert f"from {newer}" in reason
    assert "L1 has changed since" in reason
    assert tiers.strategy.served == {newer: 1}


@pytest.mark.parametrize("damaged", [MemorySource.SNAPSHOT, MemorySource.SQL])
async def test_an_older_intact_snapshot_is_used_if_the_newest_is_damaged(
    tiers: Tiers, damaged: MemorySource
) -> None:
    if damaged is MemorySource.SNAPSHOT:
        tiers.second.response, tiers.row = flip_byte(COMPLETE), to_row(OLDER)
    else:
        tiers.second.response, tiers.row = OLDER, to_row(flip_byte(COMPLETE))
    found = await tiers.recover(COMPLETE.digest)
    result = found.recovery
    assert result.source in {MemorySource.SNAPSHOT, MemorySource.SQL} - {damaged}
    assert (result.verified, result.behind, found.order) == (
        False,
        True,
        OLDER.order,
    )
    assert await tiers.items() == (to_text("older"),)
    (problem,) = result.problems
    assert all(repr(item.key) in problem for item in ITEMS)
    ((_, problem_kind, reason),) = tiers.problems
    assert (problem_kind, problem in reason) == ("behind", True)


async def test_a_memory_missing_everywhere_is_empty_and_reported(tiers: Tiers) -> None:
    await tiers.keep_in_l1(to_text("of a run that died"))
    found = await tiers.recover(COMPLETE.digest)
    assert source_and_quality(found.recovery) == (MemorySource.NONE, 0, False, True)
    assert await tiers.items() == ()
    assert [problem_kind for _, problem_kind, _ in tiers.problems] == ["nothing_found"]


ROWS: dict[str, L1Snapshot] = {
    "flipped": to_row(flip_byte(COMPLETE)),
    "cut off": replace(to_row(COMPLETE), content=to_bytes(COMPLETE)[:-1]),
    "junk": replace(to_row(COMPLETE), content=b"junk"),
    "of another digest": replace(to_row(COMPLETE), digest=OLDER.digest),
}
SECONDS: dict[str, PackedSnapshot | Exception] = {
    "flipped": flip_byte(COMPLETE),
    "without chunks": replace(COMPLETE, chunks=()),
    "no snapshot": ConsistencyError("what is in Redis is no snapshot", changed=["text"]),
}


@pytest.mark.parametrize("second", SECONDS)
async def test_a_damaged_snapshot_is_skipped_and_named(tiers: Tiers, second: str) -> None:
    tiers.second.response, tiers.row = SECONDS[second], to_row(COMPLETE)
    result = (await tiers.recover(COMPLETE.digest)).recovery
    assert (result.source, result.verified, result.behind) == (
        MemorySource.SQL,
        True,
        False,
    )
    (problem,) = result.problems
    assert "'text'" in problem


@pytest.mark.parametrize(("second", "in_sql"), list(product([*SECONDS, None], [*ROWS, None]))[:-1])
async def test_recovery_is_refused_if_every_copy_is_damaged(
    tiers: Tiers, second: str | None, in_sql: str | None
) -> None:
    await tiers.keep_in_l1(to_text("of a run that died"))
    tiers.second.response = SECONDS[second] if second else None
    tiers.row = ROWS[in_sql] if in_sql else None
    with pytest.raises(ConsistencyError) as refused:
        await tiers.recover(COMPLETE.digest)
    all_keys = tuple(sorted(item.key for item in ITEMS))
    if in_sql == "flipped" or second in {"flipped", "without chunks"}:
        assert refused.value.missing == all_keys
    assert ("the snapshot in the database" in str(refused.value)) is (in_sql is not None)
    assert AGENT_ID in str(refused.value)
    assert tiers.strategy.served == {}
    assert await tiers.items() == (to_text("of a run that died"),), "L1 must not change"


@pytest.mark.parametrize("times", [1, 2])
async def test_a_restore_damaged_in_l1_is_retried_from_the_next_tier_or_refused(
    tiers: Tiers, times: int
) -> None:
    tiers.l1.garbled = ["garbled"] * times
    tiers.second.response, tiers.row = COMPLETE, to_row(COMPLETE)
    if times == 1:
        result = (await tiers.recover(COMPLETE.digest)).recovery
        assert (result.source, result.verified) == (MemorySource.SQL, True)
        assert "extra: 'garbled'" in result.problems[0]
        assert await tiers.items() == ITEMS
    else:
        with pytest.raises(ConsistencyError) as refused:
            await tiers.recover(COMPLETE.digest)
        assert (refused.value.missing, refused.value.extra) == (("text",), ("garbled",))


@pytest.mark.parametrize("times", [1, 2])
async def test_an_l1_that_changes_during_a_read_is_read_again(tiers: Tiers, times: int) -> None:
    await tiers.keep_in_l1(*ITEMS)
    tiers.l1.foreign_writes, tiers.l1.reads = times, 0
    found = await tiers.recover(COMPLETE.digest)
    assert (found.recovery.source, found.recovery.verified) == (MemorySource.L1, True)
    assert tiers.l1.reads == times + 1
    assert found.version == (await tiers.l1.read(AGENT_ID)).version


async def test_an_l1_that_keeps_changing_is_unavailable(tiers: Tiers) -> None:
    await tiers.keep_in_l1(*ITEMS)
    tiers.l1.foreign_writes = 3
    tiers.second.response = COMPLETE
    with pytest.raises(MemoryUnavailable, match="keeps changing while it is read"):
        await tiers.recover(COMPLETE.digest)
    await tiers.l1.execute(EARLIER, [Command("GET", "text")])  # its owner is unchanged
    assert tiers.strategy.served == {}


@pytest.mark.parametrize(
    "expected",
    [COMPLETE.digest, OLDER.digest, "1:of nothing", f"{UNREADABLE_PREFIX}0", None],
    ids=["in L1", "in the second place", "nowhere", "absent", "none"],
)
async def test_a_run_that_lost_the_task_is_fenced_in_any_recovery(
    tiers: Tiers, expected: str | None
) -> None:
    """L1 has it, another tier has it, no tier has it, and no memory is expected."""
    await tiers.keep_in_l1(*ITEMS, by=NEXT)
    tiers.second.response = OLDER if expected == OLDER.digest else None
    with pytest.raises(MemoryFenced):
        await tiers.recover(expected, by=EARLIER)
    await tiers.l1.execute(NEXT, [Command("GET", "text")])
    assert await tiers.items() == ITEMS
    assert tiers.strategy.served == {}


async def test_an_unavailable_l1_is_not_replaced_by_another_tier(tiers: Tiers) -> None:
    await tiers.keep_in_l1(*ITEMS)
    tiers.l1.unavailable = True
    tiers.strategy = tiers.create_strategy(tiers.l1, UnusedTier())
    with pytest.raises(MemoryUnavailable, match="L1 is unavailable"):
        await tiers.recover(COMPLETE.digest)
    assert tiers.fetches == 0


async def test_an_unavailable_second_tier_is_skipped_and_named(tiers: Tiers) -> None:
    tiers.second.response, tiers.row = (
        MemoryUnavailable("the second place is unavailable"),
        to_row(COMPLETE),
    )
    result = (await tiers.recover(COMPLETE.digest)).recovery
    assert (result.source, result.verified, result.behind) == (
        MemorySource.SQL,
        True,
        False,
    )
    assert result.problems == ("the second place is unavailable",)


async def test_an_unavailable_database_is_not_mistaken_for_an_empty_one(tiers: Tiers) -> None:
    await tiers.keep_in_l1(to_text("of a run that died"))
    tiers.second.response, tiers.row = OLDER, StoreUnavailable("the database is unavailable")
    with pytest.raises(StoreUnavailable):
        await tiers.recover(COMPLETE.digest)
    assert await tiers.items() == (to_text("of a run that died"),)


@pytest.mark.parametrize("source", [MemorySource.SNAPSHOT, MemorySource.SQL])
@pytest.mark.parametrize("in_l1", [True, False])
async def test_keys_that_have_expired_meanwhile_are_left_out(
    tiers: Tiers, source: MemorySource, in_l1: bool
) -> None:
    """Even if L1 has exactly the remaining items, since its digest looks like a loss."""
    later = Item("later", Kind.STRING, b"1", 3_000)
    packed = pack(memory_contents(*ITEMS, later), 5)
    if in_l1:
        await tiers.keep_in_l1(*ITEMS, later)
    tiers.second.response = packed if source is MemorySource.SNAPSHOT else None
    tiers.row = to_row(packed)
    tiers.clock.advance(timedelta(seconds=1))
    found = await tiers.recover(packed.digest)
    expected = pack(memory_contents(*ITEMS[1:], later), 5)
    assert source_and_quality(found.recovery) == (source, len(ITEMS), True, False)
    assert (found.digest, found.order) == (expected.digest, 5)
    assert await tiers.items() == (*ITEMS[1:], later), "the other item must keep its expiry"


@pytest.mark.parametrize("source", [MemorySource.SNAPSHOT, MemorySource.SQL])
async def test_a_large_snapshot_is_unpacked_off_the_event_loop(
    tiers: Tiers, source: MemorySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(7)
    large = tuple(
        Item(f"page:{number}", Kind.STRING, rng.randbytes(100_000)) for number in range(100)
    )
    packed, threads = pack(memory_contents(*large), 5), set()

    def record_thread(*args: Any) -> Any:
        threads.add(threading.current_thread())
        return unpack(*args)

    monkeypatch.setattr(recovery, "unpack", record_thread)
    tiers.second.response = packed if source is MemorySource.SNAPSHOT else None
    tiers.row = to_row(packed)
    found = await tiers.recover(packed.digest)
    assert (found.recovery.source, found.recovery.keys, found.recovery.verified) == (
        source,
        100,
        True,
    )
    assert await tiers.items() == large
    assert threads
    assert threading.current_thread() not in threads


async def test_a_large_l1_memory_is_fingerprinted_off_the_event_loop(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = tuple(Item(f"page:{number}", Kind.STRING, b"x" * 10_000) for number in range(1_000))
    await tiers.keep_in_l1(*many)
    threads: list[threading.Thread] = []

    def record_thread(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return fingerprint(*args)

    monkeypatch.setattr(recovery, "fingerprint", record_thread)
    found = await tiers.recover(pack(memory_contents(*many), 5).digest)
    assert (found.recovery.source, found.recovery.keys, found.recovery.verified) == (
        MemorySource.L1,
        1_000,
        True,
    )
    assert threads[0] is not threading.current_thread()
