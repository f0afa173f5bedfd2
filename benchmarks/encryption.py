"""Throughput of a mesh with encryption, next to the same mesh without it."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from benchmarks.environment import BenchmarkServers
from benchmarks.measure import Medians, Sample, interleaved
from benchmarks.report import Cell, Report, Table
from meshpoint import Peer, TaskExecutionContext, agent
from meshpoint.client.mesh import Mesh
from meshpoint.local import local_mesh
from meshpoint.ports.observer import Observers

CLEAR, SEALED = "clear", "encrypted"
TARGET = 0.93
_KEY = base64.b64encode(b"k" * 32).decode()
_IN_FLIGHT = 16
_SIZES = (100, 10_000)  # bytes of each request and each reply
_FAN_OUTS = (1, 10)
_ask_echo = Peer("echo", str, str)


@agent("echo")
async def echo(ctx: TaskExecutionContext, text: str) -> str:
    """Return the text."""
    return text


@agent("caller")
async def caller(ctx: TaskExecutionContext, request: tuple[int, str]) -> int:
    """Pause for some calls."""
    calls, text = request
    return len(await ctx.gather(*(_ask_echo(text) for _ in range(calls))))


async def run(stage: BenchmarkServers, *, quick: bool) -> Report:
    """Measure tasks on PostgreSQL alone, which also has the queues."""
    tasks, rounds = (100, 3) if quick else (400, 7)
    measured: dict[tuple[int, int], Medians] = {}
    async with AsyncExitStack() as meshes:
        opened = {
            name: await meshes.enter_async_context(await _serve(stage, keys))
            for name, keys in ((CLEAR, ()), (SEALED, (_KEY,)))
        }
        for size in _SIZES:
            for calls in _FAN_OUTS:
                contenders = {
                    name: _round(mesh, calls, "x" * size, max(tasks // calls, _IN_FLIGHT))
                    for name, mesh in opened.items()
                }
                for contender in contenders.values():  # a warm-up
                    await contender()
                title = f"N={calls}, {size} bytes"
                measured[size, calls] = await interleaved(contenders, rounds, title=title)
    rows: list[list[Cell]] = [
        [
            f"N={calls}, {size:,} bytes",
            medians.rate(CLEAR).median,
            medians.rate(SEALED).median,
            f"{medians.ratio(SEALED, CLEAR):.2f}",
        ]
        for (size, calls), medians in measured.items()
    ]
    table = Table(
        "Tasks per second in one process, on PostgreSQL alone",
        ("calls and size of each", "clear", "encrypted", "ratio"),
        rows,
        f"{_IN_FLIGHT} tasks in flight. Target: {TARGET}, round by round.",
    )
    figures = {
        f"N={calls}, {size} bytes": round(medians.ratio(SEALED, CLEAR).median, 3)
        for (size, calls), medians in measured.items()
    }
    return Report("encryption", await stage.describe("cryptography"), [table], {**figures})


async def _serve(
    stage: BenchmarkServers, keys: tuple[str, ...]
) -> AbstractAsyncContextManager[Mesh]:
    url = await stage.database()
    return local_mesh(
        caller, echo, broker_url=url, db_url=url, encryption_keys=keys, observer=Observers(())
    )


def _round(mesh: Mesh, calls: int, text: str, tasks: int) -> Callable[[], Awaitable[Sample]]:
    async def run_tasks() -> Sample:
        slots, started_at = asyncio.Semaphore(_IN_FLIGHT), time.perf_counter()

        async def run_one() -> None:
            async with slots:
                assert await mesh.call(caller, (calls, text)) == calls

        await asyncio.gather(*(run_one() for _ in range(tasks)))
        return Sample(tasks, time.perf_counter() - started_at)

    return run_tasks
