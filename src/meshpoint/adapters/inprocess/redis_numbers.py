"""Numbers as Redis reads, adds and writes them."""

from __future__ import annotations

import re
from fractions import Fraction
from math import isfinite, isnan

_WHOLE = re.compile(rb"0|-?[1-9][0-9]{0,18}")
_REAL = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|[+-]?inf(?:inity)?", re.IGNORECASE)
_LOWEST, _HIGHEST = -(2**63), 2**63 - 1
_LONGEST = 1024  # characters of a number; the largest double has 309 digits and a fraction
_DIGITS = 64  # binary ones of a long double on x86
_PLACES = 17  # decimal ones that INCRBYFLOAT writes


class Refused(ValueError):
    """A command does not fit its arguments, or what its key holds. Whoever knows the key names it."""


def whole(text: bytes) -> int:
    """A signed number of 64 bits, in the one form that Redis takes."""
    if _WHOLE.fullmatch(text) is None or not _LOWEST <= (number := int(text)) <= _HIGHEST:
        raise Refused(f"{_shown(text)} is no whole number of 64 bits")
    return number


def whole_sum(number: int, by: int) -> int:
    """What INCRBY and HINCRBY make of two whole numbers."""
    if not _LOWEST <= number + by <= _HIGHEST:
        raise Refused(f"{number} and {by} together are no whole number of 64 bits")
    return number + by


def real(text: bytes) -> float:
    """A score, which may be infinite."""
    if len(text) > _LONGEST or _REAL.fullmatch(text) is None:
        raise Refused(f"{_shown(text)} is no number")
    return float(text)


def real_text(number: float) -> bytes:
    """A score as Redis answers it: the shortest text that is this number again."""
    return repr(number).removesuffix(".0").encode()


def score_sum(score: float, by: float) -> float:
    """What ZINCRBY makes of two scores."""
    if isnan(score + by):
        raise Refused(f"{score} and {by} together are no number")
    return score + by


def unsigned(score: float) -> float:
    """A score to keep: a zero has no sign, which Redis keeps or forgets by the size of the set."""
    return score + 0.0


def float_sum(text: bytes, by: bytes) -> bytes:
    """What INCRBYFLOAT makes of two texts: it adds long doubles, and so 0.1 and 0.2 are 0.3."""
    total = _long_double(_fraction(text) + _fraction(by))
    try:
        float(total)
    except OverflowError:
        raise Refused(f"{_shown(text)} and {_shown(by)} together are infinite") from None
    scaled = round(total * 10**_PLACES)
    before, after = divmod(abs(scaled), 10**_PLACES)
    sign = "-" if scaled < 0 else ""
    return f"{sign}{before}.{after:0{_PLACES}}".rstrip("0").rstrip(".").encode()


def _fraction(text: bytes) -> Fraction:
    number = real(text)
    if not isfinite(number):
        raise Refused(f"{_shown(text)} is infinite")
    # Asked first: an exponent in the text could be of any size. What is as small as this leaves no trace in a sum.
    return Fraction(0) if abs(number) < 1e-300 else _long_double(Fraction(text.decode()))


def _long_double(number: Fraction) -> Fraction:
    if not number:
        return number
    size = abs(number)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent + 1 - _DIGITS)
    return round(number / unit) * unit


def _shown(text: bytes) -> str:
    shown = text[:40].decode(errors="backslashreplace")
    return repr(shown if len(text) <= 40 else f"{shown}…")
