"""Ids that a database rejects are refused on arrival, because one would fail a whole batch."""

from dataclasses import replace

import pytest

from meshpoint.engine import receive
from meshpoint.errors import PoisonMessage
from meshpoint.model.bodies import A2AMessage, CancelBody, Part, RequestBody, response_body
from meshpoint.model.messages import Header, Message, MessageType
from meshpoint.model.options import Options
from meshpoint.model.outcomes import Ok

BAD = ["a\0b", "a\nb", "\ud800", "x" * 281]
OPTIONS = Options()


def a_request() -> Message:
    said = A2AMessage(message_id="m", role="ROLE_USER", parts=[Part(data=1)])
    return Message(MessageType.REQUEST, RequestBody(message=said).to_bytes(), "m", "task", "someone")


def a_response() -> Message:
    body = response_body("call", None, Ok(1)).to_bytes()
    return Message(MessageType.RESPONSE, body, "m", "call", "peer", headers={Header.PARENT_TASK.value: "task"})


def test_good_names_pass() -> None:
    assert receive.request(a_request(), OPTIONS).task_id == "task"
    assert receive.claim(a_response(), OPTIONS).sub_task_id == "call"


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_name_is_refused_wherever_it_stands(bad: str) -> None:
    asked, answered = a_request(), a_response()
    parent = {Header.PARENT_TASK.value: bad}
    for message in (replace(asked, correlation_id=bad), replace(asked, app_id=bad), replace(asked, headers=parent)):
        with pytest.raises(PoisonMessage, match="printable"):
            receive.request(message, OPTIONS)
    for message in (replace(answered, correlation_id=bad), replace(answered, headers=parent)):
        with pytest.raises(PoisonMessage, match="printable"):
            receive.claim(message, OPTIONS)
        assert receive.unreadable_claim(message, "why", OPTIONS) is None


def test_a_cancel_that_names_no_possible_task_is_refused() -> None:
    cancel = Message(MessageType.CANCEL, CancelBody(id="a\0b").to_bytes(), "m", "a", "someone")
    with pytest.raises(PoisonMessage, match="printable"):
        receive.cancelled_task(cancel, OPTIONS)
