"""Checks and encodes what an agent stores in its working memory.

Each function raises `MemoryRefused` with a one-line message that names the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from math import isnan
from typing import Any, TypeAlias

from meshpoint.errors import MemoryRefused

Value: TypeAlias = bytes | str
"""Input value: bytes, or text that is stored as UTF-8. Values are always read as bytes."""

MAX_KEY = 1024
"""Maximum length of a key in bytes."""


def checked_key(key: Any) -> str:
    """Check that `key` is a str of 1 to `MAX_KEY` bytes and return it."""
    if not isinstance(key, str):
        raise MemoryRefused(f"a memory key must be str, not {kind_of(key)}")
    if not 1 <= len(_utf8(key, key)) <= MAX_KEY:
        raise refused(key, f"must have 1 to {MAX_KEY} bytes")
    return key


def value_bytes(key: str, value: Any) -> bytes:
    """Encode a value."""
    match value:
        case bytes():
            return bytes(value)
        case str():
            return _utf8(key, value)
        case bytearray() | memoryview():
            return bytes(value)
        case _:
            raise refused(key, f"expected bytes or str, not {kind_of(value)}; use set_model for models")


def _utf8(key: object, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise refused(key, f"the text cannot be encoded as UTF-8: {error.reason}") from error


def number_bytes(key: str, value: Any) -> bytes:
    """Encode a number that can be compared with others, so not NaN."""
    if not isinstance(value, int | float):
        raise refused(key, f"expected a number, not {kind_of(value)}")
    try:
        number = float(value)
    except OverflowError as error:
        raise refused(key, "the number is too large for a float") from error
    if isnan(number):
        raise refused(key, "NaN cannot be ordered")
    return repr(number).encode()


def whole_bytes(key: str, value: Any) -> bytes:
    """Encode a 64-bit integer."""
    if not isinstance(value, int):
        raise refused(key, f"expected an integer, not {kind_of(value)}")
    if not -(2**63) <= value < 2**63:
        raise refused(key, "the integer does not fit into 64 bits")
    return b"%d" % value


def milliseconds(key: str, ttl: Any) -> bytes:
    """Encode a time to live of at least one millisecond."""
    if not isinstance(ttl, timedelta):
        raise refused(key, f"a time to live must be a timedelta, not {kind_of(ttl)}")
    left = ttl // timedelta(milliseconds=1)
    if left <= 0:
        raise refused(key, f"a time to live of {ttl} expires immediately; use delete")
    return b"%d" % left


def pairs_of(what: str, values: Any) -> Iterable[tuple[Any, Any]]:
    """The items of a mapping. `what` names it in errors."""
    if not isinstance(values, Mapping):
        raise MemoryRefused(f"{what}: expected a mapping, not {kind_of(values)}")
    return values.items()


def refused(key: object, problem: str) -> MemoryRefused:
    """Build the error for `key`."""
    return MemoryRefused(f"{named(key)}: {problem}")


def named(key: object) -> str:
    """Format a key for errors, cut after 100 characters."""
    shown = repr(key)
    return f"memory key {shown if len(shown) <= 100 else f'{shown[:100]}…'}"


def kind_of(value: object) -> str:
    """The type name of `value`, for errors."""
    return type(value).__name__
