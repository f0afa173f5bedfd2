"""Large values are processed off the event loop, in threads that agent code cannot exhaust."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.adapters.redis import checkpoint_cache
from meshpoint.adapters.sql import codec
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.memory import Item, Kind, MemorySource, Owner, make_agent_id
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.model.tasks import L1Snapshot
from meshpoint.testing.clock import FakeClock
from meshpoint.working_memory.packing import to_bytes
from meshpoint.working_memory.recovery import DualRecoveryStrategy
from meshpoint.working_memory.snapshots import L1CacheSnapshotter

LARGE = os.urandom(600 * 1024)
OWNER = Owner(make_agent_id(AgentName("agent"), TaskId("task")), RunId("run"), 1)


class AgentThreads(ThreadPoolExecutor):
    """The event loop's default executor, which agent code may exhaust at any time."""

    def __init__(self) -> None:
        super().__init__(1)
        self.submitted: list[object] = []

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.submitted.append(function)
        return super().submit(function, *args, **kwargs)


class DurableMemory(InProcessWorkingMemory):
    """A working memory that outlives its process."""

    @property
    def durable(self) -> bool:
        return True


async def compress_columns() -> None:
    assert await codec.unpack(await codec.pack(LARGE)) == LARGE


async def round_trip_checkpoint() -> None:
    checkpoint = AgentCheckpoint(
        operation_id=TaskId("task"), agent=AgentName("agent"), seq=1, subject=LARGE.hex()
    )
    copy = await checkpoint_cache.encode_checkpoint(checkpoint)
    assert await checkpoint_cache.decode_checkpoint(copy) == checkpoint


async def round_trip_memory() -> None:
    l1, report = DurableMemory(FakeClock()), lambda *_: None
    items = [
        Item("large", Kind.STRING, LARGE),
        *(Item(f"{n}", Kind.STRING, b"") for n in range(1000)),
    ]
    await l1.replace(OWNER, items)
    packed = (
        await L1CacheSnapshotter(l1, None, 2**30, report).snapshot_on_checkpoint(OWNER, 1)
    ).packed

    async def from_sql() -> L1Snapshot:
        return L1Snapshot(packed.order, packed.digest, to_bytes(packed))

    found = await DualRecoveryStrategy(l1, None, report).recover(OWNER, packed.digest, from_sql)
    assert found.recovery.source is MemorySource.L1
    await l1.replace(OWNER, [])
    found = await DualRecoveryStrategy(l1, None, report).recover(OWNER, packed.digest, from_sql)
    assert found.recovery.source is MemorySource.SQL


@pytest.mark.parametrize("handled", [compress_columns, round_trip_checkpoint, round_trip_memory])
async def test_large_values_use_no_threads_of_agent_code(
    handled: Callable[[], Awaitable[None]],
) -> None:
    threads = AgentThreads()
    asyncio.get_running_loop().set_default_executor(threads)
    await handled()
    assert threads.submitted == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_has_its_own_threads() -> None:
    code = """if True:
        import asyncio, os
        from meshpoint.own_threads import run_in_own_thread

        assert asyncio.run(run_in_own_thread(int, "1")) == 1
        if not (child := os.fork()):
            os._exit(asyncio.run(run_in_own_thread(int, "7")))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
