"""Redis commands on lists, hashes, sets and sorted sets, applied to plain Python values.

Each function receives the key's value, empty if the key does not exist, and changes it in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeAlias

from meshpoint.adapters.inprocess.redis_numbers import (
    CommandRefused,
    add_int64,
    add_scores,
    format_float,
    normalize_zero,
    parse_float,
    parse_int64,
)
from meshpoint.model.memory import Answer, Kind

List: TypeAlias = deque[bytes]
Hash: TypeAlias = dict[bytes, bytes]
Set: TypeAlias = set[bytes]
SortedSet: TypeAlias = dict[bytes, float]

OK = b"OK"


def _rpush(values: List, *new: bytes) -> int:
    values.extend(new)
    return len(values)


def _lpush(values: List, *new: bytes) -> int:
    values.extendleft(new)
    return len(values)


def _rpop(values: List) -> bytes | None:
    return values.pop() if values else None


def _lpop(values: List) -> bytes | None:
    return values.popleft() if values else None


def _ltrim(values: List, start: bytes, stop: bytes) -> bytes:
    first, after = _slice(start, stop, len(values))
    for _ in range(len(values) - after):
        values.pop()
    for _ in range(first):
        values.popleft()
    return OK


def _lrange(values: List, start: bytes, stop: bytes) -> list[bytes]:
    return list(islice(values, *_slice(start, stop, len(values))))


def _lindex(values: List, index: bytes) -> bytes | None:
    position = parse_int64(index)
    return values[position] if -len(values) <= position < len(values) else None


def _slice(start: bytes, stop: bytes, size: int) -> tuple[int, int]:
    """Convert inclusive Redis bounds, where negative ones count from the end, to slice bounds."""
    first, last = parse_int64(start), parse_int64(stop)
    first = max(first + size if first < 0 else first, 0)
    last = min(last + size if last < 0 else last, size - 1)
    return (first, last + 1) if first <= last else (0, 0)


def _hset(fields: Hash, *pairs: bytes) -> int:
    before = len(fields)
    fields.update(_to_pairs(pairs))
    return len(fields) - before


def _hget(fields: Hash, field: bytes) -> bytes | None:
    return fields.get(field)


def _hgetall(fields: Hash) -> list[bytes]:
    return list(chain.from_iterable(fields.items()))


def _hdel(fields: Hash, *removed: bytes) -> int:
    return sum(fields.pop(field, None) is not None for field in removed)


def _hincrby(fields: Hash, field: bytes, by: bytes) -> int:
    number = add_int64(parse_int64(fields.get(field, b"0")), parse_int64(by))
    fields[field] = b"%d" % number
    return number


def _contains(members: Hash | Set, member: bytes) -> int:
    return int(member in members)


def _sadd(members: Set, *new: bytes) -> int:
    before = len(members)
    members.update(new)
    return len(members) - before


def _srem(members: Set, *removed: bytes) -> int:
    before = len(members)
    members.difference_update(removed)
    return before - len(members)


def _smembers(members: Set) -> list[bytes]:
    return list(members)


def _zadd(scores: SortedSet, *pairs: bytes) -> int:
    before = len(scores)
    # Parse all pairs before setting any.
    for score, member in [(parse_float(score), member) for score, member in _to_pairs(pairs)]:
        _set_score(scores, member, score)
    return len(scores) - before


def _zincrby(scores: SortedSet, by: bytes, member: bytes) -> bytes:
    score = add_scores(scores.get(member, 0.0), parse_float(by))
    _set_score(scores, member, score)
    return format_float(score)


def _set_score(scores: SortedSet, member: bytes, score: float) -> None:
    scores[member] = normalize_zero(score)


def _zrem(scores: SortedSet, *removed: bytes) -> int:
    return sum(scores.pop(member, None) is not None for member in removed)


def _zscore(scores: SortedSet, member: bytes) -> bytes | None:
    score = scores.get(member)
    return None if score is None else format_float(score)


def _zrange(scores: SortedSet, start: bytes, stop: bytes, with_scores: bytes) -> list[bytes]:
    _require_withscores(with_scores)
    first, after = _slice(start, stop, len(scores))
    return _flatten(_ranked(scores)[first:after])


def _zrangebyscore(scores: SortedSet, low: bytes, high: bytes, with_scores: bytes) -> list[bytes]:
    _require_withscores(with_scores)
    lowest, highest = parse_float(low), parse_float(high)
    return _flatten((score, member) for score, member in _ranked(scores) if lowest <= score <= highest)


def _require_withscores(with_scores: bytes) -> None:
    if with_scores.upper() != b"WITHSCORES":
        raise CommandRefused("it requires WITHSCORES")


def _ranked(scores: SortedSet) -> list[tuple[float, bytes]]:
    return sorted((score, member) for member, score in scores.items())


def _flatten(ranked: Iterable[tuple[float, bytes]]) -> list[bytes]:
    return [part for score, member in ranked for part in (member, format_float(score))]


def _to_pairs(parts: tuple[bytes, ...]) -> Iterable[tuple[bytes, bytes]]:
    if len(parts) % 2:
        raise CommandRefused("it takes pairs of arguments")
    return zip(parts[::2], parts[1::2], strict=True)


@dataclass(frozen=True, slots=True)
class CollectionCommand:
    """A command's implementation, the kind of value it needs, and its number of arguments."""

    kind: Kind
    function: Callable[..., Answer]
    min_args: int = 0
    max_args: float = 0


def _fixed_arity(kind: Kind, function: Callable[..., Answer], arguments: int = 0) -> CollectionCommand:
    return CollectionCommand(kind, function, arguments, arguments)


def _variadic(kind: Kind, function: Callable[..., Answer]) -> CollectionCommand:
    return CollectionCommand(kind, function, 1, float("inf"))


COMMANDS = {
    "RPUSH": _variadic(Kind.LIST, _rpush),
    "LPUSH": _variadic(Kind.LIST, _lpush),
    "RPOP": _fixed_arity(Kind.LIST, _rpop),
    "LPOP": _fixed_arity(Kind.LIST, _lpop),
    "LTRIM": _fixed_arity(Kind.LIST, _ltrim, 2),
    "LRANGE": _fixed_arity(Kind.LIST, _lrange, 2),
    "LINDEX": _fixed_arity(Kind.LIST, _lindex, 1),
    "LLEN": _fixed_arity(Kind.LIST, len),
    "HSET": _variadic(Kind.HASH, _hset),
    "HGET": _fixed_arity(Kind.HASH, _hget, 1),
    "HGETALL": _fixed_arity(Kind.HASH, _hgetall),
    "HDEL": _variadic(Kind.HASH, _hdel),
    "HINCRBY": _fixed_arity(Kind.HASH, _hincrby, 2),
    "HEXISTS": _fixed_arity(Kind.HASH, _contains, 1),
    "HLEN": _fixed_arity(Kind.HASH, len),
    "SADD": _variadic(Kind.SET, _sadd),
    "SREM": _variadic(Kind.SET, _srem),
    "SMEMBERS": _fixed_arity(Kind.SET, _smembers),
    "SISMEMBER": _fixed_arity(Kind.SET, _contains, 1),
    "SCARD": _fixed_arity(Kind.SET, len),
    "ZADD": _variadic(Kind.ZSET, _zadd),
    "ZREM": _variadic(Kind.ZSET, _zrem),
    "ZINCRBY": _fixed_arity(Kind.ZSET, _zincrby, 2),
    "ZSCORE": _fixed_arity(Kind.ZSET, _zscore, 1),
    "ZRANGE": _fixed_arity(Kind.ZSET, _zrange, 3),
    "ZRANGEBYSCORE": _fixed_arity(Kind.ZSET, _zrangebyscore, 3),
    "ZCARD": _fixed_arity(Kind.ZSET, len),
}
