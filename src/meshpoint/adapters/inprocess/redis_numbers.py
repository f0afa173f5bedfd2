"""Numbers as Redis reads, adds and writes them."""

from __future__ import annotations

import re
from fractions import Fraction
from math import isfinite, isnan

_INT64_PATTERN = re.compile(rb"0|-?[1-9][0-9]{0,18}")
_FLOAT_PATTERN = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|[+-]?inf(?:inity)?", re.IGNORECASE)
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_MAX_LENGTH = 1024  # characters of a number; the largest double has 309 digits and a fraction
_MANTISSA_BITS = 64  # binary ones of a long double on x86
_DECIMAL_PLACES = 17  # decimal ones that INCRBYFLOAT writes


class CommandRefused(ValueError):
    """A command does not fit its arguments, or what its key holds. Whoever knows the key names it."""


def parse_int64(text: bytes) -> int:
    """A signed number of 64 bits, in the one form that Redis takes."""
    if _INT64_PATTERN.fullmatch(text) is None or not _INT64_MIN <= (number := int(text)) <= _INT64_MAX:
        raise CommandRefused(f"{_excerpt(text)} is no whole number of 64 bits")
    return number


def add_int64(number: int, by: int) -> int:
    """What INCRBY and HINCRBY make of two whole numbers."""
    if not _INT64_MIN <= number + by <= _INT64_MAX:
        raise CommandRefused(f"{number} and {by} together are no whole number of 64 bits")
    return number + by


def parse_float(text: bytes) -> float:
    """A score, which may be infinite."""
    if len(text) > _MAX_LENGTH or _FLOAT_PATTERN.fullmatch(text) is None:
        raise CommandRefused(f"{_excerpt(text)} is no number")
    return float(text)


def format_float(number: float) -> bytes:
    """A score as Redis answers it: the shortest text that is this number again."""
    return repr(number).removesuffix(".0").encode()


def add_scores(score: float, by: float) -> float:
    """What ZINCRBY makes of two scores."""
    if isnan(score + by):
        raise CommandRefused(f"{score} and {by} together are no number")
    return score + by


def normalize_zero(score: float) -> float:
    """A score to keep: a zero has no sign, which Redis keeps or forgets by the size of the set."""
    return score + 0.0


def add_long_doubles(text: bytes, by: bytes) -> bytes:
    """What INCRBYFLOAT makes of two texts: it adds long doubles, and so 0.1 and 0.2 are 0.3."""
    total = _round_to_long_double(_parse_fraction(text) + _parse_fraction(by))
    try:
        float(total)
    except OverflowError:
        raise CommandRefused(f"{_excerpt(text)} and {_excerpt(by)} together are infinite") from None
    scaled = round(total * 10**_DECIMAL_PLACES)
    before, after = divmod(abs(scaled), 10**_DECIMAL_PLACES)
    sign = "-" if scaled < 0 else ""
    return f"{sign}{before}.{after:0{_DECIMAL_PLACES}}".rstrip("0").rstrip(".").encode()


def _parse_fraction(text: bytes) -> Fraction:
    number = parse_float(text)
    if not isfinite(number):
        raise CommandRefused(f"{_excerpt(text)} is infinite")
    # Asked first: an exponent in the text could be of any size. What is as small as this leaves no trace in a sum.
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
