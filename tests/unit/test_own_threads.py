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

from meshpoint.adapters.inprocess.clock import FakeClock
from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.adapters.redis import copies
from meshpoint.adapters.sql import codec
from meshpoint.model.agent_memory import MemorySource
from meshpoint.model.checkpoint import L1Snapshot
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.memory import Item, Kind, Owner, agent_id
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.working_memory.packing import to_bytes
from meshpoint.working_memory.recovery import DualRecoveryStrategy
from meshpoint.working_memory.snapshots import L1CacheSnapshotter

LARGE = os.urandom(600 * 1024)
OWNER = Owner(agent_id(AgentName("agent"), TaskId("task")), RunId("run"), 1)


class OfAgents(ThreadPoolExecutor):
    """The event loop's default executor, which agent code may exhaust at any time."""

    def submit(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the default executor belongs to agent code")


class Surviving(InProcessWorkingMemory):
    """A working memory that outlives its process."""

    @property
    def survives(self) -> bool:
        return True


async def columns() -> None:
    assert await codec.unpack(await codec.pack(LARGE)) == LARGE


async def checkpoints() -> None:
    checkpoint = AgentCheckpoint(operation_id=TaskId("task"), agent=AgentName("agent"), seq=1, subject=LARGE.hex())
    assert await copies.decode_checkpoint(await copies.encode_checkpoint(checkpoint)) == checkpoint


async def memories() -> None:
    l1, told = Surviving(FakeClock()), lambda *_: None
    items = [Item("large", Kind.STRING, LARGE), *(Item(f"{n}", Kind.STRING, b"") for n in range(1000))]
    await l1.replace(OWNER, items)
    packed = (await L1CacheSnapshotter(l1, None, 2**30, told).snapshot_on_checkpoint(OWNER, 1)).packed

    async def from_sql() -> L1Snapshot:
        return L1Snapshot(packed.order, packed.digest, to_bytes(packed))

    found = await DualRecoveryStrategy(l1, None, told).recover(OWNER, packed.digest, from_sql)
    assert found.recovery.source is MemorySource.L1
    await l1.replace(OWNER, [])
    found = await DualRecoveryStrategy(l1, None, told).recover(OWNER, packed.digest, from_sql)
    assert found.recovery.source is MemorySource.SQL


@pytest.mark.parametrize("handled", [columns, checkpoints, memories])
async def test_large_values_need_none_of_the_threads_of_agent_code(handled: Callable[[], Awaitable[None]]) -> None:
    asyncio.get_running_loop().set_default_executor(OfAgents(1))
    await handled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    code = """if True:
        import asyncio, os
        from meshpoint.own_threads import run_in_own_thread

        assert asyncio.run(run_in_own_thread(int, "1")) == 1
        if not (child := os.fork()):
            os._exit(asyncio.run(run_in_own_thread(int, "7")))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
