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
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

from benchmarks.rivals import job

Ask: TypeAlias = Callable[[int], Awaitable[object]]
"""Runs one job with this fan-out and returns the agent's answer."""


def serve(rival: AbstractAsyncContextManager[Ask]) -> None:
    """Execute commands until standard input closes."""
    words = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep libraries' output out of the protocol
    asyncio.run(_serve(rival, lambda word: print(json.dumps(word), file=words, flush=True)))


async def _serve(rival: AbstractAsyncContextManager[Ask], tell: Callable[[dict[str, Any]], None]) -> None:
    async with rival as ask:
        tell({"ready": True})
        async for order in _orders():
            try:
                tell(await _round(ask, **order))
            except Exception as error:
                tell({"error": f"{type(error).__name__}: {error}"})


async def _orders() -> AsyncIterator[dict[str, Any]]:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        yield json.loads(line)


async def _round(ask: Ask, fan_out: int, in_flight: int, seconds: float) -> dict[str, Any]:
    """Start jobs for `seconds`, `in_flight` at a time, and wait for all of them to end."""
    latencies: list[float] = []
    begin = time.perf_counter()

    async def one_after_another() -> None:
        while (start := time.perf_counter()) < begin + seconds:
            job.check(fan_out, await ask(fan_out))
            latencies.append(time.perf_counter() - start)

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(one_after_another())
    return {"seconds": time.perf_counter() - begin, "latencies": latencies}
