"""Input digests of a subtask: equal exactly for equal values, in every process."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, SecretStr

from meshpoint.errors import SubtaskRefused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.ids import TaskId
from meshpoint.model.json_values import MAX_DEPTH, check_json
from meshpoint.subtasks.inputs import describe_difference, input_digests


def of(value: object) -> str:
    """The digest of one argument."""
    return input_digests("x", lambda value: None, (value,), {})["value"]


class HttpClient:
    """An argument that is not data, so it does not count."""


class Trip(BaseModel):
    to: str
    days: int = 1


class Other(BaseModel):
    to: str
    days: int = 1


@dataclass
class Leg:
    start: str
    trip: Trip | None = None


class Size(IntEnum):
    ONE = 1


class Word(StrEnum):
    ONE = "one"


class Client(Enum):
    HTTP = HttpClient()
    FTP = object()


def step(filing: str, year: int = 2024, *notes: str, deep: bool = False, **more: int) -> None: ...


def given_(*args: Any, **kwargs: Any) -> dict[str, str]:
    return input_digests("x", step, args, kwargs)


def test_position_name_default_and_partial_are_one_spelling() -> None:
    spelled = given_("10-K", 2024)
    assert spelled == given_("10-K") == given_(year=2024, filing="10-K") == given_("10-K", deep=False)
    assert spelled == input_digests("x", functools.partial(step, "10-K"), (), {"year": 2024})
    assert spelled == input_digests("x", functools.partial(functools.partial(step, year=2024), filing="10-K"), (), {})
    assert set(spelled) == {"filing", "year", "deep"}


def test_each_further_argument_has_a_digest_of_its_own() -> None:
    found = given_("10-K", 2024, "a", "b", c=1)
    assert set(found) == {"filing", "year", "notes[0]", "notes[1]", "deep", "c"}


def test_a_keyword_called_like_a_positional_parameter_does_not_hide_it() -> None:
    def both(a: int, /, **more: int) -> None: ...

    assert input_digests("x", both, (1,), {"a": 2}) != input_digests("x", both, (3,), {"a": 2})
    assert input_digests("x", both, (1,), {"a": 2}) != input_digests("x", both, (1,), {"a": 3})


def test_the_task_itself_and_self_are_no_inputs() -> None:
    class Analyst:
        def parse(self, ctx: TaskExecutionContext, filing: str) -> None: ...

    ctx = TaskExecutionContext(TaskId("t-1"))
    assert set(input_digests("x", Analyst().parse, (ctx, "10-K"), {})) == {"filing"}
    assert set(input_digests("x", Analyst().parse, (), {"ctx": ctx, "filing": "10-K"})) == {"filing"}


def test_functions_without_a_signature_of_their_own_are_digested_by_place() -> None:
    def with_session(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function("session", *args, **kwargs)

        return wrapper

    @with_session
    def load(session: str, row: int) -> None: ...

    assert set(input_digests("x", load, (1,), {})) == {"args[0]"}
    assert input_digests("x", max, (1, 2), {}) == {"args[0]": of(1), "args[1]": of(2)}


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (HttpClient(), "'value' is a HttpClient"),
        (len, "'value' is a builtin_function_or_method"),
        ((n for n in ()), "'value' is a generator"),
        ({"a": [1, HttpClient()]}, r"\"value\['a'\]\[1\]\" is a HttpClient"),
        (Leg("Oslo", HttpClient()), "'value.trip' is a HttpClient"),  # type: ignore[arg-type]
        ({HttpClient(): 1}, "'value{…}' is a HttpClient"),
        (float("nan"), "'value' is nan"),
        ([1.0, float("-inf")], r"'value\[1\]' is -inf"),
        (Trip, "'value' is a ModelMetaclass"),
    ],
)
def test_an_argument_that_is_no_data_is_refused_by_its_place(value: object, what: str) -> None:
    with pytest.raises(SubtaskRefused, match=f"subtask 'x': argument {what}, which has no canonical form; pass data"):
        input_digests("x", lambda value: None, (value,), {})


def test_what_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(SubtaskRefused, match="nested more than 100 deep"):
        of(endless)


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


def test_what_a_deliverable_may_hold_an_argument_may_hold() -> None:
    assert of(check_json(nested(MAX_DEPTH), "value"))
    with pytest.raises(SubtaskRefused, match="nested more than 100 deep"):
        of(nested(MAX_DEPTH + 1))


def test_a_partial_may_not_bring_what_is_no_data() -> None:
    with pytest.raises(SubtaskRefused, match="argument 'filing' is a HttpClient"):
        input_digests("x", functools.partial(step, HttpClient()), (), {})


def test_a_default_that_is_no_data_is_left_out() -> None:
    def fetch(url: str, client: HttpClient = HttpClient()) -> None: ...  # noqa: B008

    assert set(input_digests("x", fetch, ("u",), {})) == {"url"}
    with pytest.raises(SubtaskRefused, match="argument 'client'"):
        input_digests("x", fetch, ("u", HttpClient()), {})


def test_a_closure_counts_as_far_as_it_is_data() -> None:
    def make(factor: int, client: HttpClient) -> Callable[[], object]:
        def inner() -> object:
            return factor, client, later, make

        if factor > 100:
            later = 1  # never assigned, so an empty cell
        return inner

    one, two = make(1, HttpClient()), make(2, HttpClient())
    assert set(input_digests("x", one, (), {})) == {"closure.factor"}
    assert (
        input_digests("x", one, (), {})
        == input_digests("x", make(1, HttpClient()), (), {})
        != input_digests("x", two, (), {})
    )
    assert input_digests("x", functools.partial(one), (), {}) == input_digests("x", one, (), {})


DIFFERENT: list[Any] = [
    None, True, False, 0, 1, 2**70, -(2**70), 1.0, 1.5, "", "1", "None", "one", b"", b"1", "MQ==", [], {}, set(), [1],
    [[1]], ["1"], {1}, {"1"}, {1: 2}, {"1": 2}, [["1", 2]], {"dict": []}, ["dict"], ["list", 1], Decimal("1"),
    Decimal("1.0"), UUID(int=1), str(UUID(int=1)), date(2024, 1, 1), "2024-01-01", datetime(2024, 1, 1, tzinfo=UTC),
    datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=1))), timedelta(1), timedelta(2), Path("a"), "a",
    Size.ONE, Word.ONE, Client.HTTP, Client.FTP, Trip(to="a"), Trip(to="b"), Other(to="a"), {"to": "a", "days": 1},
    Leg("a"), Leg("a", Trip(to="a")), SecretStr("a"), SecretStr("b"), "\ud800",
]  # fmt: skip


def test_values_that_differ_have_digests_that_differ() -> None:
    assert len({of(value) for value in DIFFERENT}) == len(DIFFERENT)


def test_a_list_is_a_tuple_and_a_dict_has_no_order() -> None:
    assert of([1, [2]]) == of((1, (2,)))
    assert of({"a": 1, "b": 2}) == of({"b": 2, "a": 1}) == of(MappingProxyType({"b": 2, "a": 1}))
    assert of({3, 1, 2}) == of(frozenset([2, 3, 1]))
    assert of(bytearray(b"1")) == of(b"1") == of(memoryview(b"1"))


def test_a_model_counts_by_its_fields() -> None:
    class Row(BaseModel, extra="allow", arbitrary_types_allowed=True):
        name: str
        client: HttpClient | None = Field(default=None, exclude=True)

    assert of(Row(name="a")) == of(Row(name="a", client=HttpClient()))
    assert of(Row(name="a")) != of(Row(name="a", more=1))  # type: ignore[call-arg]
    assert of(Row(name="a", more=1)) != of(Row(name="a", more=2))  # type: ignore[call-arg]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, JSON)
def test_json_values_have_one_digest_exactly_if_they_have_one_canonical_text(a: Any, b: Any) -> None:
    def text(value: Any) -> str:
        return json.dumps(value, sort_keys=True)

    assert (of(a) == of(b)) == (text(a) == text(b))
    assert of(a) == of(json.loads(text(a)))


def test_another_process_with_other_hashes_finds_the_same_digests() -> None:
    script = (
        "from meshpoint.subtasks.inputs import input_digests\n"
        "words = set('abcdefghij') | {('x', frozenset('yz')), b'1', 1, None}\n"
        "print(input_digests('x', lambda a, b: None, (words, {'k': words}), {}))"
    )

    def found(seed: str) -> str:
        env = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env
        ).stdout

    words = {*"abcdefghij", ("x", frozenset("yz")), b"1", 1, None}
    assert found("1") == f"{input_digests('x', lambda a, b: None, (words, {'k': words}), {})}\n"


def test_the_digests_of_this_release_stay() -> None:
    # Checkpoints store these digests: a change would make every resumed operation start over.
    assert of({"to": "Oslo", "days": [1, 2.5, None], "on": date(2024, 1, 1)}) == "1da4f125085ec370cd4958cde92dca18"


@pytest.mark.parametrize(
    ("recorded", "now", "told"),
    [
        ({"a": "1"}, {"a": "1"}, None),
        ({}, {}, None),
        ({"trip": "1"}, {"trip": "2"}, "input 'trip' differs"),
        ({"a": "1", "b": "1"}, {"a": "2", "b": "2"}, "inputs 'a' and 'b' differ"),
        ({"a": "1", "b": "1", "c": "1"}, {"a": "2", "b": "2", "c": "2"}, "inputs 'a', 'b' and 'c' differ"),
        ({}, {"c": "1"}, "input 'c' is new"),
        ({"d": "1"}, {}, "input 'd' is gone"),
        (
            {"a": "1", "d": "1", "e": "1"},
            {"a": "2", "c": "1"},
            "input 'a' differs; input 'c' is new; inputs 'd' and 'e' are gone",
        ),
    ],
)
def test_a_difference_is_told_by_name(recorded: dict[str, str], now: dict[str, str], told: str | None) -> None:
    assert describe_difference(recorded, now) == told
