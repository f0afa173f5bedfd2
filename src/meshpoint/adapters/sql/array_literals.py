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
    if values and None not in values:
        text = '","'.join(values)  # type: ignore[arg-type]
        if "\\" not in text and text.count('"') == 2 * (len(values) - 1):
            return f'{{"{text}"}}'
    return "{" + ",".join(map(_quote, values)) + "}"


def int_array(values: Iterable[int]) -> str:
    """An array of integers."""
    return "{" + ",".join(map(str, values)) + "}"


def _quote(value: str | None) -> str:
    if value is None:
        return "NULL"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
