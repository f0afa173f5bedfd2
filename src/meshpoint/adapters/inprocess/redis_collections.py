"""What the commands of Redis do to a list, a hash, a set and a sorted set, as plain Python values.

Each function gets what the key holds, empty where there is no such key, and changes it in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeAlias

from meshpoint.adapters.inprocess.redis_numbers import Refused, real, real_text, score_sum, unsigned, whole, whole_sum
from meshpoint.model.memory import Answer, Kind

List: TypeAlias = deque[bytes]
Hash: TypeAlias = dict[bytes, bytes]
Set: TypeAlias = set[bytes]
SortedSet: TypeAlias = dict[bytes, float]

OK = b"OK"

# ── lists ──────────────────────────────────────────────────────────────────────────────────────────


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
    place = whole(index)
    return values[place] if -len(values) <= place < len(values) else None


def _slice(start: bytes, stop: bytes, size: int) -> tuple[int, int]:
    """Redis' bounds, of which both are included and negative ones count from the end, as Python's for a slice."""
    first, last = whole(start), whole(stop)
    first = max(first + size if first < 0 else first, 0)
    last = min(last + size if last < 0 else last, size - 1)
    return (first, last + 1) if first <= last else (0, 0)


# ── hashes ─────────────────────────────────────────────────────────────────────────────────────────


def _hset(fields: Hash, *pairs: bytes) -> int:
    before = len(fields)
    fields.update(_paired(pairs))
    return len(fields) - before


def _hget(fields: Hash, field: bytes) -> bytes | None:
    return fields.get(field)


def _hgetall(fields: Hash) -> list[bytes]:
    return list(chain.from_iterable(fields.items()))


def _hdel(fields: Hash, *gone: bytes) -> int:
    return sum(fields.pop(field, None) is not None for field in gone)


def _hincrby(fields: Hash, field: bytes, by: bytes) -> int:
    number = whole_sum(whole(fields.get(field, b"0")), whole(by))
    fields[field] = b"%d" % number
    return number


def _contains(members: Hash | Set, member: bytes) -> int:
    return int(member in members)


# ── sets ───────────────────────────────────────────────────────────────────────────────────────────


def _sadd(members: Set, *new: bytes) -> int:
    before = len(members)
    members.update(new)
    return len(members) - before


def _srem(members: Set, *gone: bytes) -> int:
    before = len(members)
    members.difference_update(gone)
    return before - len(members)


def _smembers(members: Set) -> list[bytes]:
    return list(members)


# ── sorted sets ────────────────────────────────────────────────────────────────────────────────────


def _zadd(scores: SortedSet, *pairs: bytes) -> int:
    before = len(scores)
    for score, member in [(real(score), member) for score, member in _paired(pairs)]:  # all of them, or none
        _score(scores, member, score)
    return len(scores) - before


def _zincrby(scores: SortedSet, by: bytes, member: bytes) -> bytes:
    score = score_sum(scores.get(member, 0.0), real(by))
    _score(scores, member, score)
    return real_text(score)


def _score(scores: SortedSet, member: bytes, score: float) -> None:
    scores[member] = unsigned(score)


def _zrem(scores: SortedSet, *gone: bytes) -> int:
    return sum(scores.pop(member, None) is not None for member in gone)


def _zscore(scores: SortedSet, member: bytes) -> bytes | None:
    score = scores.get(member)
    return None if score is None else real_text(score)


def _zrange(scores: SortedSet, start: bytes, stop: bytes, with_scores: bytes) -> list[bytes]:
    _check(with_scores)
    first, after = _slice(start, stop, len(scores))
    return _flat(_ranked(scores)[first:after])


def _zrangebyscore(scores: SortedSet, low: bytes, high: bytes, with_scores: bytes) -> list[bytes]:
    _check(with_scores)
    lowest, highest = real(low), real(high)
    return _flat((score, member) for score, member in _ranked(scores) if lowest <= score <= highest)


def _check(with_scores: bytes) -> None:
    if with_scores.upper() != b"WITHSCORES":
        raise Refused("it is always asked for WITHSCORES")


def _ranked(scores: SortedSet) -> list[tuple[float, bytes]]:
    return sorted((score, member) for member, score in scores.items())


def _flat(ranked: Iterable[tuple[float, bytes]]) -> list[bytes]:
    return [part for score, member in ranked for part in (member, real_text(score))]


def _paired(parts: tuple[bytes, ...]) -> Iterable[tuple[bytes, bytes]]:
    if len(parts) % 2:
        raise Refused("it takes pairs")
    return zip(parts[::2], parts[1::2], strict=True)


# ── all of them ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class CollectionCommand:
    """What a command does to a key of this kind, and how many arguments it takes at least and at most."""

    kind: Kind
    do: Callable[..., Answer]
    least: int = 0
    most: float = 0


def _of(kind: Kind, do: Callable[..., Answer], arguments: int = 0) -> CollectionCommand:
    return CollectionCommand(kind, do, arguments, arguments)


def _many(kind: Kind, do: Callable[..., Answer]) -> CollectionCommand:
    return CollectionCommand(kind, do, 1, float("inf"))


COMMANDS = {
    "RPUSH": _many(Kind.LIST, _rpush),
    "LPUSH": _many(Kind.LIST, _lpush),
    "RPOP": _of(Kind.LIST, _rpop),
    "LPOP": _of(Kind.LIST, _lpop),
    "LTRIM": _of(Kind.LIST, _ltrim, 2),
    "LRANGE": _of(Kind.LIST, _lrange, 2),
    "LINDEX": _of(Kind.LIST, _lindex, 1),
    "LLEN": _of(Kind.LIST, len),
    "HSET": _many(Kind.HASH, _hset),
    "HGET": _of(Kind.HASH, _hget, 1),
    "HGETALL": _of(Kind.HASH, _hgetall),
    "HDEL": _many(Kind.HASH, _hdel),
    "HINCRBY": _of(Kind.HASH, _hincrby, 2),
    "HEXISTS": _of(Kind.HASH, _contains, 1),
    "HLEN": _of(Kind.HASH, len),
    "SADD": _many(Kind.SET, _sadd),
    "SREM": _many(Kind.SET, _srem),
    "SMEMBERS": _of(Kind.SET, _smembers),
    "SISMEMBER": _of(Kind.SET, _contains, 1),
    "SCARD": _of(Kind.SET, len),
    "ZADD": _many(Kind.ZSET, _zadd),
    "ZREM": _many(Kind.ZSET, _zrem),
    "ZINCRBY": _of(Kind.ZSET, _zincrby, 2),
    "ZSCORE": _of(Kind.ZSET, _zscore, 1),
    "ZRANGE": _of(Kind.ZSET, _zrange, 3),
    "ZRANGEBYSCORE": _of(Kind.ZSET, _zrangebyscore, 3),
    "ZCARD": _of(Kind.ZSET, len),
}
