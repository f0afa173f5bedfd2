"""A rival's end of the protocol: commands on standard input, results on standard output.

A command is `{"fan_out": N, "in_flight": M, "seconds": S}`; its result is `{"seconds": …,
"latencies": […]}` or `{"error": …}`. The rival drains when standard input closes, which also
happens if the benchmark dies.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

from benchmarks.rivals import job

Ask: TypeAlias = Callable[[int], Awaitable[object]]
"""Runs one job with this fan-out and returns the agent's answer."""
_THREADS = 64
"""The most jobs ever in flight."""


def serve(rival: AbstractAsyncContextManager[Ask]) -> None:
    """Execute commands until standard input closes."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep libraries' output out of the protocol
    asyncio.run(_serve(rival, lambda line: print(json.dumps(line), file=output, flush=True)))


@asynccontextmanager
async def asking_workers(
    command: Sequence[str], connect: Callable[[], Callable[[int], object]]
) -> AsyncIterator[Ask]:
    """Start workers, and yield a function that runs one job.

    `connect` returns a function that blocks until a job is done, so it is called in threads.
    """
    workers = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
    try:
        run_job = connect()
        loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(_THREADS)

        async def ask(fan_out: int) -> object:
            return await loop.run_in_executor(threads, run_job, fan_out)

        await ask(1)  # wait until the workers are ready
        yield ask
    finally:
        workers.terminate()
        await workers.wait()


async def _serve(
    rival: AbstractAsyncContextManager[Ask], respond: Callable[[dict[str, Any]], None]
) -> None:
    async with rival as ask:
        respond({"ready": True})
        async for command in _commands():
            try:
                respond(await _run_round(ask, **command))
            except Exception as error:
                respond({"error": f"{type(error).__name__}: {error}"})


async def _commands() -> AsyncIterator[dict[str, Any]]:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async for line in reader:
        yield json.loads(line)


async def _run_round(ask: Ask, fan_out: int, in_flight: int, seconds: float) -> dict[str, Any]:
    """Start jobs for `seconds`, `in_flight` at a time, and wait for all of them to end."""
    latencies: list[float] = []
    start_time = time.perf_counter()

    async def run_jobs() -> None:
        while (start := time.perf_counter()) < start_time + seconds:
            job.check(fan_out, await ask(fan_out))
            latencies.append(time.perf_counter() - start)

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(run_jobs())
    return {"seconds": time.perf_counter() - start_time, "latencies": latencies}
