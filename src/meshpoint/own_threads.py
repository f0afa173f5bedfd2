"""Threads for Meshpoint's own computations on large values: compression, packing, digests.

`asyncio.to_thread` shares its threads with agent code, whose stuck calls would block every other agent.
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

    It must end by itself, since the process waits for it on exit. Not called if cancelled before its turn.
    """
    return await asyncio.get_running_loop().run_in_executor(
        _executor(os.getpid()), partial(function, *args, **kwargs)
    )


@cache
def _executor(process_id: int) -> ThreadPoolExecutor:
    """The threads of this process. A forked process starts its own."""
    return ThreadPoolExecutor(_MAX_THREADS, "meshpoint-own")
