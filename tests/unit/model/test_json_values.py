"""Containers that accept JSON values only."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from datetime import date
from enum import StrEnum
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from json_strategies import json_values, texts
from meshpoint.errors import NotJson
from meshpoint.model.declared_type import DeclaredType, TypeMismatch
from meshpoint.model.json_values import (
    MAX_DEPTH,
    JsonDict,
    JsonList,
    call_digest,
    check_json,
    copy_containers,
    differing_field,
    json_digest,
)

NOT_JSON = [
    object(),
    date(2026, 1, 1),
    b"bytes",
    {1, 2},
    (1, 2),
    float("nan"),
    float("inf"),
    "\ud800",
    {1: "one"},
]


@given(st.dictionaries(texts, json_values), st.lists(json_values))
def test_json_is_stored_unchanged(mapping: dict[str, Any], sequence: list[Any]) -> None:
    assert json.loads(json.dumps(JsonDict(mapping).to_plain())) == mapping
    assert json.loads(json.dumps(JsonList(sequence))) == sequence
    assert (
        copy.deepcopy(JsonDict(mapping))
        == pickle.loads(pickle.dumps(JsonDict(mapping)))
        == mapping
    )


@pytest.mark.parametrize("value", NOT_JSON, ids=lambda value: type(value).__name__)
def test_every_dict_mutation_refuses_non_json(value: Any) -> None:
    flags = JsonDict({"kept": 1}, name="flags")
    operations: list[Callable[[], object]] = [
        lambda: flags.__setitem__("bad", value),
        lambda: flags.update({"fine": 2, "bad": value}),
        lambda: flags.update([("bad", value)]),
        lambda: flags.update(bad=value),
        lambda: flags.setdefault("bad", value),
        lambda: flags.__ior__({"bad": value}),
        lambda: JsonDict({"bad": value}, name="flags"),
    ]
    for operation in operations:
        with pytest.raises(NotJson, match=r"flags\.bad"):
            operation()
    assert flags == {"kept": 1}


@pytest.mark.parametrize("value", NOT_JSON, ids=lambda value: type(value).__name__)
def test_every_list_mutation_refuses_non_json(value: Any) -> None:
    items = JsonList([1], name="items")
    operations: list[tuple[Callable[[], object], int]] = [
        (lambda: items.append(value), 1),
        (lambda: items.insert(0, value), 0),
        (lambda: items.extend([2, value]), 2),
        (lambda: items.__iadd__([value]), 1),
        (lambda: items.__setitem__(0, value), 0),
        (lambda: items.__setitem__(slice(0, 1), [value]), 0),
        (lambda: JsonList([value], name="items"), 0),
    ]
    for operation, index in operations:
        with pytest.raises(NotJson, match=rf"items\[{index}\]"):
            operation()
    assert items == [1]


def test_a_change_deep_inside_is_refused_with_its_full_path() -> None:
    flags: Any = JsonDict({"trip": {"legs": [{"from": "HAM"}]}}, name="flags")
    legs: Any = flags["trip"]["legs"]
    with pytest.raises(NotJson, match=r"^flags\.trip\.legs\[0\]\.when: date is not JSON"):
        legs[0]["when"] = date(2026, 1, 1)
    legs.insert(0, {"from": "BER"})
    with pytest.raises(NotJson, match=r"^flags\.trip\.legs\[1\]\.when"):
        legs[1]["when"] = date(2026, 1, 1)
    with pytest.raises(NotJson, match=r"^flags\.trip\.plan\.days\[1\]"):
        flags["trip"]["plan"] = {"days": [1, object()]}


def test_a_key_that_is_not_a_string_is_refused_with_its_path() -> None:
    flags: Any = JsonDict({"deep": {}}, name="flags")
    with pytest.raises(NotJson, match=r"^flags\.deep: the key 1 is not a string"):
        flags["deep"].update({1: 2})


def test_a_value_is_copied_when_set() -> None:
    source: dict[str, Any] = {"legs": [1]}
    flags: Any = JsonDict({"trip": source})
    source["legs"].append(object())
    assert flags == {"trip": {"legs": [1]}}


def test_a_plain_copy_is_plain_and_independent() -> None:
    flags: Any = JsonDict({"trip": {"legs": [{}]}})
    plain: Any = flags.to_plain()
    flags["trip"]["legs"][0]["late"] = True
    assert plain == {"trip": {"legs": [{}]}}
    assert (type(plain["trip"]), type(plain["trip"]["legs"])) == (dict, list)


def test_subclasses_of_scalars_become_plain_scalars() -> None:
    class Colour(StrEnum):
        RED = "red"

    assert type(JsonDict({"colour": Colour.RED})["colour"]) is str


def test_repeated_elements_become_separate_copies() -> None:
    rows: Any = JsonList([{}])
    rows *= 2
    rows[0]["x"] = 1
    assert rows == [{"x": 1}, {}]


def test_a_container_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(NotJson, match=f"flags: nested more than {MAX_DEPTH} deep"):
        JsonDict({"endless": endless}, name="flags")


def test_a_container_set_inside_itself_is_copied() -> None:
    flags = JsonDict({"a": 1})
    flags["before"] = flags
    assert flags == {"a": 1, "before": {"a": 1}}


def test_a_validated_value_is_a_plain_copy() -> None:
    assert check_json([{"a": 1}], "status") == [{"a": 1}]
    with pytest.raises(NotJson, match=r"^status\[0\]\.a: object is not JSON"):
        check_json([{"a": object()}], "status")


def test_iterators_become_lists_at_any_depth() -> None:
    value = {
        "a": (item for item in (1, iter([2]))),
        "b": [map(str, [3])],
        "c": (zip([4], [5], strict=True),),
        "d": 6,
    }
    assert copy_containers(value) == {"a": [1, [2]], "b": [["3"]], "c": ([(4, 5)],), "d": 6}


def test_a_self_containing_value_is_left_to_the_serializer() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert copy_containers(endless) is endless


@pytest.mark.parametrize("declared", [Any, list[int], dict[str, Any]])
def test_an_endless_iterator_is_refused(declared: Any) -> None:
    value = {"numbers": count()} if declared == dict[str, Any] else count()
    with pytest.raises(NotJson, match="more than 100000 values"):
        copy_containers(value)
    with pytest.raises(TypeMismatch, match="more than 100000 values"):
        DeclaredType(declared, "result").write(value)


@pytest.mark.parametrize(
    ("one", "other", "field"),
    [
        ({"city": "Rome"}, {"city": "Oslo"}, "city"),
        ({"a": 1, "to": {"city": "Rome"}}, {"a": 1, "to": {"city": "Oslo"}}, "to.city"),
        ({"a": 1}, {"a": 1, "b": 2}, "b"),
        ({"a": 1, "b": 2}, {"a": 1}, "b"),
        ({"a": [1]}, {"a": [2]}, "a"),
        ({"a": {"b": 1}}, {"a": None}, "a"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, None),
        ("Rome", "Oslo", None),
        ([1], [2], None),
    ],
)
def test_the_first_field_that_differs(one: JsonValue, other: JsonValue, field: str | None) -> None:
    assert differing_field(one, other) == field


@given(texts, json_values | st.integers() | texts)
def test_the_digest_of_a_call_is_that_of_its_peer_and_input(peer: str, call_input: Any) -> None:
    assert call_digest(peer, call_input) == json_digest([peer, call_input])


def test_equal_inputs_of_other_types_have_digests_of_their_own() -> None:
    inputs: list[JsonValue] = [1, True, 1.0, "1", "1" * 101]
    for _ in range(2):  # the digests of some inputs are remembered
        digests = [call_digest("flights", each) for each in inputs]
        assert digests == [json_digest(["flights", each]) for each in inputs]
        assert len(set(digests)) == len(inputs)
