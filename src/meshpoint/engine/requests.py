"""Begin the first segment of each new task, and settle repeated requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import assert_never

from meshpoint.engine import finish, receive
from meshpoint.engine.begin import begin, begin_redelivered
from meshpoint.engine.cancels import CANCELLED
from meshpoint.engine.dispatch import Outgoing
from meshpoint.engine.prefetch import Intake
from meshpoint.engine.refusals import ID_IN_USE, Refusals, refusal
from meshpoint.engine.runtime import Site, Spawn
from meshpoint.engine.segment import Segment
from meshpoint.engine.segments import Segments
from meshpoint.engine.senders import Relation, foreign_address, relation, sender_of
from meshpoint.errors import NON_DEFECT_ERRORS, PoisonMessage
from meshpoint.model.checkpoint import Begun, CancelFound, Fenced, Known, Reply, Run, TaskState
from meshpoint.model.envelopes import pack
from meshpoint.model.events import Step
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.operations import (
    ASKED_BY_ANOTHER,
    ASKED_FOR_OTHERWISE,
    Adopted,
    NotRevived,
    Refusal,
    Revive,
    Revived,
)
from meshpoint.model.options import AckPolicy
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.model.requesters import binds, same_requester
from meshpoint.ports.backend import Home
from meshpoint.ports.broker import Delivery

_AFTER_DEFECT = timedelta(seconds=1)
"""Delay before requeueing a request that hit a defect. The broker counts and limits deliveries."""


class Requests:
    """Accepts requests. `poke` wakes the sweeper, `intake` assigns slots to new tasks."""

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
        """Begin the first segment of each new task, and settle repeated requests.

        A batch that hits a defect is retried one by one, so only the faulty request is set aside.
        """
        left = list(deliveries)
        try:
            await self._take_in(left)
        except NON_DEFECT_ERRORS:
            for delivery in left:
                await delivery.requeue()
            raise
        except Exception as error:
            if len(left) == 1:
                self._refusals.set_aside(left[0], error)
            else:
                for delivery in left:
                    await self.on_requests([delivery])

    async def _take_in(self, left: list[Delivery]) -> None:
        """Handle the requests in `left`, removing each request once it is dealt with.

        The slot is taken last, so that no slot is held during a database outage: in-process tasks
        need them.
        """
        arrived: list[tuple[Segment, receive.Request, Delivery]] = []
        try:
            for delivery in list(left):
                if segment_of := await self._read(delivery):
                    arrived.append((*segment_of, delivery))
                else:
                    left.remove(delivery)
            rows = await self._lookup([request.task_id for _, request, _ in arrived])
            segments = {segment.run.task_id: segment for segment, _, _ in arrived}
            known = {id_: row for id_, row in rows.items() if not self._is_nothing_to(segments[id_], row[1])}
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
            for segment, _, _ in arrived:  # unacked, so they are redelivered
                self._segments.give_up(segment)

    async def _read(self, delivery: Delivery) -> tuple[Segment, receive.Request] | None:
        options = self._site.options
        try:
            sender = sender_of(delivery.message, self._site.agent, options)
            if (foreign := foreign_address(delivery.message)) is not None:
                raise PoisonMessage(foreign)
            request = receive.request(delivery.message, options)
        except PoisonMessage as error:
            self._refusals.dead_letter_soon(delivery, str(error))
            return None
        segment = Segment(
            run=Run(request.task_id, self._site.agent, RunId(new_id())),
            requester=request.requester,
            request=delivery.message,
            deliveries=[delivery],
            input_=request.input,
            sender=sender,
        )
        if await self._is_at_work(segment, request, delivery):
            return None
        self._segments.arrive(segment)
        return segment, request

    async def _is_at_work(self, segment: Segment, request: receive.Request, delivery: Delivery) -> bool:
        """Whether the task with the request's id in this process takes care of the request.

        If so, the request is settled already or will be soon.
        """
        live = self._segments.live.get(request.task_id)
        known = self._segments.asked_for(request.task_id)
        if known is None:
            return False
        if live is not None and live.settling and live.home is not None and live.home.durable:
            self._spawn(self._later(live.left, delivery))  # its reply may go to another address
            return True
        match relation(segment.sender, segment.digest, *known):
            case Relation.SAME if request.resume is None:
                await self._segments.adopt(request.task_id, delivery)
                await self._ack_if_row_is_enough(request.task_id)
            case Relation.SAME if live is not None:
                self._spawn(self._asked_again(live, segment, request))
            case _ if live is not None and not live.decided.is_set():  # lookup is pending
                self._spawn(self._later(live.decided, delivery))
            case Relation.OTHER_INPUT:
                self._follow_up(segment, partial(self._refuse_in_use, segment))
            case Relation.STRANGER:
                self._follow_up(segment, partial(self._turn_away, segment, request))
            case Relation.SAME:  # unacked here, not running: the row knows more
                return False
        return True

    async def _later(self, happened: asyncio.Event, delivery: Delivery) -> None:
        await happened.wait()
        await self.on_requests(await self._segments.unless_draining(delivery))

    async def _asked_again(self, live: Segment, asking: Segment, request: receive.Request) -> None:
        """Redirect the reply of a task that runs here to its resumed requester.

        The redirect is recorded in the task's row. A segment without a row still answers the
        previous request, whose sender no longer waits; after that the new request is requeued.
        """
        if live.beginning is not None:
            await asyncio.wait({live.beginning})
        if live.home is None or not live.home.durable:
            await live.left.wait()
            await self._come_again(asking)
            return
        owner, digest = live.requester.app_id, live.digest
        known = Known(request.task_id, self._site.agent, TaskState.RUNNING, requester=owner, digest=digest)
        self._follow_up(asking, partial(self._again, asking, request, live.home, known))

    async def _ack_if_row_is_enough(self, task_id: TaskId) -> None:
        running = self._segments.live.get(task_id)
        if running is not None and running.home is not None and running.home.durable:
            await self._segments.ack(running)

    async def _lookup(self, task_ids: Sequence[TaskId]) -> dict[TaskId, tuple[Home, Known]]:
        """Look up the rows of these tasks in every backend.

        The database wins if another replica ran a task that this process also has in memory.
        """
        found: dict[TaskId, tuple[Home, Known]] = {}
        if task_ids:
            with self._site.steps.step(Step.RECEIVE, task_ids):
                for home in self._site.homes:
                    rows = await self._site.patience.until_answered(partial(home.store.lookup, task_ids))
                    new = [task_id for task_id in rows if task_id not in found or found[task_id][1].early]
                    found.update({task_id: (home, rows[task_id]) for task_id in new})
        return found

    def _often_redelivered(self, segment: Segment, request: receive.Request, delivery: Delivery) -> bool:
        """Whether a request was redelivered often enough to be stored in a row before it runs."""
        often = self._site.durable is not None and delivery.count >= self._site.options.begin_at_delivery
        return often and self._refusal(segment, request, delivery.count) is None

    async def _write_redelivered(self, arrived: Sequence[tuple[Segment, receive.Request, Delivery]]) -> None:
        """Insert the tasks and ack their requests before any task runs: one may kill this process.

        From then on the broker no longer counts deliveries. Any replica may run the tasks that got
        no slot.
        """
        home = self._site.durable
        assert home is not None
        results = await begin_redelivered([(segment, request.resume) for segment, request, _ in arrived], self._site)
        running: list[tuple[Segment, receive.Request]] = []
        for (segment, request, _), result in zip(arrived, results, strict=True):
            if isinstance(result, Begun) and not result.queued:
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
        """Whether to run the task here now. If not, its request is settled or soon will be."""
        if known is not None and not self._begins_anew(segment, request, known[1]):
            self._follow_up(segment, partial(self._again, segment, request, *known))
            return False
        if refused := self._refusal(segment, request, delivery.count):
            self._follow_up(segment, partial(self._refuse, segment, refused))
            return False
        if self._site.durable is None or (
            self._site.options.ack_policy is AckPolicy.AT_CHECKPOINT
            # A resumed requester's task may run on another replica: only the row can decide.
            and request.resume is None
        ):
            return True
        return await self._write_first(segment, request)

    def _begins_anew(self, segment: Segment, request: receive.Request, known: Known) -> bool:
        """Whether a resumed requester needs a rerun because the task's reply was deleted."""
        same = relation(segment.sender, segment.digest, known.requester, known.digest) is Relation.SAME
        return request.resume is not None and known.forgotten and same and known.agent == self._site.agent

    def _refusal(self, segment: Segment, request: receive.Request, count: int) -> Failed | None:
        options = self._site.options
        if self._site.durable is None and count >= options.begin_at_delivery + options.max_attempts:
            segment.dead_reason = f"it was delivered {count} times and no run of it came to an end"
            return Failed(FailureKind.ERROR, segment.dead_reason)
        return refusal(request, options, self._site.clock.now())

    async def _write_first(self, segment: Segment, request: receive.Request) -> bool:
        """Insert the task as running and ack its request.

        From then on the lease protects the run, not the broker.
        """
        home, result = await begin(segment, self._site, order=request.resume)
        if isinstance(result, Begun):
            segment.run, segment.home = result.run, home
            self._segments.own(segment)
            await self._segments.ack(segment)
            return True
        self._not_begun(segment, request, result)
        return False

    def _not_begun(self, segment: Segment, request: receive.Request, result: Fenced | CancelFound) -> None:
        """Settle a request whose task already has a row."""
        match result:
            case Fenced() if request.resume is not None:  # the new row needs this requester
                self._follow_up(segment, partial(self._come_again, segment))
            case Fenced():
                self._follow_up(segment, partial(self._met_row, segment))
            case CancelFound():
                self._follow_up(segment, partial(self._refuse, segment, CANCELLED))
            case _:
                assert_never(result)

    def _follow_up(self, segment: Segment, step: Callable[[], Awaitable[None]]) -> None:
        """Settle a request that does not run here. After a defect, it is requeued with a delay."""
        self._spawn(self._followed_up(segment, step))

    async def _followed_up(self, segment: Segment, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        except Exception:
            await self._site.clock.sleep(_AFTER_DEFECT)
            await self._come_again(segment)
            raise

    def _is_nothing_to(self, segment: Segment, known: Known) -> bool:
        """Whether a row is only an early cancel from another sender or for another agent."""
        own = known.agent == self._site.agent
        return known.early and not (own and binds(known.requester, segment.requester.app_id))

    async def _met_row(self, segment: Segment) -> None:
        """Settle a request whose task id got a row concurrently, from this or another request."""
        if await self._segments.id_is_taken(segment):
            await self._refuse_in_use(segment)
        else:
            await self._settled(segment)

    async def _turn_away(self, segment: Segment, request: receive.Request) -> None:
        """Refuse a request that uses the id of another requester's task.

        The request is dead-lettered. A request to resume the task gets no reply.
        """
        reason = f"the task {request.task_id} is another requester's, not {segment.sender.name!r}'s"
        if request.resume is None:
            await self._outgoing.refuse(finish.refusal_for(segment, ID_IN_USE))
        self._segments.leave(segment)
        while segment.deliveries:
            await self._refusals.bury(segment.deliveries.pop(), reason)

    async def _again(self, segment: Segment, request: receive.Request, home: Home, known: Known) -> None:
        """Handle a request whose task has a row: do what is still missing, run nothing twice."""
        found = (
            Relation.SAME if known.early else relation(segment.sender, segment.digest, known.requester, known.digest)
        )
        if found is Relation.STRANGER:
            await self._turn_away(segment, request)
        elif known.agent != self._site.agent:
            await self._refuse_in_use(segment, f" to agent {known.agent!r}")
        elif found is Relation.OTHER_INPUT:
            await self._refuse_in_use(segment)
        elif request.resume is not None and known.state is not TaskState.COMPLETED:
            await self._revive(segment, request.resume, home, known)
        elif known.reply is not None:
            await self._reply_again(segment, known)
        elif home.durable or known.forgotten:
            if known.state is TaskState.WAITING:
                self._poke()  # the sweep resends messages that are due
            await self._settled(segment)
        else:
            await self._segments.hold(known.task_id, segment.deliveries)
            self._segments.leave(segment)

    async def _revive(self, segment: Segment, order: str, home: Home, known: Known) -> None:
        """Resume the task from its own checkpoint: its requester was resumed and asked again.

        A task that is still running continues unchanged and answers the new request.
        """
        wish = self._wish(segment, order, known)
        with self._site.steps.step(Step.RESUME, [known.task_id]):
            result = await self._site.patience.until_answered(lambda: home.store.revive(wish))
        match result:
            case Revived(again=True) | NotRevived(refusal=Refusal.COMPLETED):
                await self._as_it_is_now(segment, home)  # the looked-up row is stale
            case Revived() if wish.order is None:
                await self._settled(segment)
                self._segments.ready_somewhere.set()
            case Revived() | Adopted():
                await self._wait_for_its_end(segment, home)
            case NotRevived(refusal=Refusal.OTHER_ACTIVE, detail=other):
                message = f"agent {known.agent!r} is exclusive, and its operation {other} is active"
                await self._refuse(segment, Failed(FailureKind.ERROR, message))
            case NotRevived(refusal=Refusal.RUNNING):
                await self._settled(segment)
            case NotRevived(detail=detail) if detail == ASKED_BY_ANOTHER:  # since the lookup
                await self._come_again(segment)
            case NotRevived(detail=detail) if detail == ASKED_FOR_OTHERWISE:
                await self._refuse_in_use(segment)
            case NotRevived(detail=detail) if detail:
                await self._refuse(segment, Failed(FailureKind.ERROR, f"the task does not go on: {detail}"))
            case NotRevived():  # row deleted after the lookup: redelivery finds none
                await self._come_again(segment)
            case _:
                assert_never(result)

    def _wish(self, segment: Segment, order: str, known: Known) -> Revive:
        assert segment.request is not None
        wish = Revive(task_id=known.task_id, token=new_id(), agent=self._site.agent, without_checkpoint=True)
        if not same_requester(known.requester, segment.sender.name):
            return wish  # from an operator: the reply still goes to the task's requester
        return replace(
            wish,
            order=order,
            request=pack(segment.request),
            requester=segment.requester,
            adopt=True,
            digest=segment.digest,
        )

    async def _as_it_is_now(self, segment: Segment, home: Home) -> None:
        """Reread the row to answer an already served request or a just completed task."""
        task_id = segment.run.task_id
        known = (await self._site.patience.until_answered(partial(home.store.lookup, [task_id]))).get(task_id)
        if known is None:
            await self._come_again(segment)
        elif known.reply is not None:
            await self._reply_again(segment, known)
        else:
            await self._wait_for_its_end(segment, home)

    async def _wait_for_its_end(self, segment: Segment, home: Home) -> None:
        """Leave the request to its task, which runs now or soon and knows where to reply."""
        if home.durable:
            await self._settled(segment)
            self._poke()  # the sweep resends messages that are due
        else:
            await self._segments.hold(segment.run.task_id, segment.deliveries)
            self._segments.leave(segment)
        self._segments.ready_somewhere.set()

    async def _come_again(self, segment: Segment) -> None:
        self._segments.leave(segment)
        while segment.deliveries:
            await segment.deliveries.pop().requeue()

    async def _reply_again(self, segment: Segment, known: Known) -> None:
        assert known.reply is not None
        # An early cancel's tombstone does not name the requester; this request does.
        reply = replace(known.reply, requester=segment.requester)
        if known.early or same_requester(known.requester, segment.sender.name):
            await self._answer(segment, reply, again=True)
        else:  # from an operator: the row keeps its requester
            await self._outgoing.refuse(reply)
            await self._settled(segment)

    async def _refuse(self, segment: Segment, refused: Failed) -> None:
        reply = finish.refusal_for(segment, refused)
        await self._answer(segment, reply, again=refused.kind is FailureKind.CANCELLED, digest=segment.digest)

    async def _answer(self, segment: Segment, reply: Reply, *, again: bool, digest: str | None = None) -> None:
        may_be_acked = await self._outgoing.answer(reply, segment.run.id, again=again, digest=digest)
        if may_be_acked or segment.dead_reason is not None:
            await self._settled(segment)
        else:
            await self._segments.hold(segment.run.task_id, segment.deliveries)
            self._segments.leave(segment)

    async def _refuse_in_use(self, segment: Segment, whose: str = "") -> None:
        """Reply that the task id is in use.

        An undeliverable reply is not stored: the row belongs to another request.
        """
        refused = replace(ID_IN_USE, message=ID_IN_USE.message + whose)
        await self._outgoing.refuse(finish.refusal_for(segment, refused))
        await self._settled(segment)

    async def _settled(self, segment: Segment) -> None:
        if segment.dead_reason is None:
            await self._segments.ack(segment)
        else:
            self._site.steps.note(Step.DEAD_TASK, segment.run.task_id, reason=segment.dead_reason)
            for delivery in segment.deliveries:
                await self._refusals.bury(delivery, segment.dead_reason)
        self._segments.leave(segment)
