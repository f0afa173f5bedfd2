"""The `Broker` port on RabbitMQ."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from aiormq.exceptions import AuthenticationError, ChannelNotFoundEntity, ProbableAuthenticationError
from yarl import URL

from meshpoint.adapters.rabbitmq.confirming import Parcel
from meshpoint.adapters.rabbitmq.connection import Link, MakeConnection, Wired, translated
from meshpoint.adapters.rabbitmq.content import Content
from meshpoint.adapters.rabbitmq.envelope import Unsendable, bare_dead_letter, to_dead_letter, to_properties
from meshpoint.adapters.rabbitmq.frames import Arrived, short_string
from meshpoint.adapters.rabbitmq.publisher import Publisher
from meshpoint.adapters.rabbitmq.subscription import RabbitSubscription
from meshpoint.adapters.rabbitmq.topology import MAX_LENGTH, Declaring, Topology, declare_exchange
from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.messages import Address, Message, bounded_reason, dead_letters_of, private_of
from meshpoint.ports.broker import OnDelivery, Published

log = logging.getLogger(__name__)

_LOOK_EVERY = 60.0
"""Seconds between checks that the exchange, queues and bindings still exist."""
_RETURN_WITHIN = 30.0
"""Seconds that the consumers of a deleted queue have to declare it again."""
_REMEMBERED = 10_000
_LOOKS_AT_ONCE = 8
_LOOKED_LATELY = 1.0
"""Seconds before a missing queue is looked up again."""


class RabbitMqBroker:
    """A `Broker` on RabbitMQ.

    Args:
        url: `amqp://` or `amqps://`; the parameters `heartbeat` (seconds), `cafile`, `certfile` and `keyfile`
            are understood.
        namespace: prefix of everything at the broker; meshes of different names never meet.
        publish_timeout: how long the broker may take to connect, to confirm, or to answer.
        private_ttl: how long a private queue outlives its last consumer.
        delivery_limit: deliveries of one message before the broker moves it to the dead letters.
        max_length: maximum messages in a new queue. A full queue refuses more; dead-letter queues drop their oldest
        instead. `None` means no limit.
        user_id: the name under which the broker knows the login, which it verifies on each message; by default
            the user of `url`.
        purpose: what this process is for, in the names of its connections; a replica has none.
        make_connection: returns an aio-pika connection for a URL, not yet connected; defaults to
        `aio_pika.Connection`. Robust connections are unsuitable: they hide that deliveries were lost.
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
        self._consuming = Link(url, f"{name} consuming", publish_timeout, make_connection)
        self._publishing = Link(url, f"{name} publishing", publish_timeout, make_connection)
        self._publisher = Publisher(self._publishing, self._topology, publish_timeout, self._redeclare_all)
        self._declaring_queues = Declaring(self._consuming, self._topology)
        self._missing = _Missing()
        self._looking = asyncio.Semaphore(_LOOKS_AT_ONCE)
        self._looks: set[asyncio.Task[int | None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._subscriptions: list[RabbitSubscription] = []
        self._wanted: dict[tuple[AgentName, ReplicaId | None], None] = {}
        self._shards: dict[AgentName, int] = {}
        self._declared: set[tuple[AgentName, ReplicaId | None]] = set()
        self._declared_on: Wired | None = None
        self._declaring = asyncio.Lock()

    @property
    def connected(self) -> bool:
        """Whether both connections stand and every consumer is at its queue, as far as is known here."""
        attached = all(subscription.attached for subscription in self._subscriptions)
        return self._consuming.up and self._publishing.up and attached

    @property
    def can_publish(self) -> bool:
        """Whether the publishing connection is open, as far as this process knows."""
        return self._publishing.up

    def consuming(self, address: Address) -> bool:
        """Whether a consumer of `address` is attached to its queue, as far as this process knows."""
        return self._consuming.up and any(each.address == address and each.taking for each in self._subscriptions)

    @property
    def max_message_bytes(self) -> int | None:
        """Largest body in bytes that the broker accepts; known once it has refused a larger one."""
        return self._publisher.max_body

    async def open(self) -> None:
        """Connect.

        Raises:
            ConfigurationError: the broker refuses the login.
            BrokerUnavailable: it does not answer.
        """
        try:
            await self._consuming.open()
            await self._publishing.open()
        except BaseException as error:
            await self.close()
            if isinstance(error.__cause__, AuthenticationError | ProbableAuthenticationError):
                raise ConfigurationError(
                    "mesh.broker_url", "the broker refuses the login", "check user, password and virtual host"
                ) from error
            raise
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Cancel consumers, give unsettled deliveries back, disconnect."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        subscriptions, self._subscriptions = self._subscriptions, []
        try:
            await asyncio.gather(*(subscription.close() for subscription in subscriptions))
            await self._publisher.close()
        finally:
            await asyncio.gather(self._consuming.close(), self._publishing.close())

    async def declare(self, agent: AgentName, replica: ReplicaId | None = None, *, shards: int = 1) -> None:
        """Make the queues of `agent` exist, and the private queue of `replica`.

        They are declared again when the connection was lost, as private queues may have expired meanwhile.

        Raises:
            ConfigurationError: a queue exists with other settings, or may not be declared; names it.
        """
        if shards > self._shards.get(agent, 1):
            self._shards[agent] = shards
            self._declared.discard((agent, None))
        await self._restore(wanted=[(agent, None), *([(agent, replica)] if replica else [])])
        self._wanted[agent, None] = None
        if replica:
            self._wanted[agent, replica] = None

    async def publish(self, messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        """Send messages and wait for the broker's word on each, in the order of the arguments."""
        words = await self._publish(messages)
        gone = {address for (address, _), word in zip(messages, words, strict=True) if word is Published.UNROUTABLE}
        if gone:
            why = dict(zip(gone, await asyncio.gather(*map(self._look, gone)), strict=True))
            returned = [place for place, word in enumerate(words) if word is Published.UNROUTABLE]
            again = [place for place in returned if why[messages[place][0]] is Published.ACCEPTED]
            for place in returned:
                words[place] = why[messages[place][0]]
            for place, word in zip(again, await self._publish([messages[place] for place in again]), strict=True):
                words[place] = Published.OVERLOADED if word is Published.UNROUTABLE else word
        return words

    async def broadcast(self, agent: AgentName, message: Message) -> None:
        """Send `message` to the private queue of every live replica of `agent`."""
        await self._publish([(Address(self._topology.broadcast_key(agent)), message)])

    async def consume(self, address: Address, prefetch: int, on_delivery: OnDelivery) -> RabbitSubscription:
        """Deliver messages of `address` until cancelled, through lost connections.

        Raises:
            ConfigurationError: nobody declared `address`.
        """
        subscription = RabbitSubscription(
            self._consuming,
            self._topology.queue(address),
            address,
            on_delivery,
            prefetch=prefetch,
            timeout=self._timeout,
            restore=partial(self._redeclare, address),
            bury=self._bury,
            delivery_limit=self._topology.delivery_limit,
        )
        await subscription.start()
        self._subscriptions = [each for each in self._subscriptions if not each.over]
        self._subscriptions.append(subscription)
        return subscription

    async def depth(self, address: Address) -> int | None:
        """Messages in the queue that no consumer holds; None when there is no such queue."""
        name = self._topology.queue(address)
        try:
            short_string(name)
        except ValueError:
            return None
        look = asyncio.create_task(self._depth(name, address))
        self._looks.add(look)
        look.add_done_callback(self._looked)
        return await asyncio.shield(look)

    def _looked(self, look: asyncio.Task[int | None]) -> None:
        self._looks.discard(look)
        if not look.cancelled():
            look.exception()  # the caller may be gone

    async def _depth(self, name: str, address: Address) -> int | None:
        """Never cancelled: aiormq then closes the channel, and RabbitMQ, which closes it too where there is no queue,
        ends the connection of all consumers with "expected 'channel.open'" (seen with 3.10 and aiormq 7.2.4)."""
        async with self._looking, self._consuming.channel() as channel:
            try:
                with translated(f"looking at {address[:100]}"):
                    async with asyncio.timeout(self._timeout):
                        found = await channel.queue_declare(name, passive=True)
            except ValueError:  # the library refuses to ask for this name; no queue of a mesh has one like it
                return None
            except BrokerUnavailable as error:
                if isinstance(error.__cause__, ChannelNotFoundEntity):
                    return None
                raise
        return found.message_count

    async def _publish(self, messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        words: dict[int, Published] = {}
        parcels: dict[int, Parcel] = {}
        for place, (address, message) in enumerate(messages):
            try:
                key = short_string(address)
            except ValueError:  # not a valid queue name
                words[place] = Published.UNROUTABLE
                continue
            try:
                properties = to_properties(message, self._user_id)
            except Unsendable as error:
                log.error("message %.100s cannot be sent: %s", message.message_id, error)
                words[place] = Published.REJECTED
                continue
            parcels[place] = Parcel(key, message.message_id, properties, message.body)
        words |= zip(parcels, await self._publisher.publish(list(parcels.values())), strict=True)
        for place, (address, _) in enumerate(messages):
            if words[place] is Published.ACCEPTED:
                self._missing.seen(address)
        return [words[place] for place in range(len(messages))]

    async def _look(self, address: Address) -> Published:
        """Result for a message to `address` that was returned. ACCEPTED: the route is repaired; send it again.

        A broker that is shutting down returns messages as if their queues did not exist; those messages wait.
        """
        if self._missing.just_looked(address):
            return Published.UNROUTABLE
        there = await self.depth(address) is not None
        try:
            if any(self._declares(*each, address) for each in self._wanted):
                await self._redeclare(address, True)
                return Published.OVERLOADED if there else Published.ACCEPTED
            if there:
                await self._declaring_queues.bind(address)
                return Published.ACCEPTED
        except (BrokerUnavailable, ConfigurationError) as error:
            log.warning("cannot repair the route to %s: %s", address, error)
        if there or self._missing.will_return(address):
            return Published.OVERLOADED
        self._missing.looked(address)
        return Published.UNROUTABLE

    async def _redeclare(self, address: Address, anew: bool) -> None:
        """Redeclare only what `address` needs, so that one queue that cannot be declared does not affect others."""
        if anew:
            self._declared_on = None
        await self._restore([each for each in self._wanted if self._declares(*each, address)])

    async def _redeclare_all(self) -> None:
        """Redeclare everything, each item independently, because the exchange may be gone."""
        self._declared_on = None
        for each in list(self._wanted):
            try:
                await self._restore([each])
            except (BrokerUnavailable, ConfigurationError) as error:
                log.warning("cannot declare the queues of %s again: %s", each[0], error)

    def _declares(self, agent: AgentName, replica: ReplicaId | None, address: Address) -> bool:
        if replica is not None:
            return address == private_of(agent, replica)
        return address in self._topology.queues(agent, self._shards.get(agent, 1))

    async def _restore(self, wanted: Sequence[tuple[AgentName, ReplicaId | None]]) -> None:
        async with self._declaring:
            connection = await self._consuming.connection()
            if connection is not self._declared_on:
                self._declared.clear()
                await declare_exchange(self._consuming, self._topology)
                self._declared_on = connection
            for agent, replica in [each for each in wanted if each not in self._declared]:
                with translated("declaring queues"):
                    async with asyncio.timeout(self._timeout):
                        if replica is None:
                            await self._declaring_queues.agent(agent, self._shards.get(agent, 1))
                        else:
                            await self._declaring_queues.private(agent, replica)
                self._declared.add((agent, replica))

    async def _watch(self) -> None:
        """Redeclare everything periodically: RabbitMQ does not notify clients of deleted exchanges or bindings."""
        while True:
            await asyncio.sleep(_LOOK_EVERY * random.uniform(0.75, 1.25))
            if self._consuming.up:
                await self._redeclare_all()

    async def _bury(self, address: Address, arrived: Arrived, content: Content, reason: str) -> bool:
        """Copy a delivery to the dead-letter queue of the agent behind `address`, as completely as possible."""
        agent = AgentName(address.partition(".")[0])
        key, bare = dead_letters_of(agent), bare_dead_letter(reason, self._user_id)
        whole = to_dead_letter(arrived, content, reason, self._user_id, self._publisher.room)
        word = Published.REJECTED
        for properties, body in ((whole, arrived.body), (bare, arrived.body), (bare, b"")):
            word = await self._publish_copy(key, content.message_id, properties, body)
            if word is not Published.REJECTED:
                break
            log.error("a dead letter of %s can be copied only in part: %s", address, bounded_reason(reason))
        if word is Published.ACCEPTED:
            return True
        log.error("the dead-letter queue of %s refuses a message (%s): %s", agent, word.name, bounded_reason(reason))
        return False

    async def _publish_copy(self, key: Address, id_: str | None, properties: bytes, body: bytes) -> Published:
        parcel = Parcel(short_string(key), id_, properties, body)
        (word,) = await self._publisher.publish([parcel])
        if word is Published.UNROUTABLE:
            await self._redeclare(key, True)
            (word,) = await self._publisher.publish([parcel])
        return word


class _Missing:
    """Queues that existed recently. Their consumers will declare them again, so messages can wait for them."""

    def __init__(self) -> None:
        self._there: OrderedDict[Address, float | None] = OrderedDict()  # when it was first missing
        self._looked: OrderedDict[Address, float] = OrderedDict()  # when it was last missing

    def looked(self, address: Address) -> None:
        """Record that `address` has no queue."""
        self._looked[address] = asyncio.get_running_loop().time()
        if len(self._looked) > _REMEMBERED:
            self._looked.popitem(last=False)

    def just_looked(self, address: Address) -> bool:
        """Whether a very recent lookup found no such queue."""
        at = self._looked.pop(address, None)
        if at is None or asyncio.get_running_loop().time() - at > _LOOKED_LATELY:
            return False
        self._looked[address] = at
        return True

    def seen(self, address: Address) -> None:
        """Record that a message reached `address`."""
        if address in self._there:
            self._there[address] = None
            return
        self._there[address] = None
        if len(self._there) > _REMEMBERED:
            self._there.popitem(last=False)

    def will_return(self, address: Address) -> bool:
        """Whether a missing queue is likely to come back."""
        if address not in self._there:
            return False
        now = asyncio.get_running_loop().time()
        since = self._there[address]
        if since is None:
            since = self._there[address] = now
        if now - since < _RETURN_WITHIN:
            return True
        del self._there[address]
        return False
