"""The sweeper: what time alone makes due."""

from __future__ import annotations

from meshpoint.errors import Unavailable
from meshpoint.lifecycle import claim
from meshpoint.lifecycle.dispatch import Outgoing
from meshpoint.lifecycle.grace import Grace
from meshpoint.lifecycle.site import Site, Spawn
from meshpoint.model.events import Step
from meshpoint.model.letters import status_letter
from meshpoint.ports.home import Home
from meshpoint.worker.segments import Segments

_PURGE_EVERY = 60  # looks


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
        self._grace = Grace(site.clock, site.options.settle_time, site.options.lease)
        self._looks = 0

    def begin_grace(self) -> None:
        """Begin both waits: answers that are queued come first, and owners get a lease's time to renew."""
        self._grace.begin()

    async def look(self) -> None:
        """Look once, at each home that can be reached."""
        for home in self._site.homes:
            try:
                await self.on_due(home)
            except Unavailable as error:
                self._site.patience.note_away(error)

    async def on_due(self, home: Home) -> None:
        """One look at one home."""
        batch = self._site.options.sweep_batch
        store = home.store
        for task in await claim.take_ready(home, self._site):
            self._segments.resume(home, task)
        if not self._site.broker.connected or (home.durable and self._site.patience.note_back()):
            self._grace.begin()
        if self._grace.may_expire:
            await self._expire(home)
        if home.durable and self._grace.may_take_over:
            for task in await claim.take_over(home, self._site):
                self._segments.resume(home, task)
        if unsent := await store.unsent(self._site.agent, batch):
            await self._segments.send(home, unsent)
        for alive in await store.keep_alives(self._site.replica, batch):
            await self._outgoing.tell(
                status_letter(self._site.agent, alive.task_id, alive.requester, {"alive": True})
            )
        self._looks += 1
        if self._looks % _PURGE_EVERY == 0:
            await self.purge(home)

    async def purge(self, home: Home) -> None:
        """Delete tombstones whose time has come."""
        purged = await home.store.purge(self._site.agent, self._site.options.sweep_batch)
        if purged:
            self._site.steps.note(Step.PURGE, purged=purged)

    async def _expire(self, home: Home) -> None:
        for expired in await claim.expire(home, self._site):
            self._segments.arrived(home, expired.then)
            if expired.cancels:
                self._spawn(self._segments.send(home, expired.cancels))

    async def take_ready(self) -> None:
        """Go on with tasks that waited for a slot, if there may be any."""
        if self._site.durable is not None and self._segments.ready_somewhere.is_set():
            self._segments.ready_somewhere.clear()
            try:
                for task in await claim.take_ready(self._site.durable, self._site):
                    self._segments.resume(self._site.durable, task)
            except Unavailable as error:
                self._site.patience.note_away(error)
