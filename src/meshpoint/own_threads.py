"""Threads for Meshpoint's own computations on large values: compression, packing, digests.

Not those of `asyncio.to_thread`: agent code uses them too, and calls of its own that never return would block every
other agent in the process.
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

_MOST = max(2, min(4, os.cpu_count() or 1))


async def in_own_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `function` returned, or raised, in one of the threads.

    It must end by itself, since the process waits for it on exit. Not called if cancelled before its turn.
    """
    return await asyncio.get_running_loop().run_in_executor(
        _threads_of(os.getpid()), partial(function, *args, **kwargs)
    )


@cache
def _threads_of(process_id: int) -> ThreadPoolExecutor:
    """The threads of this process. A forked one has none of its parent's."""
    return ThreadPoolExecutor(_MOST, "meshpoint-own")
