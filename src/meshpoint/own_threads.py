"""Threads for Meshpoint's own computations on large values: compression, packing, digests.

Agent code uses the threads of `asyncio.to_thread`. If these were shared, stuck calls in agent code
would block every other agent.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_MAX_THREADS = max(2, min(4, os.cpu_count() or 1))


async def run_in_own_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in a thread and return its result.

    `function` must end by itself, since the process waits for it on exit. It is not called if the
    caller is cancelled before a thread is free.
    """
    return await asyncio.get_running_loop().run_in_executor(
        _executor(os.getpid()), partial(function, *args, **kwargs)
    )


@cache
def _executor(process_id: int) -> ThreadPoolExecutor:
    """The threads of this process. A forked process starts its own."""
    return ThreadPoolExecutor(_MAX_THREADS, "meshpoint-own")
