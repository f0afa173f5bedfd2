"""Answers are checked against the schema of their question, within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, TypeAdapter

from meshpoint.model import json_schema
from meshpoint.model.json_schema import find_mismatch


class Item(BaseModel):
    name: str
    count: int | None = None


class Decision(BaseModel, extra="forbid"):
    approved: bool
    items: list[Item] = []
    colour: Literal["red", "blue"] = "red"


@pytest.mark.parametrize(
    ("type_", "value", "expected"),
    [
        (Decision, {"approved": "yes"}, "approval.approved: should be a boolean"),
        (Decision, {}, "approval.approved: is missing"),
        (Decision, {"approved": True, "by": 1}, "approval.by: is unknown"),
        (Decision, {"approved": True, "items": 1}, "approval.items: should be an array"),
        (
            Decision,
            {"approved": True, "items": [{"name": "a"}, {"name": 1}]},
            "approval.items[1].name: should be a string",
        ),
        (
            Decision,
            {"approved": True, "items": [{"name": "a", "count": "b"}]},
            "approval.items[0].count: fits none of its types",
        ),
        (
            Decision,
            {"approved": True, "colour": "green"},
            "approval.colour: should be one of 'red', 'blue'",
        ),
        (Decision, {"approved": True, "items": [{"name": "a", "count": 2}]}, None),
        (int, 1.5, "approval: should be an integer"),
        (int, True, "approval: should be an integer"),
        (float, 1, None),
        (int | None, None, None),
    ],
)
def test_the_first_mismatch(type_: Any, value: Any, expected: str | None) -> None:
    schema = TypeAdapter(type_).json_schema()
    assert find_mismatch(schema, value, "approval") == expected


def test_a_schema_whose_alternatives_multiply() -> None:
    defs: dict[str, Any] = {
        f"d{level}": {"anyOf": 2 * [{"$ref": f"#/$defs/d{level + 1}"}]} for level in range(24)
    }
    defs["d24"] = {"type": "string"}
    counted = json_schema._Search(defs)
    counted.find({"$ref": "#/$defs/d0"}, 1, json_schema._MAX_DEPTH)
    # Each call takes a step. Without the limit, there would be 50 million.
    assert -100 < counted._steps_left <= 0


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"type": "string", "pattern": "^(a+)+$"},
        {"$ref": "#/nowhere"},
        {"anyOf": []},
        {"type": "unheard-of"},
        {"properties": {"a": True}},
    ],
)
def test_unknown_schemas_accept_everything(schema: dict[str, Any]) -> None:
    assert find_mismatch(schema, "a" * 40 + "b", "approval") is None


def test_a_deep_value() -> None:
    value: Any = 1
    for _ in range(900):
        value = [value]
    schema = {"type": "array", "items": {"$ref": "#/$defs/a"}}
    assert find_mismatch({**schema, "$defs": {"a": schema}}, value, "approval") is None


def test_the_path_of_a_mismatch_has_short_names() -> None:
    schema = TypeAdapter(dict[str, list[int]]).json_schema()
    problem = find_mismatch(schema, {"k" * 1_000_000: [1, "2"]}, "q")
    assert problem == f"q.{'k' * 99}…[1]: should be an integer"


class CountingList(list[Any]):
    """Counts the values that are read from it."""

    read = 0

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            self.read += 1
            yield each


def test_a_long_list_is_read_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_schema, "_MAX_STEPS", 50)
    values = CountingList(range(1000))
    assert find_mismatch(TypeAdapter(list[int]).json_schema(), values, "q") is None
    assert values.read <= 51
