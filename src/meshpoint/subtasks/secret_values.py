"""Find secrets by value, after a migration has moved, renamed or wrapped them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from pydantic import JsonValue

from meshpoint.model.secrets import pointer


def values_at(pointers: Collection[str], value: JsonValue) -> list[JsonValue]:
    """Return the values at these JSON pointers. Pointers without a target are skipped."""
    return [inner for at, inner in _walk(value, "") if at in pointers] if pointers else []


def pointers_to(secrets: Sequence[JsonValue], value: JsonValue) -> list[str]:
    """Return JSON pointers to values that equal a secret, or are text that contains one."""
    searchable = [each for each in secrets if not isinstance(each, bool) and each not in (None, "", [], {})]
    return [at for at, inner in _walk(value, "") if any(_matches(secret, inner) for secret in searchable)]


def _matches(secret: JsonValue, inner: JsonValue) -> bool:
    return secret == inner or (isinstance(secret, str) and isinstance(inner, str) and secret in inner)


def _walk(value: JsonValue, at: str) -> Iterator[tuple[str, JsonValue]]:
    yield at, value
    match value:
        case dict():
            for key, inner in value.items():
                yield from _walk(inner, at + pointer(key))
        case list():
            for index, inner in enumerate(value):
                yield from _walk(inner, at + pointer(index))
