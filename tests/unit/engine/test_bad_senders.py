"""Sender names that cannot be stored: the messages become dead letters, and no statement fails."""

from __future__ import annotations

import pytest

from meshpoint.engine import receive
from meshpoint.errors import PoisonMessage
from meshpoint.model.bodies import A2AMessage, Part, StatusBody, StatusUpdate, TaskState, TaskStatus
from meshpoint.model.envelopes import cancel_message, reply_bytes
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import Header, Message, MessageType
from meshpoint.model.options import Options
from meshpoint.model.outcomes import Ok

SENDERS = ["a\0b", "x" * 249, "a\x1bb"]


@pytest.mark.parametrize("sender", SENDERS)
def test_of_a_cancel(sender: str) -> None:
    """An early cancel is stored with its sender, and PostgreSQL rejects NUL bytes."""
    with pytest.raises(PoisonMessage, match="app_id"):
        receive.cancelled_task(cancel_message(AgentName(sender), TaskId("task")), Options())


@pytest.mark.parametrize("sender", SENDERS)
def test_of_a_response(sender: str) -> None:
    message = back(MessageType.RESPONSE, reply_bytes(TaskId("call"), None, Ok(1)), sender)
    with pytest.raises(PoisonMessage, match="app_id"):
        receive.claim(message, Options())
    assert receive.unreadable_claim(message, "why", Options()) is None


@pytest.mark.parametrize("sender", SENDERS)
def test_of_a_status(sender: str) -> None:
    said = A2AMessage(role="ROLE_AGENT", parts=[Part(data=1)])
    update = StatusUpdate(task_id="call", status=TaskStatus(state=TaskState.WORKING, message=said))
    with pytest.raises(PoisonMessage, match="app_id"):
        receive.status(back(MessageType.STATUS, StatusBody(status_update=update).to_bytes(), sender), Options())


def back(kind: MessageType, body: bytes, sender: str) -> Message:
    return Message(
        kind, body, message_id="m", correlation_id="call", app_id=sender, headers={Header.PARENT_TASK.value: "task"}
    )
