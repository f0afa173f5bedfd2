"""Find and handle work that is due by the clock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from meshpoint.engine import claim
from meshpoint.engine.dispatch import Outgoing
from meshpoint.engine.grace import Grace
from meshpoint.engine.runtime import Site, Spawn
from meshpoint.engine.segments import Segments
from meshpoint.errors import NON_DEFECT_ERRORS, Unavailable
from meshpoint.model.checkpoint import Arrival, Due, Resumable, Send, StillWaiting
from meshpoint.model.envelopes import status_letter
from meshpoint.model.events import Step
from meshpoint.ports.backend import Home

log = logging.getLogger("meshpoint.sweeper")

_PURGE_EVERY = 60  # sweeps
_PURGE_BATCHES = 10  # in one transaction: deleting is cheap
_MOST_LOOKS_AT_ONCE = 200
"""Maximum full batches before a pause of one interval: rows that stay due must not burn a core."""
_MOST_SENDING = 8
"""Batches in flight to the broker, separately for due messages and keep-alives."""
_FEW_SLOTS = 2


class Sweeper:
    """Sweeps each backend for due work."""

    def __init__(
        self,
        site: Site,
        segments: Segments,
        outgoing: Outgoing,
        spawn: Spawn,
    ) -> None:
        self._site = site
        self._segments = segments
        self._outgoing = outgoing
        self._spawn = spawn
        # A database outage does not affect in-process tasks.
        self._graces = {
            durable: Grace(site.clock, site.options.settle_time, site.options.lease) for durable in (True, False)
        }
        self._looks = self._looks_at_once = 0
        self._sending: set[asyncio.Task[None]] = set()
        self._telling: set[asyncio.Task[None]] = set()
        self.by_hand = False
        """`True` if this process consumes no messages, so expiry need not wait for responses."""

    def begin_grace(self) -> None:
        """Start both grace periods.

        Queued responses are handled before calls expire, and lease owners get one lease period to
        renew.
        """
        for grace in self._graces.values():
            grace.begin()

    async def look(self, homes: Sequence[Home]) -> bool:
        """Sweep each reachable backend once. Returns `True` if more is due right now."""
        self._looks += 1
        more = False
        for home in homes:
            try:
                with self._site.steps.step(Step.SWEEP, durable=home.durable):
                    more |= await self.on_due(home)
            except Unavailable as error:
                self._site.patience.note_away(error)
        if self._site.broker.can_publish:
            self._site.patience.note_broker_back()
        self._looks_at_once = (self._looks_at_once + 1) % _MOST_LOOKS_AT_ONCE if more else 0
        return self._looks_at_once > 0

    async def on_due(self, home: Home) -> bool:
        """Handle one batch of each kind of due work. Returns `True` if any kind has more.

        A defect in one step does not stop the others.
        """
        due = await self._due(home)
        limit = self._site.options.sweep_batch
        counts = due or Due(limit, limit, limit, limit, limit)
        more = False
        for step, count in (
            (self._take_ready, counts.ready),
            (self._expire, counts.expired),
            (self._take_over, counts.lapsed),
            (self._send, counts.unsent),
            (self._keep_alive, counts.keep_alives),
            (self._clean, 0),
        ):
            try:
                more |= await step(home, count)
            except NON_DEFECT_ERRORS:
                raise
            except Exception:
                log.exception("agent %s: a step of the sweeper failed", self._site.agent)
        return more and due is not None

    async def _due(self, home: Home) -> Due | None:
        """Count due work by kind. Returns `None` after a defect; then each step queries alone."""
        try:
            due = await home.store.due(self._site.replica, self._site.options.sweep_batch)
        except NON_DEFECT_ERRORS:
            raise
        except Exception:
            log.exception("agent %s: due work could not be counted", self._site.agent)
            return None
        if home.durable and self._site.patience.note_back():
            self._graces[True].begin()
        return due

    async def _take_over(self, home: Home, count: int) -> bool:
        if count and home.durable and self._graces[True].may_take_over:
            taken = await claim.take_over(home, self._site, count)
            self._resume(home, taken, taken_over=True)
            return self._is_full(len(taken))
        return False

    async def _send(self, home: Home, count: int) -> bool:
        if not count or not self._site.broker.can_publish:
            return False  # a failed attempt would delay the next one, longer each time
        if len(self._sending) >= _MOST_SENDING:
            return False  # the next sweep is soon enough
        unsent = await home.store.unsent(self._site.agent, self._site.options.sweep_batch)
        if unsent:
            sending = self._spawn(self._send_all(home, unsent))  # must not delay the rest
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
        return self._is_full(len(unsent))

    async def _send_all(self, home: Home, sends: Sequence[Send]) -> None:
        try:
            await self._segments.send(home, sends, again=True)
        except NON_DEFECT_ERRORS as error:
            self._note(error)
        except Exception:
            log.exception("agent %s: what was due is sent again later", self._site.agent)

    async def _keep_alive(self, home: Home, count: int) -> bool:
        if not count or not self._site.broker.can_publish or len(self._telling) >= _MOST_SENDING:
            return False
        alive = await home.store.keep_alives(self._site.replica, self._site.options.sweep_batch)
        letters = [status_letter(self._site.agent, each.task_id, each.requester, {"alive": True}) for each in alive]
        if letters:
            telling = self._spawn(self._outgoing.tell(letters))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)
        return self._is_full(len(alive))

    async def _clean(self, home: Home, _: int) -> bool:
        if self._looks % _PURGE_EVERY == 0:
            await self.purge(home)
        return False

    async def purge(self, home: Home) -> None:
        """Delete all expired tombstones: as many again will have expired by the next purge."""
        limit = _PURGE_BATCHES * self._site.options.sweep_batch
        purged = limit
        while purged == limit:
            with self._site.steps.look(Step.PURGE) as found:
                purged = await home.store.purge(self._site.agent, limit)
                found.detail = {"purged": purged} if purged else {}

    async def _expire(self, home: Home, count: int) -> bool:
        grace = self._graces[home.durable]
        if not (self.by_hand or self._site.broker.consuming(home.reply_to)):
            grace.begin_settling()
        if not count or not grace.may_expire:
            return False
        arrivals: list[Arrival] = []
        expired = await claim.expire(home, self._site, count)
        for each in expired:
            if isinstance(each.then, StillWaiting):
                if each.cancels:
                    self._spawn(self._send_all(home, each.cancels))
            else:
                arrivals.append(replace(each.then, cancels=each.cancels))
        self._segments.all_arrived(home, arrivals)
        # More tasks may be due even if all calls in a full batch got extended meanwhile.
        return self._is_full(count)

    def _is_full(self, count: int) -> bool:
        return count >= self._site.options.sweep_batch

    def _note(self, error: Exception) -> None:
        if isinstance(error, Unavailable):
            self._site.patience.note_away(error)
        else:
            log.error("agent %s: %s", self._site.agent, error)

    async def take_ready(self) -> None:
        """Resume tasks that wait for a slot, if there may be any."""
        if not self._segments.ready_somewhere.is_set():
            return
        self._segments.ready_somewhere.clear()
        for home in self._site.homes:
            try:
                await self._take_ready(home, await self._ready(home))
            except Unavailable as error:
                self._site.patience.note_away(error)

    async def _ready(self, home: Home) -> int:
        """Slots to reserve for ready tasks. Skips the count if few slots are free."""
        free = self._site.slots.free
        return free if free <= _FEW_SLOTS else (await home.store.due(self._site.replica, free)).ready

    async def _take_ready(self, home: Home, count: int) -> bool:
        count = min(count, self._site.slots.free)
        taken = await claim.take_ready(home, self._site, count)
        self._resume(home, taken)
        if count and len(taken) >= count:  # there may be more tasks than slots
            self._segments.ready_somewhere.set()
        return False

    def _resume(self, home: Home, tasks: Sequence[Resumable], *, taken_over: bool = False) -> None:
        """Run the next segment of each task. After a defect, a task waits for its lease expiry."""
        for task in tasks:
            try:
                self._segments.resume(home, task, taken_over=taken_over, apart=task.suspect)
            except Exception:
                self._site.slots.give_back()
                self._site.apart.give_back(task.suspect)
                log.exception("task %s: left to its lease", task.run.task_id)
