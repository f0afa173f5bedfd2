"""Outcomes of peer calls."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
from pydantic import JsonValue

from meshpoint.model.bodies import ResponseBody, parse_body
from meshpoint.model.envelopes import encode_reply
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import (
    Failed,
    FailureKind,
    Ok,
    Outcome,
    decode_outcome,
    encode_outcome,
)
from meshpoint.model.usage import Tokens, TokenUsage

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_result_without_usage_is_like_one_with_an_empty_usage() -> None:
    result = Ok.without_usage("text", ({"id": 1},))
    assert result == Ok("text", ({"id": 1},), TokenUsage())
    assert repr(Ok.without_usage(1)) == repr(Ok(1))
    for copied in (copy.deepcopy(Ok.without_usage(1)), pickle.loads(pickle.dumps(Ok(1)))):
        assert copied == Ok(1)
    assert replace(Ok.without_usage(1), value=2) == Ok(2)


def test_each_result_has_a_usage_of_its_own() -> None:
    one, other = Ok.without_usage(1), Ok.without_usage(1)
    one.usage.record(Tokens(input=1), model="model")
    assert one.usage.total == Tokens(input=1)
    assert other.usage.is_empty


def test_a_result_has_no_other_attributes() -> None:
    with pytest.raises(AttributeError, match="'Ok' object has no attribute 'text'"):
        Ok(1).text  # type: ignore[attr-defined]  # noqa: B018  # read for the error


@pytest.mark.parametrize("outcome", [Ok(1), Failed(FailureKind.ERROR, "no")])
def test_a_stored_outcome_keeps_its_trace_context(outcome: Outcome) -> None:
    traced = replace(outcome, traceparent=TRACEPARENT)
    assert decode_outcome(encode_outcome(traced)).traceparent == TRACEPARENT
    assert decode_outcome(encode_outcome(outcome)).traceparent is None
    assert b"traceparent" not in encode_outcome(outcome)
    assert traced == outcome


@pytest.mark.parametrize("outcome", [Ok(1), Failed(FailureKind.ERROR, "no")])
def test_a_response_carries_a_trace_context(outcome: Outcome) -> None:
    encoded = encode_reply(TaskId("t"), None, outcome, traceparent=TRACEPARENT)
    assert parse_body(ResponseBody, encoded).outcome().traceparent == TRACEPARENT


@pytest.mark.parametrize("value", ["x" * 56, "00-\n", "", 7, None, ["00"]])
def test_an_invalid_trace_context_is_dropped(value: JsonValue) -> None:
    encoded = encode_reply(TaskId("t"), None, Ok(1), traceparent="00")
    body = parse_body(ResponseBody, encoded)
    body.task.metadata["traceparent"] = value
    assert body.outcome().traceparent is None
