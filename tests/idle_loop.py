"""An event loop on which a test can wait until all tasks wait."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_SHORT_WAIT_SECONDS = 0.03
"""A timer due within this time is work in progress: an inbox waits up to 0.02 s for more."""


class IdleLoop(asyncio.SelectorEventLoop):
    """The default loop, which also knows when it is idle.

    It is idle when no callback is ready, no file has events, no call runs in an executor and no
    timer is due soon: nothing happens until a fake clock moves or another process or a thread of
    its own acts. The loop itself notices this, at the moment when it would block.
    """

    def __init__(self) -> None:
        super().__init__(_Selector(self))
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._executor_calls: set[asyncio.Future[Any]] = set()

    async def wait_until_idle(self) -> None:
        """Wait until the loop has nothing to do."""
        waiter = self.create_future()
        self._idle_waiters.append(waiter)
        await waiter

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run `func` in a thread. The loop is not idle before its result is here."""
        call = super().run_in_executor(executor, func, *args)
        self._executor_calls.add(call)
        call.add_done_callback(self._executor_calls.discard)
        return call

    def report_idle(self, timeout: float | None) -> bool:
        """Wake the waiters if a wait of `timeout` seconds would begin. Returns `True` if any."""
        if self._executor_calls or (timeout is not None and timeout <= _SHORT_WAIT_SECONDS):
            return False
        waiters, self._idle_waiters = self._idle_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        return bool(waiters)


class _Selector(selectors.DefaultSelector):
    """Reports to the loop before it blocks. It does not block if that wakes a waiter."""

    def __init__(self, loop: IdleLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Ready files. Blocks for up to `timeout` seconds, or without a limit."""
        if events := super().select(0):
            return events
        if timeout == 0 or self._loop.report_idle(timeout):
            return []
        return super().select(timeout)


async def idle() -> None:
    """Wait until nothing is left to do before a fake clock moves, without spinning."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, IdleLoop)
    await loop.wait_until_idle()


def advance_loop(seconds: float) -> None:
    """Move the clock of the running loop, so that its timers become due."""
    loop = asyncio.get_running_loop()
    earlier = loop.time
    loop.time = lambda: earlier() + seconds  # type: ignore[method-assign]
