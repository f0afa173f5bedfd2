"""Refuse messages that cannot be read and requests that must not run.

The reason goes to the requester and into the dead letter.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from functools import partial

from meshpoint.engine.parsing import Request
from meshpoint.engine.replies import Replies
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.senders import impersonation_error, reply_address_error
from meshpoint.errors import ConfigurationError
from meshpoint.model.call_attempts import final_failure
from meshpoint.model.envelopes import encode_reply, fingerprint
from meshpoint.model.error_text import describe_exception
from meshpoint.model.events import Step
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Header, Message, MessageType, truncate_reason
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.model.tasks import Reply, Requester, TaskState
from meshpoint.ports.broker import Delivery

log = logging.getLogger("meshpoint.refuse")

_DEFECT_RETRY_DELAY = timedelta(seconds=1)
"""Delay before redelivery of a message that could be neither handled nor dead-lettered."""
_MAX_CONCURRENT_COPIES = 64
"""Maximum dead letters copied at once: each body is buffered twice until it is sent."""


def internal_error_text(error: BaseException) -> str:
    """The public text of a defect, without the SQL and values that database errors quote."""
    cause = getattr(error, "orig", None) or error
    return f"internal error: {describe_exception(cause)}"


ID_IN_USE = Failed(FailureKind.INVALID, "the task id is in use by another request")


def find_refusal(request: Request, runtime: ReplicaRuntime) -> Failed | None:
    """Why a readable request must not run, or `None` if it may."""
    deadline = request.requester.deadline
    if deadline is not None and deadline <= runtime.clock.now():
        return Failed(FailureKind.TIMEOUT, "the request's deadline had passed before it could run")
    depth = request.a2a_context.call_depth
    max_depth = runtime.options.max_call_depth
    if depth > max_depth:
        return final_failure(
            FailureKind.ERROR, f"call depth {depth} is beyond max_call_depth {max_depth}"
        )
    return None


class Refusals:
    """Dead-letters unreadable deliveries.

    A delivery stays unacked until its copy is confirmed. So the prefetch limits how many are in
    flight, and a crash loses none.
    """

    def __init__(self, runtime: ReplicaRuntime, replies: Replies) -> None:
        self._runtime = runtime
        self._spawn = runtime.background.spawn
        self._replies = replies
        self._copy_semaphore = asyncio.Semaphore(_MAX_CONCURRENT_COPIES)
        self._in_progress: set[asyncio.Task[None]] = set()

    def dead_letter_in_background(self, delivery: Delivery, reason: str) -> None:
        """Move `delivery` to the dead letters in the background, so other messages need not wait.

        Only the sender of an unreadable request gets an error reply. Messages from impostors, or
        with another sender's reply address, are not answered.
        """
        task = self._spawn(self._dead_letter_or_requeue, delivery, reason)
        self._in_progress.add(task)
        task.add_done_callback(self._in_progress.discard)

    async def wait_until_done(self) -> None:
        """Wait until no dead-lettering is in progress."""
        while self._in_progress:
            await asyncio.wait(self._in_progress)

    async def _dead_letter_or_requeue(self, delivery: Delivery, reason: str) -> None:
        try:
            async with self._copy_semaphore:
                await self._reply_and_dead_letter(delivery, reason)
        except Exception:
            log.exception(
                "message %s: not dead-lettered, it will be redelivered",
                delivery.message.message_id,
            )
            self._spawn(self._requeue_later, delivery)

    async def _reply_and_dead_letter(self, delivery: Delivery, reason: str) -> None:
        reason = truncate_reason(reason)
        message = delivery.message
        if (
            message.type is MessageType.REQUEST
            and message.correlation_id
            and impersonation_error(message, self._runtime.options) is None
            and reply_address_error(message) is None
        ):
            await self._send_refusal(message, reason)
        await self.dead_letter(delivery, reason)

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        """Dead-letter `delivery`, whose sender already has its answer or expects none."""
        reason = truncate_reason(reason)
        message = delivery.message
        self._runtime.steps.emit(
            Step.DEAD_LETTER,
            TaskId(message.correlation_id),
            type=message.type.value,
            reason=reason,
        )
        try:
            await self._runtime.retry.until_available(partial(delivery.dead_letter, reason))
        except ConfigurationError:  # must not block other messages until it is fixed
            log.exception(
                "message %s: it cannot be dead-lettered and will be redelivered",
                message.message_id,
            )
            self._spawn(self._requeue_later, delivery)

    def dead_letter_defective(self, delivery: Delivery, error: Exception) -> None:
        """Dead-letter a delivery that hit a defect, before it breaks one replica after another."""
        log.error(
            "message %s: it could not be handled", delivery.message.message_id, exc_info=error
        )
        self.dead_letter_in_background(delivery, internal_error_text(error))

    async def _requeue_later(self, delivery: Delivery) -> None:
        await self._runtime.clock.sleep(_DEFECT_RETRY_DELAY)
        await delivery.requeue()

    async def _send_refusal(self, message: Message, reason: str) -> None:
        task_id = TaskId(message.correlation_id)
        parent = message.headers.get(Header.PARENT_TASK)
        requester = Requester(
            message.reply_to, parent_task_id=None if parent is None else str(parent)
        )
        body = encode_reply(
            task_id,
            None,
            Failed(FailureKind.INVALID, reason),
            refused_fingerprint=fingerprint(message),
        )
        await self._replies.publish_refusal(
            Reply(self._runtime.agent, task_id, TaskState.FAILED, body, requester)
        )
