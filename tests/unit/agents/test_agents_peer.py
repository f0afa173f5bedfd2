"""Peers: inputs are checked when a call is made, outputs when they are read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter
from typing_extensions import TypedDict

from meshpoint import (
    FIRST,
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
    assert peer(value).as_call("c").input == json
    assert peer.read(Ok(json)) == Ok(value)


def test_a_call_is_unsent_and_carries_the_peers_limits() -> None:
    peer = Peer("p", int, str, timeout=timedelta(seconds=3), idle_timeout=timedelta(seconds=1))
    assert peer(1).as_call("id") == Call("id", "p", 1, timedelta(seconds=3), timedelta(seconds=1))


def test_changing_the_input_later_changes_nothing() -> None:
    value = {"a": [1]}
    call = Peer("p", dict[str, list[int]], str)(value)
    value["a"].append(2)
    assert call.as_call("c").input == {"a": [1]}


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


@pytest.mark.parametrize(
    ("duration", "problem"),
    [
        (
            86_400_000,
            "timeout: 86400000 s is 2.7 years; durations are in seconds: timedelta(days=1)",
        ),
        (10**400, "5.7e+300 years; durations are in seconds: timedelta(days=1)"),
        (float("inf"), "years; durations are in seconds: timedelta(days=1)"),
        (float("nan"), "timeout is not a number; durations are in seconds: timedelta(days=1)"),
        (True, "timeout must be a timedelta or a number of seconds, not bool; "),
        ("3", "timeout must be a timedelta or a number of seconds, not str; "),
        (-1, "timeout is -1; it must not be negative"),
        (0, "timeout is 0; give a positive duration, or leave it out"),
        (
            timedelta(days=9999),
            "timeout is 9999 days, 0:00:00; give a duration of at most ten years",
        ),
    ],
)
def test_a_duration_that_makes_no_sense_is_refused(duration: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(problem)):
        Peer("p", int, int, timeout=duration)
    if "give a" not in problem:
        with pytest.raises(
            AgentMisbehaved, match=re.escape(problem.replace("timeout", "a join deadline"))
        ):
            FIRST.within(duration)


def test_a_number_is_seconds() -> None:
    peer = Peer("p", int, int, timeout=90, idle_timeout=0.5)
    assert (peer.timeout, peer.idle_timeout) == (timedelta(minutes=1.5), timedelta(seconds=0.5))
    assert FIRST.within(2) == FIRST.within(timedelta(seconds=2))


def test_options_of_a_peer_change_in_a_copy() -> None:
    peer = Peer("p", int, str, timeout=9, idle_timeout=1, description="Counts.")
    patient = peer.with_options(timeout=60)
    assert (patient.timeout, patient.idle_timeout) == (timedelta(minutes=1), peer.idle_timeout)
    assert (patient.name, patient.description) == ("p", "Counts.")
    assert patient(1).as_call("c").timeout == timedelta(minutes=1)
    endless = peer.with_options(timeout=None, idle_timeout=None)
    assert (endless.timeout, endless.idle_timeout) == (None, None)
    assert peer.timeout == timedelta(seconds=9)
    with pytest.raises(ConfigurationError, match="peer 'p': idle_timeout is 0"):
        peer.with_options(idle_timeout=0)


def test_a_peer_has_the_schemas_of_its_types() -> None:
    peer = Peer("p", Query, Box)
    assert peer.input_schema["properties"]["onDay"] == {
        "format": "date",
        "title": "Onday",
        "type": "string",
    }
    assert peer.output_schema["properties"]["sides"]["type"] == "array"
    with pytest.raises(ConfigurationError, match="it has no JSON schema"):
        _ = Peer("p", TypeAdapter(Callable[[], int]), int).input_schema


def test_the_repr_of_a_peer_shows_its_types() -> None:
    assert repr(Peer("p", list[int], Box)) == "Peer('p', list[int], Box)"
