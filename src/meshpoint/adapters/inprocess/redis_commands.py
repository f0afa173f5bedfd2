"""Redis commands on lists, hashes, sets and sorted sets, applied to plain Python values.

Each function receives the key's value, empty if the key does not exist, and changes it in place.
Numbers are parsed, added and formatted exactly as Redis does.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, islice
from math import isfinite, isnan
from typing import TypeAlias

from meshpoint.model.memory import Answer, Kind

_List: TypeAlias = deque[bytes]
_Hash: TypeAlias = dict[bytes, bytes]
_Set: TypeAlias = set[bytes]
_SortedSet: TypeAlias = dict[bytes, float]

OK = b"OK"
_INT64_PATTERN = re.compile(rb"0|-?[1-9][0-9]{0,18}")
_FLOAT_PATTERN = re.compile(
    rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|[+-]?inf(?:inity)?", re.IGNORECASE
)
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_MAX_LENGTH = 1024  # digits; the largest double has 309 and a fraction
_MANTISSA_BITS = 64  # of a long double on x86
_DECIMAL_PLACES = 17  # digits after the point that INCRBYFLOAT writes


def _rpush(values: _List, *new: bytes) -> int:
    values.extend(new)
    return len(values)


def _lpush(values: _List, *new: bytes) -> int:
    values.extendleft(new)
    return len(values)


def _rpop(values: _List) -> bytes | None:
    return values.pop() if values else None


def _lpop(values: _List) -> bytes | None:
    return values.popleft() if values else None


def _ltrim(values: _List, start: bytes, stop: bytes) -> bytes:
    first, after = _slice(start, stop, len(values))
    for _ in range(len(values) - after):
        values.pop()
    for _ in range(first):
        values.popleft()
    return OK


def _lrange(values: _List, start: bytes, stop: bytes) -> list[bytes]:
    return list(islice(values, *_slice(start, stop, len(values))))


def _lindex(values: _List, index: bytes) -> bytes | None:
    position = parse_int64(index)
    return values[position] if -len(values) <= position < len(values) else None


def _slice(start: bytes, stop: bytes, size: int) -> tuple[int, int]:
    """Convert inclusive Redis bounds, where negative ones count from the end, to slice bounds."""
    first, last = parse_int64(start), parse_int64(stop)
    first = max(first + size if first < 0 else first, 0)
    last = min(last + size if last < 0 else last, size - 1)
    return (first, last + 1) if first <= last else (0, 0)


def _hset(fields: _Hash, *pairs: bytes) -> int:
    before = len(fields)
    fields.update(_to_pairs(pairs))
    return len(fields) - before


def _hget(fields: _Hash, field: bytes) -> bytes | None:
    return fields.get(field)


def _hgetall(fields: _Hash) -> list[bytes]:
    return list(chain.from_iterable(fields.items()))


def _hdel(fields: _Hash, *removed: bytes) -> int:
    return sum(fields.pop(field, None) is not None for field in removed)


def _hincrby(fields: _Hash, field: bytes, by: bytes) -> int:
    number = add_int64(parse_int64(fields.get(field, b"0")), parse_int64(by))
    fields[field] = b"%d" % number
    return number


def _contains(members: _Hash | _Set, member: bytes) -> int:
    return int(member in members)


def _sadd(members: _Set, *new: bytes) -> int:
    before = len(members)
    members.update(new)
    return len(members) - before


def _srem(members: _Set, *removed: bytes) -> int:
    before = len(members)
    members.difference_update(removed)
    return before - len(members)


def _smembers(members: _Set) -> list[bytes]:
    return list(members)


def _zadd(scores: _SortedSet, *pairs: bytes) -> int:
    before = len(scores)
    # Parse all pairs before setting any.
    for score, member in [(_parse_float(score), member) for score, member in _to_pairs(pairs)]:
        _set_score(scores, member, score)
    return len(scores) - before


def _zincrby(scores: _SortedSet, by: bytes, member: bytes) -> bytes:
    score = _add_scores(scores.get(member, 0.0), _parse_float(by))
    _set_score(scores, member, score)
    return _format_float(score)


def _set_score(scores: _SortedSet, member: bytes, score: float) -> None:
    scores[member] = normalize_zero(score)


def _zrem(scores: _SortedSet, *removed: bytes) -> int:
    return sum(scores.pop(member, None) is not None for member in removed)


def _zscore(scores: _SortedSet, member: bytes) -> bytes | None:
    score = scores.get(member)
    return None if score is None else _format_float(score)


def _zrange(scores: _SortedSet, start: bytes, stop: bytes, with_scores: bytes) -> list[bytes]:
    _require_withscores(with_scores)
    first, after = _slice(start, stop, len(scores))
    return _flatten(_ranked(scores)[first:after])


def _zrangebyscore(scores: _SortedSet, low: bytes, high: bytes, with_scores: bytes) -> list[bytes]:
    _require_withscores(with_scores)
    lowest, highest = _parse_float(low), _parse_float(high)
    return _flatten(
        (score, member) for score, member in _ranked(scores) if lowest <= score <= highest
    )


def _require_withscores(with_scores: bytes) -> None:
    if with_scores.upper() != b"WITHSCORES":
        raise CommandRefused("it requires WITHSCORES")


def _ranked(scores: _SortedSet) -> list[tuple[float, bytes]]:
    return sorted((score, member) for member, score in scores.items())


def _flatten(ranked: Iterable[tuple[float, bytes]]) -> list[bytes]:
    return [part for score, member in ranked for part in (member, _format_float(score))]


def _to_pairs(parts: tuple[bytes, ...]) -> Iterable[tuple[bytes, bytes]]:
    if len(parts) % 2:
        raise CommandRefused("it takes pairs of arguments")
    return zip(parts[::2], parts[1::2], strict=True)


class CommandRefused(ValueError):
    """A command that does not fit its arguments or its key's value. The caller adds the key."""


def parse_int64(text: bytes) -> int:
    """Parse a signed 64-bit integer, in the only form that Redis accepts."""
    if (
        _INT64_PATTERN.fullmatch(text) is None
        or not _INT64_MIN <= (number := int(text)) <= _INT64_MAX
    ):
        raise CommandRefused(f"{_excerpt(text)} is not a 64-bit integer")
    return number


def add_int64(number: int, by: int) -> int:
    """Add integers like INCRBY and HINCRBY."""
    if not _INT64_MIN <= number + by <= _INT64_MAX:
        raise CommandRefused(f"{number} plus {by} is not a 64-bit integer")
    return number + by


def _parse_float(text: bytes) -> float:
    """Parse a score. It may be infinite."""
    if len(text) > _MAX_LENGTH or _FLOAT_PATTERN.fullmatch(text) is None:
        raise CommandRefused(f"{_excerpt(text)} is not a number")
    return float(text)


def _format_float(number: float) -> bytes:
    """Format a score like Redis: the shortest text that parses to the same number."""
    return repr(number).removesuffix(".0").encode()


def _add_scores(score: float, by: float) -> float:
    """Add scores like ZINCRBY."""
    if isnan(score + by):
        raise CommandRefused(f"{score} plus {by} is not a number")
    return score + by


def normalize_zero(score: float) -> float:
    """Drop the sign of a zero score.

    Whether Redis keeps that sign depends on the size of the set.
    """
    return score + 0.0


def add_long_doubles(text: bytes, by: bytes) -> bytes:
    """Add numbers like INCRBYFLOAT: as long doubles, so that 0.1 + 0.2 is 0.3."""
    total = _round_to_long_double(_parse_fraction(text) + _parse_fraction(by))
    try:
        float(total)
    except OverflowError:
        raise CommandRefused(f"{_excerpt(text)} plus {_excerpt(by)} is infinite") from None
    scaled = round(total * 10**_DECIMAL_PLACES)
    before, after = divmod(abs(scaled), 10**_DECIMAL_PLACES)
    sign = "-" if scaled < 0 else ""
    return f"{sign}{before}.{after:0{_DECIMAL_PLACES}}".rstrip("0").rstrip(".").encode()


def _parse_fraction(text: bytes) -> Fraction:
    number = _parse_float(text)
    if not isfinite(number):
        raise CommandRefused(f"{_excerpt(text)} is infinite")
    # Check first, because the exponent may be huge. A number this small does not affect a sum.
    return Fraction(0) if abs(number) < 1e-300 else _round_to_long_double(Fraction(text.decode()))


def _round_to_long_double(number: Fraction) -> Fraction:
    if not number:
        return number
    size = abs(number)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent + 1 - _MANTISSA_BITS)
    return round(number / unit) * unit


def _excerpt(text: bytes) -> str:
    shown = text[:40].decode(errors="backslashreplace")
    return repr(shown if len(text) <= 40 else f"{shown}…")


@dataclass(frozen=True, slots=True)
class _CollectionCommand:
    """A command's implementation, the kind of value it needs, and its number of arguments."""

    kind: Kind
    function: Callable[..., Answer]
    min_args: int = 0
    max_args: float = 0


def _fixed_arity(
    kind: Kind, function: Callable[..., Answer], arguments: int = 0
) -> _CollectionCommand:
    return _CollectionCommand(kind, function, arguments, arguments)


def _variadic(kind: Kind, function: Callable[..., Answer]) -> _CollectionCommand:
    return _CollectionCommand(kind, function, 1, float("inf"))


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
