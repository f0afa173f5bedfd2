"""Build the messages that a replica sends from committed rows.

Message ids are stable across re-sends.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime, timedelta

from pydantic import JsonValue

from meshpoint.model.bodies import (
    A2AMessage,
    CancelBody,
    Part,
    StatusBody,
    StatusUpdate,
    TaskState,
    TaskStatus,
    response_body,
)
from meshpoint.model.checkpoint import CancelNotice, Dispatch, Reply, Requester
from meshpoint.model.ids import AgentName, TaskId, new_id, plain_id, resumed_id
from meshpoint.model.messages import Address, Header, HeaderValue, Message, MessageType, nested_of, responses_of
from meshpoint.model.outcomes import Outcome

Letter = tuple[Address, Message]

LONGEST_STATUS = 65_536
"""Maximum bytes of a status update's body."""


def request_letter(call: Dispatch, reply_to: Address, margin: timedelta) -> Letter:
    """Build the request for a peer call, addressed to the peer's nested-request queue.

    The peer's deadline is `margin` earlier than the call's, so that its response can arrive in
    time.
    """
    peers_own, retry = plain_id(call.sub_task_id)
    headers = {
        **call.headers,
        Header.PARENT_TASK.value: call.task_id if retry is None else resumed_id(call.task_id, retry),
        Header.DEADLINE.value: (call.deadline - margin).timestamp(),
        Header.ATTEMPT.value: call.attempt,
    }
    message = Message(
        type=MessageType.REQUEST,
        body=call.body,
        message_id=call.sub_task_id,
        correlation_id=peers_own,
        app_id=call.agent,
        reply_to=reply_to,
        headers=headers,
    )
    return nested_of(call.peer), message


def cancel_letter(notice: CancelNotice) -> Letter:
    """Build the cancel for a peer whose result is no longer needed."""
    peers_own, retry = plain_id(notice.sub_task_id)
    parent = notice.task_id if retry is None else resumed_id(notice.task_id, retry)
    return responses_of(notice.peer), cancel_message(notice.agent, peers_own, parent=parent)


def cancel_message(
    sender: AgentName,
    task_id: TaskId,
    reason: str | None = None,
    *,
    parent: str | None = None,
    on_behalf_of: str | None = None,
) -> Message:
    """Build a cancel of `task_id`, valid while the task works for `parent`.

    `None` matches any parent. A replica that forwards a cancel to other replicas sets
    `on_behalf_of` to the original sender.
    """
    headers: dict[str, HeaderValue] = {} if parent is None else {Header.PARENT_TASK.value: parent}
    if on_behalf_of is not None:
        headers[Header.ON_BEHALF_OF.value] = on_behalf_of
    return Message(
        type=MessageType.CANCEL,
        body=CancelBody(id=task_id, reason=reason).to_bytes(),
        message_id=f"{task_id}.cancel",
        correlation_id=task_id,
        app_id=sender,
        headers=headers,
    )


def reply_letter(reply: Reply) -> Letter | None:
    """Build the response to a request, or `None` if the requester wants no reply."""
    if reply.requester.reply_to is None:
        return None
    message = Message(
        type=MessageType.RESPONSE,
        body=reply.body,
        message_id=f"{reply.task_id}.reply",
        correlation_id=reply.task_id,
        app_id=reply.agent,
        headers=_parent(reply.requester),
    )
    return reply.requester.reply_to, message


def fingerprint(request: Message) -> str:
    """A digest of the request's body and headers, equal each time the request is sent.

    A refusal contains it, so that the requester can check that its own request was refused.
    """
    digest = hashlib.blake2b(request.body, digest_size=16)
    for header in _FINGERPRINTED:
        digest.update(
            f"\n{header.value}:{_canonical(header, request.headers.get(header.value))}".encode(errors="replace")
        )
    return digest.hexdigest()


_FINGERPRINTED = (
    *(Header.PARENT_TASK, Header.CALL_DEPTH, Header.DEADLINE, Header.IDLE_TIMEOUT, Header.ATTEMPT, Header.RESUME),
    Header.TRACEPARENT,
)


_LARGEST = 2.0**63


def _canonical(header: Header, value: HeaderValue | None) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
        return repr(value)
    if header is Header.ATTEMPT and value >= 1:
        return "any"
    return f"{value:.6g}" if header is not Header.DEADLINE else f"{value:.0f}"


def status_letter(
    agent: AgentName, task_id: TaskId, requester: Requester, data: JsonValue, context_id: str | None = None
) -> Letter | None:
    """Build a status update for the requester of `task_id`, or `None` without a reply address."""
    if requester.reply_to is None:
        return None
    said = A2AMessage(message_id=new_id(), role="ROLE_AGENT", parts=[Part(data=data)], task_id=task_id)
    status = TaskStatus(state=TaskState.WORKING, message=said, timestamp=datetime.now(UTC).isoformat())
    body = StatusBody(status_update=StatusUpdate(task_id=task_id, context_id=context_id, status=status))
    message = Message(
        type=MessageType.STATUS,
        body=body.to_bytes(),
        message_id=new_id(),
        correlation_id=task_id,
        app_id=agent,
        headers=_parent(requester),
    )
    return requester.reply_to, message


def wake_message(agent: AgentName) -> Message:
    """Build a broadcast that a task is ready for any replica with a free slot."""
    id_ = new_id()
    return Message(type=MessageType.WAKE, body=b"{}", message_id=id_, correlation_id=id_, app_id=agent)


def reply_bytes(task_id: TaskId, context_id: str | None, outcome: Outcome, *, refuses: str | None = None) -> bytes:
    """Encode the reply for `outcome`.

    `refuses` is the fingerprint of a request that was refused without running.
    """
    timestamp = datetime.now(UTC).isoformat()
    return response_body(task_id, context_id, outcome, timestamp=timestamp, refuses=refuses).to_bytes()


def _parent(requester: Requester) -> dict[str, str | int | float]:
    return {Header.PARENT_TASK.value: requester.parent_task_id} if requester.parent_task_id else {}


def pack(message: Message) -> bytes:
    """Serialize `message` for storage: one line of JSON for the envelope, then the body."""
    envelope = {
        "message_id": message.message_id,
        "correlation_id": message.correlation_id,
        "app_id": message.app_id,
        "reply_to": message.reply_to,
        "user_id": message.user_id,
        "headers": message.headers,
    }
    return json.dumps(envelope, separators=(",", ":")).encode() + b"\n" + message.body


def unpack(kept: bytes) -> Message:
    """Restore a request stored by `pack`."""
    envelope, _, body = kept.partition(b"\n")
    return Message(type=MessageType.REQUEST, body=body, **json.loads(envelope))
