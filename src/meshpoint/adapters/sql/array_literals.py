"""Long arrays as text, which PostgreSQL turns into arrays.

asyncpg asks of each element of an array whether it is an array itself, which takes longer than all
else that it does with the element. The source of this fact is `_get_array_shape` in its
`protocol/codecs/array.pyx`. A statement converts such a text once, by `unnest($1::text::text[])`:
an index into it would convert it for each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def text_array(values: Sequence[str | None]) -> str:
    """An array of texts."""
    try:
        text = '","'.join(values)  # type: ignore[arg-type]  # `None` raises
    except TypeError:
        return "{" + ",".join(map(_quote, values)) + "}"
    if "\\" in text or text.count('"') != 2 * max(len(values) - 1, 0):
        return "{" + ",".join(map(_quote, values)) + "}"
    return f'{{"{text}"}}' if values else "{}"


def int_array(values: Iterable[int]) -> str:
    """An array of integers."""
    return "{" + ",".join(map(str, values)) + "}"


def _quote(value: str | None) -> str:
    if value is None:
        return "NULL"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
