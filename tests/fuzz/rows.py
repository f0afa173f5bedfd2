"""The fuzzer's access to a SQLite queue: writes rows, and reads the rows of other senders."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from meshpoint.adapters.sqlite_queue.content import COLUMNS

from .amqp import Letter
from .mesh import AGENTS
from .rabbit import Connections
from .recipes import EVIL, FULL, ME, REPLIES, World, recipe, valid
from .replica import marks_of

_TEXTS = ("type", "message_id", "correlation_id", "app_id", "reply_to", "user_id")
_PAUSE = 0.02
_DECLARE = """
    INSERT INTO meshpoint_queue (name, agent, dead_letters, private) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"""
_FILL = """
    WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < 100000)
    INSERT INTO meshpoint_queue_message (queue) SELECT :queue FROM number"""
"""Fill a private queue to its limit."""
_LONG = "replace(hex(zeroblob(600000)), '0', 'x')"
ROWS = {
    f"row: {assignment}": assignment
    for assignment in (
        *(f"{name} = {value}" for name in (*_TEXTS, "headers", "timestamp") for value in
          ("NULL", "X'00ff'", "5", "CAST(X'c328' AS TEXT)", _LONG, "''", "char(0)")),
        "type = 'telepathy'",
        "headers = '[]'", "headers = '{'", "headers = '{\"x-deadline\": NaN}'", "headers = '{\"x\": [[]]}'",
        "headers = '{\"x\": ' || replace(hex(zeroblob(50000)), '0', '[') || '}'",
        "headers = '{\"x-call-depth\": ' || replace(hex(zeroblob(5000)), '0', '9') || '}'",
        "timestamp = '99999-12-12'", "timestamp = '2026-01-01'",
        "body = NULL", "body = 'text'", "body = 12", "body = zeroblob(300000)", "body = X'00'",
        "deliveries = 'many'", "deliveries = 9223372036854775807", "deliveries = 19", "deliveries = -5",
        "holder = 987654321", "dead_reason = X'ff'",
    )
}  # fmt: skip
"""Assignments to the row of a valid message, by recipe."""

for _name in ROWS:

    @recipe(_name)
    def _row(world: World) -> Letter | None:
        return valid(world, world.chance.choice(("request", "cancel", "response", "status")))


class RowSide:
    """Counterpart of `RabbitSide` for a file as the broker."""

    def __init__(self, path: str, namespace: str, world: World) -> None:
        self._path, self._namespace, self._world = path, namespace, world
        self._last, self._reader = 0, asyncio.Event()
        self.words: Counter[str] = Counter()
        self.refused: set[str] = set()
        self.dead: set[str] = set()
        self.replied: set[str] = set()
        self.closings: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        self._db = sqlite3.connect(self._path, timeout=30, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.text_factory = lambda raw: raw.decode("utf-8", "replace")
        for address in (f"{EVIL}.req", f"{EVIL}.resp", f"{EVIL}.dlq", REPLIES):
            agent = address.partition(".")[0]
            values = (self._name(address), self._name(agent), self._name(f"{agent}.dlq"))
            self._db.execute(_DECLARE, (*values, 0))
        self._db.execute(_DECLARE, (self._name(FULL), self._name(ME), self._name(f"{ME}.dlq"), 1))
        self._db.execute(_FILL, {"queue": self._name(FULL)})
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)
        self.collect()
        self._db.close()

    async def send(self, mark: str, name: str, letter: Letter) -> None:
        """Insert `letter` into each queue that its key reaches."""
        queues = self._queues(letter.key)
        word = "accepted" if queues else "returned"
        for queue in queues:
            try:
                self._insert(queue, letter, ROWS.get(name))
            except (sqlite3.IntegrityError, OverflowError):
                word = "refused"
        self.words[word] += 1
        if word != "accepted":
            self.refused.add(mark)
        await asyncio.sleep(0)

    def connections(self) -> Connections:
        """Empty, because a file has no connections."""
        return Connections()

    async def all_told(self) -> None:
        """Return at once: nothing is in flight here."""

    async def open_full(self) -> None:
        """Empty the full queue, so that replies waiting for space can be sent."""
        self._db.execute("DELETE FROM meshpoint_queue_message WHERE queue = ?", (self._name(FULL),))

    def collect(self) -> None:
        """Record the marks of the dead letters and delete these."""
        query = (
            "SELECT id, message_id, substr(body, 1, 8192) FROM meshpoint_queue_message"
            " JOIN meshpoint_queue_content USING (id) WHERE queue = ? AND holder {}"
        )
        for address in [f"{agent}.dlq" for agent in (*AGENTS, EVIL, "ledger")]:
            for unheld in ("IS NULL", "= 0"):  # one by one, because each query has its index
                for id_, message_id, body in self._db.execute(
                    query.format(unheld), (self._name(address),)
                ).fetchall():
                    self.dead |= marks_of(_bytes(message_id), _bytes(body))
                    self._delete(id_)

    def _insert(self, queue: str, letter: Letter, assignment: str | None) -> None:
        values: dict[str, Any] = {name: letter.properties.get(name) for name in _TEXTS}
        plain = {str(key): value for key, value in letter.headers.items() if isinstance(value, str | int | float)}
        values |= {"headers": json.dumps(plain), "timestamp": None, "body": letter.body}
        for name in ("type", "message_id", "correlation_id", "app_id"):
            values[name] = values[name] or ""
        stored = {name: _stored(value) for name, value in values.items()}
        texts = {name for name, value in stored.items() if isinstance(value, bytes) and name != "body"}
        holes = ", ".join("CAST(? AS TEXT)" if name in texts else "?" for name in stored)
        self._db.execute("BEGIN IMMEDIATE")
        try:
            id_ = self._db.execute("INSERT INTO meshpoint_queue_message (queue) VALUES (?)", (queue,)).lastrowid
            insert = f"INSERT INTO meshpoint_queue_content (id, {', '.join(values)}) VALUES (?, {holes})"
            self._db.execute(insert, (id_, *stored.values()))
            if assignment:
                table = "message" if assignment.startswith(("deliveries", "holder", "dead")) else "content"
                self._db.execute(f"UPDATE meshpoint_queue_{table} SET {assignment} WHERE id = ?", (id_,))
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise

    def _queues(self, key: str) -> list[str]:
        agent, _, suffix = key.partition(".")
        if suffix == "broadcast":
            query, value = "SELECT name FROM meshpoint_queue WHERE agent = ? AND private", self._name(agent)
        else:
            query, value = "SELECT name FROM meshpoint_queue WHERE name = ?", self._name(key)
        return [name for (name,) in self._db.execute(query, (value,))]

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_PAUSE)
            with suppress(sqlite3.OperationalError):
                self._read_new()
                self.collect()

    def _read_new(self) -> None:
        query = (
            f"SELECT id, queue, {COLUMNS} FROM meshpoint_queue_message JOIN meshpoint_queue_content USING (id)"
            " WHERE id > ? AND length(headers) < 10000 AND length(body) < 100000 ORDER BY id"
        )
        for id_, queue, *values in self._db.execute(query, (self._last,)).fetchall():
            self._last = id_
            address = str(queue).removeprefix(f"{self._namespace}.")
            row = dict(zip(COLUMNS.split(", "), values, strict=True))
            marks = marks_of(_bytes(row["message_id"]), _bytes(row["body"]))
            if address == REPLIES:
                self.replied |= marks_of(_bytes(row["message_id"]), _bytes(row["body"]))
                self._delete(id_)
            elif address == f"{EVIL}.req":
                self._enter(address, row, call=True)
                self._delete(id_)
            elif address == f"{EVIL}.resp":
                self._delete(id_)
            # a copy would be an answer: there are no logins
            elif not marks and not address.startswith("ledger."):
                self._enter(address, row, call=False)

    def _enter(self, address: str, row: dict[str, Any], *, call: bool) -> None:
        try:
            headers = json.loads(row["headers"])
        except (ValueError, TypeError, RecursionError):
            return
        if not isinstance(headers, dict) or not isinstance(row["body"], bytes):
            return
        properties = {name: row[name] for name in _TEXTS if isinstance(row[name], str)}
        letter = Letter(address, properties, headers, row["body"])
        if not call:
            self._world.passed(str(row["type"]), letter)
            reply_to = properties.get("reply_to", "")
            if ".private." in reply_to and reply_to not in self._world.privates:
                self._world.privates.append(reply_to)
        elif "reply_to" in properties and "x-parent-task-id" in headers:
            self._world.asked_me(letter)

    def _delete(self, id_: int) -> None:
        for table in ("content", "message"):
            self._db.execute(f"DELETE FROM meshpoint_queue_{table} WHERE id = ?", (id_,))

    def _name(self, address: str) -> str:
        return f"{self._namespace}.{address}"


def _stored(value: Any) -> Any:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) and not value.isascii() else value


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")
