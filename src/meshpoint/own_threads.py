"""Threads for Meshpoint's own computations on large values: compression, packing, digests.

Not those of `asyncio.to_thread`: agent code uses them too, and calls of its own that never return would block every
other agent in the process.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_MOST = max(2, min(4, os.cpu_count() or 1))
_IDLE_SECONDS = 10.0


class OwnThreads:
    """At most `most` threads, started when there is work and ended after `idle` seconds without any.

    The process does not wait for them on exit. Functions must end by themselves: they compute, and wait for nothing.
    """

    def __init__(self, most: int = _MOST, idle: float = _IDLE_SECONDS) -> None:
        self._most, self._idle_seconds = most, idle
        self.forget_threads()

    def forget_threads(self) -> None:
        """Start anew, in a forked process: it has none of the threads, and the lock may be locked for good."""
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._threads = self._idle = 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `function` returned, or raised, in one of the threads. Not called if cancelled before its turn."""
        result: Future[T] = Future()
        with self._changed:
            if self._idle <= len(self._jobs) and self._threads < self._most:
                threading.Thread(target=self._main, name="meshpoint-own", daemon=True).start()
                self._threads += 1
            self._jobs.append((result, partial(function, *args, **kwargs)))
            self._changed.notify()
        return await asyncio.wrap_future(result)

    # From here on: runs in the threads.

    def _main(self) -> None:
        while job := self._next():
            _settle(*job)
            del job  # may hold a large value

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._jobs, self._idle_seconds)
            self._idle -= 1
            if self._jobs:
                return self._jobs.popleft()
            self._threads -= 1
            return None


def _settle(result: Future[T], call: Callable[[], T]) -> None:
    if result.set_running_or_notify_cancel():
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)
            del result, call  # the error's traceback holds this frame, and the frame a large value


_threads = OwnThreads()
in_own_thread = _threads.run
os.register_at_fork(after_in_child=_threads.forget_threads)
