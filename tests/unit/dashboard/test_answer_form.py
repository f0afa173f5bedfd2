"""Forms from JSON schemas, and answers from posted forms."""

from __future__ import annotations

from datetime import date
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, TypeAdapter

from meshpoint.dashboard.answer_form import Input, make_input, read_answer, read_json
from meshpoint.errors import AnswerRefused


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Address(BaseModel):
    street: Annotated[str, Field(max_length=60)]
    number: int | None = None


class Everything(BaseModel):
    """A model with all kinds of fields."""

    approved: bool
    price: Annotated[float, Field(ge=0, le=1000, description="in EUR")]
    count: int = 3
    colour: Colour = Colour.RED
    kind: Literal["a", 2] = "a"
    reviewers: list[Literal["legal", "risk"]] = []
    lines: list[str] = []
    note: str | None = None
    day: date | None = None
    address: Address
    other: Address | None = None
    extra: dict[str, int] = {}
    either: int | str = 1


def schema_of(type_: Any) -> dict[str, Any]:
    return TypeAdapter(type_).json_schema()


def kinds_of(found: Input) -> dict[str, str]:
    return {each.name: each.kind for each in found.inputs}


def test_each_type_has_an_input_of_its_own() -> None:
    found = make_input(schema_of(Everything))
    assert kinds_of(found) == {
        "answer.approved": "yes_no",
        "answer.price": "number",
        "answer.count": "integer",
        "answer.colour": "choice",
        "answer.kind": "choice",
        "answer.reviewers": "choices",
        "answer.lines": "lines",
        "answer.note": "long",
        "answer.day": "date",
        "answer.address": "group",
        "answer.other": "group",
        "answer.extra": "json",
        "answer.either": "json",
    }
    price = found.inputs[1]
    assert (price.is_required, price.description) == (True, "in EUR")
    assert price.attributes == {"min": "0", "max": "1000", "step": "any"}
    assert found.inputs[3].choices == {'"red"': "red", '"blue"': "blue"}
    assert found.inputs[3].value == '"red"'
    assert kinds_of(found.inputs[9]) == {
        "answer.address.street": "text",
        "answer.address.number": "integer",
    }


def test_a_posted_form_is_an_answer_that_fits() -> None:
    schema = schema_of(Everything)
    form = {
        "answer.approved": ["false"],
        "answer.price": ["12.5"],
        "answer.count": [""],
        "answer.colour": ['"blue"'],
        "answer.kind": ["2"],
        "answer.reviewers": ['"legal"', '"risk"'],
        "answer.lines": ["one\r\n\r\ntwo"],
        "answer.note": [""],
        "answer.day": ["2026-11-27"],
        "answer.address.street": [""],
        "answer.extra": ['{"a": 1}'],
        "answer.either": ['"x"'],
        "answer.other.street": [""],
    }
    answer = read_answer(make_input(schema), form)
    assert isinstance(answer, dict)
    assert "other" not in answer
    read = Everything.model_validate(answer)
    assert (read.approved, read.price, read.count, read.kind) == (False, 12.5, 3, 2)
    assert (read.reviewers, read.lines, read.note) == (["legal", "risk"], ["one", "two"], None)
    assert read.address == Address(street="")


@pytest.mark.parametrize(
    ("type_", "text", "expected"),
    [
        (bool, "true", True),
        (int, "7", 7),
        (float, "7", 7.0),
        (str, " a ", " a "),
        (Literal["x", "y"], '"y"', "y"),
        (list[str], "a\nb", ["a", "b"]),
        (int | None, "", None),
        (None, "", None),
        (Any, "[1]", [1]),
    ],
    ids=str,
)
def test_an_answer_may_be_a_single_value(type_: Any, text: str, expected: object) -> None:
    assert read_answer(make_input(schema_of(type_)), {"answer": [text]}) == expected


@pytest.mark.parametrize(("type_", "text"), [(int, "x"), (float, ""), (bool, ""), (dict, "{")])
def test_an_unreadable_answer_is_refused(type_: Any, text: str) -> None:
    with pytest.raises(AnswerRefused):
        read_answer(make_input(schema_of(type_)), {"answer": [text]})


def test_a_refused_form_keeps_what_was_typed() -> None:
    found = make_input(schema_of(Everything), {"answer.price": ["many"], "answer.note": ["x"]})
    assert {each.name: each.value for each in found.inputs if each.value} == {
        "answer.price": "many",
        "answer.note": "x",
    }


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": ["string", "null"]},
        {"$ref": "#/$defs/missing"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": {"a": True}},
        {"type": "array", "items": {"$ref": "#/$defs/x"}},
        {"enum": []},
        {"anyOf": []},
    ],
    ids=str,
)
def test_an_odd_schema_still_has_a_form(schema: dict[str, Any]) -> None:
    assert make_input(schema).kind


def test_recursive_types_end_as_json() -> None:
    found = make_input(
        {
            "$ref": "#/$defs/n",
            "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}},
        }
    )
    depth = 0
    while found.inputs:
        found, depth = found.inputs[0], depth + 1
    assert (found.kind, depth) == ("json", 6)


def test_deep_json_is_refused() -> None:
    with pytest.raises(AnswerRefused, match="not JSON"):
        read_json("[" * 100_000)
