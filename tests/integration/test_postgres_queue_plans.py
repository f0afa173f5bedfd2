"""The plans of the queues' statements once VACUUM has found few messages or none.

That is common in short queues. If another session then holds a snapshot, millions of dead rows and
their index entries stay, and only a look-up by the whole key does not read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from meshpoint.adapters.postgres_queue import statements as sql
from meshpoint.adapters.postgres_queue.consumers import LOWEST_ID
from meshpoint.adapters.sql.array_literals import int_array
from meshpoint.adapters.sql.engine import engine_for
from meshpoint.adapters.sql.hand_over import held_arrays
from meshpoint.adapters.sql.migrations import QUEUES, upgrade
from meshpoint.adapters.sql.prepared import PreparedConnection

pytestmark = pytest.mark.servers

_DEAD_ROWS = 20_000
_FILL = """
INSERT INTO meshpoint_queue_message (queue, properties, body)
SELECT number % 10, '{}', '' FROM generate_series(1, $1::integer) AS number"""

_ROWS = 50
_CLAIMS = (
    7,
    int_array(number % 10 for number in range(_ROWS)),
    int_array(range(_ROWS)),
    int_array([1] * _ROWS),
)
_HELD = held_arrays([(1, number % 10, number, 1, 7) for number in range(_ROWS)])
_STATEMENTS: Mapping[str, tuple[Any, ...]] = {
    "CLAIM": (7, list(range(10)), [LOWEST_ID] * 10, [64] * 10, 10**6, 10**6),
    "COUNT_READY": (list(range(10)), [LOWEST_ID] * 10, [1000] * 10),
    "ACK": _CLAIMS,
    "REQUEUE": _CLAIMS,
    "DEAD_LETTER": (*_CLAIMS, ["reason"] * _ROWS, None),
    "PUBLISH_ACKING": (int_array([1]), [None], ["{}"], [b""], *_HELD),
    "READ_BODY": (1, 2, 7, 1),
    "READ_DEAD_LETTERS": (1, LOWEST_ID, 10**9, 10**6, 100),
    "REPLAY_DEAD_LETTERS": (
        "dead",
        list(range(_ROWS)),
        ["target"] * _ROWS,
        [None] * _ROWS,
        None,
    ),
    "DROP_DEAD_LETTERS": ("dead", list(range(_ROWS))),
}
_READ_IN_ORDER = {"CLAIM", "COUNT_READY", "READ_DEAD_LETTERS"}
"""They read the messages of a queue from an id on."""


@pytest.fixture(params=[0, 10])
async def connection(
    empty_postgres_url: str, request: pytest.FixtureRequest
) -> AsyncIterator[PreparedConnection]:
    """Of a broker, next to a snapshot that keeps the rows of settled messages.

    The parameter is the number of messages that VACUUM and ANALYZE find.
    """
    await asyncio.to_thread(upgrade, empty_postgres_url, QUEUES)
    holder = await asyncpg.connect(empty_postgres_url)
    other = await asyncpg.connect(empty_postgres_url)
    engine = engine_for(
        empty_postgres_url,
        command_timeout=timedelta(seconds=60),
        pool_size=1,
        in_key_order=True,
    )
    connection = PreparedConnection(engine)
    async with holder.transaction(isolation="repeatable_read"):
        await holder.execute("SELECT count(*) FROM meshpoint_queue")
        await other.execute(_FILL, _DEAD_ROWS)
        await other.execute("DELETE FROM meshpoint_queue_message")
        await other.execute(_FILL, request.param)
        await other.execute("ANALYZE meshpoint_queue_message")
        await other.execute(sql.VACUUM)
        expected = await other.fetchrow(
            "SELECT reltuples, relpages FROM pg_class WHERE relname = 'meshpoint_queue_message'"
        )
        assert expected["reltuples"] <= request.param
        assert expected["relpages"] > 100
        yield connection
    await connection.close()
    await engine.dispose()
    await holder.close()
    await other.close()


@pytest.mark.parametrize("name", _STATEMENTS)
async def test_messages_are_looked_up_by_key(connection: PreparedConnection, name: str) -> None:
    explain = f"EXPLAIN (FORMAT JSON) {getattr(sql, name)}"
    ((plan,),) = await connection.read(explain, *_STATEMENTS[name])
    nodes = list(_nodes(plan[0]["Plan"]))
    reads = [
        node
        for node in nodes
        if node.get("Relation Name") == "meshpoint_queue_message" and "Scan" in node["Node Type"]
    ]
    assert {node["Node Type"] for node in reads} == {"Index Scan"}
    conditions = [node["Index Cond"] for node in reads]
    assert all("queue = " in condition for condition in conditions)
    in_order = [condition for condition in conditions if "id > " in condition]
    assert len(in_order) == (name in _READ_IN_ORDER)
    assert all("id = " in condition for condition in conditions if condition not in in_order)
    assert not (in_order and any(node["Node Type"] == "Sort" for node in nodes))


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)
