"""Retry messages that cannot be handled yet, separately from all others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Protocol, TypeAlias

from meshpoint.engine.runtime import Spawn
from meshpoint.errors import NON_DEFECT_ERRORS
from meshpoint.model.ids import RunId
from meshpoint.ports.backend import Home
from meshpoint.ports.broker import Delivery
from meshpoint.ports.clock import Clock

log = logging.getLogger("meshpoint.postponed")

Received: TypeAlias = tuple[Delivery, RunId]
"""A delivery and the id of its claim, which stays the same across retries."""

_FIRST, _LONGEST = timedelta(milliseconds=50), timedelta(seconds=1)
_TOGETHER = 256
_MOST_ROOM = 1024


class Handle(Protocol):
    """Handles messages. Messages that must wait again are passed to `keep`."""

    def __call__(self, received: Sequence[Received], home: Home, *, shared: bool) -> Awaitable[None]: ...


class PostponedLetters:
    """Unacked messages that wait for another attempt.

    Either another database session locks their task's row, or handling them failed. `make_room`
    raises the prefetch so that other messages still arrive.
    """

    def __init__(self, handle: Handle, clock: Clock, spawn: Spawn, make_room: Callable[[int], None]) -> None:
        self._handle = handle
        self._clock = clock
        self._spawn = spawn
        self._make_room = make_room
        self._kept: dict[RunId, tuple[Received, Home, bool]] = {}
        self._trying = 0  # messages in the current attempt
        self._attempt = asyncio.Lock()
        self._waiting = self._closed = False

    async def keep(self, received: Received, home: Home, *, shared: bool) -> None:
        """Schedule this message for another attempt, or requeue it if the replica drains."""
        delivery, claim_id = received
        if self._closed:
            await delivery.requeue()
            return
        self._kept[claim_id] = received, home, shared
        self._tell()
        if not self._waiting:
            self._waiting = True
            self._spawn(self._until_handled())

    async def close(self) -> None:
        """Requeue all messages once the current attempt ends. From now on, `keep` requeues.

        Raises:
            Unavailable: the broker is unavailable. It redelivers the messages when the connection
                closes.
        """
        self._closed = True
        async with self._attempt:
            kept, self._kept = self._kept, {}
            for (delivery, _), _, _ in kept.values():
                await delivery.requeue()

    def _tell(self) -> None:
        waiting = len(self._kept) + self._trying
        self._make_room(min(1 << waiting.bit_length(), _MOST_ROOM) if waiting else 0)

    async def _until_handled(self) -> None:
        pause = _FIRST
        try:
            while self._kept:
                before = len(self._kept)
                await self._clock.sleep(pause)
                async with self._attempt:
                    await self._try_all()
                pause = _FIRST if len(self._kept) < before else min(2 * pause, _LONGEST)
        finally:
            self._waiting = False
            self._tell()

    async def _try_all(self) -> None:
        left = dict(self._kept)
        while left and not self._closed:
            _, home, shared = next(iter(left.values()))
            alike = [id_ for id_, (_, where, by) in left.items() if where is home and by is shared]
            await self._try_part([left.pop(id_) for id_ in alike[:_TOGETHER]], home, shared=shared)

    async def _try_part(self, part: Sequence[tuple[Received, Home, bool]], home: Home, *, shared: bool) -> None:
        letters = [received for received, _, _ in part]
        self._trying = len(letters)
        for _, claim_id in letters:
            del self._kept[claim_id]
        try:
            await self._handle(letters, home, shared=shared)
        except BaseException as error:
            for received in letters:
                await self.keep(received, home, shared=shared)
            if not isinstance(error, Exception):
                raise
            defect = not isinstance(error, NON_DEFECT_ERRORS)
            log.warning("%d letters will be retried later: %s", len(letters), error, exc_info=defect)
        finally:
            self._trying = 0
