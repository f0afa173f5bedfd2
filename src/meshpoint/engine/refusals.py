"""Refuse messages that cannot be read and requests that must not run.

The reason goes to the requester and into the dead letter.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime, timedelta
from functools import partial

from meshpoint.engine.dispatch import Outgoing
from meshpoint.engine.receive import Request
from meshpoint.engine.runtime import Site, Spawn
from meshpoint.engine.senders import may_be_answered
from meshpoint.errors import ConfigurationError
from meshpoint.model.checkpoint import Reply, Requester, TaskState
from meshpoint.model.envelopes import fingerprint, reply_bytes
from meshpoint.model.error_text import described
from meshpoint.model.events import Step
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Header, Message, MessageType, bounded_reason
from meshpoint.model.options import Options
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.ports.broker import Delivery

log = logging.getLogger("meshpoint.refuse")

_AFTER_DEFECT = timedelta(seconds=1)
"""Delay before redelivery of a message that could be neither handled nor dead-lettered."""
_AT_ONCE = 64
"""Maximum dead letters copied at once: each body is buffered twice until it is sent."""


def internal_error(error: BaseException) -> str:
    """The public text of a defect, without the SQL and values that database errors quote."""
    cause = getattr(error, "orig", None) or error
    return f"internal error: {described(cause)}"


ID_IN_USE = Failed(FailureKind.INVALID, "the task id is in use, by another request")


def refusal(request: Request, options: Options, now: datetime) -> Failed | None:
    """Why a readable request must not run, or `None` if it may."""
    deadline = request.requester.deadline
    if deadline is not None and deadline <= now:
        return Failed(FailureKind.TIMEOUT, "the request's deadline had passed before it could run")
    depth = request.a2a_context.call_depth
    if depth > options.max_call_depth:
        return Failed(FailureKind.ERROR, f"call depth {depth} is beyond max_call_depth {options.max_call_depth}")
    return None


class Refusals:
    """Dead-letters unreadable deliveries.

    A delivery stays unacked until its copy is confirmed. So the prefetch limits how many are in
    flight, and a crash loses none.
    """

    def __init__(self, site: Site, outgoing: Outgoing, spawn: Spawn) -> None:
        self._site = site
        self._spawn = spawn
        self._outgoing = outgoing
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._under_way: set[asyncio.Task[None]] = set()

    def dead_letter_soon(self, delivery: Delivery, reason: str) -> None:
        """Move `delivery` to the dead letters in the background, so other messages need not wait.

        Only the sender of an unreadable request gets an error reply. Messages from impostors, or
        with another sender's reply address, are not answered.
        """
        task = self._spawn(self._dead_letter_or_requeue(delivery, reason))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def done(self) -> None:
        """Wait until no dead-lettering is in progress."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    async def _dead_letter_or_requeue(self, delivery: Delivery, reason: str) -> None:
        try:
            async with self._room:
                await self._dead_letter(delivery, reason)
        except Exception:
            log.exception("message %s: not dead-lettered, it will be redelivered", delivery.message.message_id)
            self._spawn(self._requeue_later(delivery))

    async def _dead_letter(self, delivery: Delivery, reason: str) -> None:
        reason = bounded_reason(reason)
        message = delivery.message
        answered = may_be_answered(message, self._site.options)
        if message.type is MessageType.REQUEST and message.correlation_id and answered:
            await self._reply(message, reason)
        await self.bury(delivery, reason)

    async def bury(self, delivery: Delivery, reason: str) -> None:
        """Dead-letter `delivery`, whose sender already has its answer or expects none."""
        reason = bounded_reason(reason)
        message = delivery.message
        self._site.steps.note(
            Step.DEAD_LETTER, TaskId(message.correlation_id), type=message.type.value, reason=reason
        )
        try:
            await self._site.patience.until_answered(partial(delivery.dead_letter, reason))
        except ConfigurationError:  # must not block other messages until it is fixed
            log.exception("message %s: it cannot be dead-lettered and will be redelivered", message.message_id)
            self._spawn(self._requeue_later(delivery))

    def set_aside(self, delivery: Delivery, error: Exception) -> None:
        """Dead-letter a delivery that hit a defect, before it breaks one replica after another."""
        log.error("message %s: it could not be handled", delivery.message.message_id, exc_info=error)
        self.dead_letter_soon(delivery, internal_error(error))

    async def _requeue_later(self, delivery: Delivery) -> None:
        await self._site.clock.sleep(_AFTER_DEFECT)
        await delivery.requeue()

    async def _reply(self, message: Message, reason: str) -> None:
        task_id = TaskId(message.correlation_id)
        parent = message.headers.get(Header.PARENT_TASK)
        requester = Requester(message.reply_to, parent_task_id=None if parent is None else str(parent))
        body = reply_bytes(task_id, None, Failed(FailureKind.INVALID, reason), refuses=fingerprint(message))
        await self._outgoing.refuse(Reply(self._site.agent, task_id, TaskState.FAILED, body, requester))
