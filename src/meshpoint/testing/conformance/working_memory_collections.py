"""Commands on lists, hashes, sets and sorted sets."""

from __future__ import annotations

from math import copysign, inf

import pytest

from meshpoint.errors import MemoryRefused
from meshpoint.model.memory import Answer, Item, Kind
from meshpoint.testing.conformance.working_memory_values import (
    BINARY,
    Hand,
    WorkingMemoryCase,
    an_owner,
    contents,
    floats,
)

MANY = [b"%d" % number for number in range(100_000)]
"""More values than a Lua script in Redis can pass to one call."""
BOUNDS = [
    (0, -1),
    (0, 0),
    (1, 2),
    (-2, -1),
    (-100, 100),
    (3, 1),
    (4, 9),
    (-1, -2),
    (2, -2),
    (-100, -99),
    (9, 9),
]
"""Bounds for a range of four elements, including inverted ones and some out of range."""


def _within(bounds: tuple[int, int], values: list[bytes]) -> list[bytes]:
    """The values that Redis selects between `bounds`, computed independently of any adapter."""
    places = [place + len(values) if place < 0 else place for place in bounds]
    return [value for place, value in enumerate(values) if places[0] <= place <= places[1]]


def _paired(answer: Answer) -> dict[bytes, bytes]:
    assert isinstance(answer, list)
    return dict(zip(answer[::2], answer[1::2], strict=True))


def _unordered(answer: Answer) -> list[bytes]:
    assert isinstance(answer, list)
    return sorted(answer)


class CollectionSuite(WorkingMemoryCase):
    """Commands on lists, hashes, sets and sorted sets."""

    async def test_values_are_appended_in_order(self, do: Hand) -> None:
        assert await do("RPUSH", "k", b"a", b"b") == 2
        assert await do("RPUSH", "k", b"a", b"") == 4
        assert contents(await do.read_all()) == {"k": (b"a", b"b", b"a", b"")}

    async def test_each_value_is_put_in_front(self, do: Hand) -> None:
        assert await do("LPUSH", "k", b"a", b"b") == 2
        assert await do("LPUSH", "k", b"c") == 3
        assert await do("LRANGE", "k", b"0", b"-1") == [b"c", b"b", b"a"]

    async def test_list_is_popped_from_both_ends_until_gone(self, do: Hand) -> None:
        await do("RPUSH", "k", b"a", b"b", b"c")
        assert await do.all(("LPOP", "k"), ("RPOP", "k"), ("LLEN", "k"), ("LPOP", "k")) == [
            b"a",
            b"c",
            1,
            b"b",
        ]
        assert await do.all(("TYPE", "k"), ("LPOP", "k"), ("RPOP", "k")) == [b"none", None, None]
        assert await do.memory.keys(do.owner) == []

    @pytest.mark.parametrize("bounds", BOUNDS)
    async def test_range_and_trim(self, do: Hand, bounds: tuple[int, int]) -> None:
        values = [b"a", b"b", b"c", b"d"]
        await do("RPUSH", "k", *values)
        args = [b"%d" % bound for bound in bounds]
        assert await do.all(
            ("LRANGE", "k", *args), ("LTRIM", "k", *args), ("LRANGE", "k", b"0", b"-1")
        ) == [_within(bounds, values), b"OK", _within(bounds, values)]
        assert await do.memory.keys(do.owner) == (["k"] if _within(bounds, values) else [])

    async def test_an_element_by_its_place(self, do: Hand) -> None:
        await do("RPUSH", "k", b"a", b"b", b"c")
        places = {b"0": b"a", b"2": b"c", b"3": None, b"-1": b"c", b"-3": b"a", b"-4": None}
        assert await do.all(*(("LINDEX", "k", place) for place in places)) == list(places.values())

    async def test_a_place_that_is_no_whole_number_is_refused(self, do: Hand) -> None:
        await do("RPUSH", "k", b"a")
        for name, *args in (("LRANGE", b"0", b"x"), ("LTRIM", b"1.5", b"1"), ("LINDEX", b"")):
            with pytest.raises(MemoryRefused, match="'k'"):
                await do(name, "k", *args)
        assert contents(await do.read_all()) == {"k": (b"a",)}

    async def test_bytes_and_empty_values_in_a_list(self, do: Hand) -> None:
        await do("RPUSH", "k", BINARY, b"", BINARY)
        assert await do("LRANGE", "k", b"0", b"-1") == [BINARY, b"", BINARY]

    async def test_a_hundred_thousand_values_go_at_once(self, do: Hand) -> None:
        assert await do("RPUSH", "k", *MANY) == 100_000
        assert await do("LPUSH", "front", *MANY) == 100_000
        stored = contents(await do.read_all())
        assert stored == {"k": tuple(MANY), "front": tuple(reversed(MANY))}

    async def test_fields_are_set_and_new_ones_counted(self, do: Hand) -> None:
        assert await do("HSET", "k", b"f", b"1", b"g", b"2") == 2
        assert await do("HSET", "k", b"g", b"3", b"h", b"4", b"h", b"5") == 1
        assert contents(await do.read_all()) == {"k": {b"f": b"1", b"g": b"3", b"h": b"5"}}
        assert _paired(await do("HGETALL", "k")) == {b"f": b"1", b"g": b"3", b"h": b"5"}

    async def test_a_field_is_read(self, do: Hand) -> None:
        await do("HSET", "k", b"f", b"1")
        assert await do.all(("HGET", "k", b"f"), ("HGET", "k", b"g"), ("HEXISTS", "k", b"f")) == [
            b"1",
            None,
            1,
        ]
        assert await do.all(("HEXISTS", "k", b"g"), ("HLEN", "k"), ("HLEN", "none")) == [0, 1, 0]

    async def test_fields_are_deleted_until_the_hash_is_gone(self, do: Hand) -> None:
        await do("HSET", "k", b"f", b"1", b"g", b"2")
        assert await do.all(
            ("HDEL", "k", b"f", b"f", b"x"), ("HDEL", "k", b"g"), ("TYPE", "k")
        ) == [1, 1, b"none"]
        assert await do("HDEL", "k", b"g") == 0
        assert await do.memory.keys(do.owner) == []

    async def test_a_field_counts_from_nought(self, do: Hand) -> None:
        assert await do("HINCRBY", "k", b"f", b"5") == 5
        assert await do("HINCRBY", "k", b"f", b"-6") == -1
        assert await do("HGET", "k", b"f") == b"-1"

    async def test_bytes_and_empty_values_in_a_hash(self, do: Hand) -> None:
        await do("HSET", "k", BINARY, b"", b"", BINARY)
        assert _paired(await do("HGETALL", "k")) == {BINARY: b"", b"": BINARY}
        assert await do("HGET", "k", b"") == BINARY
        assert contents(await do.read_all()) == {"k": {BINARY: b"", b"": BINARY}}

    async def test_a_hundred_thousand_fields_go_at_once(self, do: Hand) -> None:
        pairs = [part for value in MANY for part in (value, value)]
        assert await do("HSET", "k", *pairs) == 100_000
        assert await do("HDEL", "k", *MANY[1:]) == 99_999
        assert contents(await do.read_all()) == {"k": {b"0": b"0"}}

    async def test_members_are_added_once(self, do: Hand) -> None:
        assert await do("SADD", "k", b"a", b"b", b"a") == 2
        assert await do("SADD", "k", b"b", b"c") == 1
        assert contents(await do.read_all()) == {"k": frozenset({b"a", b"b", b"c"})}
        assert _unordered(await do("SMEMBERS", "k")) == [b"a", b"b", b"c"]

    async def test_a_member_is_known(self, do: Hand) -> None:
        await do("SADD", "k", b"a")
        assert await do.all(
            ("SISMEMBER", "k", b"a"), ("SISMEMBER", "k", b"b"), ("SCARD", "k"), ("SCARD", "x")
        ) == [*(1, 0, 1, 0)]

    async def test_members_are_taken_away_until_the_set_is_gone(self, do: Hand) -> None:
        await do("SADD", "k", b"a", b"b")
        assert await do.all(
            ("SREM", "k", b"a", b"a", b"x"), ("SREM", "k", b"b"), ("TYPE", "k")
        ) == [1, 1, b"none"]
        assert await do("SREM", "k", b"a") == 0
        assert await do.memory.keys(do.owner) == []

    async def test_bytes_and_empty_members(self, do: Hand) -> None:
        await do("SADD", "k", BINARY, b"", b"1", b"01")
        assert _unordered(await do("SMEMBERS", "k")) == sorted([BINARY, b"", b"1", b"01"])

    async def test_numbers_and_then_words(self, do: Hand) -> None:
        await do("SADD", "k", *MANY[:1000])
        await do("SADD", "k", b"word")
        assert contents(await do.read_all()) == {"k": frozenset([*MANY[:1000], b"word"])}

    async def test_a_hundred_thousand_members_go_at_once(self, do: Hand) -> None:
        assert await do("SADD", "k", *MANY) == 100_000
        assert contents(await do.read_all()) == {"k": frozenset(MANY)}
        assert await do("SREM", "k", *MANY) == 100_000
        assert await do.memory.keys(do.owner) == []

    async def test_scores_are_set_and_new_members_counted(self, do: Hand) -> None:
        assert await do("ZADD", "k", b"1", b"a", b"2.5", b"b") == 2
        assert await do("ZADD", "k", b"3", b"a", b"4", b"c", b"5", b"c") == 1
        assert contents(await do.read_all()) == {"k": {b"a": 3.0, b"b": 2.5, b"c": 5.0}}
        assert floats(await do("ZSCORE", "k", b"b")) == [2.5]
        assert await do.all(("ZSCORE", "k", b"x"), ("ZCARD", "k"), ("ZCARD", "x")) == [None, 3, 0]

    async def test_members_come_by_score_and_then_by_their_bytes(self, do: Hand) -> None:
        await do(
            "ZADD",
            "k",
            b"2",
            b"z",
            b"1",
            b"b",
            b"1",
            b"a",
            b"1",
            b"\xff",
            b"1",
            b"",
            b"-1",
            b"m",
            b"1",
            b"B",
        )
        answer = await do("ZRANGE", "k", b"0", b"-1", b"WITHSCORES")
        assert list(_paired(answer)) == [b"m", b"", b"B", b"a", b"b", b"\xff", b"z"]
        assert floats(answer) == [-1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0]

    @pytest.mark.parametrize("bounds", BOUNDS)
    async def test_a_range_of_ranks(self, do: Hand, bounds: tuple[int, int]) -> None:
        await do("ZADD", "k", b"1", b"a", b"2", b"b", b"3", b"c", b"4", b"d")
        answer = await do("ZRANGE", "k", *(b"%d" % bound for bound in bounds), b"WITHSCORES")
        assert list(_paired(answer)) == _within(bounds, [b"a", b"b", b"c", b"d"])

    @pytest.mark.parametrize(
        ("low", "high", "members"),
        [
            *(
                (b"2", b"3", b"bc"),
                (b"-inf", b"inf", b"abcd"),
                (b"-inf", b"-inf", b"a"),
                (b"3", b"2", b""),
            ),
            *((b"2.5", b"1e300", b"c"), (b"4", b"inf", b"d"), (b"2.0", b"2", b"b")),
        ],
    )
    async def test_score_range(self, do: Hand, low: bytes, high: bytes, members: bytes) -> None:
        await do("ZADD", "k", b"-inf", b"a", b"2", b"b", b"3", b"c", b"inf", b"d")
        answer = await do("ZRANGEBYSCORE", "k", low, high, b"WITHSCORES")
        assert list(_paired(answer)) == [
            members[place : place + 1] for place in range(len(members))
        ]

    async def test_members_are_taken_away_until_it_is_gone(self, do: Hand) -> None:
        await do("ZADD", "k", b"1", b"a", b"2", b"b")
        assert await do.all(
            ("ZREM", "k", b"a", b"a", b"x"), ("ZREM", "k", b"b"), ("TYPE", "k")
        ) == [1, 1, b"none"]
        assert await do("ZREM", "k", b"a") == 0
        assert await do.memory.keys(do.owner) == []

    @pytest.mark.parametrize("members", [1, 1000])
    async def test_a_zero_that_is_read_has_no_sign(self, do: Hand, members: int) -> None:
        scores = {b"%d" % number: -0.0 for number in range(members)}
        await do("ZADD", "k", *(part for member in scores for part in (b"-0.0", member)))
        put = Hand(do.memory, an_owner())
        for stored in (await do.read_all(), await put.put(Item("k", Kind.ZSET, scores))):
            kept = contents(stored)["k"]
            assert isinstance(kept, dict)
            assert {(score, copysign(1, score)) for score in kept.values()} == {(0.0, 1.0)}

    async def test_of_scores_set_together_all_are_numbers(self, do: Hand) -> None:
        await do("ZADD", "k", b"1", b"a")
        with pytest.raises(MemoryRefused, match="'k'"):
            await do("ZADD", "k", b"2", b"a", b"x", b"b")
        assert contents(await do.read_all()) == {"k": {b"a": 1.0}}

    async def test_a_score_is_added_to(self, do: Hand) -> None:
        assert floats(await do("ZINCRBY", "k", b"1.5", b"a")) == [1.5]
        assert floats(await do("ZINCRBY", "k", b"-2", b"a")) == [-0.5]
        assert floats(await do("ZINCRBY", "k", b"inf", b"a")) == [inf]
        assert contents(await do.read_all()) == {"k": {b"a": inf}}

    async def test_infinities_that_cancel_out_are_refused(self, do: Hand) -> None:
        await do("ZADD", "k", b"inf", b"a")
        with pytest.raises(MemoryRefused, match="'k'"):
            await do("ZINCRBY", "k", b"-inf", b"a")
        assert contents(await do.read_all()) == {"k": {b"a": inf}}

    @pytest.mark.parametrize("score", [b"", b"a", b"nan", b"1_0", b"1e", b"1\x00"])
    async def test_a_score_that_is_no_number_is_refused(self, do: Hand, score: bytes) -> None:
        for name, *args in (("ZADD", b"1", b"a", score, b"b"), ("ZINCRBY", score, b"a")):
            with pytest.raises(MemoryRefused, match="'k'"):
                await do(name, "k", *args)
        assert await do.memory.keys(do.owner) == []

    async def test_a_bound_that_is_no_number_is_refused(self, do: Hand) -> None:
        for bounds in ((b"a", b"1"), (b"1", b"nan")):
            with pytest.raises(MemoryRefused, match="'k'"):
                await do("ZRANGEBYSCORE", "k", *bounds, b"WITHSCORES")

    @pytest.mark.parametrize(
        "score",
        [0.1, 1 / 3, 1e-320, 5e-324, 1.7976931348623157e308, inf, -inf, 2.0**53 + 2, -1e17, 1e21],
    )
    async def test_a_score_keeps_every_bit(self, do: Hand, score: float) -> None:
        await do("ZADD", "k", repr(score).encode(), BINARY)
        stored = await do.read_all()
        [item] = stored.items
        assert item.kind is Kind.ZSET
        answers = [
            *floats(await do("ZSCORE", "k", BINARY)),
            *floats(await do("ZRANGE", "k", b"0", b"-1", b"WITHSCORES")),
            *floats(await do("ZRANGEBYSCORE", "k", b"-inf", b"inf", b"WITHSCORES")),
        ]
        assert contents(stored) == {"k": {BINARY: score}}
        assert answers == [score] * 3
        assert contents(await do.put(*stored.items)) == {"k": {BINARY: score}}

    async def test_a_hundred_thousand_scores_go_at_once(self, do: Hand) -> None:
        pairs = [part for value in MANY for part in (value, value)]
        assert await do("ZADD", "k", *pairs) == 100_000
        assert contents(await do.read_all()) == {"k": {value: float(value) for value in MANY}}
        assert await do("ZREM", "k", *MANY[1:]) == 99_999
        assert contents(await do.read_all()) == {"k": {b"0": 0.0}}
