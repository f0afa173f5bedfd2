"""Comparison of stored contents with the expected ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshpoint.errors import ConsistencyError
from meshpoint.model.memory import Item, Kind
from meshpoint.working_memory.digests import item_digests
from meshpoint.working_memory.verifier import ConsistencyVerifier

from .items import ITEMS

verifier = ConsistencyVerifier(item_digests(ITEMS))


def test_exactly_what_was_kept_passes() -> None:
    verifier.verify(iter(reversed(ITEMS)), "it")
    verifier.verify([replace(item, expires_at=None) for item in ITEMS], "it")


def test_each_difference_names_its_keys() -> None:
    changed = replace(ITEMS[1], content=(b"a",))
    with pytest.raises(ConsistencyError) as raised:
        verifier.verify([changed, *ITEMS[2:], Item("more", Kind.STRING, b"")], "the copy")
    error = raised.value
    assert (error.missing, error.extra, error.changed) == (("text",), ("more",), ("list",))
    assert str(error) == "the copy differs from its digests; missing: 'text'; extra: 'more'; changed: 'list'"


def test_a_key_that_comes_twice_is_one_too_many() -> None:
    with pytest.raises(ConsistencyError) as raised:
        verifier.verify([*ITEMS, ITEMS[1]], "it")
    assert raised.value.extra == ("list",)
