"""Bodies with a very large number of errors; pydantic needs a kilobyte for each."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from meshpoint.errors import PoisonMessage
from meshpoint.model.bodies import Body, RequestBody, ResponseBody, parse_body

_ERROR_COUNT = 20_000
_STATUS = {"state": "TASK_STATE_COMPLETED"}
_WRONG: dict[str, tuple[type[Body], object]] = {
    "parts": (RequestBody, {"message": {"role": "ROLE_USER", "parts": [1] * _ERROR_COUNT}}),
    "parts of a wrong type": (
        RequestBody,
        {"message": {"role": "ROLE_USER", "parts": [{"text": 1}] * _ERROR_COUNT}},
    ),
    "empty parts": (RequestBody, {"message": {"role": "ROLE_USER", "parts": [{}] * _ERROR_COUNT}}),
    "artifacts": (
        ResponseBody,
        {"task": {"id": "x", "status": _STATUS, "artifacts": [1] * _ERROR_COUNT}},
    ),
}


@pytest.mark.parametrize("name", _WRONG)
def test_only_the_first_error_of_a_body_is_reported(name: str) -> None:
    kind, body = _WRONG[name]
    with pytest.raises(PoisonMessage) as refused:
        parse_body(kind, json.dumps(body).encode())
    cause = refused.value.__cause__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() == 1


@pytest.mark.parametrize(
    "usage", [dict.fromkeys(map(str, range(_ERROR_COUNT)), 1), {"by_model": {"x" * 300_000: 1}}]
)
def test_usage_is_bounded(usage: object) -> None:
    task = {"id": "x", "status": _STATUS, "metadata": {"usage": usage}}
    read = parse_body(ResponseBody, json.dumps({"task": task}).encode())
    with pytest.raises(PoisonMessage, match="more than"):
        read.outcome()
