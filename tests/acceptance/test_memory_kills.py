"""SIGKILL at any step of keeping or restoring a memory leaves the old or the new one, not a mix."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from meshpoint.adapters.redis import RedisSnapshotStore, RedisWorkingMemory
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.agent_memory import MemoryRecovery
from meshpoint.model.checkpoint import Begin, Begun, L1Snapshot, Requester, Run, Save
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.memory import Command, Item, Kind, Owner, agent_id
from meshpoint.model.subtasks import AgentCheckpoint, Operation, Saved
from meshpoint.testing.conformance.build import AGENT, HERE
from meshpoint.working_memory.packing import to_bytes
from meshpoint.working_memory.recovery import DualRecoveryStrategy
from meshpoint.working_memory.snapshots import L1CacheSnapshotter
from servers import copy_key

pytestmark = [pytest.mark.servers, pytest.mark.slow]

CHILD = Path(__file__).with_name("memory_child.py")
TESTS = CHILD.parents[1]
KEYS = 600
BYTES = 10_000
"""Size of one value; all of them exceed a single request, so that a transfer can be interrupted.
"""

Values = dict[str, bytes]


def values(mark: str) -> Values:
    """A memory whose keys all carry `mark`, with random bytes that do not compress."""
    return {f"key-{number}": random.Random(f"{mark} {number}").randbytes(BYTES) for number in range(KEYS)}


OLD, NEW = values("old"), values("new")


@dataclass
class Patient:
    """A task whose working memory is `OLD` in L1, in the Redis snapshot and in the database."""

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
        return Owner(agent_id(AGENT, self.run.task_id), self.run.id, self.run.fence)

    async def reset(self) -> None:
        """Write `OLD` to all three places."""
        await self.l1.replace(self.owner, [Item(key, Kind.STRING, value) for key, value in OLD.items()])
        last = await self.store.latest(self.run.task_id)
        seq = last.seq + 1 if last is not None else 1
        packed = (
            await L1CacheSnapshotter(self.l1, None, 2**30, lambda *_: None).snapshot_on_checkpoint(self.owner, seq)
        ).packed
        checkpoint = AgentCheckpoint(
            operation_id=self.run.task_id,
            agent=AGENT,
            seq=seq,
            l1_snapshot_hash=packed.digest,
            l1_snapshot=to_bytes(packed),
        )
        assert await self.store.save(Save(self.run, checkpoint)) == Saved()
        assert await self.snapshots.put(self.owner.agent_id, packed)

    async def write(self, new: Values) -> None:
        """Write the task's next memory to L1."""
        await self.l1.execute(self.owner, [Command("SET", key, (value,)) for key, value in new.items()])

    async def held(self) -> Values:
        """The whole contents of L1."""
        held = await self.l1.read(self.owner.agent_id)
        assert held.lost == ()
        return {item.key: item.content for item in held.items if isinstance(item.content, bytes)}

    async def recovered(self) -> MemoryRecovery:
        """The working memory that the task's next run recovers."""

        async def from_sql() -> L1Snapshot | None:
            return await self.store.l1_snapshot(self.run.task_id, AGENT)

        last = await self.store.latest(self.run.task_id)
        assert last is not None
        strategy = DualRecoveryStrategy(self.l1, self.snapshots, lambda *_: None)
        return (await strategy.recover(self.owner, last.l1_snapshot_hash, from_sql)).recovery

    async def child(self, work: str, step: int, when: str) -> tuple[int, int]:
        """Run a process that does `work` and dies at `step`; return its exit code and step count."""
        to = (self.redis_url, self.database_url, self.namespace, self.run.task_id, self.run.id, str(self.run.fence))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(CHILD), *to, work, str(step), when),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
        )
        printed, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, int(printed or 0)


@pytest_asyncio.fixture
async def patient(redis_url: str, database_url: str, namespace: str) -> AsyncIterator[Patient]:
    store = SqlStore(database_url, namespace=namespace)
    await store.open()
    run = Run(TaskId(new_id()), AGENT, RunId(new_id()))
    [begun] = await store.begin([Begin(run, HERE, Requester(), b"{}", Operation(type="test", parameters=None))])
    assert isinstance(begun, Begun)
    async with Redis.from_url(redis_url) as raw:
        l1 = RedisWorkingMemory(redis_url, namespace=namespace)
        snapshots = RedisSnapshotStore(redis_url, namespace=namespace, secret=copy_key)
        yield Patient(redis_url, database_url, namespace, l1, snapshots, store, raw, begun.run)
        await l1.forget(Owner(agent_id(AGENT, run.task_id), begun.run.id, begun.run.fence))
    await l1.close()
    await snapshots.close()
    await store.close()


@pytest.mark.parametrize(
    ("database_url", "when"), [("sqlite", "before"), ("postgres", "after")], indirect=["database_url"]
)
async def test_killed_at_each_step_of_keeping_it(patient: Patient, when: str) -> None:
    for _ in range(2):  # a new Redis takes more requests: the first child also loads the scripts
        await patient.reset()
        await patient.write(NEW)
        code, steps = await patient.child("keep", 0, when)
    assert (code, await patient.held()) == (0, NEW)
    assert steps >= 5, "too few steps for: read in parts, row, copy in parts"
    found = []
    for step in range(1, steps + 1):
        await patient.reset()
        await patient.write(NEW)
        assert (await patient.child("keep", step, when))[0] == -signal.SIGKILL, step
        how = await patient.recovered()
        assert (how.verified, how.behind) == (True, False), (step, how)
        held = await patient.held()
        assert held in (OLD, NEW), f"memory is a mix after a kill {when} step {step}"
        found.append(held == NEW)
    assert found == sorted(found), "a later step lost the kept memory"
    assert found[0] is False
    assert found[-1] is True


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("database_url", "lost"), [("sqlite", False), ("postgres", True)], indirect=["database_url"])
async def test_killed_at_each_step_of_restoring_it(patient: Patient, when: str, lost: bool) -> None:
    """L1 holds writes of a run that died, or is empty; when it is empty, the database serves."""

    async def damage() -> Values:
        await patient.reset()
        if lost:
            await patient.raw.delete(*[key async for key in patient.raw.scan_iter(f"{patient.namespace}:*")])
            return {}
        await patient.write(NEW)
        return NEW

    for _ in range(2):  # a new Redis takes more requests: the first child also loads the scripts
        before = await damage()
        code, steps = await patient.child("restore", 0, when)
    assert (code, await patient.held()) == (0, OLD)
    assert steps >= 5, "too few steps for: look-up, snapshot, restore in parts"
    for step in range(1, steps + 1):
        await damage()
        assert (await patient.child("restore", step, when))[0] == -signal.SIGKILL, step
        assert await patient.held() in (before, OLD), f"memory is a mix after a kill {when} step {step}"
        how = await patient.recovered()
        assert (how.verified, how.behind) == (True, False), (step, how)
        assert await patient.held() == OLD
