"""Arrays as text, which PostgreSQL turns into arrays.

asyncpg asks of each element of an array whether it is an array itself, which takes longer than all
else that it does with the element. The source of this fact is `_get_array_shape` in its
`protocol/codecs/array.pyx`. A statement must convert such a text once, by
`unnest($1::text::text[])` or `(SELECT $1::text::text[])`: otherwise an index into it would convert
it for each row.

Long texts with many quotes, such as JSON, are not worth it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate


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


def number_array(values: Iterable[float | None]) -> str:
    """An array of numbers or Booleans."""
    return "{" + ",".join(["NULL" if value is None else str(value) for value in values]) + "}"


def joined_values(values: Sequence[bytes | None]) -> tuple[bytes, str, str]:
    """Values in one, the position of each in it, from 1, and their sizes. NULL has the size 0."""
    given = [value or b"" for value in values]
    sizes = list(map(len, given))
    *positions, _ = accumulate(sizes, initial=1)
    return b"".join(given), int_array(positions), int_array(sizes)


def _quote(value: str | None) -> str:
    if value is None:
        return "NULL"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
