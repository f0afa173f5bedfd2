"""Envelopes open only with their key, in their place, unchanged."""

from __future__ import annotations

import pytest

from meshpoint.adapters import encryption
from meshpoint.adapters.encryption import KeyRing, RingKey, compress, expand, key_of, seq_of
from meshpoint.errors import KeyMissing

PLACE = ("table.column", "mesh/travel", "task-1")
OLD, NEW = RingKey(b"o" * 32), RingKey(b"n" * 32)


def a_ring(*keys: RingKey, scope: str = "store") -> KeyRing:
    return KeyRing(keys, setting="encryption_keys", scope=scope)


@pytest.mark.parametrize("content", [b"", b"x", b"\x02\x01", bytes(100_000)])
@pytest.mark.parametrize("seq", [0, 1, 127, 128, 2**40])
def test_an_envelope_opens_to_its_content(content: bytes, seq: int) -> None:
    envelope = a_ring(OLD).seal(content, PLACE, seq)
    ring = a_ring(NEW, OLD)
    assert ring.open(envelope, PLACE) == content
    assert seq_of(envelope) == seq
    assert key_of(envelope) == key_of(encryption.to_text(envelope)) == a_ring(OLD).key_id()


def test_every_changed_byte_is_noticed() -> None:
    ring = a_ring(NEW)
    envelope = ring.seal(b"content", PLACE, 300)
    for at in range(2, len(envelope)):
        changed = bytearray(envelope)
        changed[at] ^= 1
        with pytest.raises((ValueError, KeyMissing)):
            ring.open(bytes(changed), PLACE)
        with pytest.raises((ValueError, KeyMissing)):
            ring.open(envelope[:at], PLACE)


@pytest.mark.parametrize(
    "place",
    [
        ("table.other", "mesh/travel", "task-1"),
        ("table.column", "mesh/hotels", "task-1"),
        ("table.column", "other/travel", "task-1"),
        ("table.column", "mesh/travel", "task-2"),
        ("table.column", "mesh/travel"),
        ("table.column", "mesh/travel\0task-1"),
    ],
)
def test_an_envelope_opens_nowhere_else(place: tuple[str, ...]) -> None:
    envelope = a_ring(NEW).seal(b"content", PLACE)
    with pytest.raises(ValueError, match="was changed, or belongs elsewhere"):
        a_ring(NEW).open(envelope, place)


def test_a_missing_key_is_named() -> None:
    envelope, id_ = a_ring(OLD).seal(b"content", PLACE), a_ring(OLD).key_id()
    with pytest.raises(KeyMissing, match=f"sealed with key {id_}, which encryption_keys does not"):
        a_ring(NEW).open(envelope, PLACE)


def test_scopes_and_tenants_have_other_keys() -> None:
    secret = b"k" * 32
    rings = [
        a_ring(RingKey(secret)),
        a_ring(RingKey(secret), scope="mesh"),
        a_ring(RingKey(secret, "acme")),
        a_ring(RingKey(secret, "umbrella")),
    ]
    assert len({ring.key_id() for ring in rings}) == len(rings)


def test_equal_contents_are_found_under_each_key() -> None:
    old, ring = a_ring(OLD), a_ring(NEW, OLD)
    assert old.seal_fixed(b"ACME", PLACE) == old.seal_fixed(b"ACME", PLACE)
    assert old.seal_fixed(b"ACME", PLACE) in ring.fixed_variants(b"ACME", PLACE).values()
    assert ring.open(old.seal_fixed(b"ACME", PLACE), PLACE) == b"ACME"
    assert old.seal_fixed(b"ACME", PLACE) != old.seal_fixed(b"ACME", ("elsewhere", "mesh/"))
    assert old.digest("ada", "user", "") in ring.digests("ada", "user")
    assert old.digest("ada", "user", "") != old.digest("ada", "session", "")


def test_random_envelopes_differ() -> None:
    ring = a_ring(NEW)
    assert ring.seal(b"same", PLACE) != ring.seal(b"same", PLACE)


def test_a_ring_that_only_opens_seals_nothing() -> None:
    ring = a_ring(RingKey(b""), OLD)
    assert ring.key_id() is None
    assert ring.key_ids == a_ring(OLD).key_ids
    assert ring.open(a_ring(OLD).seal(b"x", PLACE), PLACE) == b"x"


def test_each_agent_of_a_ring_has_its_own_newest_key() -> None:
    ring = a_ring(RingKey(b"a" * 32, agent="a"), RingKey(b"b" * 32, agent="b"))
    for agent in ("a", "b"):
        envelope = ring.seal(b"x", ("table.column", f"mesh/{agent}"))
        assert key_of(envelope) == ring.key_id(agent) == ring.key_id(f"mesh/{agent}")
    assert ring.key_id("a") != ring.key_id("b")


def test_decompression_is_bounded() -> None:
    packed = compress(bytes(10_000_000))
    assert len(packed) < 10_000
    with pytest.raises(ValueError, match="10000000 bytes; the limit is 1000"):
        expand(packed, 1000)


def test_long_texts_are_found_and_digested() -> None:
    ring, long = a_ring(NEW), "ä" * 100_000
    assert ring.seal_fixed(long.encode(), PLACE) == ring.seal_fixed(long.encode(), PLACE)
    assert ring.open(ring.seal_fixed(long.encode(), PLACE), PLACE) == long.encode()
    assert ring.digest(long, "user", "a") in ring.digests(long, "user")


def test_the_nonce_of_a_fixed_envelope_depends_on_where_its_place_ends() -> None:
    ring = a_ring(NEW)
    one = ring.seal_fixed(b"b", ("t.c", "a"))
    two = ring.seal_fixed(b"", ("t.c", "ab"))
    assert one[22:34] != two[22:34]


def test_digests_tell_all_texts_apart() -> None:
    texts = ["?", "\ud800", "\udc00"]
    assert len({a_ring(NEW).digest(text, "user", "a") for text in texts}) == len(texts)


@pytest.mark.parametrize("size", range(1, 51))
def test_a_truncated_envelope_is_damaged_and_misses_no_key(size: int) -> None:
    envelope = a_ring(NEW).seal(b"", PLACE)[:size]
    with pytest.raises(ValueError, match=r"was changed|is truncated"):
        a_ring(NEW).open(envelope, PLACE)


def test_an_endless_sequence_is_cut() -> None:
    envelope = a_ring(NEW).seal(b"x", PLACE)[:34] + b"\xff" * 1_000_000
    assert seq_of(envelope) < 2**70
    with pytest.raises(ValueError, match="was changed"):
        a_ring(NEW).open(envelope, PLACE)


def test_no_description_has_a_key() -> None:
    ring, keys = a_ring(NEW), [NEW, encryption._Key.derive(NEW.secret, "store", None)]
    described = repr([ring, keys, vars(ring)])
    assert "secret" not in described
    assert repr(NEW.secret) not in described


@pytest.mark.parametrize("text", ["sealed:", "sealed: bid", "sealed::", "sealed:sealed:x", "x"])
def test_a_clear_text_may_look_like_an_envelope(text: str) -> None:
    stored = encryption.escape_text(text)
    assert not encryption.is_text_envelope(stored)
    assert encryption.unescape_text(stored) == text
