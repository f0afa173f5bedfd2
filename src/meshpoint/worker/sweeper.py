"""The sweeper: what time alone makes due."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from meshpoint.errors import NO_DEFECT, Unavailable
from meshpoint.lifecycle import claim
from meshpoint.lifecycle.dispatch import Outgoing
from meshpoint.lifecycle.grace import Grace
from meshpoint.lifecycle.site import Site, Spawn
from meshpoint.model.checkpoint import Arrival, Send, StillWaiting
from meshpoint.model.events import Step
from meshpoint.model.letters import status_letter
from meshpoint.ports.home import Home
from meshpoint.worker.segments import Segments

log = logging.getLogger("meshpoint.sweeper")

_PURGE_EVERY = 60  # looks
_PURGE_BATCHES = 10  # in one transaction: deleting is cheap


class Sweeper:
    """Looks for what is due, in each home."""

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
        # An outage of the database is none of the memory.
        self._graces = {
            durable: Grace(site.clock, site.options.settle_time, site.options.lease) for durable in (True, False)
        }
        self._looks = 0

    def begin_grace(self) -> None:
        """Begin both waits: answers that are queued come first, and owners get a lease's time to renew."""
        for grace in self._graces.values():
            grace.begin()

    async def look(self, homes: Sequence[Home]) -> None:
        """Look once, at each home that can be reached."""
        self._looks += 1
        for home in homes:
            try:
                with self._site.steps.step(Step.SWEEP, durable=home.durable):
                    await self.on_due(home)
            except Unavailable as error:
                self._site.patience.note_away(error)

    async def on_due(self, home: Home) -> None:
        """One look at one home. A step that meets a defect does not keep the others from theirs."""
        for step in (self._take_ready, self._expire, self._take_over, self._send, self._keep_alive, self._clean):
            try:
                await step(home)
            except NO_DEFECT:
                raise
            except Exception:
                log.exception("agent %s: a step of the sweeper failed", self._site.agent)

    async def _take_over(self, home: Home) -> None:
        if home.durable and self._graces[True].may_take_over:
            for task in await claim.take_over(home, self._site):
                self._segments.resume(home, task, taken_over=True, apart=task.suspect)

    async def _send(self, home: Home) -> None:
        if not self._site.broker.connected:
            return  # an attempt in vain would put off the next one, for longer each time
        if unsent := await home.store.unsent(self._site.agent, self._site.options.sweep_batch):
            self._spawn(self._send_all(home, unsent))  # a claim that waits for the database must not hold up the rest

    async def _send_all(self, home: Home, sends: Sequence[Send]) -> None:
        try:
            await self._segments.send(home, sends)
        except NO_DEFECT:
            raise
        except Exception:
            log.exception("agent %s: what was due is sent again later", self._site.agent)

    async def _keep_alive(self, home: Home) -> None:
        if not self._site.broker.connected:
            return
        for alive in await home.store.keep_alives(self._site.replica, self._site.options.sweep_batch):
            letter = status_letter(self._site.agent, alive.task_id, alive.requester, {"alive": True})
            await self._outgoing.tell(letter)

    async def _clean(self, home: Home) -> None:
        if self._looks % _PURGE_EVERY == 0:
            await self.purge(home)

    async def purge(self, home: Home) -> None:
        """Delete tombstones whose time has come: all of them, since as many come again until the next time."""
        limit = _PURGE_BATCHES * self._site.options.sweep_batch
        purged = limit
        while purged == limit:
            with self._site.steps.look(Step.PURGE) as found:
                purged = await home.store.purge(self._site.agent, limit)
                found.detail = {"purged": purged} if purged else {}

    async def _expire(self, home: Home) -> None:
        if not self._site.broker.connected or (home.durable and self._site.patience.note_back()):
            self._graces[home.durable].begin()
        if not self._graces[home.durable].may_expire:
            return
        arrivals: list[Arrival] = []
        for expired in await claim.expire(home, self._site):
            if isinstance(expired.then, StillWaiting):
                self._spawn(self._send_all(home, expired.cancels))
            else:
                arrivals.append(replace(expired.then, cancels=expired.cancels))
        self._segments.all_arrived(home, arrivals)

    async def take_ready(self) -> None:
        """Go on with tasks that waited for a slot, if there may be any."""
        if not self._segments.ready_somewhere.is_set():
            return
        self._segments.ready_somewhere.clear()
        for home in self._site.homes:
            try:
                await self._take_ready(home)
            except Unavailable as error:
                self._site.patience.note_away(error)

    async def _take_ready(self, home: Home) -> None:
        slots = self._site.slots.free
        taken = await claim.take_ready(home, self._site)
        for task in taken:
            self._segments.resume(home, task, apart=task.suspect)
        if len(taken) >= slots:  # there may be more than there were slots
            self._segments.ready_somewhere.set()
