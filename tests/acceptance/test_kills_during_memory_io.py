"""SIGKILL at any step of saving or restoring a memory leaves the old or the new one, no mix."""

from __future__ import annotations

import random
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from meshpoint.adapters.redis import RedisSnapshotStore, RedisWorkingMemory
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.memory import Command, Item, Kind, MemoryRecovery, Owner, make_agent_id
from meshpoint.model.subtasks import AgentCheckpoint, Operation, SaveCommitted
from meshpoint.model.tasks import L1Snapshot, Requester, Run
from meshpoint.model.transitions import Begin, BeginCommitted, Save
from meshpoint.testing.conformance.build import AGENT, HERE
from meshpoint.working_memory.packing import to_bytes
from meshpoint.working_memory.recovery import DualRecoveryStrategy
from meshpoint.working_memory.snapshots import L1CacheSnapshotter
from servers import REDIS_LIMIT, redis_client, redis_data_key

from .fork_server import ForkServer

pytestmark = [pytest.mark.servers, pytest.mark.slow]

KEYS = 600
BYTES = 10_000
"""Size of one value; all of them exceed a single request, so that a transfer can be interrupted.
"""

Values = dict[str, bytes]


def make_values(label: str) -> Values:
    """A memory whose keys all carry `label`, with random bytes that do not compress."""
    return {
        f"key-{number}": random.Random(f"{label} {number}").randbytes(BYTES)
        for number in range(KEYS)
    }


OLD, NEW = make_values("old"), make_values("new")


@dataclass
class MemoryTask:
    """A task whose working memory is `OLD` in L1, in the Redis snapshot and in the database."""

    fork_server: ForkServer
    redis_url: str
    database_url: str
    namespace: str
    l1: RedisWorkingMemory
    snapshots: RedisSnapshotStore
    store: SqlStore
    raw: Redis
    run: Run
    steps: list[str] = field(default_factory=list)

    @property
    def owner(self) -> Owner:
        return Owner(make_agent_id(AGENT, self.run.task_id), self.run.id, self.run.fence)

    async def reset(self) -> None:
        """Write `OLD` to all three places."""
        await self.l1.replace(
            self.owner, [Item(key, Kind.STRING, value) for key, value in OLD.items()]
        )
        final_checkpoint = await self.store.latest(self.run.task_id)
        seq = final_checkpoint.seq + 1 if final_checkpoint is not None else 1
        packed = (
            await L1CacheSnapshotter(self.l1, None, 2**30, lambda *_: None).snapshot_on_checkpoint(
                self.owner, seq
            )
        ).packed
        checkpoint = AgentCheckpoint(
            operation_id=self.run.task_id,
            agent=AGENT,
            seq=seq,
            l1_snapshot_hash=packed.digest,
            l1_snapshot=to_bytes(packed),
        )
        assert await self.store.save(Save(self.run, checkpoint)) == SaveCommitted()
        assert await self.snapshots.put(self.owner.agent_id, packed)

    async def write(self, new: Values) -> None:
        """Write the task's next memory to L1."""
        await self.l1.execute(
            self.owner, [Command("SET", key, (value,)) for key, value in new.items()]
        )

    async def l1_contents(self) -> Values:
        """The whole contents of L1."""
        stored = await self.l1.read(self.owner.agent_id)
        assert stored.lost_keys == ()
        return {item.key: item.content for item in stored.items if isinstance(item.content, bytes)}

    async def recover(self) -> MemoryRecovery:
        """The working memory that the task's next run recovers."""

        async def from_sql() -> L1Snapshot | None:
            return await self.store.l1_snapshot(self.run.task_id, AGENT)

        final_checkpoint = await self.store.latest(self.run.task_id)
        assert final_checkpoint is not None
        strategy = DualRecoveryStrategy(self.l1, self.snapshots, lambda *_: None)
        return (
            await strategy.recover(self.owner, final_checkpoint.l1_snapshot_hash, from_sql)
        ).recovery

    async def run_child(self, action: str, step: int, when: str) -> tuple[int, int]:
        """Run a process that dies at `step`; return its exit code and step count."""
        to = (
            self.redis_url,
            self.database_url,
            self.namespace,
            self.run.task_id,
            self.run.id,
            str(self.run.fence),
        )
        process = await self.fork_server.start(
            [*to, action, str(step), when], module="memory_child"
        )
        printed = await process.stdout.read()
        return await process.wait(), int(printed or 0)


@pytest_asyncio.fixture
async def memory_task(
    fork_server: ForkServer, redis_url: str, database_url: str, namespace: str
) -> AsyncIterator[MemoryTask]:
    store = SqlStore(database_url, namespace=namespace)
    await store.open()
    run = Run(TaskId(new_id()), AGENT, RunId(new_id()))
    [begin_result] = await store.begin(
        [Begin(run, HERE, Requester(), b"{}", Operation(type="test", parameters=None))]
    )
    assert isinstance(begin_result, BeginCommitted)
    async with redis_client(redis_url) as raw:
        l1 = RedisWorkingMemory(redis_url, timeout=REDIS_LIMIT, namespace=namespace)
        snapshots = RedisSnapshotStore(
            redis_url, timeout=REDIS_LIMIT, namespace=namespace, secret=redis_data_key
        )
        yield MemoryTask(
            fork_server,
            redis_url,
            database_url,
            namespace,
            l1,
            snapshots,
            store,
            raw,
            begin_result.run,
        )
        await l1.forget(
            Owner(make_agent_id(AGENT, run.task_id), begin_result.run.id, begin_result.run.fence)
        )
    await l1.close()
    await snapshots.close()
    await store.close()


@pytest.mark.parametrize(
    ("database_url", "when"),
    [("sqlite", "before"), ("postgres", "after")],
    indirect=["database_url"],
)
async def test_a_kill_at_any_step_of_storing_memory_leaves_the_old_or_the_new_one(
    memory_task: MemoryTask, when: str
) -> None:
    for _ in range(2):  # a new Redis takes more requests: the first child also loads the scripts
        await memory_task.reset()
        await memory_task.write(NEW)
        code, steps = await memory_task.run_child("keep", 0, when)
    assert (code, await memory_task.l1_contents()) == (0, NEW)
    assert steps >= 5, "too few steps for: read in parts, row, copy in parts"
    recovery = []
    for step in range(1, steps + 1):
        await memory_task.reset()
        await memory_task.write(NEW)
        assert (await memory_task.run_child("keep", step, when))[0] == -signal.SIGKILL, step
        how = await memory_task.recover()
        assert (how.verified, how.behind) == (True, False), (step, how)
        stored = await memory_task.l1_contents()
        assert stored in (OLD, NEW), f"memory is a mix after a kill {when} step {step}"
        recovery.append(stored == NEW)
    assert recovery == sorted(recovery), "a later step lost the kept memory"
    assert recovery[0] is False
    assert recovery[-1] is True


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("database_url", "lost"), [("sqlite", False), ("postgres", True)], indirect=["database_url"]
)
async def test_a_kill_at_any_step_of_restoring_memory_does_not_corrupt_it(
    memory_task: MemoryTask, when: str, lost: bool
) -> None:
    """L1 holds writes of a run that died, or is empty; when it is empty, the database serves."""

    async def damage() -> Values:
        await memory_task.reset()
        if lost:
            await memory_task.raw.delete(
                *[key async for key in memory_task.raw.scan_iter(f"{memory_task.namespace}:*")]
            )
            return {}
        await memory_task.write(NEW)
        return NEW

    for _ in range(2):  # a new Redis takes more requests: the first child also loads the scripts
        before = await damage()
        code, steps = await memory_task.run_child("restore", 0, when)
    assert (code, await memory_task.l1_contents()) == (0, OLD)
    assert steps >= 5, "too few steps for: look-up, snapshot, restore in parts"
    for step in range(1, steps + 1):
        await damage()
        assert (await memory_task.run_child("restore", step, when))[0] == -signal.SIGKILL, step
        assert await memory_task.l1_contents() in (before, OLD), (
            f"memory is a mix after a kill {when} step {step}"
        )
        exit_code = await memory_task.recover()
        assert (exit_code.verified, exit_code.behind) == (True, False), (step, exit_code)
        assert await memory_task.l1_contents() == OLD
