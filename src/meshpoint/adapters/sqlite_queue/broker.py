"""The embedded broker: durable queues in a SQLite file that several processes share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from meshpoint.adapters.sqlite_queue.content import to_row
from meshpoint.adapters.sqlite_queue.queues import ClaimedMessage, Queues
from meshpoint.adapters.sqlite_queue.session import Consumer, Job, QueueOptions, QueueSession
from meshpoint.adapters.sqlite_queue.thread import QueueThread
from meshpoint.adapters.stored_messages import (
    MAX_BODY_BYTES,
    QueueLimits,
    encode_sendable,
)
from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.messages import Address, Message, Topic, truncate_reason
from meshpoint.ports.broker import OnDelivery, PublishResult, RequestSearch

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_DEFAULT_LEASE = timedelta(seconds=5)


class SqliteBroker:
    """A `Broker` on a SQLite file, which must be on a local disk.

    Args:
        path: The file, created if missing. It may also contain the task tables.
        namespace: Separates meshes that share a file.
        lease: How long the process may be stopped before its unacked messages are requeued.
            The default is 5 seconds.
        delivery_limit: A message requeued after this many deliveries becomes a dead letter.
        private_ttl: How long a private queue outlives its broker.
        poll_interval: Maximum delay before a message from another process is noticed.
        busy_timeout: How long to wait for other writers before `BrokerUnavailable`.
        max_length: Maximum messages in a request queue before it refuses more; `None` for no
            limit.
        private_max_length: The same for the private queues of this namespace.
        dead_letters_max_length: Maximum dead letters of an agent before the oldest are dropped.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        namespace: str,
        lease: timedelta | None = None,
        delivery_limit: int = 20,
        private_ttl: timedelta = timedelta(minutes=30),
        poll_interval: timedelta = timedelta(milliseconds=10),
        busy_timeout: timedelta = timedelta(seconds=5),
        max_length: int | None = 100_000,
        private_max_length: int | None = 100_000,
        dead_letters_max_length: int | None = 10_000,
    ) -> None:
        self.path, self._namespace = Path(path).absolute(), namespace
        self._options = QueueOptions(
            lease=(lease or _DEFAULT_LEASE).total_seconds(),
            private_ttl=private_ttl.total_seconds(),
            poll_interval=poll_interval.total_seconds(),
            busy_timeout=busy_timeout.total_seconds(),
            delivery_limit=delivery_limit,
            limits=QueueLimits(
                private=private_max_length,
                requests=max_length,
                dead_letters=dead_letters_max_length,
            ),
        )
        self._thread: QueueThread | None = None
        self._session: QueueSession | None = None
        self._subscriptions: list[SqliteSubscription] = []

    @property
    def connected(self) -> bool:
        """Whether the last transaction succeeded."""
        return self._thread is not None and self._thread.connected

    @property
    def can_publish(self) -> bool:
        """Whether the last transaction succeeded."""
        return self.connected

    def is_consuming(self, address: Address) -> bool:
        """Whether this process consumes `address`, and the last transaction succeeded."""
        return self.connected and any(
            each.consumer.address == address for each in self._active_subscriptions
        )

    @property
    def _active_subscriptions(self) -> list[SqliteSubscription]:
        return [each for each in self._subscriptions if not each.cancelled]

    @property
    def max_message_bytes(self) -> int:
        """Maximum bytes of a body: larger ones could not be read back."""
        return MAX_BODY_BYTES

    async def open(self) -> None:
        """Open the file, create the tables if missing, and start the heartbeat.

        Raises:
            ConfigurationError: The file can never be used: for example, its folder does not exist,
                it is not a SQLite database, or its queues have another version.
            BrokerUnavailable: The file cannot be opened or written now.
        """
        if self._thread is None:
            thread = QueueThread(self.path, self._namespace, self._options)
            self._session = await thread.start()
            self._thread = thread

    async def close(self) -> None:
        """Finish jobs submitted before, requeue all unacked messages, and close the file."""
        thread, self._thread = self._thread, None
        self._subscriptions = []
        if thread is not None:
            await thread.stop()

    async def declare(
        self, agent: AgentName, replica: ReplicaId | None = None, *, shards: int = 1
    ) -> None:
        """Create the queues of `agent` and the private queue of `replica`, if missing.

        The private queue is kept while the broker is open, and for `private_ttl` after that.
        """
        session = self._session

        def declare(queues: Queues, holder: int) -> None:
            queues.declare(agent, shards)
            if replica is not None and session is not None:
                queues.declare_private(agent, replica, holder)
                session.register_private_queue(agent, replica)

        await self._execute(declare, durable=True)

    async def mark_database(self, agent: AgentName) -> bool:
        """Set the marker of `agent`. Returns `True` if it was not set before."""
        return await self._execute(lambda queues, _: queues.mark_database(agent), durable=True)

    async def has_database_marker(self, agent: AgentName) -> bool:
        """Whether the marker of `agent` is set."""
        return await self._execute(lambda queues, _: queues.has_database_marker(agent))

    async def remove_database_marker(self, agent: AgentName) -> None:
        """Remove the marker of `agent`, if it is set."""
        await self._execute(lambda queues, _: queues.remove_database_marker(agent), durable=True)

    async def publish(self, messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        """Append each message to its queue if that exists and has room.

        Accepted messages are on disk when this returns.
        """
        rows = [(address, encode_sendable(message, to_row)) for address, message in messages]
        storable = [(address, row) for address, row in rows if row is not None]
        if not storable:
            return [PublishResult.REJECTED] * len(rows)
        results = iter(
            await self._execute(lambda queues, _: queues.publish(storable), durable=True)
        )
        return [PublishResult.REJECTED if row is None else next(results) for _, row in rows]

    async def broadcast(self, agent: AgentName, message: Message) -> None:
        """Append `message` to the private queues of `agent` that have room."""
        if (row := encode_sendable(message, to_row)) is not None:
            await self._execute(lambda queues, _: queues.broadcast(agent, row), durable=True)

    async def subscribe(
        self, agent: AgentName, replica: ReplicaId, topics: Sequence[Topic]
    ) -> None:
        """Also deliver `topics` to the private queue of `replica`."""
        session = self._session

        def subscribe(queues: Queues, holder: int) -> None:
            queues.subscribe(agent, replica, topics)
            if session is not None:
                session.register_private_queue(agent, replica, topics)

        await self._execute(subscribe, durable=True)

    async def announce(self, topic: Topic, message: Message) -> None:
        """Append `message` to the subscribed queues that have room."""
        if (row := encode_sendable(message, to_row)) is not None:
            await self._execute(lambda queues, _: queues.announce(topic, row))

    async def consume(
        self, address: Address, prefetch: int, on_delivery: OnDelivery
    ) -> SqliteSubscription:
        """Deliver messages of `address` until cancelled, with at most `prefetch` unacked.

        Raises:
            ConfigurationError: The queue was never declared.
        """
        if await self.depth(address) is None:
            raise ConfigurationError(
                "broker", f"there is no queue {address!r}", "declare its agent first"
            )
        thread = self._require_open()
        subscription = SqliteSubscription(thread, address, prefetch, on_delivery)
        try:
            await thread.attach(subscription.consumer)
        except BaseException:  # the thread may have attached it already
            subscription.cancel_nowait()
            raise
        self._subscriptions = [*self._active_subscriptions, subscription]
        return subscription

    async def depth(self, address: Address) -> int | None:
        """Number of messages that no consumer holds; `None` if the queue does not exist."""
        return await self._execute(lambda queues, _: queues.depth(address))

    async def find_request(self, agent: AgentName, task_id: TaskId) -> RequestSearch:
        """Whether a request queue of `agent` has the task's request, held or not."""
        return RequestSearch(
            await self._execute(lambda queues, _: queues.has_request(agent, task_id))
        )

    def deny_request(self, agent: AgentName, task_id: TaskId) -> Mapping[Address, int]:
        """Empty: `find_request` sees held requests too."""
        return {}

    async def _execute(
        self, operation: Callable[[Queues, int], _T], *, durable: bool = False
    ) -> _T:
        thread = self._require_open()
        job = Job(operation, asyncio.get_running_loop().create_future(), durable=durable)
        return await thread.execute(job)

    def _require_open(self) -> QueueThread:
        if self._thread is None:
            raise BrokerUnavailable(f"{self.path}: the broker is not open")
        return self._thread


class SqliteSubscription:
    """A running consumer."""

    def __init__(
        self, thread: QueueThread, address: Address, prefetch: int, on_delivery: OnDelivery
    ) -> None:
        self._thread, self._on_delivery, self._cancelled = thread, on_delivery, False
        self._requeue_tasks: set[asyncio.Task[bool]] = set()
        self.consumer = Consumer(address, prefetch, self._deliver)

    @property
    def cancelled(self) -> bool:
        """Whether it has stopped receiving messages."""
        return self._cancelled

    async def resize(self, prefetch: int) -> None:
        """Allow up to `prefetch` unacked deliveries at a time."""
        await self._thread.resize(self.consumer, prefetch)

    async def cancel(self) -> None:
        """Stop receiving messages. Unacked deliveries can still be settled."""
        await self.cancel_nowait()

    def cancel_nowait(self) -> asyncio.Future[None]:
        """Like `cancel`, but without waiting for the thread."""
        self._cancelled = True
        return self._thread.detach(self.consumer)

    def _deliver(self, claimed: ClaimedMessage) -> None:
        if self._thread.closing:  # the thread requeues all unacked messages when it stops
            return
        delivery = SqliteDelivery(self._thread, self.consumer, claimed)
        if self._cancelled:  # the thread claimed it just before it was detached
            task = asyncio.ensure_future(delivery.requeue())
            self._requeue_tasks.add(task)
            task.add_done_callback(self._requeue_tasks.discard)
            return
        try:
            self._on_delivery(delivery)
        except Exception:
            _log.exception(
                "on_delivery failed; message %s stays unacked", claimed.message.message_id
            )


class SqliteDelivery:
    """One message handed to one consumer."""

    def __init__(self, thread: QueueThread, consumer: Consumer, claimed: ClaimedMessage) -> None:
        self._thread, self._consumer, self._claimed = thread, consumer, claimed
        self.message, self.address, self.delivery_count = (
            claimed.message,
            consumer.address,
            claimed.count,
        )
        self._settled = False

    @property
    def lost(self) -> bool:
        """Whether this process's lease has expired, so that another consumer may claim it."""
        return not self._settled and self._claimed.key not in self._consumer.unacked

    async def ack(self) -> bool:
        """Delete the message. `False` if this process no longer holds it."""
        return await self._settle(lambda queues: queues.ack(self._claimed))

    async def requeue(self) -> bool:
        """Make the message ready for any consumer; its next delivery has a higher count."""
        return await self._settle(lambda queues: queues.requeue(self._claimed))

    async def dead_letter(self, reason: str) -> bool:
        """Move the message to its agent's dead letters, with `reason` cut at 500 characters."""
        return await self._settle(
            lambda queues: queues.dead_letter(self._claimed, truncate_reason(reason))
        )

    async def _settle(self, operation: Callable[[Queues], bool]) -> bool:
        def run(queues: Queues, _: int) -> bool:
            self._consumer.unacked.discard(self._claimed.key)
            return operation(queues)

        self._settled = True
        job = Job(run, asyncio.get_running_loop().create_future(), settles=True)
        return await self._thread.execute(job)
