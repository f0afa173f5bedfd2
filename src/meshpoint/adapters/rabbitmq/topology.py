"""The exchange and the queues of a mesh, and how they come to be.

One direct exchange per namespace. A queue is bound under its address; private queues also under the broadcast
key of their agent, so that a broadcast to an agent that nobody declared is a message without a receiver and
not an error that closes the channel. The exchange carries dead letters as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from aiormq.abc import AbstractChannel
from aiormq.exceptions import ChannelAccessRefused, ChannelNotFoundEntity, ChannelPreconditionFailed
from pamqp.common import FieldTable

from meshpoint.adapters.rabbitmq.link import Link, translated
from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.messages import Address, dead_letters_of, nested_of, private_of, responses_of, shard_of


@dataclass(frozen=True, slots=True)
class Topology:
    """Names and arguments of everything that a namespace holds at the broker."""

    namespace: str
    private_ttl: timedelta
    delivery_limit: int
    max_length: int | None

    @property
    def exchange(self) -> str:
        """The one exchange of the namespace."""
        return f"{self.namespace}.mesh"

    def queue(self, address: Address) -> str:
        """The queue of `address`."""
        return f"{self.namespace}.{address}"

    @staticmethod
    def broadcast_key(agent: AgentName) -> str:
        """The routing key that reaches all private queues of `agent`."""
        return f"{agent}.broadcast"

    def queues(self, agent: AgentName, shards: int = 1) -> dict[Address, FieldTable]:
        """The shared queues of `agent` with their arguments; the dead letters first, as the others need them."""
        consumed = self._consumed(agent)
        bounded: FieldTable = {"x-max-length": self.max_length} if self.max_length else {}
        return {
            dead_letters_of(agent): {"x-queue-type": "quorum"},
            responses_of(agent): consumed,
            **{shard_of(agent, number): {**consumed, **bounded} for number in range(shards)},
            nested_of(agent): {**consumed, **bounded},
        }

    def private_queue(self) -> FieldTable:
        """The arguments of a private queue.

        Classic, as it is made for one incarnation: a quorum queue is without a leader for good when the broker
        is killed just after making it (seen with 3.10), and then every broadcast waits for it. It needs no
        delivery limit either: whoever dies of a message does not come back for it.
        """
        return {"x-queue-type": "classic", "x-expires": int(self.private_ttl.total_seconds() * 1000)}

    def _consumed(self, agent: AgentName) -> FieldTable:
        # A dead letter is moved only once the dead-letter queue has it, which RabbitMQ does only for queues
        # that refuse what is too much.
        return {
            "x-queue-type": "quorum",
            "x-delivery-limit": self.delivery_limit,
            "x-dead-letter-exchange": self.exchange,
            "x-dead-letter-routing-key": dead_letters_of(agent),
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }


async def declare_exchange(link: Link, topology: Topology) -> None:
    """Make the exchange exist. One that is there is only looked at, which needs no right to configure it."""
    try:
        async with link.channel() as channel:
            with translated("looking for the exchange"):
                await channel.exchange_declare(topology.exchange, exchange_type="direct", passive=True)
    except BrokerUnavailable as error:
        if not isinstance(error.__cause__, ChannelNotFoundEntity):
            raise
        await _create_exchange(link, topology)


async def _create_exchange(link: Link, topology: Topology) -> None:
    async with link.channel() as channel:
        with translated("declaring the exchange"):
            try:
                await channel.exchange_declare(topology.exchange, exchange_type="direct", durable=True)
            except ChannelAccessRefused as error:
                raise ConfigurationError(
                    "mesh.broker_url",
                    f"the login may not declare the exchange {topology.exchange!r}",
                    "grant it configure on that name, or declare a durable direct exchange for it",
                ) from error


async def declare_agent(channel: AbstractChannel, topology: Topology, agent: AgentName, shards: int) -> None:
    """Make the shared queues of `agent` exist, with so many for requests.

    Raises:
        ConfigurationError: a queue is there with other arguments, or the login may not declare it.
    """
    for address, arguments in topology.queues(agent, shards).items():
        await _declare_queue(channel, topology, address, arguments)


async def declare_private(channel: AbstractChannel, topology: Topology, agent: AgentName, replica: ReplicaId) -> None:
    """Make the private queue of `replica` exist, with the broadcasts of its agent.

    Raises:
        ConfigurationError: as `declare_agent`.
    """
    address = private_of(agent, replica)
    await _declare_queue(channel, topology, address, topology.private_queue())
    with translated(f"binding {address}"):
        await channel.queue_bind(topology.queue(address), topology.exchange, topology.broadcast_key(agent))


async def _declare_queue(
    channel: AbstractChannel, topology: Topology, address: Address, arguments: FieldTable
) -> None:
    name = topology.queue(address)
    try:
        await channel.queue_declare(name, durable=True, arguments=arguments)
        await channel.queue_bind(name, topology.exchange, address)
    except ChannelPreconditionFailed as error:
        raise ConfigurationError(
            "mesh.broker_url",
            f"the queue {name!r} exists with other settings ({error})",
            "give the mesh another namespace, or drain and delete that queue",
        ) from error
    except ChannelAccessRefused as error:
        raise ConfigurationError(
            "mesh.broker_url",
            f"the login may not declare or bind the queue {name!r}",
            "grant it configure and write on the queue and read on the exchange",
        ) from error
