"""PostgreSQL reads arrays from text as they were."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeAlias

import asyncpg
import pytest

from meshpoint.adapters.sql.array_literals import (
    NotSeparable,
    int_array,
    joined_values,
    number_array,
    split_texts,
    text_array,
)
from meshpoint.adapters.sql.batch_statements import value_of

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


@pytest.fixture
async def connection(postgres_url: str) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(postgres_url)
    yield connection
    await connection.close()


@pytest.mark.parametrize(
    "values",
    [
        [],
        ["a"],
        ["a", "b"],
        ["", ""],
        [None],
        ["a", None, "b"],
        ["NULL", "null", None],
        ['"'],
        ['","'],
        ['a","b', "c"],
        ["\\"],
        ["a\\", '"b'],
        ["{}", "{a,b}", "[1:2]={1,2}"],
        [" a ", "\t\n\r", ","],
        ["é", "日本", "🙂"],
    ],
    ids=repr,
)
async def test_texts_arrive_unchanged(connection: Connection, values: list[str | None]) -> None:
    statement = f"SELECT {split_texts('$1')}"
    assert await connection.fetchval(statement, text_array(values)) == values


@pytest.mark.parametrize(
    "values", [[""], ["\x1f"], ["a\x1fb", "c"], ["\x1e"], [None, "\x1e"]], ids=repr
)
def test_texts_that_would_arrive_changed_are_refused(values: list[str | None]) -> None:
    with pytest.raises(NotSeparable):
        text_array(values)


async def test_integers_arrive_unchanged(connection: Connection) -> None:
    for values in ([], [0], [1, -2, 2**63 - 1, -(2**63)]):
        literal = int_array(values)
        assert await connection.fetchval("SELECT $1::text::bigint[]", literal) == values


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("double precision", [None]),
        ("double precision", [0.1, None, 1e-9, 1e22, -2.5, 1_764_300_000.123456]),
        ("bigint", [1, None, -(2**63)]),
        ("boolean", [True, None, False]),
    ],
)
async def test_numbers_and_nulls_arrive_unchanged(
    connection: Connection, kind: str, values: list[float | None]
) -> None:
    literal = number_array(values)
    assert await connection.fetchval(f"SELECT $1::text::{kind}[]", literal) == values


@pytest.mark.parametrize(
    "values", [[], [b"a"], [b"\0", b"bc", None, b"\xff" * 1000], [None, None]]
)
async def test_joined_values_are_found_again(
    connection: Connection, values: list[bytes | None]
) -> None:
    rows = await connection.fetch(
        f"SELECT {value_of('v', '$1')} FROM unnest($2::text::int[], $3::text::int[])"
        " WITH ORDINALITY AS v(first, size, place) ORDER BY place",
        *joined_values(values),
    )
    assert [row[0] for row in rows] == values
