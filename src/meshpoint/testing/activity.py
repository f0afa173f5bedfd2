"""Notice when a mesh in this process is idle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_QUIET_TURNS = 30
"""Turns of the event loop without activity after which a mesh is idle.

Between two recorded actions, the engine awaits only what is ready within a few turns.
"""


class Activity:
    """Counts the actions of a mesh, and waits until it is idle.

    Every call to the store or the broker and every event is recorded. `is_busy` returns whether
    code runs that may wait for anything, such as a segment of an agent that waits for a socket or
    a thread. The end of such code is recorded as well.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._count = 0
        self._recorded = asyncio.Event()

    def record(self) -> None:
        """Record one action."""
        self._count += 1
        self._recorded.set()

    async def wait_until_idle(self) -> None:
        """Wait until nothing happens unless time passes or the test does something."""
        await self.wait_until_quiet()
        while self._is_busy():
            self._recorded.clear()
            await self._recorded.wait()
            await self.wait_until_quiet()

    async def wait_until_quiet(self) -> None:
        """Like `wait_until_idle`, but does not wait for code that waits for something."""
        quiet_turns = 0
        while quiet_turns < _QUIET_TURNS:
            before = self._count
            await asyncio.sleep(0)
            quiet_turns = quiet_turns + 1 if self._count == before else 0
