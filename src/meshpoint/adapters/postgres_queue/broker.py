"""The broker on PostgreSQL: durable queues in tables that the processes of a mesh share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from meshpoint.adapters.postgres_queue import statements as sql
from meshpoint.adapters.postgres_queue.consumers import LOWEST_ID, Claim, Consumer
from meshpoint.adapters.postgres_queue.content import from_row, to_content
from meshpoint.adapters.postgres_queue.notifications import Listener, Notifier
from meshpoint.adapters.postgres_queue.schema import ensure_tables
from meshpoint.adapters.postgres_queue.session import (
    SESSION_CONNECTIONS,
    Entry,
    QueueSession,
    Settlement,
)
from meshpoint.adapters.sql.batcher import BATCH_BYTES
from meshpoint.adapters.sql.engine import engine_for
from meshpoint.adapters.sql.hand_over import HeldMessage, QueuedMessage, QueueHandOver
from meshpoint.adapters.stored_messages import (
    MAX_BODY_BYTES,
    QueueLimits,
    encode_sendable,
)
from meshpoint.errors import BrokerUnavailable, ConfigurationError, PoisonMessage, Unavailable
from meshpoint.model.error_text import make_storable
from meshpoint.model.hand_over import HandOver
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.messages import (
    Address,
    Message,
    Topic,
    dead_letter_queue,
    nested_queue,
    private_queue,
    request_shard,
    response_queue,
    truncate_reason,
)
from meshpoint.ports.broker import Delivery, OnDelivery, PublishResult, RequestSearch

_log = logging.getLogger(__name__)

_CONNECTIONS = SESSION_CONNECTIONS + 2  # with the notifier and the listener
_COMMAND_TIMEOUT = timedelta(seconds=10)
_DEFAULT_LEASE = timedelta(seconds=15)
_BEATS_PER_LEASE = 5
_BEATS_PER_SWEEP = 20
"""Heartbeats between two searches for messages of holders that no longer exist."""
_OLD_SNAPSHOT = timedelta(minutes=5)
"""Age at which a snapshot of another session is worth a warning."""
_MAX_HAND_OVER_BYTES = BATCH_BYTES
"""Messages with more bytes are published apart from the commit of their task."""
_VACUUM_AFTER = 2000
"""Settled messages after which this process removes dead rows."""
_PAUSE_RATIO = 10
"""Time between two passes over all rows, dead ones included, in durations of the last pass.

While another session holds a snapshot, rows of acked messages stay, and each pass takes longer.
"""


class PostgresBroker:
    """A `Broker` on PostgreSQL.

    Args:
        url: The database, in which tables are created. It may also contain the task tables.
        namespace: Separates meshes that share a database.
        lease: How long the process may be stopped before its unacked messages are requeued.
            The default is 15 seconds.
        delivery_limit: A message requeued after this many deliveries becomes a dead letter.
        private_ttl: How long a private queue outlives its broker.
        poll_interval: Maximum delay of a message whose notification is lost.
        max_length: Maximum messages in a request queue before it refuses more; `None` for no
            limit.
        private_max_length: The same for the private queues of this namespace.
        dead_letters_max_length: Maximum dead letters of an agent before the oldest are dropped.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        lease: timedelta | None = None,
        delivery_limit: int = 20,
        private_ttl: timedelta = timedelta(minutes=30),
        poll_interval: timedelta = timedelta(seconds=1),
        max_length: int | None = 100_000,
        private_max_length: int | None = 100_000,
        dead_letters_max_length: int | None = 10_000,
    ) -> None:
        self._url, self._namespace = url, namespace
        self._lease = lease or _DEFAULT_LEASE
        self._private_ttl, self._delivery_limit = private_ttl, delivery_limit
        self._poll_seconds = poll_interval.total_seconds()
        self._beat_seconds = self._lease.total_seconds() / _BEATS_PER_LEASE
        self._limits = QueueLimits(private_max_length, max_length, dead_letters_max_length)
        self._engine: AsyncEngine | None = None
        self._session: QueueSession | None = None
        self._notifier: Notifier | None = None
        self._listener: Listener | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._consumers: list[Consumer] = []
        self._agents: dict[AgentName, int] = {}  # declared agents, and their request queues
        self._replicas: dict[tuple[AgentName, ReplicaId], set[Topic]] = {}
        self._woken: set[int] | None = set()  # queues that may have messages; `None` means any
        self._wake_up = asyncio.Event()
        self._claim_ended = asyncio.Event()
        self._last_id = LOWEST_ID  # the lowest of the last claim that found messages
        self._next_sweep = 0.0
        self._settled_count = 0
        self._next_vacuum = 0.0
        self._snapshot_pid: int | None = None  # of the session that was last warned of

    @property
    def connected(self) -> bool:
        """Whether the last statement succeeded."""
        return self._session is not None and self._session.available

    @property
    def can_publish(self) -> bool:
        """Whether the last statement succeeded."""
        return self.connected

    def is_consuming(self, address: Address) -> bool:
        """Whether this process consumes `address`, and the last statement succeeded."""
        return self.connected and any(
            each.address == address and not each.cancelled for each in self._consumers
        )

    @property
    def max_message_bytes(self) -> int:
        """Maximum bytes of a body."""
        return MAX_BODY_BYTES

    async def open(self) -> None:
        """Connect, create the tables if missing, and start the heartbeat.

        Raises:
            ConfigurationError: The login may not create them.
            BrokerUnavailable: The database does not answer.
        """
        if self._session is not None:
            return
        engine = engine_for(
            self._url,
            command_timeout=_COMMAND_TIMEOUT,
            pool_size=_CONNECTIONS,
            in_key_order=True,
        )
        session = QueueSession(engine, self._lease, self._delivery_limit, self._limits)
        try:
            await ensure_tables(engine, self._url)
            await session.register()
        except BaseException:
            await session.close()
            await engine.dispose()
            raise
        self._engine, self._session = engine, session
        self._notifier = Notifier(engine, self._namespace)
        self._listener = Listener(engine, self._namespace, self._wake)
        self._tasks = [
            asyncio.create_task(self._claim_forever(session), name="meshpoint-queue-claim"),
            asyncio.create_task(self._beat_forever(session), name="meshpoint-queue-heartbeat"),
            asyncio.create_task(self._maintain_forever(session), name="meshpoint-queue-maintain"),
        ]

    async def close(self) -> None:
        """Requeue all unacked messages and disconnect."""
        session, engine, self._session = self._session, self._engine, None
        consumers, self._consumers = self._consumers, []
        if session is None or engine is None:
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for consumer in consumers:
            consumer.cancelled = True
        unacked = [claim for consumer in consumers for claim in consumer.unacked]
        try:
            async with asyncio.timeout(_COMMAND_TIMEOUT.total_seconds()):
                await asyncio.gather(*(session.settle(Settlement(claim)) for claim in unacked))
                if session.claims_in_doubt:
                    await session.release_unknown(())
                await session.execute(sql.REMOVE_HOLDER, session.holder)
        except (TimeoutError, Unavailable) as error:
            _log.warning("unacked messages are requeued only when the lease expires: %s", error)
        if self._notifier is not None and self._listener is not None:
            self._notifier.notify(claim.queue for claim in unacked)
            await self._listener.close()
            await self._notifier.close()
        await session.close()
        await engine.dispose()

    async def declare(
        self, agent: AgentName, replica: ReplicaId | None = None, *, shards: int = 1
    ) -> None:
        """Create the queues of `agent` and the private queue of `replica`, if missing.

        The private queue is kept while the broker is open, and for `private_ttl` after that.
        """
        session = self._require_open()
        await self._declare(session, agent, shards)
        self._agents[agent] = max(shards, self._agents.get(agent, 0))
        if replica is not None:
            await self._declare_private(session, agent, replica)
            self._replicas.setdefault((agent, replica), set())

    async def _declare(self, session: QueueSession, agent: AgentName, shards: int) -> None:
        requests = [request_shard(agent, number) for number in range(shards)]
        names = [*requests, nested_queue(agent), response_queue(agent), dead_letter_queue(agent)]
        await session.execute(
            sql.DECLARE,
            [self._queue_name(name) for name in names],
            self._queue_name(agent),
            self._queue_name(dead_letter_queue(agent)),
        )

    async def _declare_private(
        self, session: QueueSession, agent: AgentName, replica: ReplicaId
    ) -> None:
        await session.execute(
            sql.DECLARE_PRIVATE,
            self._queue_name(private_queue(agent, replica)),
            self._queue_name(agent),
            self._queue_name(dead_letter_queue(agent)),
            session.holder,
        )

    async def mark_database(self, agent: AgentName) -> bool:
        """Set the marker of `agent`. Returns `True` if it was not set before."""
        rows = await self._require_open().execute(sql.SET_MARKER, self._queue_name(agent))
        return bool(rows)

    async def has_database_marker(self, agent: AgentName) -> bool:
        """Whether the marker of `agent` is set."""
        return bool(await self._require_open().execute(sql.HAS_MARKER, self._queue_name(agent)))

    async def remove_database_marker(self, agent: AgentName) -> None:
        """Remove the marker of `agent`, if it is set."""
        await self._require_open().execute(sql.REMOVE_MARKER, self._queue_name(agent))

    async def publish(self, messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        """Append each message to its queue if that exists and has room.

        Accepted messages are on disk when this returns.
        """
        session = self._require_open()
        results = [PublishResult.REJECTED] * len(messages)
        entries = {
            place: Entry(self._queue_name(address), content)
            for place, (address, message) in enumerate(messages)
            if (content := encode_sendable(message, to_content)) is not None
        }
        published = await session.publish(list(entries.values()))
        for place, result in zip(entries, published, strict=True):
            results[place] = result
        self._announce_messages(session, list(entries.values()), published)
        return results

    async def publish_acking(
        self, envelope: tuple[Address, Message], deliveries: Sequence[Delivery]
    ) -> PublishResult:
        """Append a message, and delete `deliveries` in the same statement."""
        session, (address, message) = self._require_open(), envelope
        content = encode_sendable(message, to_content)
        if content is None:
            return PublishResult.REJECTED
        held = _held(deliveries)
        entry = Entry(self._queue_name(address), content, [each.claim for each in held])
        (result,) = await session.publish([entry])
        if result is PublishResult.ACCEPTED:
            for delivery in _held(held):  # again: a lapsed lease ends claims
                delivery.forget()
        self._announce_messages(session, [entry], [result])
        return result

    @property
    def lease_id(self) -> int | None:
        """The random id under which this broker holds messages; `None` while it is closed."""
        return None if self._session is None else self._session.holder

    async def prepare_hand_over(
        self, envelopes: Sequence[tuple[Address, Message]], deliveries: Sequence[Delivery]
    ) -> HandOver | None:
        """Prepare messages and acks for the commit of a store on the same database."""
        session = self._session
        if session is None or not session.available:
            return None
        entries = [
            Entry(self._queue_name(address), content)
            for address, message in envelopes
            if (content := encode_sendable(message, to_content)) is not None
        ]
        if len(entries) < len(envelopes):
            return None
        if sum(len(entry.content.body) for entry in entries) > _MAX_HAND_OVER_BYTES:
            return None
        queues = await session.reserve(entries) if entries else []
        if queues is None:
            return None
        held = _held(deliveries)
        return _PreparedHandOver(
            envelopes,
            lease_id=session.holder,
            messages=[
                QueuedMessage(queue, *entry.content)
                for queue, entry in zip(queues, entries, strict=True)
            ],
            held=[HeldMessage(*delivery.claim) for delivery in held],
            broker=self,
            deliveries=held,
        )

    def finish_hand_over(self, hand_over: _PreparedHandOver) -> None:
        """Wake the consumers of messages that a store has published, and forget what it acked."""
        for delivery in hand_over.deliveries:
            delivery.forget()
        queues = frozenset(message.queue for message in hand_over.messages)
        if queues and self._session is not None:
            self._announce_queues(queues)

    async def broadcast(self, agent: AgentName, message: Message) -> None:
        """Append `message` to the private queues of `agent` that have room."""
        await self._fan_out(sql.FIND_REPLICAS, self._queue_name(agent), message)

    async def subscribe(
        self, agent: AgentName, replica: ReplicaId, topics: Sequence[Topic]
    ) -> None:
        """Also deliver `topics` to the private queue of `replica`."""
        session = self._require_open()
        await self._subscribe(session, agent, replica, topics)
        self._replicas.setdefault((agent, replica), set()).update(topics)

    async def _subscribe(
        self, session: QueueSession, agent: AgentName, replica: ReplicaId, topics: Sequence[Topic]
    ) -> None:
        queue = self._queue_name(private_queue(agent, replica))
        await session.execute(sql.SUBSCRIBE, queue, [self._queue_name(topic) for topic in topics])

    async def announce(self, topic: Topic, message: Message) -> None:
        """Append `message` to the subscribed queues that have room."""
        await self._fan_out(sql.FIND_SUBSCRIBED, self._queue_name(topic), message)

    async def _fan_out(self, find: str, key: str, message: Message) -> None:
        session = self._require_open()
        content = encode_sendable(message, to_content)
        if content is None:
            return
        names = [row.name for row in await session.execute(find, key)]
        entries = [Entry(name, content) for name in names]
        self._announce_messages(session, entries, await session.publish(entries))

    def _announce_messages(
        self, session: QueueSession, entries: Sequence[Entry], results: Sequence[PublishResult]
    ) -> None:
        queues = session.known_queues(
            entry.name
            for entry, result in zip(entries, results, strict=True)
            if result is PublishResult.ACCEPTED
        )
        if queues:
            self._announce_queues(queues)

    def _announce_queues(self, queues: frozenset[int]) -> None:
        self._wake(queues)
        if self._notifier is not None:
            self._notifier.notify(queues)

    async def consume(
        self, address: Address, prefetch: int, on_delivery: OnDelivery
    ) -> PostgresSubscription:
        """Deliver messages of `address` until cancelled, with at most `prefetch` unacked.

        Raises:
            ConfigurationError: The queue was never declared.
        """
        session = self._require_open()
        name = self._queue_name(address)
        queue = (await session.find_queues([name])).get(name)
        if queue is None:
            raise ConfigurationError(
                "broker", f"there is no queue {address!r}", "declare its agent first"
            )

        def deliver(claim: Claim, message: Message) -> None:
            delivery = PostgresDelivery(self, consumer, claim, message)
            try:
                on_delivery(delivery)
            except Exception:
                _log.exception("on_delivery failed; message %s stays unacked", message.message_id)

        consumer = Consumer(address, queue.id, prefetch, deliver)
        self._consumers.append(consumer)
        self._wake(frozenset({queue.id}))
        return PostgresSubscription(self, consumer)

    async def depth(self, address: Address) -> int | None:
        """Number of messages that no consumer holds; `None` if the queue does not exist."""
        rows = await self._require_open().execute(sql.DEPTH, self._queue_name(address))
        return rows[0].messages if rows else None

    async def find_request(self, agent: AgentName, task_id: TaskId) -> RequestSearch:
        """Whether a request queue of `agent` has the task's request, held or not."""
        values = (task_id, self._queue_name(agent))
        return RequestSearch(bool(await self._require_open().execute(sql.HAS_REQUEST, *values)))

    def deny_request(self, agent: AgentName, task_id: TaskId) -> Mapping[Address, int]:
        """Empty: `find_request` sees held requests too."""
        return {}

    async def settle(self, consumer: Consumer, settlement: Settlement) -> bool:
        """End a claim, and make room for the next message."""
        session = self._session
        if session is None:
            return False
        valid = await session.settle(settlement)
        self.forget(consumer, settlement.claim)
        queue = settlement.claim.queue
        if valid and not settlement.acked:
            self._forget_hint(queue)
            if self._notifier is not None:
                self._notifier.notify({queue})
        if settlement.dead:
            self._wake(None)
        return valid

    def forget(self, consumer: Consumer, claim: Claim) -> None:
        """Make room for the next message after a claim has ended.

        Claims again only for a consumer that had no room: another one is woken by each message.
        """
        was_full = not consumer.room
        consumer.unacked.discard(claim)
        if consumer.ended:
            self._consumers = [each for each in self._consumers if each is not consumer]
        self._settled_count += 1
        if was_full:
            self._wake(frozenset({claim.queue}))

    async def resize(self, consumer: Consumer, prefetch: int) -> None:
        """Change the maximum number of unacked messages of `consumer`.

        Returns after the last claim that was sent with the earlier one.
        """
        consumer.prefetch = prefetch
        self._wake(frozenset({consumer.queue}))
        await self._claim_ended.wait()

    async def cancel(self, consumer: Consumer) -> None:
        """Stop claiming for `consumer`. Returns after the last claim."""
        consumer.cancelled = True
        await self._claim_ended.wait()
        self._consumers = [each for each in self._consumers if not each.ended]

    def _wake(self, queues: frozenset[int] | None) -> None:
        """Claim messages of `queues` soon, or of all queues."""
        if queues is None or self._woken is None:
            self._woken = None
        else:
            self._woken.update(queues)
        self._wake_up.set()

    def _forget_hint(self, queue: int) -> None:
        for consumer in self._consumers:
            if consumer.queue == queue:
                consumer.low = LOWEST_ID

    async def _claim_forever(self, session: QueueSession) -> None:
        self._claim_ended.set()
        next_poll = 0.0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll_seconds):
                    await self._wake_up.wait()
            self._wake_up.clear()
            if (now := time.monotonic()) >= next_poll:
                next_poll = now + self._poll_seconds
                self._woken = None  # finds messages that were not notified
                session.recall_doubts()
            sweeps = now >= self._next_sweep
            if sweeps:  # finds messages that were committed late or requeued
                self._woken = None
                session.forget_lows()
                for consumer in self._consumers:
                    consumer.low = LOWEST_ID
            woken, self._woken = self._woken, set()
            consumers = [
                each
                for each in self._consumers
                if each.room and (woken is None or each.queue in woken)
            ]
            if consumers or session.claims_in_doubt:
                self._claim_ended.clear()
                try:
                    seconds = await self._claim(session, consumers)
                    if sweeps:
                        pause = max(self._poll_seconds, _PAUSE_RATIO * seconds)
                        self._next_sweep = now + pause
                except Unavailable:
                    self._woken = None  # again at the next poll
                except Exception:
                    _log.exception("messages could not be claimed")
                    self._woken = None
                finally:
                    self._claim_ended.set()

    async def _claim(self, session: QueueSession, consumers: Sequence[Consumer]) -> float:
        """Claim and deliver messages, for one consumer of each queue.

        Wakes the loop again for queues that may have more. Returns how many seconds the claim
        took.
        """
        if session.claims_in_doubt:
            await self._release_unknown(session)
        by_queue = {consumer.queue: consumer for consumer in reversed(consumers)}
        rooms = {queue: consumer.room for queue, consumer in by_queue.items()}
        begun = time.monotonic()
        claimed = await session.claim(list(by_queue.values()))
        seconds = time.monotonic() - begun
        for claim, _ in claimed:
            by_queue[claim.queue].unacked.add(claim)
        for place, (claim, row) in enumerate(claimed):
            try:
                await self._deliver(session, by_queue[claim.queue], claim, row)
            except BaseException:  # the others are requeued as if their claim were in doubt
                session.doubt_claims()
                for other, _ in claimed[place:]:
                    by_queue[other.queue].unacked.discard(other)
                raise
        counts = Counter(claim.queue for claim, _ in claimed)
        full = frozenset(queue for queue, count in counts.items() if count >= rooms[queue])
        for queue, consumer in by_queue.items():
            if queue not in counts and rooms[queue]:
                consumer.took(self._last_id)
        lowest = {claim.queue: claim.id for claim, _ in reversed(claimed)}
        if claimed:
            self._last_id = claimed[0][0].id
        for queue, lowest_id in lowest.items():
            consumer = by_queue[queue]
            consumer.took(lowest_id)
            if consumer in self._consumers:  # another consumer of this process comes first
                self._consumers.remove(consumer)
                self._consumers.append(consumer)
        if full:
            self._wake(full)
        return seconds

    async def _release_unknown(self, session: QueueSession) -> None:
        """Requeue messages that a claim took although its answer was lost."""
        known = [claim.id for each in self._consumers for claim in each.unacked]
        await session.release_unknown(known)
        self._wake(None)

    async def _deliver(
        self, session: QueueSession, consumer: Consumer, claim: Claim, row: Any
    ) -> None:
        body = row.body
        if body is None and row.body_size <= MAX_BODY_BYTES:
            body = await session.read_body(claim)
            if body is None:
                consumer.unacked.discard(claim)
                return
        if consumer.cancelled or self._session is None:
            await self.settle(consumer, Settlement(claim))
            return
        reason = None if row.dead_reason is None else make_storable(row.dead_reason)
        try:
            if body is None:
                raise PoisonMessage("body: is too large to load")
            message = from_row(row.properties, body, reason)
        except PoisonMessage as error:
            _log.warning("unreadable message %d in %s: %s", claim.id, consumer.address, error)
            unreadable = Settlement(
                claim, dead=True, reason=str(error), holder=sql.UNREADABLE_HOLDER
            )
            await self.settle(consumer, unreadable)
        else:
            consumer.deliver(claim, message)

    async def _beat_forever(self, session: QueueSession) -> None:
        while True:
            await asyncio.sleep(self._beat_seconds)
            try:
                if not await session.extend_lease():
                    await self._renew_holder(session)
            except Unavailable:
                continue
            except Exception:
                _log.exception("the lease of the queues could not be extended")

    async def _maintain_forever(self, session: QueueSession) -> None:
        beats = 0
        while True:
            await asyncio.sleep(self._beat_seconds)
            beats += 1
            try:
                await self._maintain(session, sweep=beats % _BEATS_PER_SWEEP == 0)
            except Unavailable:
                continue
            except Exception:
                _log.exception("queue maintenance failed")

    async def _renew_holder(self, session: QueueSession) -> None:
        """Continue as a new holder: another process may have requeued our unacked messages."""
        lost = session.holder
        await session.register()
        for consumer in self._consumers:
            consumer.unacked.clear()
        await session.execute(sql.REMOVE_HOLDER, lost)
        await self._redeclare(session)
        await self._free(session)
        self._wake(None)

    async def _redeclare(self, session: QueueSession) -> None:
        """Recreate deleted queues, and look up the queues of all consumers again."""
        for agent, shards in list(self._agents.items()):
            await self._declare(session, agent, shards)
        for (agent, replica), topics in list(self._replicas.items()):
            await self._declare_private(session, agent, replica)
            await self._subscribe(session, agent, replica, list(topics))
        found = await session.find_queues(
            {self._queue_name(consumer.address) for consumer in self._consumers}
        )
        for consumer in self._consumers:
            if queue := found.get(self._queue_name(consumer.address)):
                consumer.queue = queue.id

    async def _maintain(self, session: QueueSession, *, sweep: bool) -> None:
        ((removed,),) = await session.execute(sql.REMOVE_LAPSED_HOLDERS)
        if removed or sweep:
            await self._free(session)
        if sweep:
            await self._redeclare(session)
            await self._warn_of_old_snapshot(session)
        await session.execute(sql.DROP_UNUSED_QUEUES, self._private_ttl)
        limit = self._limits.dead_letters
        if limit is not None:
            for row in await session.execute(sql.FIND_DEAD_LETTERS, self._queue_name("")):
                ((dropped,),) = await session.execute(sql.TRIM_DEAD_LETTERS, row.id, limit)
                if dropped:
                    _log.warning(
                        "%s holds more than %d messages: dropped its oldest %d",
                        *(row.name, limit, dropped),
                    )
        if self._settled_count >= _VACUUM_AFTER and time.monotonic() >= self._next_vacuum:
            self._settled_count = 0
            begun = time.monotonic()
            try:
                await session.execute(sql.VACUUM)
            finally:
                now = time.monotonic()
                self._next_vacuum = now + _PAUSE_RATIO * (now - begun)

    async def _warn_of_old_snapshot(self, session: QueueSession) -> None:
        """Warn once of each session whose snapshot keeps the rows of acked messages."""
        rows = await session.execute(sql.FIND_OLD_SNAPSHOT, _OLD_SNAPSHOT)
        pid = rows[0].pid if rows else None
        if pid is not None and pid != self._snapshot_pid:
            _log.warning(
                "session %d has had a transaction open for %d s: the queues grow, and become "
                "slower, until it ends",
                *(pid, rows[0].seconds),
            )
        self._snapshot_pid = pid

    async def _free(self, session: QueueSession) -> None:
        freed = {row.queue for row in await session.execute(sql.FREE, self._delivery_limit)}
        if freed:
            for queue in freed:
                self._forget_hint(queue)
            self._wake(frozenset(freed))
            if self._notifier is not None:
                self._notifier.notify(freed)

    def _require_open(self) -> QueueSession:
        if self._session is None:
            raise BrokerUnavailable("the broker is not open")
        return self._session

    def _queue_name(self, address: str) -> str:
        return f"{self._namespace}.{address}"


class PostgresSubscription:
    """A running consumer."""

    def __init__(self, broker: PostgresBroker, consumer: Consumer) -> None:
        self._broker, self._consumer = broker, consumer

    async def resize(self, prefetch: int) -> None:
        """Allow up to `prefetch` unacked deliveries at a time."""
        await self._broker.resize(self._consumer, prefetch)

    async def cancel(self) -> None:
        """Stop receiving messages. Unacked deliveries can still be settled."""
        await self._broker.cancel(self._consumer)


class PostgresDelivery:
    """One message handed to one consumer."""

    def __init__(
        self, broker: PostgresBroker, consumer: Consumer, claim: Claim, message: Message
    ) -> None:
        self._broker, self._consumer, self.claim = broker, consumer, claim
        self.message, self.address, self.delivery_count = (
            message,
            consumer.address,
            claim.deliveries,
        )
        self._settled = self._is_forgotten = False

    @property
    def is_held(self) -> bool:
        """Whether the message can still be settled by this process."""
        return not self._settled and self.claim in self._consumer.unacked

    def forget(self) -> None:
        """Record that another statement has removed the message."""
        self._settled = self._is_forgotten = True
        self._broker.forget(self._consumer, self.claim)

    @property
    def lost(self) -> bool:
        """Whether this process's lease has expired, so that another consumer may claim it."""
        return not self._settled and self.claim not in self._consumer.unacked

    async def ack(self) -> bool:
        """Delete the message. `False` if this process no longer holds it."""
        return await self._settle(Settlement(self.claim, acked=True))

    async def requeue(self) -> bool:
        """Make the message ready for any consumer; its next delivery has a higher count."""
        return await self._settle(Settlement(self.claim))

    async def dead_letter(self, reason: str) -> bool:
        """Move the message to its agent's dead letters, with `reason` cut at 500 characters."""
        return await self._settle(
            Settlement(self.claim, dead=True, reason=make_storable(truncate_reason(reason)))
        )

    async def _settle(self, settlement: Settlement) -> bool:
        if self._is_forgotten:
            return True
        self._settled = True
        return await self._broker.settle(self._consumer, settlement)


def _held(deliveries: Sequence[Delivery]) -> list[PostgresDelivery]:
    """The deliveries that this process can still settle."""
    return [each for each in deliveries if isinstance(each, PostgresDelivery) and each.is_held]


@dataclass(slots=True, eq=False)
class _PreparedHandOver(QueueHandOver):
    """A hand-over to a store. `deliveries` have the messages in `held`."""

    broker: PostgresBroker = field(kw_only=True)
    deliveries: Sequence[PostgresDelivery] = ()

    def finish(self) -> None:
        """Wake the consumers of the messages published."""
        self.is_done = True
        self.broker.finish_hand_over(self)
