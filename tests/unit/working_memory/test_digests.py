"""The digest of a memory, equal only for equal content, and comparisons with it."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from meshpoint.errors import ConsistencyError
from meshpoint.model.memory import Item, Kind
from meshpoint.working_memory.digests import (
    EMPTY_FINGERPRINT,
    ConsistencyVerifier,
    item_digest,
    item_digests,
    memory_digest,
)

from .items import ITEMS

verifier = ConsistencyVerifier(item_digests(ITEMS))


def test_the_order_of_keys_does_not_matter() -> None:
    assert len({memory_digest(item_digests(order)) for order in permutations(ITEMS)}) == 1


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        (Kind.HASH, {b"a": b"1", b"b": b"2"}, {b"b": b"2", b"a": b"1"}),
        (Kind.ZSET, {b"a": 1.0, b"b": 2.0}, {b"b": 2.0, b"a": 1.0}),
        (Kind.SET, frozenset([b"a", b"b", b"c"]), frozenset([b"c", b"b", b"a"])),
    ],
)
def test_the_order_within_a_hash_or_set_does_not_matter(
    kind: Kind, one: object, other: object
) -> None:
    assert item_digest(Item("k", kind, one)) == item_digest(Item("k", kind, other))  # type: ignore[arg-type]  # wrong on purpose


DIFFERENT = [
    Item("k", Kind.STRING, b"a"),
    Item("k2", Kind.STRING, b"a"),
    Item("k", Kind.STRING, b"b"),
    Item("k", Kind.STRING, b""),
    Item("k", Kind.LIST, (b"a",)),
    Item("k", Kind.SET, frozenset([b"a"])),
    Item("k", Kind.LIST, (b"a", b"b")),
    Item("k", Kind.LIST, (b"b", b"a")),
    Item("k", Kind.LIST, (b"ab",)),
    Item("k", Kind.LIST, (b"a", b"b", b"")),
    Item("k", Kind.SET, frozenset([b"a", b"b"])),
    Item("k", Kind.HASH, {b"a": b"b"}),
    Item("k", Kind.HASH, {b"a": b"b", b"c": b"d"}),
    Item("k", Kind.HASH, {b"a": b"d", b"c": b"b"}),
    Item("k", Kind.ZSET, {b"a": 1.0}),
    Item("k", Kind.ZSET, {b"a": 1.0000000000000002}),
    Item("k", Kind.ZSET, {b"a": float("inf")}),
    Item("ka", Kind.STRING, b""),
]


def test_every_other_difference_changes_the_digest() -> None:
    digests = {memory_digest(item_digests([item])) for item in DIFFERENT}
    assert len(digests) == len(DIFFERENT)
    assert EMPTY_FINGERPRINT not in digests


def test_the_expiry_of_a_key_does_not_change_the_digest() -> None:
    (item, *_) = ITEMS
    assert (
        item_digest(item)
        == item_digest(replace(item, expires_at=None))
        == item_digest(replace(item, expires_at=9))
    )


def test_the_digest_of_a_sample_is_stable() -> None:
    """Databases store digests: a changed algorithm would make every memory look modified."""
    assert memory_digest(item_digests(ITEMS)) == KNOWN
    assert EMPTY_FINGERPRINT.startswith("1:")


KNOWN = "1:acb4de630c9ad52a87cd53d9999e2a39f5e3255d44d0cd05f359c66ea084b277"


def test_an_identical_memory_passes() -> None:
    verifier.verify(iter(reversed(ITEMS)), "it")
    verifier.verify([replace(item, expires_at=None) for item in ITEMS], "it")


def test_each_difference_names_its_keys() -> None:
    changed = replace(ITEMS[1], content=(b"a",))
    with pytest.raises(ConsistencyError) as raised:
        verifier.verify([changed, *ITEMS[2:], Item("more", Kind.STRING, b"")], "the copy")
    error = raised.value
    assert (error.missing, error.extra, error.changed) == (("text",), ("more",), ("list",))
    assert (
        str(error)
        == "the copy differs from its digests; missing: 'text'; extra: 'more'; changed: 'list'"
    )


def test_a_duplicate_key_is_reported() -> None:
    with pytest.raises(ConsistencyError) as raised:
        verifier.verify([*ITEMS, ITEMS[1]], "it")
    assert raised.value.extra == ("list",)
