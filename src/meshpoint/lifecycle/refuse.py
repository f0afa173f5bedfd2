"""Say no: to what cannot be read, and to what must not run. The requester hears why, and so do the dead letters."""

from __future__ import annotations

from datetime import datetime

from meshpoint.errors import PoisonMessage, Unavailable
from meshpoint.lifecycle.receive import Request, requester_of
from meshpoint.lifecycle.site import Site
from meshpoint.model.checkpoint import Reply, TaskState
from meshpoint.model.events import Step
from meshpoint.model.ids import TaskId
from meshpoint.model.letters import reply_bytes, reply_letter
from meshpoint.model.messages import MessageType
from meshpoint.model.options import Options
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.ports.broker import Delivery


def refusal(request: Request, options: Options, now: datetime) -> Failed | None:
    """Why a readable request must not run, if so."""
    deadline = request.requester.deadline
    if deadline is not None and deadline <= now:
        return Failed(FailureKind.TIMEOUT, "the request's deadline had passed before it could run")
    depth = request.a2a_context.call_depth
    if depth > options.max_call_depth:
        return Failed(FailureKind.ERROR, f"call depth {depth} is beyond max_call_depth {options.max_call_depth}")
    return None


class Refusals:
    """Dead-letters unreadable deliveries."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        """Move `delivery` to the dead letters. The sender of an unreadable request gets an error reply."""
        message = delivery.message
        self._site.steps.note(
            Step.DEAD_LETTER, TaskId(message.correlation_id), type=message.type.value, reason=reason
        )
        try:
            if message.type is MessageType.REQUEST and message.correlation_id:
                await self._reply(delivery, reason)
            await delivery.dead_letter(reason)
        except Unavailable:
            pass  # un-acked: it comes again, and is refused again

    async def _reply(self, delivery: Delivery, reason: str) -> None:
        message = delivery.message
        task_id = TaskId(message.correlation_id)
        try:
            requester = requester_of(message)
        except PoisonMessage:
            return
        body = reply_bytes(task_id, None, Failed(FailureKind.INVALID, reason))
        letter = reply_letter(Reply(self._site.agent, task_id, TaskState.FAILED, body, requester))
        if letter is not None:
            await self._site.broker.publish([letter])
