"""The `Broker` port on RabbitMQ."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from aiormq.abc import AbstractConnection, DeliveredMessage
from aiormq.exceptions import AuthenticationError, ChannelNotFoundEntity, ProbableAuthenticationError
from yarl import URL

from meshpoint.adapters.rabbitmq.envelope import to_dead_letter, to_properties
from meshpoint.adapters.rabbitmq.link import Link, translated
from meshpoint.adapters.rabbitmq.publisher import Parcel, Publisher
from meshpoint.adapters.rabbitmq.subscription import RabbitSubscription
from meshpoint.adapters.rabbitmq.topology import Topology, declare_agent, declare_exchange, declare_private
from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.messages import Address, Message, dead_letters_of, private_of
from meshpoint.ports.broker import OnDelivery, Published


class RabbitMqBroker:
    """A `Broker` on RabbitMQ.

    Args:
        url: `amqp://` or `amqps://`; the parameters `heartbeat` (seconds), `cafile`, `certfile` and `keyfile`
            are understood.
        namespace: prefix of everything at the broker; meshes of different names never meet.
        publish_timeout: how long the broker may take to connect, to confirm, or to answer.
        private_ttl: how long a private queue outlives its last consumer.
        delivery_limit: deliveries of one message before the broker moves it to the dead letters.
        max_length: messages in a request queue from which on it refuses more; None is no limit.
        user_id: the name under which the broker knows the login, which it verifies on each message; by default
            the user of `url`.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        publish_timeout: timedelta = timedelta(seconds=10),
        private_ttl: timedelta = timedelta(hours=1),
        delivery_limit: int = 20,
        max_length: int | None = None,
        user_id: str | None = None,
    ) -> None:
        self._topology = Topology(namespace, private_ttl, delivery_limit, max_length)
        self._user_id = user_id or URL(url).user or "guest"
        self._timeout = publish_timeout.total_seconds()
        self._consuming = Link(url, f"{namespace} consuming", publish_timeout)
        self._publishing = Link(url, f"{namespace} publishing", publish_timeout)
        self._publisher = Publisher(self._publishing, self._topology, publish_timeout)
        self._subscriptions: list[RabbitSubscription] = []
        self._wanted: dict[tuple[AgentName, ReplicaId | None], None] = {}
        self._shards: dict[AgentName, int] = {}
        self._declared: set[tuple[AgentName, ReplicaId | None]] = set()
        self._declared_on: AbstractConnection | None = None
        self._declaring = asyncio.Lock()

    @property
    def connected(self) -> bool:
        """Whether both connections stand and every consumer is at its queue, as far as is known here."""
        attached = all(subscription.attached for subscription in self._subscriptions)
        return self._consuming.up and self._publishing.up and attached

    @property
    def can_publish(self) -> bool:
        """Whether the publishing connection is open, as far as is known here."""
        return self._publishing.up

    def consuming(self, address: Address) -> bool:
        """Whether a consumer of `address` is attached to its queue, as far as is known here."""
        return self._consuming.up and any(each.address == address and each.taking for each in self._subscriptions)

    async def open(self) -> None:
        """Connect.

        Raises:
            ConfigurationError: the broker refuses the login.
            BrokerUnavailable: it does not answer.
        """
        try:
            await self._consuming.open()
            await self._publishing.open()
        except BrokerUnavailable as error:
            await self.close()
            if isinstance(error.__cause__, AuthenticationError | ProbableAuthenticationError):
                raise ConfigurationError(
                    "mesh.broker_url", "the broker refuses the login", "check user, password and virtual host"
                ) from error
            raise

    async def close(self) -> None:
        """Cancel consumers, give unsettled deliveries back, disconnect."""
        subscriptions, self._subscriptions = self._subscriptions, []
        await asyncio.gather(*(subscription.close() for subscription in subscriptions))
        await self._publisher.close()
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
        words = await self._publisher.publish([self._parcel(address, message) for address, message in messages])
        gone = {address for (address, _), word in zip(messages, words, strict=True) if word is Published.UNROUTABLE}
        # A broker that is shutting down returns messages as if their queues had never been: ask for the queue itself.
        there = {address for address in gone if await self.depth(address) is not None}
        return [
            Published.OVERLOADED if word is Published.UNROUTABLE and address in there else word
            for (address, _), word in zip(messages, words, strict=True)
        ]

    async def broadcast(self, agent: AgentName, message: Message) -> None:
        """Send `message` to the private queue of every live replica of `agent`."""
        await self._publisher.publish([self._parcel(self._topology.broadcast_key(agent), message)])

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
        )
        await subscription.start()
        self._subscriptions = [each for each in self._subscriptions if not each.over]
        self._subscriptions.append(subscription)
        return subscription

    async def depth(self, address: Address) -> int | None:
        """Messages in the queue that no consumer holds; None when there is no such queue."""
        async with self._consuming.channel() as channel:
            try:
                with translated(f"looking at {address}"):
                    async with asyncio.timeout(self._timeout):
                        found = await channel.queue_declare(self._topology.queue(address), passive=True)
            except BrokerUnavailable as error:
                if isinstance(error.__cause__, ChannelNotFoundEntity):
                    return None
                raise
        return found.message_count

    def _parcel(self, key: str, message: Message) -> Parcel:
        return Parcel(key, to_properties(message, self._user_id), message.body)

    async def _redeclare(self, address: Address, anew: bool) -> None:
        """Declare what `address` needs again, and no more: one queue that cannot be declared keeps no other away."""
        if anew:
            self._declared_on = None
        await self._restore([each for each in self._wanted if self._declares(*each, address)])

    def _declares(self, agent: AgentName, replica: ReplicaId | None, address: Address) -> bool:
        if replica is not None:
            return address == private_of(agent, replica)
        return address in self._topology.queues(agent)

    async def _restore(self, wanted: Sequence[tuple[AgentName, ReplicaId | None]]) -> None:
        async with self._declaring:
            connection = await self._consuming.connection()
            if connection is not self._declared_on:
                self._declared.clear()
                await declare_exchange(self._consuming, self._topology)
                self._declared_on = connection
            missing = [each for each in wanted if each not in self._declared]
            if missing:
                await self._declare(missing)

    async def _declare(self, missing: Sequence[tuple[AgentName, ReplicaId | None]]) -> None:
        with translated("declaring queues"):
            async with asyncio.timeout(self._timeout), self._consuming.channel() as channel:
                for agent, replica in missing:
                    if replica is None:
                        await declare_agent(channel, self._topology, agent, self._shards.get(agent, 1))
                    else:
                        await declare_private(channel, self._topology, agent, replica)
                    self._declared.add((agent, replica))

    async def _bury(self, address: Address, delivered: DeliveredMessage, reason: str) -> None:
        """Copy `delivered` to the dead letters of the agent of `address`."""
        agent = AgentName(address.partition(".")[0])
        parcel = Parcel(
            dead_letters_of(agent), to_dead_letter(delivered, reason, self._user_id), bytes(delivered.body)
        )
        (word,) = await self._publisher.publish([parcel])
        if word is Published.UNROUTABLE:
            await self._redeclare(dead_letters_of(agent), True)
            (word,) = await self._publisher.publish([parcel])
        if word is not Published.ACCEPTED:
            raise BrokerUnavailable(f"the dead letters of {agent} do not take a message: {word.name}")
