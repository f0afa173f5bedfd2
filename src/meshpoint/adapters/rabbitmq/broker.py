"""The `Broker` port on RabbitMQ."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Mapping, Sequence
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from aiormq.exceptions import (
    AuthenticationError,
    ChannelNotFoundEntity,
    ProbableAuthenticationError,
)
from yarl import URL

from meshpoint.adapters.rabbitmq.connection import (
    Connection,
    MakeConnection,
    OpenConnection,
    login_refused,
    translate_errors,
)
from meshpoint.adapters.rabbitmq.content import Content
from meshpoint.adapters.rabbitmq.envelope import (
    UnencodableMessage,
    minimal_dead_letter,
    to_dead_letter,
    to_properties,
)
from meshpoint.adapters.rabbitmq.frames import RawDelivery, short_string
from meshpoint.adapters.rabbitmq.publisher import OutboundMessage, Publisher
from meshpoint.adapters.rabbitmq.subscription import RabbitSubscription
from meshpoint.adapters.rabbitmq.topology import (
    MAX_LENGTH,
    DatabaseMarkers,
    QueueDeclarer,
    Topology,
    declare_exchange,
)
from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.messages import (
    MAX_SHARDS,
    Address,
    Message,
    Topic,
    dead_letter_queue,
    is_dead_letter_queue,
    is_request_queue,
    nested_queue,
    private_queue,
    request_shard,
    truncate_reason,
)
from meshpoint.ports.broker import SEARCH_SECONDS, OnDelivery, PublishResult, RequestSearch

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_REDECLARE_INTERVAL = 60.0
"""Seconds between checks that the exchange, queues and bindings still exist."""
_REDECLARE_GRACE = 30.0
"""Seconds that the consumers of a deleted queue have to declare it again."""
_MAX_TRACKED_QUEUES = 10_000
_MAX_CONCURRENT_LOOKUPS = 8
_DENIAL_SECONDS = SEARCH_SECONDS + 3.0
"""Seconds for which a consumer must have lasted, and have returned nothing, to deny a request.

They count from the reply with which the broker confirms the return. A consumer that denies
therefore existed when the search began, because denials are read within `SEARCH_SECONDS`.
"""
_MISSING_TTL = 1.0
"""Seconds before a missing queue is looked up again."""


class RabbitMqBroker:
    """A `Broker` on RabbitMQ.

    Args:
        url: `amqp://` or `amqps://`, with the optional parameters `heartbeat` (seconds), `cafile`,
            `certfile` and `keyfile`.
        namespace: prefix of all names at the broker. Different namespaces are separate meshes.
        publish_timeout: limit for connecting, for a confirm, or for any other answer.
        private_ttl: how long a private queue outlives its last consumer.
        delivery_limit: deliveries of one message before the broker dead-letters it.
        max_length: maximum messages in a new queue. A full queue refuses more, but a dead-letter
            queue drops its oldest. `None` means no limit.
        user_id: the login's name at the broker, which verifies it on each message. Defaults to the
            user in `url`.
        purpose: added to the names of the connections. Empty for a replica.
        make_connection: returns an unconnected aio-pika connection for a URL. Defaults to
            `aio_pika.Connection`. Robust connections are unsuitable: they hide lost deliveries.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        publish_timeout: timedelta = timedelta(seconds=10),
        private_ttl: timedelta = timedelta(hours=1),
        delivery_limit: int = 20,
        max_length: int | None = MAX_LENGTH,
        user_id: str | None = None,
        purpose: str = "",
        make_connection: MakeConnection | None = None,
    ) -> None:
        self._topology = Topology(namespace, private_ttl, delivery_limit, max_length)
        self._user_id = user_id or URL(url).user or "guest"
        self._timeout = publish_timeout.total_seconds()
        name = f"{namespace} {purpose}".strip()
        self._consume_connection = Connection(
            url, f"{name} consuming", publish_timeout, make_connection
        )
        self._publish_connection = Connection(
            url, f"{name} publishing", publish_timeout, make_connection
        )
        self._publisher = Publisher(
            self._publish_connection, self._topology, publish_timeout, self._redeclare_all
        )
        self._declarer = QueueDeclarer(self._consume_connection, self._topology)
        self._markers = DatabaseMarkers(self._consume_connection, self._topology, self._timeout)
        self._marked_agents: set[AgentName] = set()
        self._missing_queues = _MissingQueues()
        self._lookup_semaphore = asyncio.Semaphore(_MAX_CONCURRENT_LOOKUPS)
        self._lookups: set[asyncio.Task[Any]] = set()
        self._redeclare_task: asyncio.Task[None] | None = None
        self._subscriptions: list[RabbitSubscription] = []
        self._declarations: dict[tuple[AgentName, ReplicaId | None], None] = {}
        self._shards: dict[AgentName, int] = {}
        self._topics: dict[ReplicaId, frozenset[Topic]] = {}
        self._declared: set[tuple[AgentName, ReplicaId | None]] = set()
        self._declared_connection: OpenConnection | None = None
        self._declare_lock = asyncio.Lock()

    @property
    def connected(self) -> bool:
        """Whether both connections are open and every consumer is attached, as far as is known."""
        attached = all(subscription.attached for subscription in self._subscriptions)
        return self._consume_connection.up and self._publish_connection.up and attached

    @property
    def can_publish(self) -> bool:
        """Whether the publishing connection is open, as far as this process knows."""
        return self._publish_connection.up

    def is_consuming(self, address: Address) -> bool:
        """Whether a consumer of `address` is attached to its queue, as far as we know."""
        return self._consume_connection.up and any(
            each.address == address and each.is_consuming for each in self._subscriptions
        )

    @property
    def max_message_bytes(self) -> int | None:
        """Largest body in bytes that the broker accepts; `None` until it refuses a larger one."""
        return self._publisher.max_body_bytes

    async def open(self) -> None:
        """Open both connections.

        Raises:
            ConfigurationError: the broker refuses the login.
            BrokerUnavailable: the broker does not answer.
        """
        try:
            await self._consume_connection.open()
            await self._publish_connection.open()
        except BaseException as error:
            await self.close()
            if isinstance(error.__cause__, AuthenticationError | ProbableAuthenticationError):
                raise login_refused() from error
            raise
        if self._redeclare_task is None:
            self._redeclare_task = asyncio.create_task(self._redeclare_periodically())

    async def close(self) -> None:
        """Cancel the consumers, requeue their unacked deliveries, and disconnect."""
        if self._redeclare_task is not None:
            self._redeclare_task.cancel()
            self._redeclare_task = None
        subscriptions, self._subscriptions = self._subscriptions, []
        try:
            await asyncio.gather(*(subscription.close() for subscription in subscriptions))
            await self._publisher.close()
        finally:
            await asyncio.gather(
                self._consume_connection.close(), self._publish_connection.close()
            )

    async def declare(
        self, agent: AgentName, replica: ReplicaId | None = None, *, shards: int = 1
    ) -> None:
        """Declare the queues of `agent`, and the private queue of `replica` if given.

        They are declared again after a lost connection, because private queues may have expired.

        Raises:
            ConfigurationError: the login may not declare or bind a queue; names the queue.
        """
        if shards > self._shards.get(agent, 1):
            self._shards[agent] = shards
            self._declared.discard((agent, None))
        await self._ensure_declared(
            declarations=[(agent, None), *([(agent, replica)] if replica else [])]
        )
        self._declarations[agent, None] = None
        if replica:
            self._declarations[agent, replica] = None

    async def mark_database(self, agent: AgentName) -> bool:
        """Set the marker of `agent`. Returns `True` if it was not set before.

        The broker sets it again if it is lost, and logs a warning if the login may not set it.
        """
        is_new = not await self.has_database_marker(agent)
        if not is_new or await self._markers.set(agent):
            self._marked_agents.add(agent)
        return is_new

    async def has_database_marker(self, agent: AgentName) -> bool:
        """Whether the marker of `agent` is set."""
        return await self._look_up(self._markers.exists(agent))

    async def remove_database_marker(self, agent: AgentName) -> None:
        """Remove the marker of `agent`, if it is set.

        Raises:
            ConfigurationError: the login may not delete it.
        """
        self._marked_agents.discard(agent)
        await self._markers.remove(agent)

    async def publish(self, messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        """Send messages and wait for the result of each, in the order of the arguments."""
        results = await self._publish_once(messages)
        if PublishResult.UNROUTABLE in results:
            await self._retry_unroutable(messages, results)
        return results

    async def broadcast(self, agent: AgentName, message: Message) -> None:
        """Send `message` to the private queue of every live replica of `agent`."""
        await self._publish_once([(Address(self._topology.broadcast_key(agent)), message)])

    async def subscribe(
        self, agent: AgentName, replica: ReplicaId, topics: Sequence[Topic]
    ) -> None:
        """Deliver `topics` to the private queue of `replica` too, including after an outage.

        Raises:
            ConfigurationError: the login may not bind the queue.
        """
        known = self._topics.get(replica, frozenset())
        if not known.issuperset(topics):
            self._topics[replica] = known.union(topics)
            self._declared.discard((agent, replica))
        await self._ensure_declared([(agent, replica)])

    async def announce(self, topic: Topic, message: Message) -> None:
        """Send `message` to every private queue that is subscribed to `topic`."""
        await self._publish_once([(Address(topic), message)])

    async def consume(
        self, address: Address, prefetch: int, on_delivery: OnDelivery
    ) -> RabbitSubscription:
        """Deliver messages of `address` until cancelled, reattaching after lost connections.

        Raises:
            ConfigurationError: no queue is declared at `address`.
        """
        subscription = RabbitSubscription(
            self._consume_connection,
            self._topology.queue_name(address),
            address,
            on_delivery,
            prefetch=prefetch,
            timeout=self._timeout,
            ensure_declared=partial(self._redeclare, address),
            dead_letter=self._dead_letter,
            delivery_limit=self._topology.delivery_limit,
        )
        await subscription.start()
        self._subscriptions = [each for each in self._subscriptions if not each.is_finished]
        self._subscriptions.append(subscription)
        return subscription

    async def depth(self, address: Address) -> int | None:
        """Number of ready messages in the queue, or `None` if it does not exist."""
        name = self._topology.queue_name(address)
        try:
            short_string(name)
        except ValueError:
            return None
        queue = await self._look_up(self._lookup_queue(name, address))
        return None if queue is None else queue[0]

    async def find_request(self, agent: AgentName, task_id: TaskId) -> RequestSearch:
        """Whether a request queue has ready messages, and how many consumers may hold more.

        RabbitMQ names neither the messages nor what a consumer holds. A cancelled consumer counts
        until its deliveries are settled, and a dead one until RabbitMQ notices. A quorum queue
        without a leader, or with a slow one, seems to have no messages and no consumers.
        """
        addresses = {
            each.address for each in self._request_subscriptions(agent) if each.is_consuming
        }
        if not await self._are_all_request_queues(agent, addresses):
            raise BrokerUnavailable(f"agent {agent!r} does not consume all its request queues")
        queues = await asyncio.gather(
            *(
                self._look_up(self._lookup_queue(self._topology.queue_name(address), address))
                for address in addresses
            )
        )
        found = {
            address: queue
            for address, queue in zip(addresses, queues, strict=True)
            if queue is not None and queue[1]
        }
        if len(found) < len(addresses):
            raise BrokerUnavailable(f"the request queues of agent {agent!r} do not reply")
        return RequestSearch(
            any(ready for ready, _ in found.values()),
            {address: consumers for address, (_, consumers) in found.items()},
        )

    async def _are_all_request_queues(self, agent: AgentName, addresses: set[Address]) -> bool:
        """Whether `addresses` has all request queues of `agent`.

        While this process starts or drains, it consumes only some. A replica with a larger
        `request_shards` may have declared more, and have died.
        """
        shards = len(addresses) - 1
        known = {nested_queue(agent), *(request_shard(agent, number) for number in range(shards))}
        if shards < 1 or addresses != known:
            return False
        following = request_shard(agent, shards)
        if shards == MAX_SHARDS or self._missing_queues.recently_missing(following):
            return True
        if await self.depth(following) is not None:
            return False
        self._missing_queues.record_missing(following)
        return True

    def deny_request(self, agent: AgentName, task_id: TaskId) -> Mapping[Address, int]:
        """The consumers of this process that neither hold the request nor have returned any."""
        since, counts = monotonic() - _DENIAL_SECONDS, Counter[Address]()
        for subscription in self._request_subscriptions(agent):
            if subscription.holds(task_id):
                return {}
            counts[subscription.address] += subscription.count_consumers_since(since)
        return counts

    def _request_subscriptions(self, agent: AgentName) -> list[RabbitSubscription]:
        return [
            each
            for each in self._subscriptions
            if is_request_queue(each.address)
            and each.address.partition(".")[0] == agent
            and not each.is_finished
        ]

    async def _look_up(self, step: Coroutine[Any, Any, _T]) -> _T:
        """Await `step`, which continues even if the caller is cancelled."""
        lookup = asyncio.create_task(self._limit_concurrency(step))
        self._lookups.add(lookup)
        lookup.add_done_callback(self._lookup_done)
        return await asyncio.shield(lookup)

    async def _limit_concurrency(self, step: Coroutine[Any, Any, _T]) -> _T:
        async with self._lookup_semaphore:
            return await step

    def _lookup_done(self, lookup: asyncio.Task[Any]) -> None:
        self._lookups.discard(lookup)
        if not lookup.cancelled():
            lookup.exception()  # retrieve it: the caller may have been cancelled

    async def _lookup_queue(self, name: str, address: Address) -> tuple[int, int] | None:
        """Look up the number of ready messages and of consumers. Must never be cancelled.

        aiormq closes the channel of a cancelled call. If the queue does not exist, RabbitMQ closes
        it too, and then ends the connection of all consumers with "expected 'channel.open'" (seen
        with 3.10 and aiormq 7.2.4).
        """
        async with self._consume_connection.channel() as channel:
            try:
                with translate_errors(f"looking at {address[:100]}"):
                    async with asyncio.timeout(self._timeout):
                        queue = await channel.queue_declare(name, passive=True)
            # The library refuses this name, so no queue of a mesh has it.
            except ValueError:
                return None
            except BrokerUnavailable as error:
                if isinstance(error.__cause__, ChannelNotFoundEntity):
                    return None
                raise
        return queue.message_count or 0, queue.consumer_count or 0

    async def _publish_once(
        self, messages: Sequence[tuple[Address, Message]]
    ) -> list[PublishResult]:
        results = [PublishResult.UNROUTABLE] * len(messages)
        outbound: dict[int, OutboundMessage] = {}
        for index, (address, message) in enumerate(messages):
            try:
                key = short_string(address)
            except ValueError:  # not a valid queue name
                continue
            try:
                properties = to_properties(message, self._user_id)
            except UnencodableMessage as error:
                log.error("message %.100s cannot be sent: %s", message.message_id, error)
                results[index] = PublishResult.REJECTED
                continue
            outbound[index] = OutboundMessage(key, message.message_id, properties, message.body)
        published = await self._publisher.publish(list(outbound.values()))
        for index, result in zip(outbound, published, strict=True):
            results[index] = result
            if result is PublishResult.ACCEPTED:
                self._missing_queues.record_reached(messages[index][0])
        return results

    async def _retry_unroutable(
        self, messages: Sequence[tuple[Address, Message]], results: list[PublishResult]
    ) -> None:
        """Repair the routes of returned messages and send those again. Updates `results`."""
        returned = [
            index for index, result in enumerate(results) if result is PublishResult.UNROUTABLE
        ]
        addresses = list({messages[index][0] for index in returned})
        repairs = await asyncio.gather(*map(self._repair_route, addresses))
        repaired = dict(zip(addresses, repairs, strict=True))
        for index in returned:
            results[index] = repaired[messages[index][0]]
        retries = [index for index in returned if results[index] is PublishResult.ACCEPTED]
        again = await self._publish_once([messages[index] for index in retries])
        for index, result in zip(retries, again, strict=True):
            results[index] = (
                PublishResult.OVERLOADED if result is PublishResult.UNROUTABLE else result
            )

    async def _repair_route(self, address: Address) -> PublishResult:
        """Try to repair the route for a message to `address` that was returned as unroutable.

        Returns `ACCEPTED` if the message should be sent again; otherwise its result. A broker that
        is shutting down returns messages as if their queues did not exist; those messages wait.
        """
        if self._missing_queues.recently_missing(address):
            return PublishResult.UNROUTABLE
        exists = await self.depth(address) is not None
        try:
            if any(self._declares(*each, address) for each in self._declarations):
                await self._redeclare(address, True)
                return PublishResult.OVERLOADED if exists else PublishResult.ACCEPTED
            if exists:
                await self._declarer.bind(address)
                return PublishResult.ACCEPTED
        except (BrokerUnavailable, ConfigurationError) as error:
            log.warning("cannot repair the route to %s: %s", address, error)
        if exists or self._missing_queues.may_return(address):
            return PublishResult.OVERLOADED
        self._missing_queues.record_missing(address)
        return PublishResult.UNROUTABLE

    async def _redeclare(self, address: Address, force: bool) -> None:
        """Declare again only what `address` needs, so that it is independent of other queues."""
        if force:
            self._declared_connection = None
        await self._ensure_declared(
            [each for each in self._declarations if self._declares(*each, address)]
        )

    async def _redeclare_all(self) -> None:
        """Declare everything again, each agent and replica independently of the others' errors."""
        self._declared_connection = None
        for each in list(self._declarations):
            try:
                await self._ensure_declared([each])
            except (BrokerUnavailable, ConfigurationError) as error:
                log.warning("cannot declare the queues of %s again: %s", each[0], error)
        for agent in list(self._marked_agents):
            try:
                await self.mark_database(agent)
            except BrokerUnavailable as error:
                log.warning("cannot set the marker of %s again: %s", agent, error)

    def _declares(self, agent: AgentName, replica: ReplicaId | None, address: Address) -> bool:
        if replica is not None:
            return address == private_queue(agent, replica)
        return address in self._topology.queues(agent, self._shards.get(agent, 1))

    async def _ensure_declared(
        self, declarations: Sequence[tuple[AgentName, ReplicaId | None]]
    ) -> None:
        async with self._declare_lock:
            connection = await self._consume_connection.ensure_connected()
            if connection is not self._declared_connection:
                self._declared.clear()
                await declare_exchange(self._consume_connection, self._topology)
                self._declared_connection = connection
            for agent, replica in [each for each in declarations if each not in self._declared]:
                with translate_errors("declaring queues"):
                    async with asyncio.timeout(self._timeout):
                        if replica is None:
                            await self._declarer.declare_agent(agent, self._shards.get(agent, 1))
                        else:
                            topics = self._topics.get(replica, ())
                            await self._declarer.declare_private(agent, replica, topics)
                self._declared.add((agent, replica))

    async def _redeclare_periodically(self) -> None:
        """Declare everything again about once a minute.

        RabbitMQ does not report deleted exchanges or bindings.
        """
        while True:
            await asyncio.sleep(_REDECLARE_INTERVAL * random.uniform(0.75, 1.25))
            if self._consume_connection.up:
                await self._redeclare_all()

    async def _dead_letter(
        self, address: Address, raw: RawDelivery, content: Content, reason: str
    ) -> bool:
        """Copy a delivery to the dead letters of its agent, as completely as possible.

        Returns `False` if the dead-letter queue refuses even a minimal copy.
        """
        agent = AgentName(address.partition(".")[0])
        key, minimal = dead_letter_queue(agent), minimal_dead_letter(reason, self._user_id)
        died_in = None if is_dead_letter_queue(address) else address
        complete = to_dead_letter(
            raw, content, reason, self._user_id, self._publisher.max_payload, died_in
        )
        result = PublishResult.REJECTED
        for properties, body in ((complete, raw.body), (minimal, raw.body), (minimal, b"")):
            result = await self._publish_dead_letter(key, content.message_id, properties, body)
            if result is not PublishResult.REJECTED:
                break
            log.error(
                "a dead letter of %s can be copied only in part: %s",
                address,
                truncate_reason(reason),
            )
        if result is PublishResult.ACCEPTED:
            return True
        log.error(
            "the dead-letter queue of %s refuses a message (%s): %s",
            agent,
            result.name,
            truncate_reason(reason),
        )
        return False

    async def _publish_dead_letter(
        self, key: Address, id_: str | None, properties: bytes, body: bytes
    ) -> PublishResult:
        outbound = OutboundMessage(short_string(key), id_, properties, body)
        (result,) = await self._publisher.publish([outbound])
        if result is PublishResult.UNROUTABLE:
            await self._redeclare(key, True)
            (result,) = await self._publisher.publish([outbound])
        return result


class _MissingQueues:
    """Tracks missing queues. A recently used one will be declared again, so messages can wait."""

    def __init__(self) -> None:
        self._missing_since: OrderedDict[Address, float | None] = OrderedDict()  # first missing at
        self._looked_up_at: OrderedDict[Address, float] = OrderedDict()  # last missing at

    def record_missing(self, address: Address) -> None:
        """Record that a lookup found no queue at `address`."""
        self._looked_up_at[address] = asyncio.get_running_loop().time()
        if len(self._looked_up_at) > _MAX_TRACKED_QUEUES:
            self._looked_up_at.popitem(last=False)

    def recently_missing(self, address: Address) -> bool:
        """Whether a lookup within the last second found no queue at `address`."""
        at = self._looked_up_at.pop(address, None)
        if at is None or asyncio.get_running_loop().time() - at > _MISSING_TTL:
            return False
        self._looked_up_at[address] = at
        return True

    def record_reached(self, address: Address) -> None:
        """Record that the queue of `address` accepted a message."""
        if address in self._missing_since:
            self._missing_since[address] = None
            return
        self._missing_since[address] = None
        if len(self._missing_since) > _MAX_TRACKED_QUEUES:
            self._missing_since.popitem(last=False)

    def may_return(self, address: Address) -> bool:
        """Whether the queue existed and has not been missing for too long."""
        if address not in self._missing_since:
            return False
        now = asyncio.get_running_loop().time()
        since = self._missing_since[address]
        if since is None:
            since = self._missing_since[address] = now
        if now - since < _REDECLARE_GRACE:
            return True
        del self._missing_since[address]
        return False
