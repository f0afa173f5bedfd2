"""Send committed messages, then mark them sent. The task rows are the outbox."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import TypeVar

from pydantic import JsonValue

from meshpoint.engine.backoff import Addresses
from meshpoint.engine.nested import NestedRoutes
from meshpoint.engine.runtime import Site
from meshpoint.engine.unacked import Held
from meshpoint.errors import NON_DEFECT_ERRORS, BrokerUnavailable, Unavailable
from meshpoint.model.checkpoint import (
    CancelNotice,
    Claim,
    Dispatch,
    KeepReply,
    Known,
    Reply,
    Requester,
    Send,
    TaskState,
)
from meshpoint.model.context import Report
from meshpoint.model.envelopes import (
    LONGEST_STATUS,
    Letter,
    cancel_letter,
    reply_bytes,
    reply_letter,
    request_letter,
    status_letter,
    wake_message,
)
from meshpoint.model.events import Step
from meshpoint.model.ids import RunId, TaskId, new_id
from meshpoint.model.messages import Address, Message
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.ports.backend import Home
from meshpoint.ports.broker import Delivery, Published

T = TypeVar("T")

log = logging.getLogger("meshpoint.dispatch")

_PUBLISHED_AT_ONCE = 32
"""Addresses that one batch publishes to concurrently."""
_PROMPT = 2.0
"""Seconds that a request stays unacked while its reply is unconfirmed.

After that, the reply is kept and sent separately.
"""
_SLOW = 1.0
"""Seconds after which a publish counts as slow."""
_STEP = {Dispatch: Step.DISPATCH, CancelNotice: Step.CANCEL_NOTICE, Reply: Step.REPLY}


class Outgoing:
    """Sends committed requests, cancels and replies, and marks them.

    Failed messages stay due in their home, and the sweeper sends them again under the same ids.
    Addresses are published to independently, so that a full, missing or silent queue delays only
    its own messages.

    `held` has the requests of tasks in memory, and counts the replies in memory that wait for
    their address.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._addresses = Addresses(site.clock)
        self._routes = NestedRoutes()
        self.held = Held()

    async def send(
        self, home: Home, sends: Sequence[Send], *, again: bool = False
    ) -> tuple[list[Claim], list[TaskId]]:
        """Publish messages and mark them sent.

        A reply that another run may also send is stored instead of published, and the row decides.

        Args:
            home: The home that committed the messages.
            sends: The messages.
            again: The messages were overdue. Addresses in back-off are skipped: the sweeper sends
                later.

        Returns:
            The undeliverable calls, and the tasks whose reply is settled with no other reply due.
        """
        doubtful = [send for send in sends if isinstance(send, Reply) and self._may_be_second(home, send)]
        sends = [send for send in sends if send not in doubtful]
        settled: list[Send] = []
        undeliverable: list[Claim] = []
        kinds = [[send for send in sends if isinstance(send, kind)] for kind in _STEP]
        published = [self._publish(home, of_kind, again=again) for of_kind in kinds if of_kind]
        for send, word in chain.from_iterable(await _together(published)):
            if isinstance(send, Dispatch) and word in {Published.UNROUTABLE, Published.REJECTED}:
                undeliverable.append(self._undeliverable(send, word))
            elif self._is_settled(send, word):
                settled.append(send)
        replied = await self._replied(home, [send for send in settled if isinstance(send, Reply)])
        await self._mark(home, settled)
        for send in settled:
            if isinstance(send, Reply) and self._may_be_second(home, send):
                # The request was lost while the reply was being sent.
                await self._store_if_possible(send)
        replied += [reply.task_id for reply in doubtful if await self.put_away(home, reply, patient=not again)]
        return undeliverable, replied

    async def _replied(self, home: Home, replies: Sequence[Reply]) -> list[TaskId]:
        """Return the tasks of `replies`.

        In-memory tasks are included only if their reply is still current.

        Meanwhile the request may have arrived from another address, or the task may have been
        resumed. This runs before the replies are marked: after a defect here, they are sent again.
        """
        ids = [reply.task_id for reply in replies]
        rows = {} if home.durable or not ids else await home.store.lookup(ids)
        return [reply.task_id for reply in replies if _is_last(reply, rows.get(reply.task_id))]

    def _is_settled(self, send: Send, word: Published | None) -> bool:
        """Whether nothing is left to send; otherwise the sweeper tries again."""
        match send, word:
            case _, Published.ACCEPTED:
                return True
            case _, Published.REJECTED:
                self._note_rejected(send.task_id, type(send).__name__.lower())
                return True
            case CancelNotice(), Published.UNROUTABLE:
                return True
            case Reply(), Published.UNROUTABLE:
                return self._give_up(send)
            case _:
                return False

    def _note_rejected(self, task_id: TaskId, what: str) -> None:
        reason = "the broker can never accept it: too large, or not encodable"
        self._site.steps.note(Step.MESSAGE_REJECTED, task_id, type=what, reason=reason)

    async def _publish(
        self, home: Home, sends: Sequence[Send], *, again: bool
    ) -> list[tuple[Send, Published | None]]:
        """Publish `sends`, all of one kind.

        A result is `None` if it was not sent or is in doubt.
        """
        addressed = [(send, self._letter(home, send)) for send in sends]
        words: list[tuple[Send, Published | None]] = []
        letters: list[tuple[Send, Letter]] = []
        for send, letter in addressed:
            if letter is None:  # its requester did not want a reply
                words.append((send, Published.ACCEPTED))
            elif self._waits(send, letter[0], again=again):
                words.append((send, Published.UNROUTABLE if self._addresses.gone(letter[0]) else None))
            else:
                letters.append((send, letter))
        if letters:
            try:
                with self._site.steps.step(_STEP[type(sends[0])], [send.task_id for send, _ in letters]):
                    published = await self._words([letter for _, letter in letters])
            except Unavailable:
                return words  # recorded for each address
            words += [(send, word) for (send, _), word in zip(letters, published, strict=True)]
            await self._explain_rejected(words)
        return words

    def _waits(self, send: Send, address: Address, *, again: bool) -> bool:
        """Whether to skip `send` for now. The first attempt at a peer's queue is never skipped."""
        return (again or isinstance(send, Reply)) and self._addresses.blocked(address, fresh=not again)

    async def _explain_rejected(self, words: list[tuple[Send, Published | None]]) -> None:
        """Replace each reply that the broker can never accept with a small failure.

        The failure has the same message id.
        """
        for place, (send, word) in enumerate(words):
            if isinstance(send, Reply) and word is Published.REJECTED:
                words[place] = (send, await self._instead(send))

    async def _instead(self, reply: Reply) -> Published | None:
        failed = Failed(FailureKind.ERROR, self._too_large("result", len(reply.body)))
        body = reply_bytes(reply.task_id, None, failed)
        letter = reply_letter(replace(reply, body=body, state=TaskState.FAILED))
        if letter is None or len(body) >= len(reply.body):
            # The broker rejects something other than the body.
            return Published.REJECTED
        self._site.steps.note(Step.MESSAGE_REJECTED, reply.task_id, type="reply", reason=failed.message)
        try:
            return (await self._words([letter]))[0]
        except Unavailable:
            return None

    def _too_large(self, what: str, size: int) -> str:
        limit = self._site.broker.max_message_bytes
        accepts = f"the broker accepts at most {limit}" if limit else "the broker does not accept that many"
        return f"the {what} has {size} bytes; {accepts}"

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

    async def answer(
        self,
        reply: Reply,
        run_id: RunId,
        *,
        again: bool = False,
        digest: str | None = None,
        may_run_elsewhere: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Publish a reply that no run commits.

        If it cannot be delivered at once, it is kept and sent later.

        Args:
            reply: The reply.
            run_id: The run that replies.
            again: The request of an ended task was redelivered.
            digest: Digest of the request's input.
            may_run_elsewhere: Returns whether the request was lost meanwhile. If so, a confirmed
                reply is also stored, so that the next delivery of the request finds it. A reply
                that needs another attempt is stored before it is sent, and dropped if another run
                has a row.

        Returns:
            `True` if the request may be acked: the reply is confirmed or stored in a row, or its
            loss is reported. `False` if only this process has the reply: the request belongs in
            `held`.
        """
        letter = reply_letter(reply)
        if letter is None:
            return True
        attempts = count(1)

        async def attempt() -> Published:
            if next(attempts) > 1 and self._site.durable is not None and may_run_elsewhere():
                return Published.OVERLOADED  # its row must decide before it is sent
            return await self._prompt_word(reply, letter)

        word = Published.UNROUTABLE if self._addresses.gone(letter[0]) else Published.OVERLOADED
        if not self._addresses.blocked(letter[0], fresh=True) or self._must_wait(letter[0]):
            with self._site.steps.step(Step.REPLY, [reply.task_id]):
                word = await self._site.patience.until_answered(attempt)
        if word is Published.REJECTED:
            self._note_rejected(reply.task_id, "reply")
        elif word is not Published.ACCEPTED:
            keep = self._site.options.reply_retry_time if word is Published.UNROUTABLE else None
            return await self._keep(KeepReply(run_id, reply, keep, again, digest))
        elif (durable := self._site.durable) is not None and may_run_elsewhere():
            await self._store_sent(durable, KeepReply(run_id, reply, digest=digest))
        return True

    async def _store_sent(self, home: Home, wish: KeepReply) -> None:
        """Store a reply that was sent, unless another run has a row."""
        if await self._store(home, wish):
            await self._mark(home, [wish.reply])

    async def _prompt_word(self, reply: Reply, letter: Letter) -> Published:
        """Publish a reply. Returns `OVERLOADED` if the broker works but does not confirm it."""
        began = self._site.clock.monotonic()
        try:
            async with asyncio.timeout(_PROMPT):
                return await self._word_on_reply(reply, letter)
        except TimeoutError:
            if not (self._site.broker.can_publish and self._has_room):
                return await self._word_on_reply(reply, letter)
        self._addresses.failed(letter[0], began=began, silent=True)
        return Published.OVERLOADED

    def _must_wait(self, address: Address) -> bool:
        """Whether a reply must wait for the broker's confirmation.

        There is no room to keep it, so it would be dropped, and the broker may only be slow.
        """
        return not self._has_room and self._addresses.silent(address)

    @property
    def _has_room(self) -> bool:
        """Whether another reply can wait in memory."""
        durable = self._site.durable is not None
        return durable or self.held.ended < self._site.options.max_in_memory

    async def _word_on_reply(self, reply: Reply, letter: Letter) -> Published:
        word = (await self._words([letter]))[0]
        if word is Published.REJECTED:
            word = await self._instead(reply)
        if word is None:
            raise BrokerUnavailable("publishing a reply: the broker did not confirm it")
        return word

    async def _keep(self, wish: KeepReply) -> bool:
        """Keep a reply. Returns `True` if its request may be acked."""
        home, reply = self._site.homes[0], wish.reply
        if not (self._has_room or self.held.has_ended(reply.task_id)):
            self._drop(reply, "max_in_memory replies are waiting already")
            return True
        if not await self._store(home, wish):
            self._drop(reply, "the row with its id belongs to another run")
        elif not home.durable:
            self.held.end(reply.task_id)
            return False
        return True

    async def store(self, home: Home, reply: Reply, run_id: RunId, digest: str | None) -> bool:
        """Store the reply of a task without a row.

        Returns `False` if another run has a row for it.
        """
        return await self._store(home, KeepReply(run_id, reply, digest=digest))

    async def _store(self, home: Home, wish: KeepReply) -> bool:
        reply = wish.reply
        with self._site.steps.step(Step.END, [reply.task_id], state=reply.state.value):
            (stored,) = await self._site.patience.until_answered(lambda: home.store.keep_replies([wish]))
        return stored

    def _drop(self, reply: Reply, why: str) -> None:
        self._site.steps.note(Step.REPLY_DROPPED, reply.task_id, reply_to=reply.requester.reply_to, reason=why)

    def is_refused(self, reply: Reply) -> bool:
        """Whether its address refused the last message while the broker was available."""
        return reply.requester.reply_to is not None and self._addresses.troubled(reply.requester.reply_to)

    def _may_be_second(self, home: Home, reply: Reply) -> bool:
        """Whether another replica may run the in-memory task of `reply` from the database."""
        one_home = home.durable or self._site.durable is None
        return not one_home and self.held.may_run_elsewhere(reply.task_id)

    async def _store_if_possible(self, reply: Reply) -> None:
        """Store the sent reply of an in-memory task in the database.

        Nothing is stored if another run has a row or the database is unavailable.
        """
        assert self._site.durable is not None
        first = replace(reply, fence=0)
        try:
            (kept,) = await self._site.durable.store.keep_replies([KeepReply(RunId(reply.task_id), first)])
        except Unavailable as error:
            self._site.patience.note_away(error)
        else:
            await self._mark(self._site.durable, [first] if kept else [])

    async def put_away(self, home: Home, reply: Reply, *, patient: bool = False) -> bool:
        """Keep an undeliverable reply of an in-memory task.

        Returns `True` if its request may be acked.

        The reply is stored in the database or, without a database, in this process, up to a limit.
        With `patient`, wait until the database is available.
        """
        address = reply.requester.reply_to
        if self._site.durable is None:
            if self._has_room:
                self.held.end(reply.task_id)
                return False
            if address is not None and self._must_wait(address):
                return False
            self._drop(reply, "max_in_memory replies are waiting already")
        else:
            gone = address is not None and self._addresses.gone(address)
            # Each attempt uses the same id, so that a repeated write finds the earlier one.
            wish = KeepReply(RunId(reply.task_id), reply, self._site.options.reply_retry_time if gone else None)
            keep = partial(self._site.durable.store.keep_replies, [wish])
            try:
                (kept,) = await (self._site.patience.until_answered(keep) if patient else keep())
            except Unavailable as error:
                self._site.patience.note_away(error)
                return False
            if not kept:
                self._drop(reply, "the row with its id belongs to another run")
        await home.store.mark_sent([reply])
        return True

    async def refuse(self, reply: Reply) -> None:
        """Publish the reply to an unreadable request, once."""
        letter = reply_letter(reply)
        if letter is None:
            return
        word: Published | None = None
        if not self._addresses.blocked(letter[0], fresh=True):
            word = (await self._site.patience.until_answered(partial(self._words, [letter])))[0]
        if word is not Published.ACCEPTED:
            self._drop(reply, "its queue did not accept it")

    def release_held(self, stays: Callable[[TaskId], bool]) -> list[Delivery]:
        """Return the requests of tasks in memory to requeue, except for tasks that stay.

        Lost replies are reported.
        """
        deliveries, lost = self.held.let_all_go(stays)
        for task_id in lost:
            self._site.steps.note(Step.REPLY_DROPPED, task_id, reason="the process ends")
        return deliveries

    async def tell(self, letters: Sequence[Letter | None]) -> None:
        """Publish advisory messages. They are lost if the broker or their queue rejects them."""
        wanted = [each for each in letters if each is not None and not self._addresses.blocked(each[0])]
        if not wanted:
            return
        with suppress(Unavailable):  # already reported
            for (_, message), word in zip(wanted, await self._words(wanted), strict=True):
                if word is Published.REJECTED:
                    self._note_rejected(TaskId(message.correlation_id), message.type.value)

    def report_to(self, task_id: TaskId, requester: Requester) -> Report:
        """Return the function behind `ctx.status`, which sends a status update to the requester.

        An update is lost if the broker is unavailable or the update is too large.
        """

        async def report(data: JsonValue) -> None:
            letter = status_letter(self._site.agent, task_id, requester, data)
            if letter is not None and (size := len(letter[1].body)) > LONGEST_STATUS:
                reason = f"ctx.status was given too much: {size} bytes; at most {LONGEST_STATUS} are sent"
                self._site.steps.note(Step.STATUS_DROPPED, task_id, reason=reason, dropped=1)
                return
            await self.tell([letter])

        return report

    async def wake_others(self) -> None:
        """Notify all replicas that a task is ready.

        A lost notification costs one sweep interval.
        """
        try:
            await self._site.broker.broadcast(self._site.agent, wake_message(self._site.agent))
        except Unavailable as error:
            self._site.patience.note_away(error)

    async def _words(self, letters: Sequence[Letter]) -> list[Published | None]:
        """Publish letters, each address independently. A result is `None` if it is in doubt.

        Raises:
            BrokerUnavailable: all results are in doubt.
        """
        places: dict[Address, list[int]] = {}
        for place, (address, _) in enumerate(letters):
            places.setdefault(address, []).append(place)
        if len(places) == 1:
            return [*await self._words_of_one(letters[0][0], [message for _, message in letters])]
        words: list[Published | None] = [None] * len(letters)
        at_once = asyncio.Semaphore(_PUBLISHED_AT_ONCE)
        errors: list[Unavailable] = []

        async def publish(address: Address, numbers: list[int]) -> None:
            async with at_once:
                try:
                    of_one = await self._words_of_one(address, [letters[number][1] for number in numbers])
                except Unavailable as error:
                    errors.append(error)
                    return
            for number, word in zip(numbers, of_one, strict=True):
                words[number] = word

        await asyncio.gather(*(publish(address, numbers) for address, numbers in places.items()))
        if len(errors) == len(places):
            raise errors[0]
        return words

    async def _words_of_one(self, address: Address, messages: Sequence[Message]) -> list[Published]:
        began = self._site.clock.monotonic()
        try:
            words = await self._published([(address, message) for message in messages])
        except Unavailable as error:
            self._site.patience.note_away(error)
            raise
        if Published.UNROUTABLE in words or Published.OVERLOADED in words:
            slow = self._site.clock.monotonic() - began >= _SLOW
            self._addresses.failed(address, began=began, gone=Published.UNROUTABLE in words, slow=slow)
        elif Published.ACCEPTED in words:
            self._addresses.worked(address)
            self._site.patience.note_broker_back()
        return words

    async def _published(self, letters: Sequence[Letter]) -> list[Published]:
        """Publish letters. A letter that cannot be encoded does not affect the others."""
        try:
            return await self._routes.publish(letters, self._site.broker.publish)
        except NON_DEFECT_ERRORS:
            raise
        except Exception:
            if len(letters) > 1:
                return [word for letter in letters for word in await self._published([letter])]
            address, message = letters[0]
            log.warning("a %s for %s cannot be sent: %s", message.type, address, message.message_id, exc_info=True)
            return [Published.REJECTED]

    def _undeliverable(self, call: Dispatch, word: Published) -> Claim:
        message = f"no replica of agent {call.peer!r} ever declared its queue"
        if word is Published.REJECTED:
            message = self._too_large("request", len(call.body))
        return Claim(
            RunId(new_id()), call.task_id, call.sub_task_id, Failed(FailureKind.UNDELIVERABLE, message), None
        )


def _is_last(reply: Reply, known: Known | None) -> bool:
    if known is None or known.forgotten:
        return True
    last = known.reply
    return last is not None and (last.fence, last.requester.reply_to) == (reply.fence, reply.requester.reply_to)


async def _together(steps: Sequence[Awaitable[T]]) -> list[T]:
    """Run `steps` concurrently. A single step, the usual case, needs no task."""
    return [await steps[0]] if len(steps) == 1 else await asyncio.gather(*steps)
