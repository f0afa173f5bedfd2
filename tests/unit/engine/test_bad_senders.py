"""Sender names that cannot be stored: the messages become dead letters, and no statement fails."""

from __future__ import annotations

import pytest

from meshpoint.engine import parsing
from meshpoint.errors import PoisonMessage
from meshpoint.model.bodies import (
    A2AMessage,
    A2ATaskState,
    Part,
    StatusBody,
    StatusUpdate,
    TaskStatus,
)
from meshpoint.model.envelopes import cancel_message, encode_reply
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import Header, Message, MessageType
from meshpoint.model.options import Options
from meshpoint.model.outcomes import Ok

SENDERS = ["a\0b", "x" * 249, "a\x1bb"]


@pytest.mark.parametrize("sender", SENDERS)
def test_an_invalid_sender_of_a_cancel_is_refused(sender: str) -> None:
    """An early cancel is stored with its sender, and PostgreSQL rejects NUL bytes."""
    with pytest.raises(PoisonMessage, match="app_id"):
        parsing.parse_cancel(cancel_message(AgentName(sender), TaskId("task")), Options())


@pytest.mark.parametrize("sender", SENDERS)
def test_an_invalid_sender_of_a_response_is_refused(sender: str) -> None:
    message = parse_message(
        MessageType.RESPONSE, encode_reply(TaskId("call"), None, Ok(1)), sender
    )
    with pytest.raises(PoisonMessage, match="app_id"):
        parsing.parse_claim(message, Options())
    assert parsing.claim_for_unreadable(message, "why", Options()) is None


@pytest.mark.parametrize("sender", SENDERS)
def test_an_invalid_sender_of_a_status_is_refused(sender: str) -> None:
    content = A2AMessage(message_id="m", role="ROLE_AGENT", parts=[Part(data=1)])
    update = StatusUpdate(
        task_id="call", status=TaskStatus(state=A2ATaskState.WORKING, message=content)
    )
    with pytest.raises(PoisonMessage, match="app_id"):
        parsing.parse_status(
            parse_message(MessageType.STATUS, StatusBody(status_update=update).to_bytes(), sender),
            Options(),
        )


def parse_message(kind: MessageType, body: bytes, sender: str) -> Message:
    return Message(
        kind,
        body,
        message_id="m",
        correlation_id="call",
        app_id=sender,
        headers={Header.PARENT_TASK.value: "task"},
    )
