"""The fuzzer on PostgreSQL: writes rows, and reads the rows of other senders."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Self

import asyncpg

from .amqp import WireMessage
from .recipes import EVIL, FULL_QUEUE, MALLORY, REPLIES, FuzzState, recipe, valid_message
from .replica import marks_of
from .row_side import DEAD_LETTERS, DECLARED, POLL_SECONDS, TEXTS, RowSide, to_bytes

_LONG = "x" * 1_200_000
_WRONG_TEXTS: tuple[Any, ...] = (None, 5, [], {}, "", "\0", "\ud800", _LONG)
_WRONG_HEADERS: tuple[Any, ...] = (
    None,
    5,
    [],
    "",
    {"x": [[]]},
    {"x-deadline": float("nan")},
    {"x": "\ud800"},
    {"\ud800": "x"},
    {"x-deadline": _LONG},
    {"x-call-depth": 10**4000},
)
_WRONG_VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(TEXTS, _WRONG_TEXTS),
    "type": (*_WRONG_TEXTS, "telepathy"),
    "timestamp": (*_WRONG_TEXTS, "99999-12-12", "2026-01-01"),
    "headers": _WRONG_HEADERS,
}
_PROPERTIES: dict[str, tuple[str, Any]] = {
    f"table row: {name} = {json.dumps(value)[:20]}": (name, value)
    for name, values in _WRONG_VALUES.items()
    for value in values
}
"""A property of a valid message and its value, by recipe."""
_COLUMNS = {
    f"table row: {assignment}": assignment
    for assignment in (
        "properties = ''", "properties = '{'", "properties = '[]'", "properties = 'null'",
        "properties = repeat('[', 50000)", "properties = repeat('x', 3000000)",
        "properties = '{\"type\": \"request\", \"headers\": ' || repeat('[', 50000) || '}'",
        "properties = '{\"headers\": ' || repeat('9', 5000) || '}'",
        "body = ''", "body = '\\x00'", "body = decode(repeat('00', 300000), 'hex')",
        "deliveries = 2147483647", "deliveries = 19", "deliveries = -5",
        "holder = 987654321", "holder = -1",
        "dead_reason = repeat('x', 200000)", "dead_reason = ''",
        "request = NULL", "request = 'other'", "request = ''",
        "id = 9223372036854775807 - id", "id = -id",
    )
}  # fmt: skip
"""Assignments to the row of a valid message, by recipe."""
POSTGRES_ROWS = (*_PROPERTIES, *_COLUMNS)

for _name in POSTGRES_ROWS:

    @recipe(_name)
    def _row(world: FuzzState) -> WireMessage | None:
        return valid_message(world, world.rng.choice(("request", "cancel", "response", "status")))


_DECLARE = """
INSERT INTO meshpoint_queue (name, agent, dead_letters, is_private) VALUES ($1, $2, $3, $4)
ON CONFLICT DO NOTHING"""
_FILL = """
INSERT INTO meshpoint_queue_message (queue, properties, body)
SELECT id, '{}', '' FROM meshpoint_queue, generate_series(1, 100000) WHERE name = $1"""
"""Fill a private queue to its limit."""
_EMPTY = """
DELETE FROM meshpoint_queue_message m USING meshpoint_queue q WHERE q.id = m.queue AND name = $1"""
_FIND = "SELECT id FROM meshpoint_queue WHERE name = $1"
_FIND_REPLICAS = "SELECT id FROM meshpoint_queue WHERE agent = $1 AND is_private"
_INSERT = """
INSERT INTO meshpoint_queue_message (queue, request, properties, body) VALUES ($1, $2, $3, $4)
RETURNING id"""
_READ_NEW = """
SELECT m.id, q.id AS queue, q.name, m.properties, m.body
  FROM meshpoint_queue q CROSS JOIN LATERAL (
    SELECT id, properties, body FROM meshpoint_queue_message
     WHERE queue = q.id AND id > $1 AND id < 4611686018427387904
       AND octet_length(properties) < 20000 AND octet_length(body) < 100000
     ORDER BY queue, id LIMIT 1000) m
 WHERE q.name <> $2 ORDER BY m.id"""
"""In each queue by its index. Rows with invented ids are passed over."""
_TAKE_DEAD_LETTERS = """
WITH taken AS (
    DELETE FROM meshpoint_queue_message m USING meshpoint_queue q
     WHERE q.id = m.queue AND q.name = ANY ($1::text[]) AND (m.holder IS NULL OR m.holder = 0)
    RETURNING m.properties, m.body)
SELECT left(properties, 20000) AS properties, substr(body, 1, 8192) AS body FROM taken"""
_DELETE = "DELETE FROM meshpoint_queue_message WHERE queue = $1 AND id = $2"


class PostgresSide(RowSide):
    """The side for a database as the broker."""

    def __init__(self, url: str, namespace: str, world: FuzzState) -> None:
        super().__init__(namespace, world)
        self._url = url

    async def __aenter__(self) -> Self:
        self._pool = await asyncpg.create_pool(self._url, min_size=1, max_size=4)
        self._reading = await asyncpg.connect(self._url)
        for address in (*DECLARED, FULL_QUEUE):
            agent = MALLORY if address == FULL_QUEUE else address.partition(".")[0]
            await self._pool.execute(
                _DECLARE,
                self.queue_name(address),
                self.queue_name(agent),
                self.queue_name(f"{agent}.dlq"),
                address == FULL_QUEUE,
            )
        await self._pool.execute(_FILL, self.queue_name(FULL_QUEUE))
        self._poll_task = asyncio.create_task(self._poll())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._poll_task.cancel()
        await asyncio.gather(self._poll_task, return_exceptions=True)
        self._reading.terminate()  # the poll may have been in a statement
        await self._collect_dead_letters(self._pool)
        await self._pool.close()

    async def send(self, mark: str, name: str, message: WireMessage) -> None:
        """Insert `message` into each queue that its key reaches."""
        agent, _, suffix = message.key.partition(".")
        if suffix == "broadcast":
            rows = await self._pool.fetch(_FIND_REPLICAS, self.queue_name(agent))
        elif "\0" in message.key or not message.key.isprintable():
            rows = []  # no queue has such a name
        else:
            rows = await self._pool.fetch(_FIND, self.queue_name(message.key))
        result = "accepted" if rows else "returned"
        for row in rows:
            try:
                await self._insert(row["id"], name, message)
            except asyncpg.PostgresError:
                result = "refused"
        self.record_result(mark, result)

    async def drain_full_queue(self) -> None:
        """Empty the full queue, so that replies waiting for space can be sent."""
        await self._pool.execute(_EMPTY, self.queue_name(FULL_QUEUE))

    async def _insert(self, queue: int, name: str, message: WireMessage) -> None:
        properties = {each: _to_text(value) for each, value in message.properties.items()}
        for required in ("type", "message_id", "correlation_id", "app_id"):
            properties.setdefault(required, "")
        table: dict[str, Any] = {**properties, "headers": _plain(message.headers)}
        request = properties["correlation_id"] if properties["type"] == "request" else None
        if name in _PROPERTIES:
            changed, value = _PROPERTIES[name]
            table[changed] = value
        assignment = _COLUMNS.get(name)
        async with self._pool.acquire() as connection, connection.transaction():
            id_ = await connection.fetchval(
                _INSERT, queue, _storable(request), json.dumps(table), message.body
            )
            if assignment:
                await connection.execute(
                    f"UPDATE meshpoint_queue_message SET {assignment} "
                    "WHERE queue = $1 AND id = $2",
                    queue,
                    id_,
                )

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self._read_new()
            await self._collect_dead_letters(self._reading)

    async def _read_new(self) -> None:
        full = self.queue_name(FULL_QUEUE)
        for row in await self._reading.fetch(_READ_NEW, self._last_row_id, full):
            self._last_row_id = row["id"]
            address = row["name"].removeprefix(f"{self._namespace}.")
            marks = marks_of(to_bytes(row["properties"]), row["body"])
            if address == REPLIES:
                self.replied |= marks
            elif address == f"{EVIL}.req":
                self._observe(address, row, call=True)
            # a copy would be an answer: there are no logins
            elif address != f"{EVIL}.resp" and not marks and not address.startswith("ledger."):
                self._observe(address, row, call=False)
            if address == REPLIES or address in (f"{EVIL}.req", f"{EVIL}.resp"):
                await self._reading.execute(_DELETE, row["queue"], row["id"])

    async def _collect_dead_letters(self, connection: asyncpg.Connection | asyncpg.Pool) -> None:
        """Record the marks of the dead letters and delete these."""
        names = [self.queue_name(address) for address in DEAD_LETTERS]
        for row in await connection.fetch(_TAKE_DEAD_LETTERS, names):
            self.dead |= marks_of(to_bytes(row["properties"]), row["body"])

    def _observe(self, address: str, row: asyncpg.Record, *, call: bool) -> None:
        try:
            table = json.loads(row["properties"])
        except (ValueError, RecursionError):
            return
        if isinstance(table, dict):
            self.observe(address, table, table.get("headers", {}), row["body"], call=call)


def _to_text(value: str | bytes | int) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def _storable(text: str | None) -> str | None:
    """`text` if a column can have it, as the broker writes it."""
    return text if text is not None and text.isprintable() and text.isascii() else None


def _plain(headers: dict[Any, Any]) -> dict[str, Any]:
    return {
        _to_text(key): value
        for key, value in headers.items()
        if isinstance(value, str | int | float)
    }
