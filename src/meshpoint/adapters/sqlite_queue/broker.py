"""The broker that needs no server: durable queues in a SQLite file that several processes share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from meshpoint.adapters.sqlite_queue.content import Row, to_row
from meshpoint.adapters.sqlite_queue.jobs import Consumer, Job
from meshpoint.adapters.sqlite_queue.queues import Claimed, Limits, Queues
from meshpoint.adapters.sqlite_queue.session import Session, Tuning
from meshpoint.adapters.sqlite_queue.thread import QueueThread
from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.messages import Address, Message, bounded_reason, is_sendable
from meshpoint.ports.broker import OnDelivery, Published

_log = logging.getLogger(__name__)

T = TypeVar("T")


class SqliteBroker:
    """A `Broker` over the file at `path`, which must be on a disk of this host.

    Args:
        path: created if need be; may be the file of the task tables.
        namespace: meshes with different namespaces do not see each other.
        lease: how long the process may stand still before others get what it holds.
        delivery_limit: a message given back after so many deliveries goes to the dead letters.
        private_ttl: how long a private queue outlives its broker.
        poll_interval: how long a message from another process may lie unseen.
        busy_timeout: how long to wait for other writers before `BrokerUnavailable`.
        max_length: maximum messages in a request queue before it refuses more; `None` means no limit.
        private_max_length: the same for the private queues of this namespace.
        dead_letters_max_length: maximum dead letters of one agent before the oldest are dropped.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        namespace: str,
        lease: timedelta = timedelta(seconds=5),
        delivery_limit: int = 20,
        private_ttl: timedelta = timedelta(minutes=30),
        poll_interval: timedelta = timedelta(milliseconds=10),
        busy_timeout: timedelta = timedelta(seconds=5),
        max_length: int | None = 100_000,
        private_max_length: int | None = 100_000,
        dead_letters_max_length: int | None = 10_000,
    ) -> None:
        self.path, self._namespace = Path(path).absolute(), namespace
        self._tuning = Tuning(
            lease=lease.total_seconds(),
            private_ttl=private_ttl.total_seconds(),
            poll_interval=poll_interval.total_seconds(),
            busy_timeout=busy_timeout.total_seconds(),
            delivery_limit=delivery_limit,
            limits=Limits(private=private_max_length, requests=max_length, dead_letters=dead_letters_max_length),
        )
        self._thread: QueueThread | None = None
        self._session: Session | None = None
        self._subscriptions: list[SqliteSubscription] = []

    @property
    def connected(self) -> bool:
        """Whether the last transaction succeeded."""
        return self._thread is not None and self._thread.connected

    @property
    def can_publish(self) -> bool:
        """Whether the last transaction succeeded."""
        return self.connected

    def consuming(self, address: Address) -> bool:
        """Whether this process consumes `address`, and the last transaction succeeded."""
        return self.connected and any(each.consumer.address == address for each in self._attached)

    @property
    def _attached(self) -> list[SqliteSubscription]:
        return [each for each in self._subscriptions if not each.cancelled]

    @property
    def max_message_bytes(self) -> int | None:
        """No limit."""
        return None

    async def open(self) -> None:
        """Open the file and begin to beat.

        Raises:
            ConfigurationError: the folder is not there, or the file has queues of another version.
            BrokerUnavailable: the file cannot be opened or written.
        """
        if self._thread is None:
            thread = QueueThread(self.path, self._namespace, self._tuning)
            self._session = await thread.start()
            self._thread = thread

    async def close(self) -> None:
        """Settle what was asked before, give the rest back, close the file."""
        thread, self._thread = self._thread, None
        self._subscriptions = []
        if thread is not None:
            await thread.stop()

    async def declare(self, agent: AgentName, replica: ReplicaId | None = None, *, shards: int = 1) -> None:
        """Make the queues of `agent`, and the private one of `replica`, exist."""
        session = self._session

        def declare(queues: Queues, holder: int) -> None:
            queues.declare(agent, shards)
            if replica is not None and session is not None:
                queues.declare_private(agent, replica, holder)
                session.own(agent, replica)

        await self._do(declare, durable=True)

    async def publish(self, messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        """Append each message to its queue, if there is one; it is on the disk when this returns."""
        rows = [(address, _row(message)) for address, message in messages]
        storable = [(address, row) for address, row in rows if row is not None]
        if not storable:
            return [Published.REJECTED] * len(rows)
        words = iter(await self._do(lambda queues, _: queues.publish(storable), durable=True))
        return [Published.REJECTED if row is None else next(words) for _, row in rows]

    async def broadcast(self, agent: AgentName, message: Message) -> None:
        """Append `message` to the private queues of `agent`."""
        if (row := _row(message)) is not None:
            await self._do(lambda queues, _: queues.broadcast(agent, row), durable=True)

    async def consume(self, address: Address, prefetch: int, on_delivery: OnDelivery) -> SqliteSubscription:
        """Deliver messages of `address` until cancelled.

        Raises:
            ConfigurationError: nobody declared `address`.
        """
        if await self.depth(address) is None:
            raise ConfigurationError("broker", f"there is no queue {address!r}", "declare its agent first")
        thread = self._reach()
        subscription = SqliteSubscription(thread, address, prefetch, on_delivery)
        try:
            await thread.attach(subscription.consumer)
        except BaseException:  # the thread may have attached it already
            subscription.give_up()
            raise
        self._subscriptions = [*self._attached, subscription]
        return subscription

    async def depth(self, address: Address) -> int | None:
        """Messages that no consumer holds; None when there is no such queue."""
        return await self._do(lambda queues, _: queues.depth(address))

    async def _do(self, run: Callable[[Queues, int], T], *, durable: bool = False) -> T:
        thread = self._reach()
        job = Job(run, asyncio.get_running_loop().create_future(), durable=durable)
        return await thread.do(job)

    def _reach(self) -> QueueThread:
        if self._thread is None:
            raise BrokerUnavailable(f"{self.path}: the broker is not open")
        return self._thread


def _row(message: Message) -> Row | None:
    """The row of `message`, or `None` if it cannot be stored."""
    if not is_sendable(message):
        _log.warning("message %r cannot be sent: its envelope is too large", message.message_id[:300])
        return None
    try:
        return to_row(message)
    except ValueError as error:
        _log.warning("message %r cannot be sent: %s", message.message_id[:300], error)
        return None


class SqliteSubscription:
    """A running consumer."""

    def __init__(self, thread: QueueThread, address: Address, prefetch: int, on_delivery: OnDelivery) -> None:
        self._thread, self._on_delivery, self._cancelled = thread, on_delivery, False
        self._returning: set[asyncio.Task[bool]] = set()
        self.consumer = Consumer(address, prefetch, self._deliver)

    @property
    def cancelled(self) -> bool:
        """Whether it has stopped taking deliveries."""
        return self._cancelled

    async def resize(self, prefetch: int) -> None:
        """Let up to `prefetch` deliveries be unsettled at a time."""
        await self._thread.resize(self.consumer, prefetch)

    async def cancel(self) -> None:
        """Take no more deliveries; those unsettled can still be settled."""
        await self.give_up()

    def give_up(self) -> asyncio.Future[None]:
        """Like `cancel`, but without waiting for the thread."""
        self._cancelled = True
        return self._thread.detach(self.consumer)

    def _deliver(self, claimed: Claimed) -> None:
        if self._thread.closing:  # all is given back at the end
            return
        delivery = SqliteDelivery(self._thread, self.consumer, claimed)
        if self._cancelled:  # it was claimed just before
            task = asyncio.ensure_future(delivery.requeue())
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)
            return
        try:
            self._on_delivery(delivery)
        except Exception:
            _log.exception("on_delivery failed; message %s stays unsettled", claimed.message.message_id)


class SqliteDelivery:
    """One message handed to one consumer."""

    def __init__(self, thread: QueueThread, consumer: Consumer, claimed: Claimed) -> None:
        self._thread, self._consumer, self._claimed = thread, consumer, claimed
        self.message, self.address, self.count = claimed.message, consumer.address, claimed.count
        self._settled = False

    @property
    def lost(self) -> bool:
        """Whether the lease on it has expired, so another consumer may claim it."""
        return not self._settled and self._claimed.key not in self._consumer.held

    async def ack(self) -> bool:
        """Settle it: done."""
        return await self._settle(lambda queues: queues.ack(self._claimed))

    async def requeue(self) -> bool:
        """Give it back for another consumer; raises its count."""
        return await self._settle(lambda queues: queues.requeue(self._claimed))

    async def dead_letter(self, reason: str) -> bool:
        """Move it to its agent's dead letters."""
        return await self._settle(lambda queues: queues.dead_letter(self._claimed, bounded_reason(reason)))

    async def _settle(self, how: Callable[[Queues], bool]) -> bool:
        def run(queues: Queues, _: int) -> bool:
            self._consumer.held.discard(self._claimed.key)
            return how(queues)

        self._settled = True
        job = Job(run, asyncio.get_running_loop().create_future(), settles=True)
        return await self._thread.do(job)
