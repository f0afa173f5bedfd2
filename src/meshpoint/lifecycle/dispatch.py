"""Room 4: send what was committed, then mark it sent. The rows are the outbox."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from pydantic import JsonValue

from meshpoint.errors import NO_DEFECT, Unavailable
from meshpoint.lifecycle.nested import NestedRoutes
from meshpoint.lifecycle.site import Site
from meshpoint.model.checkpoint import CancelNotice, Claim, Dispatch, Reply, Requester, Send
from meshpoint.model.context import Report
from meshpoint.model.events import Step
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.letters import Letter, cancel_letter, reply_letter, request_letter, status_letter, wake_message
from meshpoint.model.messages import Address
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.ports.broker import Published
from meshpoint.ports.home import Home

log = logging.getLogger("meshpoint.dispatch")

_NOT_TAKEN_YET = timedelta(seconds=1)
"""Before a reply is tried again whose queue is full, or not there (yet)."""
_MOST_GONE = 10_000
"""Addresses that are remembered as gone."""
_STEP = {Dispatch: Step.DISPATCH, CancelNotice: Step.CANCEL_NOTICE, Reply: Step.REPLY}


class Outgoing:
    """Sends committed requests, cancels and replies, and marks them.

    Whatever fails here stays due in its home: the sweeper sends it again, under the same ids.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._gone: set[Address] = set()
        self._routes = NestedRoutes()

    async def send(self, home: Home, sends: Sequence[Send]) -> tuple[list[Claim], list[TaskId]]:
        """Publish and mark; the calls that turned out undeliverable, and the tasks whose reply is settled."""
        settled: list[Send] = []
        undeliverable: list[Claim] = []
        for kind, step in _STEP.items():
            of_kind = [send for send in sends if isinstance(send, kind)]
            if of_kind:
                for send, published in await self._publish(home, of_kind, step):
                    match send, published:
                        case (_, Published.ACCEPTED) | (CancelNotice(), Published.UNROUTABLE):
                            settled.append(send)
                        case Dispatch(), Published.UNROUTABLE:
                            undeliverable.append(_undeliverable(send))
                        case Reply(), Published.UNROUTABLE if self._give_up(send):
                            settled.append(send)
                        case _:
                            pass  # still due: the sweeper tries again
        await self._mark(home, settled)
        return undeliverable, [send.task_id for send in settled if isinstance(send, Reply)]

    async def _publish(self, home: Home, sends: Sequence[Send], step: Step) -> list[tuple[Send, Published]]:
        addressed = [(send, self._letter(home, send)) for send in sends]
        nobody_asked = [(send, Published.ACCEPTED) for send, letter in addressed if letter is None]
        letters = [(send, letter) for send, letter in addressed if letter is not None]
        if not letters:
            return nobody_asked
        try:
            with self._site.steps.step(step, [send.task_id for send, _ in letters]):
                published = await self._routes.publish([letter for _, letter in letters], self._words)
        except Unavailable as error:
            self._site.patience.note_away(error)
            return nobody_asked
        return nobody_asked + [(send, word) for (send, _), word in zip(letters, published, strict=True)]

    def _letter(self, home: Home, send: Send) -> Letter | None:
        match send:
            case Dispatch():
                return request_letter(send, home.reply_to, self._site.options.deadline_margin)
            case CancelNotice():
                return cancel_letter(send)
            case Reply():
                return reply_letter(send)

    def _give_up(self, reply: Reply) -> bool:
        if reply.age < self._site.options.reply_retry_time:
            return False
        self._site.steps.note(Step.REPLY_UNROUTABLE, reply.task_id, reply_to=reply.requester.reply_to)
        return True

    async def _mark(self, home: Home, settled: Sequence[Send]) -> None:
        if not settled:
            return
        try:
            with self._site.steps.step(Step.MARK, [send.task_id for send in settled]):
                await home.store.mark_sent(settled)
        except Unavailable as error:  # losing a mark only sends again
            self._site.patience.note_away(error)

    async def deliver(self, letter: Letter | None, task_id: TaskId) -> None:
        """Publish a reply that no row keeps: repeat until the broker has it, or give up on its address."""
        if letter is None:
            return
        clock, publish = self._site.clock, partial(self._words, [letter])
        give_up_at = clock.now() + self._site.options.reply_retry_time
        with self._site.steps.step(Step.REPLY, [task_id]):
            while (word := (await self._site.patience.until_answered(publish))[0]) is not Published.ACCEPTED:
                if word is Published.UNROUTABLE and (letter[0] in self._gone or clock.now() >= give_up_at):
                    self._site.steps.note(Step.REPLY_UNROUTABLE, task_id, reply_to=letter[0])
                    self._remember_as_gone(letter[0])
                    return
                await clock.sleep(_NOT_TAKEN_YET)
        self._gone.discard(letter[0])

    def _remember_as_gone(self, address: Address) -> None:
        # Each further reply would hold an un-acked request, and so a place in the prefetch, for the whole time.
        if len(self._gone) >= _MOST_GONE:
            self._gone.clear()
        self._gone.add(address)

    async def tell(self, letter: Letter | None) -> None:
        """Publish something advisory: lost when the broker is away."""
        if letter is not None:
            try:
                await self._words([letter])
            except Unavailable as error:
                self._site.patience.note_away(error)

    def report_to(self, task_id: TaskId, requester: Requester) -> Report:
        """What `ctx.status` calls: a status update to the requester, lost when the broker is away."""

        async def report(data: JsonValue) -> None:
            await self.tell(status_letter(self._site.agent, task_id, requester, data))

        return report

    async def wake_others(self) -> None:
        """Tell all replicas that a task is ready. Losing it costs one sweep interval."""
        try:
            await self._site.broker.broadcast(self._site.agent, wake_message(self._site.agent))
        except Unavailable as error:
            self._site.patience.note_away(error)

    async def _words(self, letters: Sequence[Letter]) -> list[Published]:
        """The broker's word on each letter. One that cannot be put on the wire goes nowhere, but takes none along."""
        try:
            return await self._site.broker.publish(letters)
        except NO_DEFECT:
            raise
        except Exception:
            if len(letters) > 1:
                return [word for letter in letters for word in await self._words([letter])]
            address, message = letters[0]
            log.warning("a %s for %s cannot be sent: %s", message.type, address, message.message_id, exc_info=True)
            return [Published.UNROUTABLE]


def _undeliverable(call: Dispatch) -> Claim:
    message = f"no replica of agent {call.peer!r} ever declared its queue"
    return Claim(RunId(new_id()), call.task_id, call.sub_task_id, Failed(FailureKind.UNDELIVERABLE, message), None)
