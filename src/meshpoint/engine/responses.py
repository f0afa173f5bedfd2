"""Handle responses, status updates, cancels and wake-ups."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, assert_never

from pydantic import JsonValue

from meshpoint.engine import receive
from meshpoint.engine.cancels import CancelCommand, cancel_tasks
from meshpoint.engine.dispatch import Outgoing
from meshpoint.engine.postponed import PostponedLetters, Received
from meshpoint.engine.refusals import Refusals
from meshpoint.engine.runtime import Site, Spawn
from meshpoint.engine.segments import Segments
from meshpoint.engine.senders import canceller_of, impostor
from meshpoint.engine.throttle import Throttle
from meshpoint.errors import NON_DEFECT_ERRORS, PoisonMessage
from meshpoint.model.checkpoint import (
    CancelBeforeRequest,
    CancelledNow,
    CancelRefused,
    CancelRequested,
    CancelStale,
    CancelTooLate,
    Claim,
    Dispatch,
    Locked,
    ProgressNoted,
    TaskState,
    WrongSender,
)
from meshpoint.model.envelopes import (
    LONGEST_STATUS,
    Letter,
    cancel_message,
    fingerprint,
    request_letter,
    status_letter,
)
from meshpoint.model.events import Step
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.messages import Message, MessageType
from meshpoint.ports.backend import Home
from meshpoint.ports.broker import Delivery

log = logging.getLogger("meshpoint.letters")

_STATUS_RATE = 20  # maximum status updates forwarded per second for one task

Answer: TypeAlias = tuple[Delivery, Claim, str | None]
"""A response, the claim of its outcome, and the reason if the response is unreadable."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to handle a batch of messages.

    `shared` is `True` for the agent's queue, `False` for this replica's private queue. `refused`
    messages are dead-lettered after the rest of the batch. `elsewhere` holds the ids of messages
    that are postponed or being dead-lettered.
    """

    home: Home
    shared: bool
    refused: list[tuple[Received, str]] = field(default_factory=list)
    elsewhere: set[RunId] = field(default_factory=set)


class Letters:
    """Handles every message that is not a request. `poke` wakes the sweeper."""

    def __init__(
        self,
        site: Site,
        segments: Segments,
        outgoing: Outgoing,
        refusals: Refusals,
        poke: Callable[[], None],
        spawn: Spawn,
        make_room: Callable[[int], None],
    ) -> None:
        self._site = site
        self._segments = segments
        self._outgoing = outgoing
        self._refusals = refusals
        self._poke = poke
        self._forwarded = Throttle(_STATUS_RATE, site.clock.now)
        self._spawn = spawn
        self._postponed = PostponedLetters(self._take_in, site.clock, spawn, make_room)

    async def on_letters(self, deliveries: Sequence[Delivery], home: Home, *, shared: bool) -> None:
        """Handle a batch of messages that are not requests.

        `shared` is `True` for the agent's queue, `False` for this replica's private queue. A batch
        that hits a defect is retried one by one, and a delivery that hits it again is set aside.
        Each delivery keeps its claim id, so that a retry recognizes its own commit.

        Raises:
            Unavailable, ConfigurationError: the batch will be retried.
        """
        received, attempt = [(delivery, RunId(new_id())) for delivery in deliveries], Attempt(home, shared)
        try:
            await self._try(received, attempt)
        except NON_DEFECT_ERRORS:
            for each in [each for each in received if each[1] not in attempt.elsewhere]:
                await self._postponed.keep(each, home, shared=shared)
            raise

    async def requeue_postponed(self) -> None:
        """Requeue all postponed messages. From now on, postponed messages are requeued at once."""
        await self._postponed.close()

    async def _take_in(self, received: Sequence[Received], home: Home, *, shared: bool) -> None:
        await self._try(received, Attempt(home, shared))

    async def _try(self, received: Sequence[Received], attempt: Attempt) -> None:
        if (defect := await self._defect(received, attempt)) is None:
            return
        log.warning("retrying %d messages one by one", len(received), exc_info=defect)
        for each in [each for each in received if each[1] not in attempt.elsewhere]:
            if (defect := await self._defect([each], attempt)) is not None:
                self._refusals.set_aside(each[0], defect)
                attempt.elsewhere.add(each[1])

    async def _defect(self, received: Sequence[Received], attempt: Attempt) -> Exception | None:
        """Handle messages. Returns the internal error raised, or `None`."""
        try:
            await self._sort(received, attempt)
        except NON_DEFECT_ERRORS:
            raise
        except Exception as error:
            return error
        return None

    async def _sort(self, received: Sequence[Received], attempt: Attempt) -> None:
        of_type: dict[MessageType, list[Received]] = {kind: [] for kind in MessageType}
        attempt.refused.clear()
        for each in received:
            if (reason := self._refusal(each[0].message)) is not None:
                attempt.refused.append((each, reason))
            else:
                of_type[each[0].message.type].append(each)
        await self.on_cancels(of_type[MessageType.CANCEL], attempt)
        await self.on_responses(of_type[MessageType.RESPONSE], attempt)
        await self.on_status(of_type[MessageType.STATUS], attempt)
        for delivery, _ in of_type[MessageType.WAKE]:
            self._segments.ready_somewhere.set()
            self._poke()
            await delivery.ack()
        for (delivery, claim_id), reason in attempt.refused:
            attempt.elsewhere.add(claim_id)
            self._refusals.dead_letter_soon(delivery, reason)

    def _refusal(self, message: Message) -> str | None:
        """Why a message is refused unread, or `None` if it is not."""
        if message.type is MessageType.REQUEST:
            return "a request does not belong on a response queue"
        if message.type is MessageType.WAKE and message.app_id != self._site.agent:
            return f"app_id: {message.app_id!r} does not wake the replicas of {self._site.agent!r}"
        return impostor(message, self._site.options)

    async def on_responses(self, received: Sequence[Received], attempt: Attempt) -> None:
        """Record outcomes in one batch, resume the tasks whose join is complete, then ack."""
        readable: list[Answer] = []
        for delivery, claim_id in received:
            try:
                claim = receive.claim(delivery.message, self._site.options)
                readable.append((delivery, replace(claim, id=claim_id), None))
            except PoisonMessage as error:
                failed = receive.unreadable_claim(delivery.message, str(error), self._site.options)
                if failed is None:
                    attempt.refused.append(((delivery, claim_id), str(error)))
                else:
                    readable.append((delivery, replace(failed, id=claim_id), str(error)))
        readable = await self._without_refusals_of_others(readable, attempt)
        if not readable:
            return
        arrivals = await self._segments.claim(attempt.home, [each for _, each, _ in readable])
        with self._site.steps.step(Step.ACK, [each.task_id for _, each, _ in readable]):
            for (delivery, claim, unreadable), arrival in zip(readable, arrivals, strict=True):
                if isinstance(arrival, Locked):
                    await self._wait_for(arrival.task_id, (delivery, claim.id), attempt)
                elif isinstance(arrival, WrongSender):
                    reason = (
                        f"the response came from {delivery.message.app_id!r}, the call went to {arrival.expected!r}"
                    )
                    attempt.refused.append(((delivery, claim.id), reason))
                elif unreadable is not None:
                    attempt.refused.append(((delivery, claim.id), unreadable))
                else:
                    await delivery.ack()

    async def _wait_for(self, task_id: TaskId, received: Received, attempt: Attempt) -> None:
        self._site.steps.note(Step.ROW_LOCKED, task_id)
        attempt.elsewhere.add(received[1])
        await self._postponed.keep(received, attempt.home, shared=attempt.shared)

    async def _without_refusals_of_others(self, readable: Sequence[Answer], attempt: Attempt) -> list[Answer]:
        """Filter out refusals of requests that are not our calls: they are not outcomes.

        A peer sends a refusal to the reply address in the refused request. A third party that
        knows a call's ids could have sent that request.
        """
        refusals = [each for each in readable if each[1].refuses is not None]
        if not refusals:
            return list(readable)
        calls = [(each.task_id, each.sub_task_id) for _, each, _ in refusals]
        requests = await self._site.patience.until_answered(lambda: attempt.home.store.requested(calls))
        others: list[Delivery] = []
        for (delivery, refusal, _), call in zip(refusals, requests, strict=True):
            if call is not None and refusal.refuses != self._fingerprint(call, attempt.home):
                others.append(delivery)
                attempt.refused.append(((delivery, refusal.id), "it refuses a request that is not this call's"))
        return [each for each in readable if each[0] not in others]

    def _fingerprint(self, call: Dispatch, home: Home) -> str:
        _, request = request_letter(call, home.reply_to, self._site.options.deadline_margin)
        return fingerprint(request)

    async def on_status(self, received: Sequence[Received], attempt: Attempt) -> None:
        """Extend idle deadlines, and forward peers' status updates to our own requesters."""
        news: list[receive.StatusNews] = []
        for delivery, id_ in received:
            try:
                news.append(receive.status(delivery.message, self._site.options))
            except PoisonMessage as error:
                attempt.refused.append(((delivery, id_), str(error)))
            else:
                await delivery.ack()
        if not news:
            return
        updates = [each.progress for each in news]
        noted = await self._site.patience.until_answered(lambda: attempt.home.store.progress(updates))
        forwards = zip(news, noted, strict=True)
        await self._outgoing.tell([self._forward(to, each.data) for each, to in forwards if to is not None])

    def _forward(self, to: ProgressNoted, data: JsonValue) -> Letter | None:
        """The status update for the requester, or `None` if the rate limit drops it."""
        letter = status_letter(self._site.agent, to.task_id, to.requester, data)
        if letter is None:
            return None
        too_long = len(letter[1].body) > LONGEST_STATUS
        if not too_long and self._forwarded.lets_through(to.task_id):
            return letter
        if dropped := self._forwarded.drop(to.task_id):
            reason = f"more than {LONGEST_STATUS} bytes" if too_long else f"more than {_STATUS_RATE} a second"
            self._site.steps.note(Step.STATUS_DROPPED, to.task_id, reason=reason, dropped=dropped)
        return None

    async def on_cancels(self, cancels: Sequence[Received], attempt: Attempt) -> None:
        """Cancel tasks.

        Commands from the shared queue cancel in the database. Broadcasts cancel in this process.
        """
        agent, options, shared = self._site.agent, self._site.options, attempt.shared
        wished: dict[CancelCommand, list[Received]] = {}
        for delivery, id_ in cancels:
            try:
                sender = canceller_of(delivery.message, agent, options, shared=shared)
                wish = CancelCommand(*receive.cancelled_task(delivery.message, options), sender)
                wished.setdefault(wish, []).append((delivery, id_))
            except PoisonMessage as error:
                attempt.refused.append(((delivery, id_), str(error)))
        if not wished:
            return
        wishes = list(wished)
        refused = await (self._cancel_everywhere(wishes) if shared else self._cancel_here(wishes))
        for wish, received in wished.items():
            for each in received:
                match refused.get(wish):
                    case Locked():
                        await self._wait_for(wish.task_id, each, attempt)
                    case CancelRefused():
                        reason = f"the task {wish.task_id} is another requester's, not {wish.sender!r}'s"
                        attempt.refused.append((each, reason))
                    case None:
                        await each[0].ack()

    async def _cancel_everywhere(
        self, wishes: Sequence[CancelCommand]
    ) -> dict[CancelCommand, CancelRefused | Locked]:
        """Cancel tasks in the database, and broadcast the cancels of tasks that may be running.

        Returns the commands for tasks of other requesters or locked by another session.
        """
        if self._site.durable is None:
            await self._broadcast_cancel(wishes)
            return {}
        refused: dict[CancelCommand, CancelRefused | Locked] = {}
        told: list[CancelCommand] = []
        results = await cancel_tasks(self._site.durable, wishes, self._site)
        for wish, result in zip(wishes, results, strict=True):
            match result:
                case CancelledNow(reply=reply, cancels=cancels):
                    # Committed and due: a slow address must not delay the messages after it.
                    self._spawn(self._segments.send(self._site.durable, [reply, *cancels]))
                case CancelRequested():  # by an authorized sender, maybe another one
                    told.append(wish._replace(sender=None))
                case CancelBeforeRequest():
                    told.append(wish)
                case CancelTooLate(reply=reply) if reply.state is TaskState.CANCELLED:
                    # Cancelled earlier, but a crash may have prevented the broadcast.
                    told.append(wish)
                case CancelTooLate() | CancelStale():
                    pass
                case CancelRefused() | Locked():
                    refused[wish] = result
                case _:
                    assert_never(result)
        await self._broadcast_cancel(told)
        return refused

    async def _broadcast_cancel(self, wishes: Sequence[CancelCommand]) -> None:
        agent = self._site.agent

        async def tell_all() -> None:
            messages = [
                cancel_message(agent, id_, parent=parent, on_behalf_of=sender) for id_, parent, sender in wishes
            ]
            await asyncio.gather(*(self._site.broker.broadcast(agent, message) for message in messages))

        await self._site.patience.until_answered(tell_all)

    async def _cancel_here(self, wishes: Sequence[CancelCommand]) -> dict[CancelCommand, CancelRefused | Locked]:
        """Cancel tasks in this process. Returns the commands for tasks of other requesters."""
        refused: dict[CancelCommand, CancelRefused | Locked] = {}
        waiting: list[CancelCommand] = []
        for wish in wishes:
            match self._segments.cancel(*wish):
                case False:
                    refused[wish] = CancelRefused()
                case None if wish.task_id in self._segments.held or self._site.durable is None:
                    waiting.append(wish)
                case _:
                    pass
        if not waiting:
            return refused
        results = await cancel_tasks(self._site.memory, waiting, self._site)
        for wish, result in zip(waiting, results, strict=True):
            match result:
                case CancelledNow():
                    self._spawn(self._segments.send(self._site.memory, [result.reply, *result.cancels]))
                case CancelRefused():
                    refused[wish] = result
                case _:
                    pass
        return refused
