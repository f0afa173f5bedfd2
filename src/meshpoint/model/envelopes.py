"""Build the messages that a replica sends from committed rows.

Message ids are stable across re-sends.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from pydantic import JsonValue

from meshpoint.model.bodies import (
    A2AMessage,
    A2ATaskState,
    AttachBody,
    Body,
    CancelBody,
    CompleteBody,
    CompletedBody,
    DenyBody,
    Part,
    ReadBody,
    ResponseBody,
    SignalBody,
    StatusBody,
    StatusUpdate,
    TaskBody,
    TaskStatus,
)
from meshpoint.model.ids import AgentName, ReplicaId, TaskId, new_id, resumed_id, split_resumed_id
from meshpoint.model.messages import (
    TRACEPARENT,
    Address,
    AttachStatus,
    CompletionStatus,
    Header,
    HeaderValue,
    Message,
    MessageType,
    nested_queue,
    response_queue,
)
from meshpoint.model.outcomes import AdvisedFailure, Failed, FailureKind, Ok, Outcome
from meshpoint.model.status_metadata import NO_METADATA, StatusMetadata
from meshpoint.model.tasks import NO_DEADLINE, CancelNotice, Dispatch, Reply, Requester
from meshpoint.model.transitions import Claim

Envelope = tuple[Address, Message]


class Search(NamedTuple):
    """A search for a task. Replicas that do not have it send `token` to `reply_to`."""

    token: str
    reply_to: Address


KEEP_ALIVE: JsonValue = {"alive": True}
"""The data of a status update that only says that its task has not ended."""
MAX_STATUS_BYTES = 65_536
"""Maximum bytes of a status update's body."""


def request_envelope(call: Dispatch, reply_to: Address, margin: timedelta) -> Envelope:
    """Build the request for a peer call, addressed to the peer's nested-request queue.

    The peer's deadline, if the call has one, is `margin` earlier, so that its response can arrive
    in time.
    """
    peer_task_id, retry = split_resumed_id(call.sub_task_id)
    headers = {
        **call.headers,
        Header.PARENT_TASK.value: call.task_id
        if retry is None
        else resumed_id(call.task_id, retry),
        Header.ATTEMPT.value: call.attempt,
    }
    if call.deadline < NO_DEADLINE:
        headers[Header.DEADLINE.value] = (call.deadline - margin).timestamp()
    message = Message(
        type=MessageType.REQUEST,
        body=call.body,
        message_id=call.sub_task_id,
        correlation_id=peer_task_id,
        app_id=call.agent,
        reply_to=reply_to,
        headers=headers,
    )
    return nested_queue(call.peer), message


def describe_envelopes(envelopes: Iterable[tuple[Address, Message]]) -> dict[str, JsonValue]:
    """Details of an event about these messages: their queues, ids and trace contexts."""
    messages: list[JsonValue] = [
        {
            "queue": address,
            "id": message.message_id,
            "correlation": message.correlation_id,
            "trace": message.headers.get(TRACEPARENT),
        }
        for address, message in envelopes
    ]
    return {"messages": messages}


def describe_responses(queue: Address, claims: Iterable[Claim]) -> dict[str, JsonValue]:
    """Details of an event about responses in `queue`, as `describe_envelopes` has them."""
    messages: list[JsonValue] = [
        {
            "queue": queue,
            "id": claim.sub_task_id,
            "correlation": claim.sub_task_id,
            "trace": claim.outcome.traceparent,
        }
        for claim in claims
        if claim.sender is not None
    ]
    return {"messages": messages}


def cancel_envelope(notice: CancelNotice) -> Envelope:
    """Build the cancel for a peer whose result is no longer needed."""
    peer_task_id, retry = split_resumed_id(notice.sub_task_id)
    parent = notice.task_id if retry is None else resumed_id(notice.task_id, retry)
    return response_queue(notice.peer), cancel_message(notice.agent, peer_task_id, parent=parent)


def cancel_message(
    sender: AgentName,
    task_id: TaskId,
    *,
    parent: str | None = None,
    on_behalf_of: str | None = None,
    reason: str = "",
) -> Message:
    """Build a cancel of `task_id`, valid while the task works for `parent`.

    `None` matches any parent. A replica that forwards a cancel to other replicas sets
    `on_behalf_of` to the original sender. The outcome's message repeats `reason`.
    """
    headers: dict[str, HeaderValue] = {} if parent is None else {Header.PARENT_TASK.value: parent}
    if on_behalf_of is not None:
        headers[Header.ON_BEHALF_OF.value] = on_behalf_of
    return Message(
        type=MessageType.CANCEL,
        body=CancelBody(id=task_id, reason=reason or None).to_bytes(),
        message_id=f"{task_id}.cancel",
        correlation_id=task_id,
        app_id=sender,
        headers=headers,
    )


def attach_message(
    sender: AgentName,
    task_id: TaskId,
    reply_to: Address,
    *,
    on_behalf_of: str | None = None,
    query: str | None = None,
    wants_snapshot: bool = False,
    search: Search | None = None,
) -> Message:
    """Build an attach, which asks for the outcome of `task_id` at `reply_to`.

    A replica that forwards it to other replicas sets `on_behalf_of` to the original sender. With
    `query`, a token that the reply repeats, it asks for the status only. With `wants_snapshot`, it
    also asks for the latest status and the open questions. With `search`, it asks the other
    replicas to deny that they have the task.
    """
    headers: dict[str, HeaderValue] = {}
    if on_behalf_of is not None:
        headers[Header.ON_BEHALF_OF.value] = on_behalf_of
    if query is not None:
        headers[Header.QUERY.value] = query
    if wants_snapshot:
        headers[Header.SNAPSHOT.value] = 1
    if search is not None:
        headers[Header.DENY_TO.value] = search.reply_to
    return Message(
        type=MessageType.ATTACH,
        body=AttachBody(id=task_id).to_bytes(),
        message_id=f"{task_id}.attach" if search is None else search.token,
        correlation_id=task_id,
        app_id=sender,
        reply_to=reply_to,
        headers=headers,
    )


def deny_envelope(
    agent: AgentName, question: Message, replica: ReplicaId, consumers: Mapping[Address, int]
) -> Envelope | None:
    """Build the denial of a task, in reply to the attach `question` of another replica.

    `None` if the question wants none.
    """
    address = question.headers.get(Header.DENY_TO.value)
    if not isinstance(address, str) or not address.startswith(f"{agent}.private."):
        return None
    return Address(address), Message(
        type=MessageType.DENY,
        body=DenyBody(
            replica=replica, consumers={str(queue): n for queue, n in consumers.items()}
        ).to_bytes(),
        message_id=new_id(),
        correlation_id=question.message_id,
        app_id=agent,
    )


def complete_message(
    sender: AgentName, question_id: str, task_id: TaskId, value: JsonValue, reply_to: Address
) -> Message:
    """Build an answer to a question. The result is sent to `reply_to`."""
    body = CompleteBody(question=question_id, value=value)
    return _completion_message(sender, task_id, body, reply_to)


def reject_message(
    sender: AgentName, question_id: str, task_id: TaskId, reason: str, reply_to: Address
) -> Message:
    """Build a rejection of a question. The result is sent to `reply_to`."""
    body = CompleteBody(rejects=question_id, reason=reason)
    return _completion_message(sender, task_id, body, reply_to)


def _completion_message(
    sender: AgentName, task_id: TaskId, body: CompleteBody, reply_to: Address
) -> Message:
    return Message(
        type=MessageType.COMPLETE,
        body=body.to_bytes(),
        message_id=new_id(),
        correlation_id=task_id,
        app_id=sender,
        reply_to=reply_to,
    )


def signal_message(
    sender: AgentName,
    task_id: TaskId,
    signal: str,
    signal_id: str,
    value: JsonValue,
    reply_to: Address,
) -> Message:
    """Build a signal to a task. The result is sent to `reply_to`."""
    body = SignalBody(id=task_id, signal=signal, signal_id=signal_id, value=value)
    return _message_to_task(MessageType.SIGNAL, sender, task_id, body, reply_to)


def read_message(sender: AgentName, task_id: TaskId, key: str, reply_to: Address) -> Message:
    """Build a request for a value of a task. The value is sent to `reply_to`."""
    body = ReadBody(id=task_id, key=key)
    return _message_to_task(MessageType.READ, sender, task_id, body, reply_to)


def _message_to_task(
    message_type: MessageType, sender: AgentName, task_id: TaskId, body: Body, reply_to: Address
) -> Message:
    return Message(
        type=message_type,
        body=body.to_bytes(),
        message_id=new_id(),
        correlation_id=task_id,
        app_id=sender,
        reply_to=reply_to,
    )


def forwarded_message(agent: AgentName, message: Message, on_behalf_of: str | None) -> Message:
    """Build the copy of a message that a replica broadcasts to the others.

    `on_behalf_of` is its sender; `None` if the sender may use every task.
    """
    headers: dict[str, HeaderValue] = {}
    if on_behalf_of is not None:
        headers[Header.ON_BEHALF_OF.value] = on_behalf_of
        if message.user_id is not None:
            headers[Header.ON_BEHALF_OF_LOGIN.value] = message.user_id
    return replace(message, app_id=agent, user_id=None, headers=headers)


def completion_reply(
    agent: AgentName, message: Message, status: CompletionStatus, body: CompletedBody
) -> Envelope | None:
    """Build the reply to an answer, a signal or a read. `None` without a reply address."""
    if message.reply_to is None:
        return None
    return message.reply_to, Message(
        type=message.type,
        body=body.to_bytes(),
        message_id=f"{message.message_id}.answer",
        correlation_id=message.message_id,
        app_id=agent,
        headers={Header.COMPLETED.value: status.value},
    )


def attach_status(
    agent: AgentName,
    task_id: TaskId,
    reply_to: Address,
    status: AttachStatus,
    requester: str | None = None,
    *,
    certain: bool = False,
    query: str | None = None,
    data: JsonValue = None,
) -> Envelope | None:
    """Build the reply to an attach, a status update. A refusal names the task's `requester`.

    `certain`: an unknown task is in no queue, in no replica and not in the database.
    The reply to a query repeats its token and, in `data`, has a `TaskStatus`.
    """
    if requester is not None:
        data = {"requester": requester}
    envelope = status_envelope(agent, task_id, Requester(reply_to), data)
    if envelope is None:
        return None
    address, message = envelope
    headers: dict[str, HeaderValue] = {Header.ATTACH.value: status.value}
    if query is not None:
        headers[Header.QUERY.value] = query
    if certain:
        headers[Header.CERTAIN.value] = 1
    return address, replace(message, headers=headers)


def accepted_status(
    agent: AgentName, task_id: TaskId, reply_to: Address, token: str
) -> Envelope | None:
    """Build the status update that accepts the start of a task that must not exist yet."""
    envelope = status_envelope(agent, task_id, Requester(reply_to), None)
    if envelope is None:
        return None
    address, message = envelope
    return address, replace(message, headers={Header.START.value: token})


def reply_envelope(reply: Reply) -> Envelope | None:
    """Build the response to a request, or `None` if the requester wants no reply."""
    reply_to, parent = reply.requester.reply_to, reply.requester.parent_task_id
    if reply_to is None:
        return None
    message = Message(
        type=MessageType.RESPONSE,
        body=reply.body,
        # Each end of a resumed task has another fence.
        message_id=f"{reply.task_id}.reply" + (f".{reply.fence}" if reply.fence else ""),
        correlation_id=reply.task_id,
        app_id=reply.agent,
        headers={Header.PARENT_TASK.value: parent} if parent else {},
    )
    return reply_to, message


def fingerprint(request: Message) -> str:
    """A digest of the request's body and headers, equal each time the request is sent.

    A refusal contains it, so that the requester can check that its own request was refused.
    """
    digest = hashlib.blake2b(request.body, digest_size=16)
    for header in _FINGERPRINT_HEADERS:
        value = _canonical_value(header, request.headers.get(header.value))
        digest.update(f"\n{header.value}:{value}".encode(errors="replace"))
    return digest.hexdigest()


_FINGERPRINT_HEADERS = (
    Header.PARENT_TASK,
    Header.CALL_DEPTH,
    Header.DEADLINE,
    Header.IDLE_TIMEOUT,
    Header.ATTEMPT,
    Header.RESUME,
    Header.TRACEPARENT,
)
_MAX_NUMBER = 2.0**63


def _canonical_value(header: Header, value: HeaderValue | None) -> str:
    if value is None:
        return ""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) < _MAX_NUMBER
    ):
        return repr(value)
    if header is Header.ATTEMPT and value >= 1:
        return "any"
    return f"{value:.6g}" if header is not Header.DEADLINE else f"{value:.0f}"


def status_envelope(
    agent: AgentName,
    task_id: TaskId,
    requester: Requester,
    data: JsonValue,
    metadata: StatusMetadata = NO_METADATA,
) -> Envelope | None:
    """Build a status update for the requester of `task_id`, or `None` without a reply address."""
    parent = requester.parent_task_id
    if requester.reply_to is None:
        return None
    a2a_message = A2AMessage(
        message_id=new_id(), role="ROLE_AGENT", parts=[Part(data=data)], task_id=task_id
    )
    status = TaskStatus(
        state=A2ATaskState.WORKING, message=a2a_message, timestamp=datetime.now(UTC).isoformat()
    )
    update = StatusUpdate(task_id=task_id, status=status, metadata=metadata.to_json())
    body = StatusBody(status_update=update)
    message = Message(
        type=MessageType.STATUS,
        body=body.to_bytes(),
        message_id=new_id(),
        correlation_id=task_id,
        app_id=agent,
        headers={Header.PARENT_TASK.value: parent} if parent else {},
    )
    return requester.reply_to, message


def status_envelopes(
    agent: AgentName,
    task_id: TaskId,
    requester: Requester,
    followers: Sequence[Address],
    data: JsonValue,
    metadata: StatusMetadata,
) -> list[Envelope]:
    """Build a status update for the requester of `task_id` and for its followers.

    All addresses get the same message, which is encoded once.
    """
    if requester.reply_to is None and followers:
        requester, followers = replace(requester, reply_to=followers[0]), followers[1:]
    envelope = status_envelope(agent, task_id, requester, data, metadata)
    if envelope is None:
        return []
    return [envelope, *((address, envelope[1]) for address in followers)]


def wake_message(agent: AgentName) -> Message:
    """Build a broadcast that a task is ready for any replica with a free slot."""
    id_ = new_id()
    return Message(
        type=MessageType.WAKE, body=b"{}", message_id=id_, correlation_id=id_, app_id=agent
    )


def describe_message(sender: AgentName, reply_to: Address) -> Message:
    """Build a question for cards. Its topic says which agents are asked."""
    id_ = new_id()
    return Message(
        type=MessageType.DESCRIBE,
        body=b"{}",
        message_id=id_,
        correlation_id=id_,
        app_id=sender,
        reply_to=reply_to,
    )


def card_message(agent: AgentName, body: bytes, correlation_id: str | None = None) -> Message:
    """Build a message with a card. An answer has the `correlation_id` of its question."""
    id_ = new_id()
    return Message(
        type=MessageType.CARD,
        body=body,
        message_id=id_,
        correlation_id=correlation_id or id_,
        app_id=agent,
    )


def encode_reply(
    task_id: TaskId,
    context_id: str | None,
    outcome: Outcome,
    *,
    refused_fingerprint: str | None = None,
    retry: int | None = None,
    id_in_use: bool = False,
    may_attach: bool = False,
    traceparent: str | None = None,
) -> bytes:
    """Encode the reply for `outcome`.

    Args:
        task_id: The task that replies.
        context_id: Its conversation.
        outcome: Its outcome.
        refused_fingerprint: The fingerprint of a request that was refused without running.
        retry: The attempt of a resumed requester, which counts the outcome's tokens.
        id_in_use: Whether the request was refused because a task with its id exists.
        may_attach: Whether its sender may attach to that task.
        traceparent: The trace context of the segment that replies.
    """
    metadata: dict[str, JsonValue] = (
        {} if refused_fingerprint is None else {"refuses": refused_fingerprint}
    )
    if id_in_use:
        metadata["idInUse"] = True
    if may_attach:
        metadata["mayAttach"] = True
    if retry is not None:
        metadata["retry"] = retry
    if traceparent is not None:
        metadata[TRACEPARENT] = traceparent
    if not outcome.usage.is_empty:
        metadata["usage"] = outcome.usage.model_dump(mode="json", exclude={"requests"})
    match outcome:
        case Ok(value=value):
            state, part = A2ATaskState.COMPLETED, Part(data=value)
        case Failed(kind=FailureKind.CANCELLED, message=text):
            state, part = A2ATaskState.CANCELED, Part(text=text)
        case Failed(kind=kind, message=text):
            state, part = A2ATaskState.FAILED, Part(text=text)
            metadata["failure"] = kind.value
            if isinstance(outcome, AdvisedFailure):
                metadata |= _retry_advice(outcome)
    message = A2AMessage(
        message_id=new_id(),
        role="ROLE_AGENT",
        parts=[part],
        task_id=task_id,
        context_id=context_id,
    )
    status = TaskStatus(state=state, message=message, timestamp=datetime.now(UTC).isoformat())
    return ResponseBody(
        task=TaskBody(
            id=task_id,
            context_id=context_id,
            status=status,
            artifacts=list(outcome.artifacts) if isinstance(outcome, Ok) else [],
            metadata=metadata,
        )
    ).to_bytes()


def _retry_advice(failed: AdvisedFailure) -> dict[str, JsonValue]:
    advice: dict[str, JsonValue] = {} if failed.retryable else {"retryable": False}
    return advice if failed.retry_after is None else advice | {"retryAfter": failed.retry_after}


def encode_request(request: Message) -> bytes:
    """Serialize `request` for storage: one line of JSON for the envelope, then the body."""
    properties = {
        "message_id": request.message_id,
        "correlation_id": request.correlation_id,
        "app_id": request.app_id,
        "reply_to": request.reply_to,
        "user_id": request.user_id,
        "headers": request.headers,
    }
    return json.dumps(properties, separators=(",", ":")).encode() + b"\n" + request.body


def decode_request(stored: bytes) -> Message:
    """Restore a request stored by `encode_request`."""
    properties, _, body = stored.partition(b"\n")
    return Message(type=MessageType.REQUEST, body=body, **json.loads(properties))
