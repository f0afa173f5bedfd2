"""Peers: inputs are checked when a call is made, outputs when they are read."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter
from typing_extensions import TypedDict

from meshpoint import (
    AgentMisbehaved,
    Call,
    ConfigurationError,
    Failed,
    FailureKind,
    Ok,
    Peer,
    Tokens,
    TokenUsage,
)


class Query(BaseModel):
    model_config = ConfigDict(strict=True)

    day: date = Field(alias="onDay")
    price: Decimal = Decimal(1)


@dataclass
class Box:
    sides: tuple[int, int]


class Named(TypedDict):
    name: str


STRICT = {"onDay": "2030-01-02", "price": "1.50"}


@pytest.mark.parametrize(
    ("declared", "value", "json"),
    [
        (Query, Query(onDay=date(2030, 1, 2), price=Decimal("1.50")), STRICT),
        (Box, Box((1, 2)), {"sides": [1, 2]}),
        (Named, {"name": "x"}, {"name": "x"}),
        (int, 7, 7),
        (list[Box], [Box((1, 2))], [{"sides": [1, 2]}]),
        (bytes, b"x", "x"),
        (frozenset[str], frozenset({"b", "a"}), ["a", "b"]),
        (TypeAdapter(int | None), None, None),
        (type(None), None, None),
    ],
)
def test_any_pydantic_type_round_trips_as_json(declared: Any, value: Any, json: JsonValue) -> None:
    peer = Peer("p", declared, declared)
    assert peer(value).input == json
    assert peer.read(Ok(json)) == Ok(value)


def test_a_call_is_unsent_and_carries_the_peers_limits() -> None:
    peer = Peer("p", int, str, timeout=timedelta(seconds=3), idle_timeout=timedelta(seconds=1))
    assert peer(1).as_call("id") == Call("id", "p", 1, timedelta(seconds=3), timedelta(seconds=1))


def test_changing_the_input_later_changes_nothing() -> None:
    value = {"a": [1]}
    call = Peer("p", dict[str, list[int]], str)(value)
    value["a"].append(2)
    assert call.input == {"a": [1]}


def test_an_invalid_input_error_names_the_peer_and_field() -> None:
    with pytest.raises(AgentMisbehaved, match="input for peer 'p': Named: name: Field required"):
        Peer("p", Named, str)({})  # type: ignore[typeddict-item]  # wrong on purpose
    mutated = Query(onDay=date(2030, 1, 2))
    mutated.price = "much"  # type: ignore[assignment]  # wrong on purpose
    with pytest.raises(AgentMisbehaved, match=r"input for peer 'p': Query: .*price"):
        Peer("p", Query, str)(mutated)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", object()])
def test_an_input_that_is_not_json_is_refused(value: Any) -> None:
    with pytest.raises(AgentMisbehaved, match="input for peer 'p'"):
        Peer("p", dict[str, Any], str)({"x": value})


def test_an_invalid_output_is_an_invalid_outcome_with_its_usage() -> None:
    usage = TokenUsage(total=Tokens(input=3))
    read = Peer("p", int, Box).read(Ok({"sides": [1, "x"]}, usage=usage))
    assert isinstance(read, Failed)
    assert (read.kind, read.usage) == (FailureKind.INVALID, usage)
    assert read.message.startswith("output of peer 'p': Box: sides.1: ")
    late = Failed(FailureKind.TIMEOUT)
    assert Peer("p", int, Box).read(late) is late


def test_an_invalid_peer_is_refused_with_a_fix() -> None:
    with pytest.raises(ConfigurationError, match=r"agent\.name"):
        Peer("a name", int, int)
    with pytest.raises(
        ConfigurationError, match="peer 'p': timeout is 0:00:00; give a positive duration"
    ):
        Peer("p", int, int, timeout=timedelta())
    with pytest.raises(ConfigurationError, match="peer 'p': idle_timeout"):
        Peer("p", int, int, idle_timeout=timedelta(seconds=-1))
    with pytest.raises(ConfigurationError, match="peer 'p', output: Event cannot become JSON"):
        Peer("p", int, asyncio.Event)


def test_the_repr_of_a_peer_shows_its_types() -> None:
    assert repr(Peer("p", list[int], Box)) == "Peer('p', list[int], Box)"
