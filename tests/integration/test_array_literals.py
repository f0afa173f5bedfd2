"""PostgreSQL reads arrays from text as they were."""

from __future__ import annotations

import asyncpg
import pytest

from meshpoint.adapters.sql.array_literals import int_array, text_array


@pytest.mark.parametrize(
    "values",
    [
        [],
        [""],
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
async def test_texts_arrive_unchanged(postgres_url: str, values: list[str | None]) -> None:
    connection = await asyncpg.connect(postgres_url)
    try:
        literal = text_array(values)
        assert await connection.fetchval("SELECT $1::text::text[]", literal) == values
    finally:
        await connection.close()


async def test_integers_arrive_unchanged(postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    try:
        for values in ([], [0], [1, -2, 2**63 - 1, -(2**63)]):
            literal = int_array(values)
            assert await connection.fetchval("SELECT $1::text::bigint[]", literal) == values
    finally:
        await connection.close()
