"""Parse, add and format numbers exactly as Redis does."""

from __future__ import annotations

import re
from fractions import Fraction
from math import isfinite, isnan

_INT64_PATTERN = re.compile(rb"0|-?[1-9][0-9]{0,18}")
_FLOAT_PATTERN = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|[+-]?inf(?:inity)?", re.IGNORECASE)
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_MAX_LENGTH = 1024  # digits; the largest double has 309 and a fraction
_MANTISSA_BITS = 64  # of a long double on x86
_DECIMAL_PLACES = 17  # digits after the point that INCRBYFLOAT writes


class CommandRefused(ValueError):
    """A command that does not fit its arguments or its key's value. The caller adds the key."""


def parse_int64(text: bytes) -> int:
    """Parse a signed 64-bit integer, in the only form that Redis accepts."""
    if _INT64_PATTERN.fullmatch(text) is None or not _INT64_MIN <= (number := int(text)) <= _INT64_MAX:
        raise CommandRefused(f"{_excerpt(text)} is not a 64-bit integer")
    return number


def add_int64(number: int, by: int) -> int:
    """Add integers like INCRBY and HINCRBY."""
    if not _INT64_MIN <= number + by <= _INT64_MAX:
        raise CommandRefused(f"{number} plus {by} is not a 64-bit integer")
    return number + by


def parse_float(text: bytes) -> float:
    """Parse a score. It may be infinite."""
    if len(text) > _MAX_LENGTH or _FLOAT_PATTERN.fullmatch(text) is None:
        raise CommandRefused(f"{_excerpt(text)} is not a number")
    return float(text)


def format_float(number: float) -> bytes:
    """Format a score like Redis: the shortest text that parses to the same number."""
    return repr(number).removesuffix(".0").encode()


def add_scores(score: float, by: float) -> float:
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
    number = parse_float(text)
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
