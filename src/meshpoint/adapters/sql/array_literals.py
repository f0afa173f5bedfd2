"""Arrays as text, which PostgreSQL turns into arrays.

Texts are joined by separators: the server splits them twice as fast as it parses an array literal.

asyncpg asks of each element of an array whether it is an array itself, which takes longer than all
else that it does with the element. The source of this fact is `_get_array_shape` in its
`protocol/codecs/array.pyx`. A statement must convert such a text once, by `unnest(…)` or
`(SELECT …)`: otherwise an index into it would convert it for each row.

Long texts, such as JSON, are not worth it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

_SEPARATOR, _NULL = "\x1f", "\x1e"


class NotSeparable(ValueError):
    """A text contains a character that separates texts. Such texts need other statements."""


def text_array(values: Sequence[str | None]) -> str:
    """An array of texts, for `split_texts`.

    Raises:
        NotSeparable: `split_texts` would return other texts.
    """
    given = values
    nulls = values.count(None)
    if nulls:
        given = [_NULL if value is None else value for value in values]
    text = _SEPARATOR.join(given)  # type: ignore[arg-type]
    separators = max(len(values) - 1, 0)
    if text.count(_SEPARATOR) != separators or text.count(_NULL) != nulls or values == [""]:
        raise NotSeparable("a text contains a separator, or there is only an empty one")
    return text


def split_texts(parameter: str) -> str:
    """SQL for the array that `parameter` has from `text_array`."""
    return f"string_to_array({parameter}::text, chr({ord(_SEPARATOR)}), chr({ord(_NULL)}))"


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
