"""All statements on queues and messages. Each method runs inside the caller's transaction."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshpoint.adapters.sqlite_queue.content import COLUMNS, Row, from_row
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.messages import (
    Address,
    Message,
    MessageType,
    dead_letters_of,
    private_of,
    requests_of,
    responses_of,
)
from meshpoint.ports.broker import Published

DELIVERY_LIMIT = "delivery limit"
"""Why a message is dead that was given back too often."""

_MINE = "id = ? AND holder = ? AND deliveries = ?"
_INSERT_CONTENT = f"INSERT INTO meshpoint_queue_content (id, {COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
# A type that only a newer Meshpoint knows is left for a replica that does.
_KNOWN_TYPES = ", ".join(f"'{kind.value}'" for kind in MessageType)
_READY = f"""
    FROM meshpoint_queue_message JOIN meshpoint_queue_content USING (id)
    WHERE queue = ? AND holder IS NULL AND type IN ({_KNOWN_TYPES})"""
_SELECT_READY = f"SELECT id, deliveries, dead_reason, {COLUMNS} {_READY} ORDER BY id LIMIT ?"
_DEAD_LETTER = """
    UPDATE meshpoint_queue_message SET holder = NULL, deliveries = 0, dead_reason = {reason},
        queue = (SELECT dead_letters FROM meshpoint_queue WHERE name = meshpoint_queue_message.queue)
    WHERE {which}"""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A message that `holder` holds since its `count`-th delivery: the three together name the right to settle."""

    id: int
    holder: int
    count: int
    message: Message

    @property
    def key(self) -> tuple[int, int, int]:
        """What a settling statement must find unchanged."""
        return self.id, self.holder, self.count


class Queues:
    """The queues of one namespace."""

    def __init__(self, db: sqlite3.Connection, namespace: str, delivery_limit: int) -> None:
        self._db, self._namespace, self._delivery_limit = db, namespace, delivery_limit

    # Queues

    def declare(self, agent: AgentName) -> None:
        """Make the shared queues of `agent` exist."""
        for address in (requests_of(agent), responses_of(agent), dead_letters_of(agent)):
            self._db.execute(
                "INSERT INTO meshpoint_queue (name, agent, dead_letters, private) VALUES (?, ?, ?, 0)"
                " ON CONFLICT DO NOTHING",
                (self._name(address), self._name(agent), self._name(dead_letters_of(agent))),
            )

    def declare_private(self, agent: AgentName, replica: ReplicaId, holder: int) -> None:
        """Make a private queue exist and belong to `holder`."""
        self._db.execute(
            "INSERT INTO meshpoint_queue (name, agent, dead_letters, private, holder) VALUES (?, ?, ?, 1, ?)"
            " ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, left_at = NULL",
            (
                self._name(private_of(agent, replica)),
                self._name(agent),
                self._name(dead_letters_of(agent)),
                holder,
            ),
        )

    def drop_unused(self, private_ttl: float) -> None:
        """Delete private queues, with what is in them, whose holder went `private_ttl` seconds ago."""
        unused = self._db.execute(
            "SELECT name FROM meshpoint_queue WHERE left_at <= ?", (time.time() - private_ttl,)
        ).fetchall()
        for queue in unused:
            self._db.execute(
                "DELETE FROM meshpoint_queue_content WHERE id IN"
                " (SELECT id FROM meshpoint_queue_message WHERE queue = ?)",
                queue,
            )
            self._db.execute("DELETE FROM meshpoint_queue_message WHERE queue = ?", queue)
            self._db.execute("DELETE FROM meshpoint_queue WHERE name = ?", queue)

    def depth(self, address: Address) -> int | None:
        """Messages that nobody holds; None when there is no such queue."""
        name = self._name(address)
        if not self._exists(name):
            return None
        query = "SELECT count(*) FROM meshpoint_queue_message WHERE queue = ? AND holder IS NULL"
        return int(self._db.execute(query, (name,)).fetchone()[0])

    # Messages

    def publish(self, messages: Sequence[tuple[Address, Row]]) -> list[Published]:
        """Append each message to its queue, if there is one."""
        exists = {name: self._exists(name) for name in {self._name(address) for address, _ in messages}}
        results = []
        for address, row in messages:
            name = self._name(address)
            if exists[name]:
                self._insert(name, row)
            results.append(Published.ACCEPTED if exists[name] else Published.UNROUTABLE)
        return results

    def broadcast(self, agent: AgentName, row: Row) -> None:
        """Append a message to each private queue of `agent`."""
        query = "SELECT name FROM meshpoint_queue WHERE agent = ? AND private"
        for (name,) in self._db.execute(query, (self._name(agent),)).fetchall():
            self._insert(name, row)

    def has_ready(self, address: Address) -> bool:
        """Whether a message waits that nobody holds. Needs no transaction."""
        return self._db.execute(f"SELECT 1 {_READY} LIMIT 1", (self._name(address),)).fetchone() is not None

    def claim(self, address: Address, holder: int, limit: int) -> list[Claimed]:
        """Hand up to `limit` messages to `holder`, oldest first."""
        rows = self._db.execute(_SELECT_READY, (self._name(address), limit)).fetchall()
        claimed = [
            Claimed(id_, holder, deliveries + 1, from_row(tuple(content), dead_reason))
            for id_, deliveries, dead_reason, *content in rows
        ]
        self._db.executemany(
            "UPDATE meshpoint_queue_message SET holder = ?, deliveries = deliveries + 1 WHERE id = ?",
            [(holder, each.id) for each in claimed],
        )
        return claimed

    # Settling: each tells whether the message was still held.

    def ack(self, claimed: Claimed) -> bool:
        """Delete the message."""
        mine = self._db.execute(f"DELETE FROM meshpoint_queue_message WHERE {_MINE}", claimed.key).rowcount == 1
        if mine:
            self._db.execute("DELETE FROM meshpoint_queue_content WHERE id = ?", (claimed.id,))
        return mine

    def requeue(self, claimed: Claimed) -> bool:
        """Give the message back, in its old place."""
        return self._give_back(_MINE, claimed.key) == 1

    def dead_letter(self, claimed: Claimed, reason: str) -> bool:
        """Move the message to the dead letters of its agent."""
        statement = _DEAD_LETTER.format(reason="?", which=_MINE)
        return self._db.execute(statement, (reason, *claimed.key)).rowcount == 1

    def dissolve(self, holder: int) -> None:
        """Delete a holder and give back whatever it holds."""
        self._give_back("holder = ?", (holder,))
        self._db.execute("UPDATE meshpoint_queue SET left_at = ? WHERE holder = ?", (time.time(), holder))
        self._db.execute("DELETE FROM meshpoint_queue_holder WHERE id = ?", (holder,))

    def _give_back(self, which: str, values: Iterable[int]) -> int:
        dead = _DEAD_LETTER.format(
            reason="coalesce(dead_reason, ?)", which=f"{which} AND deliveries >= {self._delivery_limit:d}"
        )
        buried = self._db.execute(dead, (DELIVERY_LIMIT, *values)).rowcount
        statement = f"UPDATE meshpoint_queue_message SET holder = NULL WHERE {which}"
        return buried + self._db.execute(statement, tuple(values)).rowcount

    def _insert(self, name: str, row: Row) -> None:
        statement = "INSERT INTO meshpoint_queue_message (queue) VALUES (?)"
        self._db.execute(_INSERT_CONTENT, (self._db.execute(statement, (name,)).lastrowid, *row))

    def _exists(self, name: str) -> bool:
        query = "SELECT 1 FROM meshpoint_queue WHERE name = ?"
        return self._db.execute(query, (name,)).fetchone() is not None

    def _name(self, address: str) -> str:
        return f"{self._namespace}.{address}"
