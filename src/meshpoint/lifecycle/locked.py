"""Retries letters for tasks whose rows another database session holds, separately from all others."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Protocol, TypeAlias

from meshpoint.errors import NO_DEFECT
from meshpoint.lifecycle.site import Spawn
from meshpoint.model.ids import RunId
from meshpoint.ports.broker import Delivery
from meshpoint.ports.clock import Clock
from meshpoint.ports.home import Home

log = logging.getLogger("meshpoint.locked")

Received: TypeAlias = tuple[Delivery, RunId]
"""A delivery and the id of its claim, which stays the same across retries."""

_FIRST, _LONGEST = timedelta(milliseconds=50), timedelta(seconds=1)
_TOGETHER = 256
_MOST_ROOM = 1024


class Handle(Protocol):
    """Handles letters; letters of tasks that are still locked return through `keep`."""

    def __call__(self, received: Sequence[Received], home: Home, *, shared: bool) -> Awaitable[None]: ...


class LockedLetters:
    """Unacked letters waiting for a lock. `make_room` raises the prefetch so that other letters still arrive."""

    def __init__(self, handle: Handle, clock: Clock, spawn: Spawn, make_room: Callable[[int], None]) -> None:
        self._handle = handle
        self._clock = clock
        self._spawn = spawn
        self._make_room = make_room
        self._kept: list[tuple[Received, Home, bool]] = []
        self._waiting = False

    def keep(self, received: Received, home: Home, *, shared: bool) -> None:
        """Schedule this letter for another attempt."""
        self._kept.append((received, home, shared))
        self._tell()
        if not self._waiting:
            self._waiting = True
            self._spawn(self._until_free())

    def _tell(self) -> None:
        kept = len(self._kept)
        self._make_room(min(1 << kept.bit_length(), _MOST_ROOM) if kept else 0)

    async def _until_free(self) -> None:
        pause = _FIRST
        try:
            while self._kept:
                before = len(self._kept)
                await self._clock.sleep(pause)
                await self._again()
                pause = _FIRST if len(self._kept) < before else min(2 * pause, _LONGEST)
        finally:
            self._waiting = False
            self._tell()

    async def _again(self) -> None:
        kept, self._kept = self._kept, []
        while kept:
            _, home, shared = kept[0]
            part = [each for each in kept[:_TOGETHER] if each[1] is home and each[2] is shared]
            kept = [each for each in kept if each not in part]
            try:
                await self._handle([received for received, _, _ in part], home, shared=shared)
            except NO_DEFECT:
                log.warning("%d letters will be retried later", len(part), exc_info=True)
                self._kept += part
            except BaseException:
                self._kept += part + kept
                raise
