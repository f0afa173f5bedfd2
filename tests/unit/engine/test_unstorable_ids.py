"""Ids that a database rejects are refused on arrival, because one would fail a whole batch."""

from dataclasses import replace

import pytest

from meshpoint.engine import parsing
from meshpoint.errors import PoisonMessage
from meshpoint.model.bodies import A2AMessage, CancelBody, Part, RequestBody
from meshpoint.model.envelopes import encode_reply
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Header, HeaderValue, Message, MessageType
from meshpoint.model.options import Options
from meshpoint.model.outcomes import Ok

BAD_NAMES = ["a\0b", "a\nb", "\ud800", "x" * 281]
OPTIONS = Options()


def create_request() -> Message:
    content = A2AMessage(message_id="m", role="ROLE_USER", parts=[Part(data=1)])
    return Message(
        MessageType.REQUEST, RequestBody(message=content).to_bytes(), "m", "task", "someone"
    )


def create_response() -> Message:
    body = encode_reply(TaskId("call"), None, Ok(1))
    return Message(
        MessageType.RESPONSE, body, "m", "call", "peer", headers={Header.PARENT_TASK.value: "task"}
    )


def test_valid_names_are_accepted() -> None:
    assert parsing.parse_request(create_request(), OPTIONS).task_id == "task"
    assert parsing.parse_claim(create_response(), OPTIONS).sub_task_id == "call"


@pytest.mark.parametrize("bad", BAD_NAMES)
def test_an_invalid_name_is_refused_in_every_field(bad: str) -> None:
    valid_request, valid_response = create_request(), create_response()
    parent: dict[str, HeaderValue] = {Header.PARENT_TASK.value: bad}
    for message in (
        replace(valid_request, correlation_id=bad),
        replace(valid_request, app_id=bad),
        replace(valid_request, headers=parent),
    ):
        with pytest.raises(PoisonMessage, match="printable"):
            parsing.parse_request(message, OPTIONS)
    for message in (
        replace(valid_response, correlation_id=bad),
        replace(valid_response, headers=parent),
    ):
        with pytest.raises(PoisonMessage, match="printable"):
            parsing.parse_claim(message, OPTIONS)
        assert parsing.claim_for_unreadable(message, "why", OPTIONS) is None


def test_a_cancel_that_names_no_possible_task_is_refused() -> None:
    cancel = Message(MessageType.CANCEL, CancelBody(id="a\0b").to_bytes(), "m", "a", "someone")
    with pytest.raises(PoisonMessage, match="printable"):
        parsing.parse_cancel(cancel, OPTIONS)
