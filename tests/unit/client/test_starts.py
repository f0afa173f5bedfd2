"""Requests for tasks that must not exist yet: what decides them, and what is remembered."""

from __future__ import annotations

import pytest

from meshpoint.client.starts import Start, Starts
from meshpoint.errors import MeshClosed, TaskExists
from meshpoint.model.bodies import ResponseBody, parse_body
from meshpoint.model.envelopes import encode_reply
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Ok

KEY = ("travel", "order-17")


def begin(starts: Starts, key: tuple[str, str] = KEY, *, is_attached: bool = False) -> Start:
    start = starts.begin(key, is_known=False, is_attached=is_attached)
    start.fingerprint = f"fingerprint of {key[1]}"
    return start


def refusal(fingerprint: str) -> ResponseBody:
    outcome = Failed(FailureKind.INVALID, "the id is in use")
    return parse_body(
        ResponseBody,
        encode_reply(
            TaskId("order-17"), None, outcome, refused_fingerprint=fingerprint, id_in_use=True
        ),
    )


RESULT = parse_body(ResponseBody, encode_reply(TaskId("order-17"), None, Ok("by train")))


async def test_only_its_own_token_accepts_a_request() -> None:
    starts = Starts()
    start = begin(starts)
    starts.accept(KEY, "of another request")
    assert not start.decided.done()
    for _ in range(2):
        starts.accept(KEY, start.token)
        assert start.decided.done()


async def test_a_second_request_in_progress_does_not_change_the_token_of_the_first() -> None:
    starts = Starts()
    first = begin(starts)
    with pytest.raises(TaskExists):
        begin(starts)
    starts.end(KEY, in_doubt=True)
    repeated = begin(starts)
    assert (repeated.token, repeated.was_in_doubt) == (first.token, True)


async def test_the_tokens_of_the_last_thousand_requests_in_doubt_are_kept() -> None:
    starts = Starts()
    tokens = list[str]()
    for number in range(1_001):
        key = "travel", str(number)
        tokens.append(begin(starts, key).token)
        starts.end(key, in_doubt=True)
    assert begin(starts, ("travel", "1")).token == tokens[1]
    assert begin(starts, ("travel", "0")).token != tokens[0]


async def test_an_outcome_does_not_decide_for_a_connection_that_has_attached() -> None:
    """It may be the outcome of the task that was there before."""
    for is_attached in (True, False):
        start = begin(starts := Starts(), is_attached=is_attached)
        assert not starts.handle_response(KEY, RESULT)
        assert start.decided.done() is not is_attached


async def test_a_refusal_decides_only_the_request_that_it_names() -> None:
    starts = Starts()
    start = begin(starts)
    assert starts.handle_response(KEY, refusal("fingerprint of another"))
    assert not start.decided.done()
    for _ in range(2):
        assert starts.handle_response(KEY, refusal(start.fingerprint))
    assert isinstance(start.decided.exception(), TaskExists)


async def test_a_refusal_of_a_plain_request_is_its_outcome() -> None:
    assert not Starts().handle_response(KEY, refusal("any"))


async def test_a_close_ends_only_requests_without_a_decision() -> None:
    starts = Starts()
    accepted, waiting = begin(starts), begin(starts, ("travel", "order-18"))
    starts.accept(KEY, accepted.token)
    starts.close(MeshClosed("closed"))
    assert accepted.decided.exception() is None
    assert isinstance(waiting.decided.exception(), MeshClosed)
