"""Keep or restore a memory and die on the way.

The fork server calls `main` with REDIS DATABASE NAMESPACE TASK RUN FENCE ACTION STEP WHEN. The
process sends itself SIGKILL at its STEP-th request to Redis or the database: before sending it or
after the response, depending on WHEN. If it never reaches STEP, it prints the number of steps and
exits with 0.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from redis.asyncio import Redis

from meshpoint.adapters.redis import RedisSnapshotStore, RedisWorkingMemory
from meshpoint.adapters.redis.connection import RedisConnection
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.memory import Owner, make_agent_id
from meshpoint.model.subtasks import AgentCheckpoint, SaveCommitted
from meshpoint.model.tasks import L1Snapshot, Run
from meshpoint.model.transitions import Save
from meshpoint.working_memory.packing import to_bytes
from meshpoint.working_memory.recovery import DualRecoveryStrategy
from meshpoint.working_memory.snapshots import L1CacheSnapshotter
from servers import REDIS_LIMIT, redis_data_key

T = TypeVar("T")

AGENT = AgentName("travel")


class StepCounter:
    """Counts requests and kills the process at the selected request."""

    def __init__(self, fatal_step: int, when: str) -> None:
        self.count, self._fatal_step, self._when = 0, fatal_step, when

    async def step(self, request: Callable[[], Awaitable[T]]) -> T:
        """Do one request, unless the process dies first."""
        self.count += 1
        is_fatal = self.count == self._fatal_step
        if is_fatal and self._when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await request()
        if is_fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


async def main(arguments: Sequence[str]) -> None:
    """Do the action "keep" or "restore"."""
    redis_url, database_url, namespace, task, run_id, fence, action, fatal_step, when = arguments
    steps = StepCounter(int(fatal_step), when)
    count_requests(steps)
    l1, snapshots = (
        RedisWorkingMemory(redis_url, timeout=REDIS_LIMIT, namespace=namespace),
        RedisSnapshotStore(
            redis_url, timeout=REDIS_LIMIT, namespace=namespace, secret=redis_data_key
        ),
    )
    store = SqlStore(database_url, namespace=namespace)
    await store.open()
    run = Run(TaskId(task), AGENT, RunId(run_id), int(fence))
    owner = Owner(make_agent_id(AGENT, run.task_id), run.id, run.fence)
    final_checkpoint = await store.latest(run.task_id)
    assert final_checkpoint is not None
    if action == "keep":
        snapshotter = L1CacheSnapshotter(l1, snapshots, 2**30, lambda *_: None)
        packed = (await snapshotter.snapshot_on_checkpoint(owner, final_checkpoint.seq + 1)).packed
        checkpoint = final_checkpoint.model_copy(
            update={
                "seq": final_checkpoint.seq + 1,
                "l1_snapshot_hash": packed.digest,
                "l1_snapshot": to_bytes(packed),
            }
        )
        assert (
            await steps.step(
                lambda: store.save(Save(run, AgentCheckpoint.model_validate(checkpoint)))
            )
            == SaveCommitted()
        )
        await snapshotter.store_snapshot(owner.agent_id, packed)
    else:

        async def from_sql() -> L1Snapshot | None:
            return await steps.step(lambda: store.l1_snapshot(run.task_id, AGENT))

        strategy = DualRecoveryStrategy(l1, snapshots, lambda *_: None)
        await strategy.recover(owner, final_checkpoint.l1_snapshot_hash, from_sql)
    print(steps.count)


def count_requests(steps: StepCounter) -> None:
    """Count each request to Redis as a step."""
    original_request = RedisConnection.execute

    async def counted_request(
        self: RedisConnection, subject: str, request: Callable[[Redis], Awaitable[T]]
    ) -> T:
        return await steps.step(lambda: original_request(self, subject, request))

    RedisConnection.execute = counted_request  # type: ignore[method-assign]  # counts
