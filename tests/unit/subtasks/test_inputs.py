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
from typing import Any, cast
from uuid import UUID

import pytest
from hypothesis import given
from pydantic import BaseModel, Field, SecretStr

from json_strategies import json_values
from meshpoint.errors import SubtaskRefused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.ids import TaskId
from meshpoint.model.json_values import MAX_DEPTH, check_json
from meshpoint.subtasks.inputs import input_digests


def digest_of(value: object) -> str:
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


def named_inputs(*args: Any, **kwargs: Any) -> dict[str, str]:
    return input_digests("x", step, args, kwargs)


def test_equivalent_ways_to_pass_an_argument_have_one_digest() -> None:
    spelled = named_inputs("10-K", 2024)
    assert (
        spelled
        == named_inputs("10-K")
        == named_inputs(year=2024, filing="10-K")
        == named_inputs("10-K", deep=False)
    )
    assert spelled == input_digests("x", functools.partial(step, "10-K"), (), {"year": 2024})
    assert spelled == input_digests(
        "x", functools.partial(functools.partial(step, year=2024), filing="10-K"), (), {}
    )
    assert set(spelled) == {"filing", "year", "deep"}


def test_each_variadic_argument_has_its_own_digest() -> None:
    found = named_inputs("10-K", 2024, "a", "b", c=1)
    assert set(found) == {"filing", "year", "notes[0]", "notes[1]", "deep", "c"}


def test_a_keyword_called_like_a_positional_parameter_does_not_hide_it() -> None:
    def both(a: int, /, **more: int) -> None: ...

    assert input_digests("x", both, (1,), {"a": 2}) != input_digests("x", both, (3,), {"a": 2})
    assert input_digests("x", both, (1,), {"a": 2}) != input_digests("x", both, (1,), {"a": 3})


def test_the_context_and_self_are_not_inputs() -> None:
    class Analyst:
        def parse(self, ctx: TaskExecutionContext, filing: str) -> None: ...

    ctx = TaskExecutionContext(TaskId("t-1"))
    assert set(input_digests("x", Analyst().parse, (ctx, "10-K"), {})) == {"filing"}
    assert set(input_digests("x", Analyst().parse, (), {"ctx": ctx, "filing": "10-K"})) == {
        "filing"
    }


def test_arguments_of_functions_without_a_signature_are_digested_by_position() -> None:
    def with_session(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function("session", *args, **kwargs)

        return wrapper

    @with_session
    def load(session: str, row: int) -> None: ...

    assert set(input_digests("x", load, (1,), {})) == {"args[0]"}
    assert input_digests("x", max, (1, 2), {}) == {
        "args[0]": digest_of(1),
        "args[1]": digest_of(2),
    }


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (HttpClient(), "'value' is a HttpClient"),
        (len, "'value' is a builtin_function_or_method"),
        ((n for n in ""), "'value' is a generator"),
        ({"a": [1, HttpClient()]}, r"\"value\['a'\]\[1\]\" is a HttpClient"),
        (Leg("Oslo", HttpClient()), "'value.trip' is a HttpClient"),  # type: ignore[arg-type]  # wrong on purpose
        ({HttpClient(): 1}, "'value{…}' is a HttpClient"),
        (float("nan"), "'value' is nan"),
        ([1.0, float("-inf")], r"'value\[1\]' is -inf"),
        (Trip, "'value' is a ModelMetaclass"),
    ],
)
def test_a_non_data_argument_is_refused_with_its_path(value: object, problem: str) -> None:
    with pytest.raises(
        SubtaskRefused,
        match=f"subtask 'x': argument {problem}, which has no canonical form; pass data",
    ):
        input_digests("x", lambda value: None, (value,), {})


def test_a_self_containing_argument_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(SubtaskRefused, match="nested more than 100 deep"):
        digest_of(endless)


def nested_list(depth: int) -> Any:
    return [nested_list(depth - 1)] if depth else 1


def test_any_value_allowed_in_a_deliverable_is_allowed_in_an_argument() -> None:
    assert digest_of(check_json(nested_list(MAX_DEPTH), "value"))
    with pytest.raises(SubtaskRefused, match="nested more than 100 deep"):
        digest_of(nested_list(MAX_DEPTH + 1))


def test_a_partial_cannot_bind_a_non_data_argument() -> None:
    with pytest.raises(SubtaskRefused, match="argument 'filing' is a HttpClient"):
        input_digests("x", functools.partial(step, cast(Any, HttpClient())), (), {})


def test_a_non_data_default_is_left_out() -> None:
    def fetch(url: str, client: HttpClient = HttpClient()) -> None: ...  # noqa: B008

    assert set(input_digests("x", fetch, ("u",), {})) == {"url"}
    with pytest.raises(SubtaskRefused, match="argument 'client'"):
        input_digests("x", fetch, ("u", HttpClient()), {})


def test_the_data_in_a_closure_is_part_of_the_digest() -> None:
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
    None, True, False, 0, 1, 2**70, -(2**70), 1.0, 1.5, "", "1", "None", "one", b"", b"1", "MQ==",
    [], {}, set(), [1], [[1]], ["1"], {1}, {"1"}, {1: 2}, {"1": 2}, [["1", 2]], {"dict": []},
    ["dict"], ["list", 1], Decimal("1"), Decimal("1.0"), UUID(int=1), str(UUID(int=1)),
    date(2024, 1, 1), "2024-01-01", datetime(2024, 1, 1, tzinfo=UTC),
    datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=1))), timedelta(1), timedelta(2),
    Path("a"), "a", Size.ONE, Word.ONE, Client.HTTP, Client.FTP, Trip(to="a"), Trip(to="b"),
    Other(to="a"), {"to": "a", "days": 1}, Leg("a"), Leg("a", Trip(to="a")),
    SecretStr("a"), SecretStr("b"), "\ud800",
]  # fmt: skip


def test_different_values_have_different_digests() -> None:
    assert len({digest_of(value) for value in DIFFERENT}) == len(DIFFERENT)


def test_lists_equal_tuples_and_the_order_of_a_dict_is_ignored() -> None:
    assert digest_of([1, [2]]) == digest_of((1, (2,)))
    assert (
        digest_of({"a": 1, "b": 2})
        == digest_of({"b": 2, "a": 1})
        == digest_of(MappingProxyType({"b": 2, "a": 1}))
    )
    assert digest_of({3, 1, 2}) == digest_of(frozenset([2, 3, 1]))
    assert digest_of(bytearray(b"1")) == digest_of(b"1") == digest_of(memoryview(b"1"))


def test_a_model_is_digested_by_its_fields() -> None:
    class Row(BaseModel, extra="allow", arbitrary_types_allowed=True):
        name: str
        client: HttpClient | None = Field(default=None, exclude=True)

    assert digest_of(Row(name="a")) == digest_of(Row(name="a", client=HttpClient()))
    assert digest_of(Row(name="a")) != digest_of(Row(name="a", more=1))  # type: ignore[call-arg]  # wrong on purpose
    assert digest_of(Row(name="a", more=1)) != digest_of(Row(name="a", more=2))  # type: ignore[call-arg]  # wrong on purpose


@given(json_values, json_values)
def test_json_values_share_a_digest_only_if_they_share_their_canonical_text(
    a: Any, b: Any
) -> None:
    def text(value: Any) -> str:
        return json.dumps(value, sort_keys=True)

    assert (digest_of(a) == digest_of(b)) == (text(a) == text(b))
    assert digest_of(a) == digest_of(json.loads(text(a)))


def test_digests_do_not_depend_on_the_hash_seed() -> None:
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

    results = {*"abcdefghij", ("x", frozenset("yz")), b"1", 1, None}
    assert (
        found("1") == f"{input_digests('x', lambda a, b: None, (results, {'k': results}), {})}\n"
    )


def test_the_digests_of_this_release_are_stable() -> None:
    # Checkpoints store these digests: a change would make every resumed operation start over.
    assert (
        digest_of({"to": "Oslo", "days": [1, 2.5, None], "on": date(2024, 1, 1)})
        == "1da4f125085ec370cd4958cde92dca18"
    )
