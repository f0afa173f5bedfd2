"""A memory is recovered from L1, the Redis snapshot or the database; damage to any is detected."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest
import pytest_asyncio
import zstandard

from meshpoint.adapters.redis import RedisSnapshotStore, RedisWorkingMemory
from meshpoint.adapters.sql import SqlStore
from meshpoint.errors import ConsistencyError
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.memory import Content, Item, Kind, MemorySource, Owner, make_agent_id
from meshpoint.model.subtasks import AgentCheckpoint, Operation, SaveCommitted
from meshpoint.model.tasks import L1Snapshot, Requester, Run
from meshpoint.model.transitions import Begin, BeginCommitted, Save
from meshpoint.testing.conformance.build import AGENT, HERE
from meshpoint.working_memory.packing import from_bytes, to_bytes
from meshpoint.working_memory.recovery import DualRecoveryStrategy, RecoveredMemory
from meshpoint.working_memory.snapshots import L1CacheSnapshotter
from servers import REDIS_LIMIT, redis_client, redis_data_key

pytestmark = pytest.mark.servers

CONTENT: dict[str, tuple[Kind, Content]] = {
    "text": (Kind.STRING, b"caf\xc3\xa9"),
    "bytes": (Kind.STRING, b"\xff\x00\xfe"),
    "empty": (Kind.STRING, b""),
    "list": (Kind.LIST, (b"2", b"", b"1", b"\x00")),
    "hash": (Kind.HASH, {b"": b"", b"\xff": b"\x00"}),
    "set": (Kind.SET, frozenset({b"a", b"", b"\xff"})),
    "scores": (
        Kind.ZSET,
        {b"tiny": 1e-320, b"top": inf, b"bottom": -inf, b"zero": -0.0, b"third": 1 / 3},
    ),
}
ITEMS = tuple(Item(key, kind, content) for key, (kind, content) in CONTENT.items())


@dataclass
class RecoveryHarness:
    """One task's memory in all three places, and direct connections to the servers."""

    l1: RedisWorkingMemory
    snapshots: RedisSnapshotStore
    store: SqlStore
    raw: Any  # a Redis that returns bytes, which its types do not say
    namespace: str
    run: Run
    owner: Owner
    digest: str = ""
    problems: list[str] = field(default_factory=list)

    async def recover(self) -> RecoveredMemory:
        """Recover, as the task's next run does first."""
        self.owner = Owner(self.owner.agent_id, RunId(new_id()), self.owner.fence + 1)
        strategy = DualRecoveryStrategy(
            self.l1,
            self.snapshots,
            lambda _, what, reason: self.problems.append(f"{what} {reason}"),
        )
        return await strategy.recover(self.owner, self.digest, self._from_sql)

    async def _from_sql(self) -> L1Snapshot | None:
        return await self.store.l1_snapshot(self.run.task_id, AGENT)

    async def l1_contents(self) -> dict[str, tuple[Kind, Content]]:
        """Contents of L1."""
        return {
            item.key: (item.kind, item.content)
            for item in (await self.l1.read(self.owner.agent_id)).items
        }

    def key(self, name: str) -> str:
        """L1's key for a value."""
        return f"{self.namespace}:L1:{{{self.owner.agent_id}}}:working:{name}"

    @property
    def chunks_key(self) -> str:
        """Key of the snapshot in Redis."""
        return f"{self.namespace}:l1_snapshot:{{{self.owner.agent_id}}}"

    @property
    def meta_key(self) -> str:
        return f"{self.namespace}:l1_snapshot_meta:{{{self.owner.agent_id}}}"

    async def save(self, content: bytes, seq: int) -> None:
        """Write a checkpoint with this snapshot of the memory."""
        checkpoint = AgentCheckpoint(
            operation_id=self.run.task_id,
            agent=AGENT,
            seq=seq,
            l1_snapshot_hash=self.digest,
            l1_snapshot=content,
        )
        assert await self.store.save(Save(self.run, checkpoint)) == SaveCommitted()


@pytest_asyncio.fixture
async def place(
    redis_url: str, database_url: str, namespace: str
) -> AsyncIterator[RecoveryHarness]:
    store = SqlStore(database_url, namespace=namespace)
    await store.open()
    l1, snapshots = (
        RedisWorkingMemory(redis_url, timeout=REDIS_LIMIT, namespace=namespace),
        RedisSnapshotStore(
            redis_url, timeout=REDIS_LIMIT, namespace=namespace, secret=redis_data_key
        ),
    )
    run = Run(TaskId(new_id()), AGENT, RunId(new_id()))
    [begin_result] = await store.begin(
        [Begin(run, HERE, Requester(), b"{}", Operation(type="test", parameters=None))]
    )
    assert isinstance(begin_result, BeginCommitted)
    async with redis_client(redis_url) as raw:
        owner = Owner(
            make_agent_id(AGENT, run.task_id), begin_result.run.id, begin_result.run.fence
        )
        harness = RecoveryHarness(l1, snapshots, store, raw, namespace, begin_result.run, owner)
        await l1.replace(owner, ITEMS)
        packed = (
            await L1CacheSnapshotter(l1, snapshots, 2**30, lambda *_: None).snapshot_on_checkpoint(
                owner, 1
            )
        ).packed
        harness.digest = packed.digest
        await harness.save(to_bytes(packed), 1)
        assert await snapshots.put(owner.agent_id, packed)
        yield harness
    await l1.close()
    await snapshots.close()
    await store.close()


Damage = Callable[[RecoveryHarness], Awaitable[Any]]


async def evict_from_l1(place: RecoveryHarness) -> None:
    assert await place.raw.delete(place.key("hash"))


async def change_l1(place: RecoveryHarness) -> None:
    assert await place.raw.hset(place.key("hash"), "\x00", "more")


async def empty_l1(place: RecoveryHarness) -> None:
    keys = [key async for key in place.raw.scan_iter(f"{place.namespace}:L1:*")]
    assert await place.raw.delete(*keys)


async def forget_snapshot(place: RecoveryHarness) -> None:
    assert await place.raw.delete(place.chunks_key, place.meta_key) == 2


async def flip_snapshot(place: RecoveryHarness) -> None:
    chunk = bytearray(await place.raw.lindex(place.chunks_key, 0))
    chunk[len(chunk) // 2] ^= 0x10
    await place.raw.lset(place.chunks_key, 0, bytes(chunk))


async def truncate_snapshot(place: RecoveryHarness) -> None:
    chunk = await place.raw.lindex(place.chunks_key, 0)
    await place.raw.lset(place.chunks_key, 0, chunk[:-7])


async def shorten_snapshot(place: RecoveryHarness) -> None:
    assert await place.raw.rpop(place.chunks_key)


async def alter_sql(place: RecoveryHarness) -> None:
    row = await place.store.l1_snapshot(place.run.task_id)
    assert row is not None
    packed = from_bytes(row.content, "it")
    chunk = bytearray(packed.chunks[0])
    chunk[len(chunk) // 2] ^= 0x01
    altered = type(packed)(
        packed.digest, packed.order, packed.manifest, (bytes(chunk), *packed.chunks[1:])
    )
    await place.save(to_bytes(altered), row.seq + 1)


async def truncate_sql(place: RecoveryHarness) -> None:
    row = await place.store.l1_snapshot(place.run.task_id)
    assert row is not None
    await place.save(row.content[:-9], row.seq + 1)


async def test_a_complete_l1_is_used(place: RecoveryHarness) -> None:
    recovered = await place.recover()
    assert (recovered.recovery.source, recovered.recovery.verified, recovered.recovery.keys) == (
        MemorySource.L1,
        True,
        len(ITEMS),
    )
    assert await place.l1_contents() == CONTENT
    assert recovered.recovery.problems == ()


@pytest.mark.parametrize("damage", [evict_from_l1, change_l1, empty_l1])
async def test_a_damaged_l1_is_repaired_from_redis(place: RecoveryHarness, damage: Damage) -> None:
    await damage(place)
    recovered = await place.recover()
    assert (recovered.recovery.source, recovered.recovery.verified) == (
        MemorySource.SNAPSHOT,
        True,
    )
    assert await place.l1_contents() == CONTENT
    if damage is evict_from_l1:
        assert any("'hash'" in problem for problem in recovered.recovery.problems), (
            recovered.recovery.problems
        )


@pytest.mark.parametrize("of_l1", [evict_from_l1, change_l1, empty_l1])
@pytest.mark.parametrize(
    "damage", [forget_snapshot, flip_snapshot, truncate_snapshot, shorten_snapshot]
)
async def test_a_damaged_snapshot_is_skipped_in_favour_of_the_database(
    place: RecoveryHarness, of_l1: Damage, damage: Damage
) -> None:
    await of_l1(place)
    await damage(place)
    recovered = await place.recover()
    assert (recovered.recovery.source, recovered.recovery.verified) == (MemorySource.SQL, True)
    assert await place.l1_contents() == CONTENT
    if damage is not forget_snapshot:
        assert any("snapshot" in problem for problem in recovered.recovery.problems), (
            recovered.recovery.problems
        )


@pytest.mark.parametrize("declared", [True, False])
async def test_a_snapshot_that_expands_beyond_its_size_is_skipped(
    place: RecoveryHarness, declared: bool
) -> None:
    await empty_l1(place)
    bomb = zstandard.ZstdCompressor(write_content_size=declared).compress(bytes(400_000_000))
    await place.raw.lset(place.chunks_key, 0, bomb)
    tracemalloc.start()
    try:
        recovered = await place.recover()
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()
    assert (recovered.recovery.source, recovered.recovery.verified) == (MemorySource.SQL, True)
    assert await place.l1_contents() == CONTENT


@pytest.mark.parametrize("in_sql", [alter_sql, truncate_sql])
@pytest.mark.parametrize("in_redis", [flip_snapshot, truncate_snapshot])
async def test_damage_everywhere_is_refused_with_the_keys(
    place: RecoveryHarness, in_redis: Damage, in_sql: Damage
) -> None:
    await change_l1(place)
    await in_redis(place)
    await in_sql(place)
    with pytest.raises(ConsistencyError) as refused:
        await place.recover()
    assert set(refused.value.missing) | set(refused.value.changed) == set(CONTENT)
    assert "'bytes'" in str(refused.value)
    assert "snapshot in the database" in str(refused.value)


@pytest.mark.parametrize("in_sql", [alter_sql, truncate_sql])
async def test_a_damaged_row_does_not_matter_while_redis_has_it(
    place: RecoveryHarness, in_sql: Damage
) -> None:
    await in_sql(place)
    await change_l1(place)
    assert (await place.recover()).recovery.source is MemorySource.SNAPSHOT
    assert await place.l1_contents() == CONTENT


async def test_a_memory_missing_everywhere_is_empty(place: RecoveryHarness) -> None:
    await empty_l1(place)
    await forget_snapshot(place)
    strategy = DualRecoveryStrategy(place.l1, place.snapshots, lambda *_: None)

    async def nothing() -> None:
        return None

    recovered = await strategy.recover(place.owner, place.digest, nothing)
    recovery = recovered.recovery
    assert (recovery.source, recovery.verified, recovery.behind, recovery.keys) == (
        MemorySource.NONE,
        False,
        True,
        0,
    )
    assert await place.l1_contents() == {}
    assert strategy.served[MemorySource.NONE] == 1
