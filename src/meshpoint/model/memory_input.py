"""What an agent puts into its working memory: checked, and as it is written.

Each function raises `MemoryRefused`, in one line that names the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from math import isnan
from typing import Any, TypeAlias

from meshpoint.errors import MemoryRefused

Value: TypeAlias = bytes | str
"""What goes in: bytes, or text, which is written as UTF-8. What comes out is bytes."""

MAX_KEY = 1024
"""Bytes of a key."""


def checked_key(key: Any) -> str:
    """A key: text of 1 to `MAX_KEY` bytes."""
    if not isinstance(key, str):
        raise MemoryRefused(f"a memory key is text, not {kind_of(key)}")
    if not 1 <= len(_utf8(key, key)) <= MAX_KEY:
        raise refused(key, f"use text of 1 to {MAX_KEY} bytes")
    return key


def value_bytes(key: str, value: Any) -> bytes:
    """What is written for a value."""
    match value:
        case bytes():
            return bytes(value)
        case str():
            return _utf8(key, value)
        case bytearray() | memoryview():
            return bytes(value)
        case _:
            raise refused(key, f"bytes or text, not {kind_of(value)}; for models there is set_model")


def _utf8(key: object, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise refused(key, f"text without a UTF-8 form: {error.reason}") from error


def number_bytes(key: str, value: Any) -> bytes:
    """A number that has its place in an order."""
    if not isinstance(value, int | float):
        raise refused(key, f"a number, not {kind_of(value)}")
    try:
        number = float(value)
    except OverflowError as error:
        raise refused(key, "a number that large has no place in a float") from error
    if isnan(number):
        raise refused(key, "not-a-number has no place in an order")
    return repr(number).encode()


def whole_bytes(key: str, value: Any) -> bytes:
    """A whole number of 64 bits."""
    if not isinstance(value, int):
        raise refused(key, f"a whole number, not {kind_of(value)}")
    if not -(2**63) <= value < 2**63:
        raise refused(key, "a whole number of more than 64 bits")
    return b"%d" % value


def milliseconds(key: str, ttl: Any) -> bytes:
    """A time to live, which is at least one millisecond."""
    if not isinstance(ttl, timedelta):
        raise refused(key, f"a time to live is a timedelta, not {kind_of(ttl)}")
    left = ttl // timedelta(milliseconds=1)
    if left <= 0:
        raise refused(key, f"a time to live of {ttl} is over at once; use delete")
    return b"%d" % left


def pairs_of(what: str, values: Any) -> Iterable[tuple[Any, Any]]:
    """The pairs of a mapping; `what` names it."""
    if not isinstance(values, Mapping):
        raise MemoryRefused(f"{what}: a mapping, not {kind_of(values)}")
    return values.items()


def refused(key: object, problem: str) -> MemoryRefused:
    """The error that names the key."""
    return MemoryRefused(f"{named(key)}: {problem}")


def named(key: object) -> str:
    """A key as errors name it."""
    shown = repr(key)
    return f"memory key {shown if len(shown) <= 100 else f'{shown[:100]}…'}"


def kind_of(value: object) -> str:
    """What something is, for errors."""
    return type(value).__name__
