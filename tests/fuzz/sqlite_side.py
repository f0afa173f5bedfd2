"""The fuzzer's access to a SQLite queue: writes rows, and reads the rows of other senders."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import suppress
from typing import Any, Self

from meshpoint.adapters.sqlite_queue.content import COLUMNS

from .amqp import WireMessage
from .recipes import EVIL, FULL_QUEUE, MALLORY, REPLIES, FuzzState, recipe, valid_message
from .replica import marks_of
from .row_side import DEAD_LETTERS, DECLARED, POLL_SECONDS, TEXTS, RowSide, to_bytes

_DECLARE_QUEUE = """
    INSERT INTO meshpoint_queue (name, agent, dead_letters, private) VALUES (?, ?, ?, ?)
    ON CONFLICT DO NOTHING"""
_FILL_QUEUE = """
    WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < 100000)
    INSERT INTO meshpoint_queue_message (queue) SELECT :queue FROM number"""
"""Fill a private queue to its limit."""
_LONG_TEXT = "replace(hex(zeroblob(600000)), '0', 'x')"
SQLITE_ROWS = {
    f"row: {assignment}": assignment
    for assignment in (
        *(f"{name} = {value}" for name in (*TEXTS, "headers", "timestamp") for value in
          ("NULL", "X'00ff'", "5", "CAST(X'c328' AS TEXT)", _LONG_TEXT, "''", "char(0)")),
        "type = 'telepathy'",
        "headers = '[]'", "headers = '{'", "headers = '{\"x-deadline\": NaN}'",
        "headers = '{\"x\": [[]]}'",
        "headers = '{\"x\": ' || replace(hex(zeroblob(50000)), '0', '[') || '}'",
        "headers = '{\"x-call-depth\": ' || replace(hex(zeroblob(5000)), '0', '9') || '}'",
        "timestamp = '99999-12-12'", "timestamp = '2026-01-01'",
        "body = NULL", "body = 'text'", "body = 12", "body = zeroblob(300000)", "body = X'00'",
        "deliveries = 'many'", "deliveries = 9223372036854775807",
        "deliveries = 19", "deliveries = -5",
        "holder = 987654321", "dead_reason = X'ff'",
    )
}  # fmt: skip
"""Assignments to the row of a valid message, by recipe."""

for _name in SQLITE_ROWS:

    @recipe(_name)
    def _row(world: FuzzState) -> WireMessage | None:
        return valid_message(world, world.rng.choice(("request", "cancel", "response", "status")))


class SqliteSide(RowSide):
    """The side for a file as the broker."""

    def __init__(self, path: str, namespace: str, world: FuzzState) -> None:
        super().__init__(namespace, world)
        self._path = path

    async def __aenter__(self) -> Self:
        self._db = sqlite3.connect(
            self._path, timeout=30, isolation_level=None, check_same_thread=False
        )
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.text_factory = lambda raw: raw.decode("utf-8", "replace")
        for address in DECLARED:
            agent = address.partition(".")[0]
            values = (
                self.queue_name(address),
                self.queue_name(agent),
                self.queue_name(f"{agent}.dlq"),
            )
            self._db.execute(_DECLARE_QUEUE, (*values, 0))
        self._db.execute(
            _DECLARE_QUEUE,
            (
                self.queue_name(FULL_QUEUE),
                self.queue_name(MALLORY),
                self.queue_name(f"{MALLORY}.dlq"),
                1,
            ),
        )
        self._db.execute(_FILL_QUEUE, {"queue": self.queue_name(FULL_QUEUE)})
        self._poll_task = asyncio.create_task(self._poll())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._poll_task.cancel()
        await asyncio.gather(self._poll_task, return_exceptions=True)
        self.collect_dead_letters()
        self._db.close()

    async def send(self, mark: str, name: str, message: WireMessage) -> None:
        """Insert `message` into each queue that its key reaches."""
        queues = self._queues(message.key)
        result = "accepted" if queues else "returned"
        for queue in queues:
            try:
                self._insert(queue, message, SQLITE_ROWS.get(name))
            except (sqlite3.IntegrityError, OverflowError):
                result = "refused"
        self.record_result(mark, result)
        await asyncio.sleep(0)

    async def drain_full_queue(self) -> None:
        """Empty the full queue, so that replies waiting for space can be sent."""
        self._db.execute(
            "DELETE FROM meshpoint_queue_message WHERE queue = ?", (self.queue_name(FULL_QUEUE),)
        )

    def collect_dead_letters(self) -> None:
        """Record the marks of the dead letters and delete these."""
        query = (
            "SELECT id, message_id, substr(body, 1, 8192) FROM meshpoint_queue_message"
            " JOIN meshpoint_queue_content USING (id) WHERE queue = ? AND holder {}"
        )
        for address in DEAD_LETTERS:
            for unheld in ("IS NULL", "= 0"):  # one by one, because each query has its index
                for id_, message_id, body in self._db.execute(
                    query.format(unheld), (self.queue_name(address),)
                ).fetchall():
                    self.dead |= marks_of(to_bytes(message_id), to_bytes(body))
                    self._delete(id_)

    def _insert(self, queue: str, message: WireMessage, assignment: str | None) -> None:
        values: dict[str, Any] = {name: message.properties.get(name) for name in TEXTS}
        plain_headers = {
            str(key): value
            for key, value in message.headers.items()
            if isinstance(value, str | int | float)
        }
        values |= {"headers": json.dumps(plain_headers), "timestamp": None, "body": message.body}
        for name in ("type", "message_id", "correlation_id", "app_id"):
            values[name] = values[name] or ""
        stored = {name: _to_column(value) for name, value in values.items()}
        texts = {
            name for name, value in stored.items() if isinstance(value, bytes) and name != "body"
        }
        placeholders = ", ".join("CAST(? AS TEXT)" if name in texts else "?" for name in stored)
        self._db.execute("BEGIN IMMEDIATE")
        try:
            id_ = self._db.execute(
                "INSERT INTO meshpoint_queue_message (queue) VALUES (?)", (queue,)
            ).lastrowid
            insert = (
                f"INSERT INTO meshpoint_queue_content (id, {', '.join(values)}) "
                f"VALUES (?, {placeholders})"
            )
            self._db.execute(insert, (id_, *stored.values()))
            if assignment:
                table = (
                    "message"
                    if assignment.startswith(("deliveries", "holder", "dead"))
                    else "content"
                )
                self._db.execute(
                    f"UPDATE meshpoint_queue_{table} SET {assignment} WHERE id = ?", (id_,)
                )
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise

    def _queues(self, key: str) -> list[str]:
        agent, _, suffix = key.partition(".")
        if suffix == "broadcast":
            query, value = (
                "SELECT name FROM meshpoint_queue WHERE agent = ? AND private",
                self.queue_name(agent),
            )
        else:
            query, value = "SELECT name FROM meshpoint_queue WHERE name = ?", self.queue_name(key)
        return [name for (name,) in self._db.execute(query, (value,))]

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            with suppress(sqlite3.OperationalError):
                self._read_new()
                self.collect_dead_letters()

    def _read_new(self) -> None:
        query = (
            f"SELECT id, queue, {COLUMNS} FROM meshpoint_queue_message "
            "JOIN meshpoint_queue_content USING (id) WHERE id > ? AND length(headers) < 10000 "
            "AND length(body) < 100000 ORDER BY id"
        )
        for id_, queue, *values in self._db.execute(query, (self._last_row_id,)).fetchall():
            self._last_row_id = id_
            address = str(queue).removeprefix(f"{self._namespace}.")
            row = dict(zip(COLUMNS.split(", "), values, strict=True))
            marks = marks_of(to_bytes(row["message_id"]), to_bytes(row["body"]))
            if address == REPLIES:
                self.replied |= marks
                self._delete(id_)
            elif address == f"{EVIL}.req":
                self._observe(address, row, call=True)
                self._delete(id_)
            elif address == f"{EVIL}.resp":
                self._delete(id_)
            # a copy would be an answer: there are no logins
            elif not marks and not address.startswith("ledger."):
                self._observe(address, row, call=False)

    def _observe(self, address: str, row: dict[str, Any], *, call: bool) -> None:
        try:
            headers = json.loads(row["headers"])
        except (ValueError, TypeError, RecursionError):
            return
        self.observe(address, row, headers, row["body"], call=call)

    def _delete(self, id_: int) -> None:
        for table in ("content", "message"):
            self._db.execute(f"DELETE FROM meshpoint_queue_{table} WHERE id = ?", (id_,))


def _to_column(value: Any) -> Any:
    return (
        value.encode("utf-8", "surrogatepass")
        if isinstance(value, str) and not value.isascii()
        else value
    )
