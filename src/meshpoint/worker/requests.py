"""Requests: begin the first segment of each new task, and see to those that arrived before."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import assert_never

from meshpoint.errors import NO_DEFECT, PoisonMessage
from meshpoint.lifecycle import finish, receive
from meshpoint.lifecycle.begin import begin, begin_redelivered
from meshpoint.lifecycle.cancel import CANCELLED
from meshpoint.lifecycle.dispatch import Outgoing
from meshpoint.lifecycle.refuse import Refusals, refusal
from meshpoint.lifecycle.segment import Segment
from meshpoint.lifecycle.senders import foreign_address, sender_of
from meshpoint.lifecycle.site import Site, Spawn
from meshpoint.model.checkpoint import Begun, CancelFound, Fenced, Known, Run, TaskState
from meshpoint.model.events import Step
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.letters import pack
from meshpoint.model.operations import Adopted, NotRevived, Refusal, Revive, Revived
from meshpoint.model.options import AckPolicy
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.ports.broker import Delivery
from meshpoint.ports.home import Home
from meshpoint.worker.intake import Intake
from meshpoint.worker.segments import Segments

_AFTER_DEFECT = timedelta(seconds=1)
"""Before a request comes again that met a defect. The broker counts its deliveries, and has a limit."""


class Requests:
    """Takes requests in. `poke` asks for a look at what is due, `intake` gives each new task its slot."""

    def __init__(
        self,
        site: Site,
        segments: Segments,
        outgoing: Outgoing,
        refusals: Refusals,
        spawn: Spawn,
        poke: Callable[[], None],
        intake: Intake,
    ) -> None:
        self._site = site
        self._segments = segments
        self._outgoing = outgoing
        self._refusals = refusals
        self._spawn = spawn
        self._poke = poke
        self._intake = intake

    async def on_requests(self, deliveries: Sequence[Delivery]) -> None:
        """Begin the first segment of each new task; settle requests that arrived before.

        What meets a defect is set aside alone.
        """
        left = list(deliveries)
        try:
            await self._take_in(left)
        except NO_DEFECT:
            for delivery in left:
                await delivery.requeue()
            raise
        except Exception as error:
            if len(left) == 1:
                await self._refusals.set_aside(left[0], error)
            else:
                for delivery in left:
                    await self.on_requests([delivery])

    async def _take_in(self, left: list[Delivery]) -> None:
        """Take `left` in, and from it whatever is seen to.

        A slot is taken last, so that none is held while the database is away: tasks in memory need them.
        """
        arrived: list[tuple[Segment, receive.Request, Delivery]] = []
        try:
            for delivery in list(left):
                if segment_of := await self._read(delivery):
                    arrived.append((*segment_of, delivery))
                else:
                    left.remove(delivery)
            known = await self._lookup([request.task_id for _, request, _ in arrived])
            redelivered = [
                each for each in arrived if self._often_redelivered(*each) and each[0].run.task_id not in known
            ]
            if redelivered:
                await self._write_redelivered(redelivered)
                for each in redelivered:
                    arrived.remove(each)
                    left.remove(each[2])
            busy = False
            while arrived:
                segment, request, delivery = arrived[0]
                if await self._admit(segment, request, delivery, known.get(request.task_id)):
                    if await self._intake.take_slot(segment, at_once=busy):
                        self._segments.start(segment, request)
                    else:
                        busy = True
                        await self._come_again(segment)
                arrived.pop(0)
                left.remove(delivery)
        finally:
            for segment, _, _ in arrived:  # un-acked: they come again, elsewhere when the replica ends
                self._segments.leave(segment)

    async def _read(self, delivery: Delivery) -> tuple[Segment, receive.Request] | None:
        options = self._site.options
        try:
            sender_of(delivery.message, self._site.agent, options)
            if (foreign := foreign_address(delivery.message)) is not None:
                raise PoisonMessage(foreign)
            request = receive.request(delivery.message, options)
        except PoisonMessage as error:
            await self._refusals.dead_letter(delivery, str(error))
            return None
        live = self._segments.live.get(request.task_id)
        if request.resume is not None and live is not None:
            self._spawn(self._asked_again(live, request, delivery))
            return None
        if request.resume is None and self._segments.adopt(request.task_id, delivery):
            await self._ack_if_row_is_enough(request.task_id)
            return None
        run = Run(request.task_id, self._site.agent, RunId(new_id()))
        segment = Segment(run=run, requester=request.requester, request=delivery.message, deliveries=[delivery])
        self._segments.arrive(segment)
        return segment, request

    async def _asked_again(self, live: Segment, request: receive.Request, delivery: Delivery) -> None:
        """A resumed requester asks for a task that runs here: it is the one to be answered now.

        Its row says so. A segment without a row answers who had asked before, who waits for it no more; then the
        request comes again.
        """
        if live.beginning is not None:
            await asyncio.wait({live.beginning})
        if live.home is None or not live.home.durable:
            await live.left.wait()
            await delivery.requeue()
            return
        run = Run(request.task_id, self._site.agent, RunId(new_id()))
        asking = Segment(run=run, requester=request.requester, request=delivery.message, deliveries=[delivery])
        known = Known(request.task_id, self._site.agent, TaskState.RUNNING)
        self._follow_up(asking, partial(self._again, asking, request, live.home, known))

    async def _ack_if_row_is_enough(self, task_id: TaskId) -> None:
        running = self._segments.live.get(task_id)
        if running is not None and running.home is not None and running.home.durable:
            await self._segments.ack(running)

    async def _lookup(self, task_ids: Sequence[TaskId]) -> dict[TaskId, tuple[Home, Known]]:
        found: dict[TaskId, tuple[Home, Known]] = {}
        if task_ids:
            with self._site.steps.step(Step.RECEIVE, task_ids):
                for home in self._site.homes:
                    rows = await self._site.patience.until_answered(partial(home.store.lookup, task_ids))
                    found.update({task_id: (home, row) for task_id, row in rows.items()})
        return found

    def _often_redelivered(self, segment: Segment, request: receive.Request, delivery: Delivery) -> bool:
        """Whether a request lost its replicas often enough to be kept by a row from now on."""
        often = self._site.durable is not None and delivery.count >= self._site.options.begin_at_delivery
        return often and self._refusal(segment, request, delivery.count) is None

    async def _write_redelivered(self, arrived: Sequence[tuple[Segment, receive.Request, Delivery]]) -> None:
        """Write the tasks and ack their requests, all before any of them runs: one may end this process.

        From here on the broker counts no deliveries. Those without a slot are ready, for any replica.
        """
        home = self._site.durable
        assert home is not None
        results = await begin_redelivered([(segment, request.resume) for segment, request, _ in arrived], self._site)
        running: list[tuple[Segment, receive.Request]] = []
        for (segment, request, _), (result, runs) in zip(arrived, results, strict=True):
            if runs and isinstance(result, Begun):
                segment.run, segment.home = result.run, home
                self._segments.own(segment)
                running.append((segment, request))
            elif isinstance(result, Begun):
                self._follow_up(segment, partial(self._queued, segment))
            else:
                self._not_begun(segment, request, result)
        for segment, _ in running:
            await self._segments.ack(segment)
        for segment, request in running:
            self._segments.start(segment, request)

    async def _queued(self, segment: Segment) -> None:
        await self._settled(segment)
        self._segments.ready_somewhere.set()
        await self._outgoing.wake_others()

    async def _admit(
        self, segment: Segment, request: receive.Request, delivery: Delivery, known: tuple[Home, Known] | None
    ) -> bool:
        """Whether the task is to run here now. If not, its request is settled, or soon will be."""
        if known is not None:
            self._follow_up(segment, partial(self._again, segment, request, *known))
            return False
        if refused := self._refusal(segment, request, delivery.count):
            self._follow_up(segment, partial(self._refuse, segment, refused))
            return False
        if self._site.durable is None or (
            self._site.options.ack_policy is AckPolicy.AT_CHECKPOINT
            and request.resume is None  # another replica may run it for who had asked before: the row decides
        ):
            return True
        return await self._write_first(segment, request)

    def _refusal(self, segment: Segment, request: receive.Request, count: int) -> Failed | None:
        options = self._site.options
        if self._site.durable is None and count >= options.begin_at_delivery + options.max_attempts:
            segment.dead_reason = f"it was delivered {count} times and no run of it came to an end"
            return Failed(FailureKind.ERROR, segment.dead_reason)
        return refusal(request, options, self._site.clock.now())

    async def _write_first(self, segment: Segment, request: receive.Request) -> bool:
        """Write the task as running and ack its request: from here on the lease owns the run, not the broker."""
        home, result = await begin(segment, self._site, order=request.resume)
        if isinstance(result, Begun):
            segment.run, segment.home = result.run, home
            self._segments.own(segment)
            await self._segments.ack(segment)
            return True
        self._not_begun(segment, request, result)
        return False

    def _not_begun(self, segment: Segment, request: receive.Request, result: Fenced | CancelFound) -> None:
        """Settle a request whose task has a row by now."""
        match result:
            case Fenced() if request.resume is not None:  # there is a row now, which is to know whom to answer
                self._follow_up(segment, partial(self._come_again, segment))
            case Fenced():
                self._follow_up(segment, partial(self._settled, segment))
            case CancelFound():
                self._follow_up(segment, partial(self._refuse, segment, CANCELLED))
            case _:
                assert_never(result)

    def _follow_up(self, segment: Segment, step: Callable[[], Awaitable[None]]) -> None:
        """Settle a request that does not run here. One that meets a defect is requeued after a pause."""
        self._spawn(self._followed_up(segment, step))

    async def _followed_up(self, segment: Segment, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        except Exception:
            await self._site.clock.sleep(_AFTER_DEFECT)
            await self._come_again(segment)
            raise

    async def _again(self, segment: Segment, request: receive.Request, home: Home, known: Known) -> None:
        """A request that arrived before. What it still needs is seen to; nothing runs twice."""
        if known.agent != self._site.agent:
            message = f"the task id names a task of agent {known.agent!r}"
            await self._refuse(segment, Failed(FailureKind.ERROR, message))
        elif request.resume is not None and known.state is not TaskState.COMPLETED:
            await self._revive(segment, request.resume, home, known)
        elif known.reply is not None:
            await self._reply_again(segment, known)
        elif home.durable:
            if known.state is TaskState.WAITING:
                self._poke()  # what is due for dispatch is sent again
            await self._settled(segment)
        else:
            self._segments.hold(known.task_id, segment.deliveries)
            self._segments.leave(segment)

    async def _revive(self, segment: Segment, order: str, home: Home, known: Known) -> None:
        """The requester was resumed and asks again: its task here goes on as well, from its own checkpoint.

        One that is still at work goes on as it is, and answers the new request.
        """
        assert segment.request is not None
        wish = Revive(
            task_id=known.task_id,
            token=new_id(),
            order=order,
            agent=self._site.agent,
            request=pack(segment.request),
            requester=segment.requester,
            without_checkpoint=True,
            adopt=True,
        )
        with self._site.steps.step(Step.RESUME, [known.task_id]):
            result = await self._site.patience.until_answered(lambda: home.store.revive(wish))
        match result:
            case Revived(again=True) | NotRevived(refusal=Refusal.COMPLETED):
                await self._as_it_is_now(segment, home)  # what was looked up is out of date
            case Revived() | Adopted():
                await self._wait_for_its_end(segment, home)
            case NotRevived(refusal=Refusal.OTHER_ACTIVE, detail=other):
                message = f"agent {known.agent!r} is exclusive, and its operation {other} is active"
                await self._refuse(segment, Failed(FailureKind.ERROR, message))
            case NotRevived(refusal=Refusal.RUNNING):
                await self._settled(segment)
            case NotRevived(detail=detail) if detail:
                await self._refuse(segment, Failed(FailureKind.ERROR, f"the task does not go on: {detail}"))
            case NotRevived():  # its row is gone since it was looked up: it comes again and finds none
                await self._come_again(segment)
            case _:
                assert_never(result)

    async def _as_it_is_now(self, segment: Segment, home: Home) -> None:
        """Answer a request that its task has served before, or that came when it had just completed."""
        task_id = segment.run.task_id
        known = (await self._site.patience.until_answered(partial(home.store.lookup, [task_id]))).get(task_id)
        if known is None:
            await self._come_again(segment)
        elif known.reply is not None:
            await self._reply_again(segment, known)
        else:
            await self._wait_for_its_end(segment, home)

    async def _wait_for_its_end(self, segment: Segment, home: Home) -> None:
        """The task is at work, or about to be, and knows whom to answer."""
        if home.durable:
            await self._settled(segment)
            self._poke()  # what is due for dispatch is sent again
        else:
            self._segments.hold(segment.run.task_id, segment.deliveries)
            self._segments.leave(segment)
        self._segments.ready_somewhere.set()

    async def _come_again(self, segment: Segment) -> None:
        self._segments.leave(segment)
        while segment.deliveries:
            await segment.deliveries.pop().requeue()

    async def _reply_again(self, segment: Segment, known: Known) -> None:
        assert known.reply is not None
        # The tombstone of a cancel that came first does not know the requester; this request does.
        reply = replace(known.reply, requester=segment.requester)
        await self._outgoing.answer(reply, segment.run.id, again=True)
        await self._settled(segment)

    async def _refuse(self, segment: Segment, refused: Failed) -> None:
        reply = finish.reply_for(segment, refused, self._site.options)
        await self._outgoing.answer(reply, segment.run.id, again=refused.kind is FailureKind.CANCELLED)
        await self._settled(segment)

    async def _settled(self, segment: Segment) -> None:
        if segment.dead_reason is None:
            await self._segments.ack(segment)
        else:
            self._site.steps.note(Step.DEAD_TASK, segment.run.task_id, reason=segment.dead_reason)
            for delivery in segment.deliveries:
                await self._refusals.bury(delivery, segment.dead_reason)
        self._segments.leave(segment)
