"""One process's statements on the queues: publishing, claiming, settling, and its lease."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from sqlalchemy.ext.asyncio import AsyncEngine

from meshpoint.adapters.postgres_queue import statements as sql
from meshpoint.adapters.postgres_queue.consumers import LOWEST_ID, Claim, Consumer, low_before
from meshpoint.adapters.postgres_queue.content import MAX_PROPERTIES_BYTES, Content
from meshpoint.adapters.sql.array_literals import int_array
from meshpoint.adapters.sql.batcher import Batcher
from meshpoint.adapters.sql.hand_over import held_arrays
from meshpoint.adapters.sql.prepared import PreparedConnection
from meshpoint.adapters.stored_messages import QueueLimits
from meshpoint.errors import BrokerUnavailable, CommitInDoubt, StoreUnavailable
from meshpoint.model.messages import is_request_queue
from meshpoint.ports.broker import PublishResult

_log = logging.getLogger(__name__)

SESSION_CONNECTIONS = 5
"""Connections of a session: slow maintenance must not hold up heartbeats, nor claims acks."""
_MAX_KNOWN_QUEUES = 10_000
_MAX_BATCH = 500
"""Messages of one statement."""
_INLINE_BODY_BYTES = 64 * 1024
"""Larger bodies are read one by one, so that a claim needs little memory."""
_RETRY_SECONDS = 0.1
_LATE_CLAIM_SECONDS = (1.0, 3.0, 7.0, 15.0, 31.0)
"""When to look for messages of a lost claim again, after the loss."""
_MAX_HOLDER = 2**63 - 1


class Queue(NamedTuple):
    """A queue that exists, or did when it was last looked up. `limit` is in messages."""

    id: int
    limit: int | None


class Entry(NamedTuple):
    """A message to be appended to the queue `name`, and the claims to ack with it."""

    name: str
    content: Content
    held: Sequence[Claim] = ()


class Settlement(NamedTuple):
    """The end of a claim. A message that is neither acked nor dead is requeued.

    `reason` says why it is a dead letter, and `holder` is who holds it from then on.
    """

    claim: Claim
    acked: bool = False
    dead: bool = False
    reason: str | None = None
    holder: int | None = None


class QueueSession:
    """The statements of one open broker, which is the holder of the messages that it claims.

    Raises, from every method:
        Unavailable: The database did not answer.
    """

    def __init__(
        self, engine: AsyncEngine, lease: timedelta, delivery_limit: int, limits: QueueLimits
    ) -> None:
        self._lease, self._delivery_limit, self._limits = lease, delivery_limit, limits
        self._connections = [PreparedConnection(engine) for _ in range(SESSION_CONNECTIONS)]
        self._publishing, self._claiming, self._settling, self._beating, self._other = (
            self._connections
        )
        self._queues: dict[str, Queue] = {}
        self._uncounted_room: dict[int, int] = {}  # messages each queue accepts before a recount
        self._lows: dict[int, int] = {}  # like `Consumer.low`, for counting
        self._publisher: Batcher[Entry, PublishResult] = Batcher(
            self._publish, lambda entry: len(entry.content.body), max_items=_MAX_BATCH
        )
        self._settler: Batcher[Settlement, bool] = Batcher(self._settle, max_items=_MAX_BATCH)
        self.holder = 0
        self.available = True
        self.claims_in_doubt = False
        """Whether a claim may have taken messages although its answer was lost."""
        self._next_doubts: list[float] = []
        self._closed = False

    async def close(self) -> None:
        """Return all connections."""
        self._closed = True
        await self._publisher.close()
        await self._settler.close()
        for connection in self._connections:
            await connection.close()

    async def execute(self, statement: str, *values: Any) -> Sequence[Any]:
        """Run a statement that may be repeated, and return its rows."""
        try:
            return await self._run(self._other, statement, *values)
        except StoreUnavailable as error:
            raise BrokerUnavailable(str(error)) from error

    async def register(self) -> None:
        """Become a new holder, with an id that no other database has."""
        holder = secrets.randbelow(_MAX_HOLDER) + 1
        try:
            await self._run(self._beating, sql.REGISTER_HOLDER, holder, self._lease)
        except StoreUnavailable as error:
            raise BrokerUnavailable(str(error)) from error
        self.holder = holder

    async def extend_lease(self) -> bool:
        """Show that this process lives. `False` if it is too late."""
        return bool(await self._run(self._beating, sql.HEARTBEAT, self.holder, self._lease))

    async def find_queues(self, names: Iterable[str]) -> dict[str, Queue]:
        """Look up queues by name. Those that do not exist are missing from the result."""
        try:
            return await self._find_queues(list(names))
        except StoreUnavailable as error:
            raise BrokerUnavailable(str(error)) from error

    async def _find_queues(self, names: Sequence[str]) -> dict[str, Queue]:
        rows = await self._run(self._publishing, sql.FIND_QUEUES, names)
        found = {row.name: Queue(row.id, self._limit(row.name, row.is_private)) for row in rows}
        if len(self._queues) + len(found) > _MAX_KNOWN_QUEUES:
            self._queues.clear()
            self._uncounted_room.clear()
            self._lows.clear()
        self._queues.update(found)
        return found

    def known_queues(self, names: Iterable[str]) -> frozenset[int]:
        """The ids of queues that were looked up before."""
        return frozenset(self._queues[name].id for name in names if name in self._queues)

    def _limit(self, name: str, is_private: bool) -> int | None:
        if is_private:
            return self._limits.private
        return self._limits.requests if is_request_queue(name) else None

    async def publish(self, entries: Sequence[Entry]) -> list[PublishResult]:
        """Append each message to its queue if that exists and has room."""
        try:
            return await self._publisher.put(entries)
        except StoreUnavailable as error:
            raise BrokerUnavailable(str(error)) from error

    async def _publish(self, entries: Sequence[Entry]) -> list[PublishResult]:
        results = await self._append(entries)
        places = [
            place for place, result in enumerate(results) if result is PublishResult.UNROUTABLE
        ]
        # A queue may have been deleted and declared again since it was looked up.
        if any(self._queues.pop(entries[place].name, None) for place in places):
            again = await self._append([entries[place] for place in places])
            for place, result in zip(places, again, strict=True):
                results[place] = result
        return results

    async def _append(self, entries: Sequence[Entry]) -> list[PublishResult]:
        queues = await self._find_room(entries)
        results = [PublishResult.UNROUTABLE] * len(entries)
        sent = dict[int, Entry]()
        for place, entry in enumerate(entries):
            if queue := queues.get(entry.name):
                if self._takes_room(queue):
                    sent[place] = entry
                else:
                    results[place] = PublishResult.OVERLOADED
        if not sent:
            return results
        contents = [entry.content for entry in sent.values()]
        held = [
            (place, *claim) for place, entry in enumerate(sent.values(), 1) for claim in entry.held
        ]
        rows = await self._run(
            self._publishing,
            sql.PUBLISH_ACKING if held else sql.PUBLISH,
            int_array(queues[entry.name].id for entry in sent.values()),
            [content.request for content in contents],
            [content.properties for content in contents],
            [content.body for content in contents],
            *(held_arrays(held) if held else ()),
        )
        accepted = {queue for (queue,) in rows}
        for place, entry in sent.items():
            if queues[entry.name].id in accepted:
                results[place] = PublishResult.ACCEPTED
        return results

    async def reserve(self, entries: Sequence[Entry]) -> list[int] | None:
        """The queues of messages that another statement is to append.

        Returns `None` if a queue does not exist or has no room.
        """
        try:
            queues = await self._find_room(entries)
        except StoreUnavailable as error:
            raise BrokerUnavailable(str(error)) from error
        targets = [queues.get(entry.name) for entry in entries]
        found = [queue.id for queue in targets if queue is not None and self._takes_room(queue)]
        return found if len(found) == len(entries) else None

    async def _find_room(self, entries: Sequence[Entry]) -> dict[str, Queue]:
        """The queues of `entries` that exist, by name, with their room counted."""
        names = {entry.name for entry in entries}
        if unknown := names.difference(self._queues):
            await self._find_queues(list(unknown))
        queues = {name: self._queues[name] for name in names if name in self._queues}
        await self._count_room(set(queues.values()))
        return queues

    async def _count_room(self, queues: Iterable[Queue]) -> None:
        """Count the messages of queues whose counted room is used up.

        Messages are not counted each time, so a queue may slightly exceed its limit.
        """
        limits = {
            queue.id: queue.limit
            for queue in queues
            if queue.limit is not None and self._uncounted_room.get(queue.id, 0) <= 0
        }
        if limits:
            ids = list(limits)
            lows = [self._lows.get(queue_id, LOWEST_ID) for queue_id in ids]
            values = (ids, lows, list(limits.values()))
            for row in await self._run(self._publishing, sql.COUNT_READY, *values):
                if row.first_id is not None:
                    self._lows[row.id] = low_before(row.first_id)
                free = limits[row.id] - row.messages
                self._uncounted_room[row.id] = 0 if free <= 0 else 1 + free // 8

    def forget_lows(self) -> None:
        """Count all messages next time, even those requeued below the counted ones."""
        self._lows.clear()

    def _takes_room(self, queue: Queue) -> bool:
        if queue.limit is None:
            return True
        self._uncounted_room[queue.id] = room = self._uncounted_room.get(queue.id, 0) - 1
        return room >= 0

    async def claim(self, consumers: Sequence[Consumer]) -> list[tuple[Claim, Any]]:
        """Claim messages for consumers with room, oldest first. Returns rows with their bodies."""
        holder, losses = self.holder, self._claiming.losses
        try:
            rows = await self._claim(holder, consumers)
        finally:
            if self._claiming.losses > losses:
                self.doubt_claims()
        return sorted(
            ((Claim(row.queue, row.id, row.deliveries, holder), row) for row in rows),
            key=lambda pair: pair[0].id,
        )

    def doubt_claims(self) -> None:
        """Record that a claim may have taken messages although its answer was lost.

        A server finishes a statement even if its client is gone, so the claim may yet commit.
        """
        self.claims_in_doubt = True
        now = time.monotonic()
        self._next_doubts = [now + seconds for seconds in _LATE_CLAIM_SECONDS]

    async def release_unknown(self, known: Collection[int]) -> None:
        """Requeue messages that lost claims took. `known` has the ids of the other messages held.

        No claim may be in progress.
        """
        await self._run(self._claiming, sql.RELEASE_UNKNOWN, self.holder, list(known))
        self.claims_in_doubt = False

    def recall_doubts(self) -> None:
        """Doubt a lost claim once more if it may have committed since it was last released."""
        while self._next_doubts and time.monotonic() >= self._next_doubts[0]:
            del self._next_doubts[0]
            self.claims_in_doubt = True

    async def _claim(self, holder: int, consumers: Sequence[Consumer]) -> Sequence[Any]:
        return await self._run(
            self._claiming,
            sql.CLAIM,
            holder,
            [consumer.queue for consumer in consumers],
            [consumer.low for consumer in consumers],
            [consumer.room for consumer in consumers],
            _INLINE_BODY_BYTES,
            MAX_PROPERTIES_BYTES,
        )

    async def read_body(self, claim: Claim) -> bytes | None:
        """The body of a claimed message; `None` if the claim is no longer valid."""
        rows = await self._run(
            self._claiming, sql.READ_BODY, claim.queue, claim.id, claim.holder, claim.deliveries
        )
        return rows[0].body if rows else None

    async def settle(self, settlement: Settlement) -> bool:
        """End a claim. `False` if it was no longer valid.

        While the database is unavailable, it is repeated until this process is a new holder.
        """
        in_doubt = False
        while True:
            try:
                (valid,) = await self._settler.put([settlement])
                return valid or in_doubt
            except CommitInDoubt:
                in_doubt = True
            except StoreUnavailable as error:
                if self._closed:
                    return False
                _log.debug("a settlement is repeated: %s", error)
            if settlement.claim.holder != self.holder:
                return False
            await asyncio.sleep(_RETRY_SECONDS)

    async def _settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        settled = set[tuple[int, int, int]]()
        kinds: dict[tuple[str, int, int | None], list[Settlement]] = {}
        for each in settlements:
            dead = each.dead or (not each.acked and each.claim.deliveries >= self._delivery_limit)
            statement = sql.ACK if each.acked else sql.DEAD_LETTER if dead else sql.REQUEUE
            kinds.setdefault((statement, each.claim.holder, each.holder), []).append(each)
        for (statement, holder, new_holder), group in kinds.items():
            values: list[Any] = [
                holder,
                int_array(each.claim.queue for each in group),
                int_array(each.claim.id for each in group),
                int_array(each.claim.deliveries for each in group),
            ]
            if statement == sql.DEAD_LETTER:
                values += [[each.reason for each in group], new_holder]
            rows = await self._run(self._settling, statement, *values)
            settled.update((holder, row.id, row.deliveries) for row in rows)
        claims = [each.claim for each in settlements]
        return [(claim.holder, claim.id, claim.deliveries) in settled for claim in claims]

    async def _run(
        self, connection: PreparedConnection, statement: str, *values: Any
    ) -> Sequence[Any]:
        try:
            rows = await connection.write(statement, *values)
        except StoreUnavailable as error:
            if self.available:
                _log.warning("the queues are unavailable: %s", error)
            self.available = False
            raise
        self.available = True
        return rows
