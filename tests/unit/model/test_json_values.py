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

from meshpoint.errors import NotJson
from meshpoint.model.json_values import MAX_DEPTH, JsonDict, JsonList, check_json, without_iterators
from meshpoint.model.typed import DoesNotFit, Typed

texts = st.text(st.characters(codec="utf-8"))
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
json_values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=20)

NOT_JSON = [object(), date(2026, 1, 1), b"bytes", {1, 2}, (1, 2), float("nan"), float("inf"), "\ud800", {1: "one"}]


@given(st.dictionaries(texts, json_values), st.lists(json_values))
def test_json_is_kept_as_it_is(mapping: dict[str, Any], sequence: list[Any]) -> None:
    assert json.loads(json.dumps(JsonDict(mapping).to_plain())) == mapping
    assert json.loads(json.dumps(JsonList(sequence))) == sequence
    assert copy.deepcopy(JsonDict(mapping)) == pickle.loads(pickle.dumps(JsonDict(mapping))) == mapping


@pytest.mark.parametrize("value", NOT_JSON, ids=lambda value: type(value).__name__)
def test_every_way_to_set_a_dicts_value_refuses_what_is_not_json(value: Any) -> None:
    flags = JsonDict({"kept": 1}, name="flags")
    ways: list[Callable[[], object]] = [
        lambda: flags.__setitem__("bad", value),
        lambda: flags.update({"fine": 2, "bad": value}),
        lambda: flags.update([("bad", value)]),
        lambda: flags.update(bad=value),
        lambda: flags.setdefault("bad", value),
        lambda: flags.__ior__({"bad": value}),
        lambda: JsonDict({"bad": value}, name="flags"),
    ]
    for way in ways:
        with pytest.raises(NotJson, match=r"flags\.bad"):
            way()
    assert flags == {"kept": 1}


@pytest.mark.parametrize("value", NOT_JSON, ids=lambda value: type(value).__name__)
def test_every_way_to_set_a_lists_value_refuses_what_is_not_json(value: Any) -> None:
    items = JsonList([1], name="items")
    ways: list[tuple[Callable[[], object], int]] = [
        (lambda: items.append(value), 1),
        (lambda: items.insert(0, value), 0),
        (lambda: items.extend([2, value]), 2),
        (lambda: items.__iadd__([value]), 1),
        (lambda: items.__setitem__(0, value), 0),
        (lambda: items.__setitem__(slice(0, 1), [value]), 0),
        (lambda: JsonList([value], name="items"), 0),
    ]
    for way, where in ways:
        with pytest.raises(NotJson, match=rf"items\[{where}\]"):
            way()
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


def test_a_key_that_is_not_a_string_is_refused_with_its_place() -> None:
    flags: Any = JsonDict({"deep": {}}, name="flags")
    with pytest.raises(NotJson, match=r"^flags\.deep: the key 1 is not a string"):
        flags["deep"].update({1: 2})


def test_what_is_set_is_copied() -> None:
    mine: dict[str, Any] = {"legs": [1]}
    flags: Any = JsonDict({"trip": mine})
    mine["legs"].append(object())
    assert flags == {"trip": {"legs": [1]}}


def test_a_plain_copy_is_plain_and_not_reached_by_later_changes() -> None:
    flags: Any = JsonDict({"trip": {"legs": [{}]}})
    plain: Any = flags.to_plain()
    flags["trip"]["legs"][0]["late"] = True
    assert plain == {"trip": {"legs": [{}]}}
    assert (type(plain["trip"]), type(plain["trip"]["legs"])) == (dict, list)


def test_subclasses_of_scalars_become_what_a_restore_would_give() -> None:
    class Colour(StrEnum):
        RED = "red"

    assert type(JsonDict({"colour": Colour.RED})["colour"]) is str


def test_repeated_elements_are_no_twins() -> None:
    rows: Any = JsonList([{}])
    rows *= 2
    rows[0]["x"] = 1
    assert rows == [{"x": 1}, {}]


def test_a_container_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(NotJson, match=f"flags: nested more than {MAX_DEPTH} deep"):
        JsonDict({"endless": endless}, name="flags")


def test_a_wrapped_container_may_be_set_inside_itself_as_a_copy() -> None:
    flags = JsonDict({"a": 1})
    flags["before"] = flags
    assert flags == {"a": 1, "before": {"a": 1}}


def test_a_checked_value_is_a_plain_copy() -> None:
    assert check_json([{"a": 1}], "status") == [{"a": 1}]
    with pytest.raises(NotJson, match=r"^status\[0\]\.a: object is not JSON"):
        check_json([{"a": object()}], "status")


def test_iterators_become_lists_at_any_depth() -> None:
    value = {"a": (each for each in (1, iter([2]))), "b": [map(str, [3])], "c": (zip([4], [5], strict=True),), "d": 6}
    assert without_iterators(value) == {"a": [1, [2]], "b": [["3"]], "c": ([(4, 5)],), "d": 6}


def test_what_contains_itself_is_left_to_the_serializer() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert without_iterators(endless) is endless


@pytest.mark.parametrize("declared", [Any, list[int], dict[str, Any]])
def test_an_iterator_without_an_end_does_not_fit(declared: Any) -> None:
    value = {"numbers": count()} if declared == dict[str, Any] else count()
    with pytest.raises(NotJson, match="more than 100000 values"):
        without_iterators(value)
    with pytest.raises(DoesNotFit, match="more than 100000 values"):
        Typed(declared, "result").write(value)
