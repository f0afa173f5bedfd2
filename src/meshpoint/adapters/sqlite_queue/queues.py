"""All statements on queues, messages, and holders of unacked messages.

Except where noted, each method must be called inside a transaction.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshpoint.adapters.sqlite_queue.content import (
    COLUMNS,
    READ_COLUMNS,
    READ_DELIVERIES,
    READ_REASON,
    ContentRow,
    from_row,
)
from meshpoint.adapters.sqlite_queue.schema import (
    MARKER_TABLE,
    TOPIC_TABLE,
    has_schema,
    has_table,
    transaction,
)
from meshpoint.adapters.stored_messages import QueueLimits
from meshpoint.errors import BrokerUnavailable, PoisonMessage
from meshpoint.model.error_text import make_storable
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.messages import (
    Address,
    Message,
    Topic,
    dead_letter_queue,
    is_request_queue,
    nested_queue,
    private_queue,
    request_shard,
    response_queue,
)
from meshpoint.ports.broker import PublishResult

_log = logging.getLogger(__name__)

DELIVERY_LIMIT_REASON = "delivery limit"
"""Reason of dead letters that were requeued too often."""

UNREADABLE_HOLDER = 0
"""Holder of dead letters that consumers cannot read, and operators read with SQL.

No broker has this id.
"""
_BUSY_TIMEOUT = 10.0
"""Seconds to wait for other writers."""
_BATCH_BYTES = 64 * 1024 * 1024
"""Total bytes of bodies after which a claim takes no more messages."""
_MAX_DELIVERIES = 2**31
_NO_LIMITS = QueueLimits()
_MAX_NAME_BYTES = 10_000  # bytes
_MAX_COUNTED_QUEUES = 10_000  # maximum queues whose free room is remembered

_CLAIM_MATCHES = "id = ? AND holder = ? AND deliveries = ?"
_INSERT_CONTENT = f"""
    INSERT OR REPLACE INTO meshpoint_queue_content (id, {COLUMNS})
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_READY_ROWS = (
    "FROM meshpoint_queue_message LEFT JOIN meshpoint_queue_content USING (id) "
    "WHERE queue = ? AND holder IS NULL"
)
_SELECT_READY = f"""
    SELECT id, {READ_DELIVERIES}, {READ_REASON}, meshpoint_queue_content.id IS NULL, {READ_COLUMNS}
    {_READY_ROWS} ORDER BY id LIMIT ?"""
_DEAD_LETTER = """
    UPDATE meshpoint_queue_message SET holder = {holder}, deliveries = 0, dead_reason = {reason},
        dead_from = coalesce((SELECT name FROM meshpoint_queue
                               WHERE name = meshpoint_queue_message.queue
                                 AND name <> dead_letters), dead_from),
        queue = coalesce((SELECT dead_letters FROM meshpoint_queue
                           WHERE name = meshpoint_queue_message.queue), queue)
    WHERE {which}"""

# Also topics of queues that an earlier release has deleted.
_DROP_TOPICS = f"DELETE FROM {TOPIC_TABLE} WHERE queue NOT IN (SELECT name FROM meshpoint_queue)"
_QUEUES_OF_NAMESPACE = """
    SELECT name, agent, private FROM meshpoint_queue
     WHERE substr(name, 1, length(:prefix)) = :prefix"""


@dataclass(frozen=True, slots=True)
class ClaimedMessage:
    """A message claimed by `holder` as its `count`-th delivery. Only this claim may settle it."""

    id: int
    holder: int
    count: int
    message: Message

    @property
    def key(self) -> tuple[int, int, int]:
        """The values that a settling statement must find unchanged."""
        return self.id, self.holder, self.count


class Queues:
    """The queues of one namespace."""

    def __init__(
        self,
        db: sqlite3.Connection,
        namespace: str,
        delivery_limit: int,
        limits: QueueLimits = _NO_LIMITS,
    ) -> None:
        self._db, self._namespace, self._delivery_limit, self._limits = (
            db,
            namespace,
            delivery_limit,
            limits,
        )
        self.unreadable_count = 0  # unreadable rows found so far
        self._uncounted_room: dict[str, int] = {}  # messages each queue accepts before a recount

    def register_holder(self) -> int:
        """Insert a new holder of unacked messages and return its id, which is never reused."""
        self._db.execute("INSERT INTO meshpoint_queue_holder DEFAULT VALUES")
        ((holder,),) = self._db.execute("SELECT last_insert_rowid()").fetchall()
        return int(holder)

    def has_holder(self, holder: int) -> bool:
        """Whether the holder's row still exists; a broker that declares it dead deletes it."""
        query = "SELECT 1 FROM meshpoint_queue_holder WHERE id = ?"
        return self._db.execute(query, (holder,)).fetchone() is not None

    def record_heartbeat(self, holder: int) -> None:
        """Increase the holder's beat."""
        self._db.execute(
            "UPDATE meshpoint_queue_holder SET beat = beat + 1 WHERE id = ?", (holder,)
        )

    def heartbeats(self) -> dict[int, int]:
        """The beat of every holder."""
        # Another program may have written any value, even a text that cannot be decoded.
        query = "SELECT id, CAST(beat AS INTEGER) FROM meshpoint_queue_holder"
        return dict(self._db.execute(query).fetchall())

    def declare(self, agent: AgentName, shards: int = 1) -> None:
        """Create the shared queues of `agent` if missing, with `shards` request queues."""
        requests = [request_shard(agent, number) for number in range(shards)]
        for address in (
            *requests,
            nested_queue(agent),
            response_queue(agent),
            dead_letter_queue(agent),
        ):
            self._db.execute(
                "INSERT INTO meshpoint_queue (name, agent, dead_letters, private)"
                " VALUES (?, ?, ?, 0) ON CONFLICT DO NOTHING",
                (
                    self._queue_name(address),
                    self._queue_name(agent),
                    self._queue_name(dead_letter_queue(agent)),
                ),
            )

    def declare_private(self, agent: AgentName, replica: ReplicaId, holder: int) -> None:
        """Create the private queue of `replica` if missing, and assign it to `holder`."""
        self._db.execute(
            "INSERT INTO meshpoint_queue (name, agent, dead_letters, private, holder)"
            " VALUES (?, ?, ?, 1, ?)"
            " ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, left_at = NULL",
            (
                self._queue_name(private_queue(agent, replica)),
                self._queue_name(agent),
                self._queue_name(dead_letter_queue(agent)),
                holder,
            ),
        )

    def subscribe(self, agent: AgentName, replica: ReplicaId, topics: Iterable[Topic]) -> None:
        """Also append the messages of `topics` to the private queue of `replica`."""
        queue = self._queue_name(private_queue(agent, replica))
        self._db.executemany(
            f"INSERT INTO {TOPIC_TABLE} (topic, queue) VALUES (?, ?) ON CONFLICT DO NOTHING",
            [(self._queue_name(topic), queue) for topic in topics],
        )

    def mark_database(self, agent: AgentName) -> bool:
        """Set the marker of `agent`. Returns `True` if it was not set before."""
        statement = f"INSERT INTO {MARKER_TABLE} (name) VALUES (?) ON CONFLICT DO NOTHING"
        return self._db.execute(statement, (self._queue_name(agent),)).rowcount == 1

    def has_database_marker(self, agent: AgentName) -> bool:
        """Whether the marker of `agent` is set."""
        query = f"SELECT 1 FROM {MARKER_TABLE} WHERE name = ?"
        return self._db.execute(query, (self._queue_name(agent),)).fetchone() is not None

    def remove_database_marker(self, agent: AgentName) -> None:
        """Remove the marker of `agent`, if it is set."""
        statement = f"DELETE FROM {MARKER_TABLE} WHERE name = ?"
        self._db.execute(statement, (self._queue_name(agent),))

    def replica_holders(self, agent: AgentName) -> list[int]:
        """The holders of the private queues of `agent`."""
        query = "SELECT holder FROM meshpoint_queue WHERE private = 1 AND agent = ?"
        return [holder for (holder,) in self._db.execute(query, (self._queue_name(agent),))]

    def drop_unused(self, private_ttl: float) -> None:
        """Delete private queues and their messages `private_ttl` seconds after the holder left."""
        unused, before = (
            "SELECT name FROM meshpoint_queue WHERE left_at <= ?",
            (time.time() - private_ttl,),
        )
        # This check avoids a scan of all messages at every heartbeat.
        if self._db.execute(f"SELECT EXISTS ({unused})", before).fetchone() == (0,):
            return
        inside = f"SELECT id FROM meshpoint_queue_message WHERE queue IN ({unused})"
        self._db.execute(f"DELETE FROM meshpoint_queue_content WHERE id IN ({inside})", before)
        self._db.execute(f"DELETE FROM meshpoint_queue_message WHERE queue IN ({unused})", before)
        self._db.execute("DELETE FROM meshpoint_queue WHERE left_at <= ?", before)
        self._db.execute(_DROP_TOPICS)

    def depth(self, address: Address) -> int | None:
        """Number of messages that no consumer holds, including unreadable dead letters.

        `None` if the queue does not exist.
        """
        name = self._queue_name(address)
        if self._is_private(name) is None:
            return None
        query = f"""
            SELECT count(*) FROM meshpoint_queue_message
             WHERE queue = ? AND (holder IS NULL OR holder = {UNREADABLE_HOLDER})"""
        return int(self._db.execute(query, (name,)).fetchone()[0])

    def has_request(self, agent: AgentName, task_id: TaskId) -> bool:
        """Whether a shared queue of `agent`, except its dead letters, has the task's request.

        Requests that a holder has claimed count.
        """
        query = """
            SELECT 1 FROM meshpoint_queue_content
              JOIN meshpoint_queue_message USING (id)
              JOIN meshpoint_queue ON meshpoint_queue.name = meshpoint_queue_message.queue
             WHERE type = 'request' AND correlation_id = ?
               AND agent = ? AND NOT private AND name <> dead_letters LIMIT 1"""
        return self._db.execute(query, (task_id, self._queue_name(agent))).fetchone() is not None

    def publish(self, messages: Sequence[tuple[Address, ContentRow]]) -> list[PublishResult]:
        """Append each message to its queue if the queue exists and has room."""
        private_by_name = {
            name: self._is_private(name)
            for name in {self._queue_name(address) for address, _ in messages}
        }
        results = []
        for address, row in messages:
            name = self._queue_name(address)
            if (private := private_by_name[name]) is None:
                results.append(PublishResult.UNROUTABLE)
            elif not self._has_room(name, private=private):
                results.append(PublishResult.OVERLOADED)
            else:
                self._insert(name, row)
                results.append(PublishResult.ACCEPTED)
        return results

    def broadcast(self, agent: AgentName, row: ContentRow) -> None:
        """Append a message to every private queue of `agent` that has room."""
        for name in self._distinct_names("name", "agent = ? AND private", self._queue_name(agent)):
            if self._has_room(name, private=True):
                self._insert(name, row)

    def announce(self, topic: Topic, row: ContentRow) -> None:
        """Append a message to every private queue that is subscribed to `topic` and has room."""
        subscribed = f"private AND name IN (SELECT queue FROM {TOPIC_TABLE} WHERE topic = ?)"
        for name in self._distinct_names("name", subscribed, self._queue_name(topic)):
            if self._has_room(name, private=True):
                self._insert(name, row)

    def trim_dead_letters(self) -> None:
        """Drop the oldest dead letters above the limit. Unreadable ones are counted separately."""
        if (limit := self._limits.dead_letters) is None:
            return
        prefix = self._queue_name("")
        for name in self._distinct_names(
            "dead_letters", "substr(name, 1, ?) = ?", len(prefix), prefix
        ):
            for holder in ("IS NULL", f"= {UNREADABLE_HOLDER}"):
                condition = f"queue = ? AND holder {holder}"
                beyond = (
                    f"SELECT id FROM meshpoint_queue_message WHERE {condition}"
                    " ORDER BY id DESC LIMIT -1 OFFSET ?"
                )
                dropped = [id_ for (id_,) in self._db.execute(beyond, (name, limit))]
                if dropped:
                    _log.warning(
                        "%s holds more than %d messages: dropped its oldest %d",
                        name,
                        limit,
                        len(dropped),
                    )
                self._delete(dropped)

    def has_ready(self, address: Address) -> bool:
        """Whether the queue has a message that no holder has claimed. Needs no transaction."""
        return (
            self._db.execute(
                f"SELECT 1 {_READY_ROWS} LIMIT 1", (self._queue_name(address),)
            ).fetchone()
            is not None
        )

    def claim_messages(self, address: Address, holder: int, limit: int) -> list[ClaimedMessage]:
        """Assign up to `limit` messages to `holder`, oldest first.

        An unreadable row becomes a dead letter with its content unchanged, and counts towards
        `limit`.
        """
        claimed, size = list[ClaimedMessage](), 0
        for id_, deliveries, dead_reason, missing, *content in self._ready_rows(address, limit):
            if size > _BATCH_BYTES:
                break
            try:
                if missing or not (
                    isinstance(deliveries, int) and 0 <= deliveries < _MAX_DELIVERIES
                ):
                    raise PoisonMessage(
                        "the row has no content" if missing else "deliveries: is not a count"
                    )
                message = from_row(
                    tuple(content),
                    None if dead_reason is None else make_storable(str(dead_reason)),
                )
            except PoisonMessage as error:
                self._dead_letter_unreadable(address, id_, str(error), missing=bool(missing))
            else:
                claimed.append(ClaimedMessage(id_, holder, deliveries + 1, message))
                size += len(message.body)
        self._db.executemany(
            "UPDATE meshpoint_queue_message SET holder = ?, deliveries = deliveries + 1"
            " WHERE id = ?",
            [(holder, each.id) for each in claimed],
        )
        return claimed

    def _ready_rows(self, address: Address, limit: int) -> list[tuple[Any, ...]]:
        values = (self._queue_name(address), limit)
        try:
            return self._db.execute(_SELECT_READY, values).fetchall()
        except sqlite3.OperationalError as error:
            if "decode" not in str(
                error
            ):  # the driver's own error: it has a text, but no error code
                raise
        # A text is not UTF-8. With surrogates, only its own row is unreadable.
        self._db.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
        try:
            return self._db.execute(_SELECT_READY, values).fetchall()
        finally:
            self._db.text_factory = str

    def _dead_letter_unreadable(
        self, address: Address, id_: int, reason: str, *, missing: bool
    ) -> None:
        self.unreadable_count += 1
        _log.warning("unreadable message %d in %s: %s", id_, self._queue_name(address), reason)
        if missing:
            self._delete([id_])
        else:
            statement = _DEAD_LETTER.format(holder=UNREADABLE_HOLDER, reason="?", which="id = ?")
            self._db.execute(statement, (reason, id_))

    def requeue_orphans(self) -> None:
        """Requeue messages whose holder does not exist."""
        orphaned = (
            f"holder IS NOT {UNREADABLE_HOLDER}"
            " AND holder NOT IN (SELECT id FROM meshpoint_queue_holder)"
        )
        self._requeue_where(f"holder IS NOT NULL AND {orphaned}", ())

    def ack(self, claimed: ClaimedMessage) -> bool:
        """Delete the message. `False` if the claim is invalid, since the message was requeued."""
        deleted = (
            self._db.execute(
                f"DELETE FROM meshpoint_queue_message WHERE {_CLAIM_MATCHES}", claimed.key
            ).rowcount
            == 1
        )
        if deleted:
            self._db.execute("DELETE FROM meshpoint_queue_content WHERE id = ?", (claimed.id,))
        return deleted

    def requeue(self, claimed: ClaimedMessage) -> bool:
        """Release the message at its old position in the queue. `False` if the claim is invalid.

        At the delivery limit, it becomes a dead letter instead.
        """
        return self._requeue_where(_CLAIM_MATCHES, claimed.key) == 1

    def dead_letter(self, claimed: ClaimedMessage, reason: str) -> bool:
        """Move the message to its agent's dead letters. `False` if the claim is invalid."""
        statement = _DEAD_LETTER.format(holder="NULL", reason="?", which=_CLAIM_MATCHES)
        return self._db.execute(statement, (reason, *claimed.key)).rowcount == 1

    def remove_holder(self, holder: int) -> None:
        """Delete a holder and requeue its unacked messages."""
        self._requeue_where("holder = ?", (holder,))
        self._db.execute(
            "UPDATE meshpoint_queue SET left_at = ? WHERE holder = ?", (time.time(), holder)
        )
        self._db.execute("DELETE FROM meshpoint_queue_holder WHERE id = ?", (holder,))

    def _requeue_where(self, condition: str, values: Iterable[int]) -> int:
        dead = _DEAD_LETTER.format(
            holder="NULL",
            reason="coalesce(dead_reason, ?)",
            which=f"{condition} AND deliveries >= {self._delivery_limit:d}",
        )
        dead_lettered = self._db.execute(dead, (DELIVERY_LIMIT_REASON, *values)).rowcount
        statement = f"UPDATE meshpoint_queue_message SET holder = NULL WHERE {condition}"
        return dead_lettered + self._db.execute(statement, tuple(values)).rowcount

    def _has_room(self, name: str, *, private: bool) -> bool:
        """Whether the queue has room.

        Messages are not counted each time, so a queue may slightly exceed its limit.
        """
        limit = (
            self._limits.private
            if private
            else self._limits.requests
            if is_request_queue(name)
            else None
        )
        if limit is None:
            return True
        if self._uncounted_room.get(name, 0) <= 0:
            free = limit - self._count(name, limit)
            if len(self._uncounted_room) >= _MAX_COUNTED_QUEUES:
                self._uncounted_room.clear()
            self._uncounted_room[name] = 0 if free <= 0 else 1 + free // 8
        self._uncounted_room[name] -= 1
        return self._uncounted_room[name] >= 0

    def _count(self, name: str, limit: int) -> int:
        some = "SELECT 1 FROM meshpoint_queue_message WHERE queue = ? AND holder IS NULL LIMIT ?"
        query = f"SELECT count(*) FROM ({some})"
        return int(self._db.execute(query, (name, limit)).fetchone()[0])

    def _delete(self, ids: Iterable[int]) -> None:
        for table in ("content", "message"):
            self._db.executemany(
                f"DELETE FROM meshpoint_queue_{table} WHERE id = ?", [(id_,) for id_ in ids]
            )

    def _insert(self, name: str, row: ContentRow) -> None:
        statement = "INSERT INTO meshpoint_queue_message (queue) VALUES (?)"
        self._db.execute(_INSERT_CONTENT, (self._db.execute(statement, (name,)).lastrowid, *row))

    def _is_private(self, name: str) -> bool | None:
        """Whether the queue is private; `None` if it does not exist."""
        row = self._db.execute(
            "SELECT private IS 1 FROM meshpoint_queue WHERE name = ?", (name,)
        ).fetchone()
        return None if row is None else bool(row[0])

    def _distinct_names(self, column: str, condition: str, *values: str | int) -> list[str]:
        """The distinct queue names in `column`, except values that no broker can have written."""
        readable = (
            f"typeof({column}) = 'text' AND length(CAST({column} AS BLOB)) <= {_MAX_NAME_BYTES}"
        )
        query = (
            f"SELECT DISTINCT CAST({column} AS BLOB) FROM meshpoint_queue"
            f" WHERE {readable} AND {condition}"
        )
        names = []
        for (raw,) in self._db.execute(query, values).fetchall():
            with suppress(UnicodeDecodeError):
                names.append(raw.decode())
        return names

    def _queue_name(self, address: str) -> str:
        return f"{self._namespace}.{address}"


def delete_queues(file: Path, namespace: str, *, keep: Collection[str] = ()) -> None:
    """Delete the queues of `namespace`, except the shared queues of the agents in `keep`.

    A request for another agent then fails at once instead of waiting for a replica that never
    starts.

    Raises:
        BrokerUnavailable: Others kept the file locked for 10 seconds, or it is unreadable.
    """
    if not file.exists():
        return
    kept = {f"{namespace}.{agent}" for agent in keep}
    try:
        with closing(sqlite3.connect(file, timeout=_BUSY_TIMEOUT, isolation_level=None)) as db:
            if not has_schema(db):
                return
            with transaction(db):
                queues = db.execute(_QUEUES_OF_NAMESPACE, {"prefix": f"{namespace}."}).fetchall()
                for name, agent, private in queues:
                    if private or agent not in kept:
                        _delete_queue(db, name)
                if has_table(
                    db, TOPIC_TABLE
                ):  # not in a file that only earlier releases have used
                    db.execute(_DROP_TOPICS)
                _delete_markers(db, namespace, kept)
    except sqlite3.DatabaseError as error:
        raise BrokerUnavailable(f"{file}: {error}") from error


def _delete_markers(db: sqlite3.Connection, namespace: str, kept: Collection[str]) -> None:
    if not has_table(db, MARKER_TABLE):  # a file that only earlier releases have used
        return
    prefix = f"{namespace}."
    query = f"SELECT name FROM {MARKER_TABLE} WHERE substr(name, 1, length(:prefix)) = :prefix"
    names = [name for (name,) in db.execute(query, {"prefix": prefix}) if name not in kept]
    db.executemany(f"DELETE FROM {MARKER_TABLE} WHERE name = ?", [(name,) for name in names])


def _delete_queue(db: sqlite3.Connection, name: str) -> None:
    messages = "SELECT id FROM meshpoint_queue_message WHERE queue = ?"
    db.execute(f"DELETE FROM meshpoint_queue_content WHERE id IN ({messages})", (name,))
    db.execute("DELETE FROM meshpoint_queue_message WHERE queue = ?", (name,))
    db.execute("DELETE FROM meshpoint_queue WHERE name = ?", (name,))
