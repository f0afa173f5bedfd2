"""Outcomes of peer calls."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest

from meshpoint.model.outcomes import Ok
from meshpoint.model.usage import Tokens, TokenUsage


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
