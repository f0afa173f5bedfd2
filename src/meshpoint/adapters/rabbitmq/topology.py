"""The exchange and the queues of a mesh.

A namespace has one direct exchange, which also carries dead letters. A queue is bound under its
address, a private queue also under the broadcast key of its agent and under topics. A broadcast to
an unknown agent therefore just has no receiver, and does not close the channel with an error.

An existing queue is used with its own arguments, so that an upgrade never fails on a queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import aiormq
from aio_pika.abc import AbstractQueue
from aiormq.exceptions import (
    ChannelAccessRefused,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
)
from pamqp.common import FieldTable

from meshpoint.adapters.rabbitmq.connection import Connection, translate_errors
from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.messages import (
    Address,
    Topic,
    dead_letter_queue,
    nested_queue,
    private_queue,
    request_shard,
    response_queue,
)

log = logging.getLogger(__name__)

MAX_LENGTH = 100_000
"""Maximum messages in a new queue. A full queue refuses more."""
_MAX_DEAD_LETTERS = 10_000
"""Maximum dead letters in a new queue, unless `max_length` is lower. The oldest are dropped."""
_RESPONSES_PER_REQUEST = 10
"""Factor for response queues: one task can wait for many responses."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Names and arguments of all exchanges and queues of a namespace."""

    namespace: str
    private_ttl: timedelta
    delivery_limit: int
    max_length: int | None = MAX_LENGTH

    @property
    def exchange(self) -> str:
        """The name of the namespace's exchange."""
        return f"{self.namespace}.mesh"

    def queue_name(self, address: Address) -> str:
        """The name of the queue at `address`."""
        return f"{self.namespace}.{address}"

    @staticmethod
    def broadcast_key(agent: AgentName) -> str:
        """The routing key that reaches all private queues of `agent`."""
        return f"{agent}.broadcast"

    def database_marker(self, agent: AgentName) -> str:
        """Name of the exchange whose existence says that replicas of `agent` have a database."""
        return f"{self.namespace}.{agent}.database"

    def queues(self, agent: AgentName, shards: int = 1) -> dict[Address, FieldTable]:
        """The shared queues of `agent` and their arguments.

        Dead letters come first: others need them.
        """
        return {
            dead_letter_queue(agent): {"x-queue-type": "quorum", **self._dead_letter_arguments()},
            response_queue(agent): {
                **self._quorum_arguments(agent),
                **self._limit_arguments(_RESPONSES_PER_REQUEST),
            },
            **{
                request_shard(agent, number): {
                    **self._quorum_arguments(agent),
                    **self._limit_arguments(),
                }
                for number in range(shards)
            },
            nested_queue(agent): {**self._quorum_arguments(agent), **self._limit_arguments()},
        }

    def private_queue_arguments(self) -> FieldTable:
        """The arguments of a private queue.

        It is a classic queue, because each incarnation declares its own. A quorum queue declared
        just before the broker is killed may never get a leader (seen with 3.10), and then blocks
        every broadcast. Its consumer counts deliveries instead.
        """
        return {
            "x-queue-type": "classic",
            "x-expires": int(self.private_ttl.total_seconds() * 1000),
            **self._limit_arguments(),
        }

    def _quorum_arguments(self, agent: AgentName) -> FieldTable:
        # At-least-once dead-lettering (a message is removed only once the dead-letter queue has
        # it) requires a queue that refuses messages beyond its limit.
        return {
            "x-queue-type": "quorum",
            "x-delivery-limit": self.delivery_limit,
            "x-dead-letter-exchange": self.exchange,
            "x-dead-letter-routing-key": dead_letter_queue(agent),
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }

    def _limit_arguments(self, factor: int = 1) -> FieldTable:
        return (
            {"x-max-length": factor * self.max_length, "x-overflow": "reject-publish"}
            if self.max_length
            else {}
        )

    def _dead_letter_arguments(self) -> FieldTable:
        limit = min(self.max_length or 0, _MAX_DEAD_LETTERS)
        return {"x-max-length": limit, "x-overflow": "drop-head"} if limit else {}


async def declare_exchange(connection: Connection, topology: Topology) -> None:
    """Declare the exchange. If it exists, this needs no permission to configure it."""
    try:
        async with connection.topology_channel() as channel:
            with translate_errors("looking for the exchange"):
                await channel.declare_exchange(topology.exchange, passive=True)
    except BrokerUnavailable as error:
        if not isinstance(error.__cause__, ChannelNotFoundEntity):
            raise
        await _create_exchange(connection, topology)


async def _create_exchange(connection: Connection, topology: Topology) -> None:
    async with connection.topology_channel() as channel:
        with translate_errors("declaring the exchange"):
            try:
                await channel.declare_exchange(topology.exchange, durable=True)
            except ChannelAccessRefused as error:
                raise ConfigurationError(
                    "mesh.broker_url",
                    f"the login may not declare the exchange {topology.exchange!r}",
                    "grant it configure on that name, or declare a durable direct exchange for it",
                ) from error


class DatabaseMarkers:
    """Markers of agents whose replicas store tasks in a database.

    A marker is a durable exchange that accepts no messages. Unlike a queue, an exchange is known
    to every node of a cluster, and has no home node whose failure would hide it.
    """

    def __init__(self, connection: Connection, topology: Topology, timeout: float) -> None:
        self._connection, self._topology, self._timeout = connection, topology, timeout

    async def exists(self, agent: AgentName) -> bool:
        """Whether the marker of `agent` is set. Must never be cancelled, like a queue lookup."""
        name = self._topology.database_marker(agent)
        async with self._connection.channel() as channel:
            try:
                with translate_errors(f"looking for {name}"):
                    async with asyncio.timeout(self._timeout):
                        await channel.exchange_declare(name, passive=True)
            except BrokerUnavailable as error:
                if isinstance(error.__cause__, ChannelNotFoundEntity):
                    return False
                raise
        return True

    async def set(self, agent: AgentName) -> bool:
        """Set the marker of `agent`. Returns `False`, with a warning, if the login may not."""
        name = self._topology.database_marker(agent)
        try:
            async with self._connection.topology_channel() as channel:
                with translate_errors(f"declaring {name}"):
                    await channel.declare_exchange(name, durable=True, internal=True)
        except BrokerUnavailable as error:
            if not isinstance(error.__cause__, ChannelAccessRefused):
                raise
            log.warning(
                "the login may not declare the exchange %s: replicas of %s without a database "
                "are not refused; grant configure on that name",
                name,
                agent,
            )
            return False
        return True

    async def remove(self, agent: AgentName) -> None:
        """Remove the marker of `agent`, if it is set.

        Raises:
            ConfigurationError: the login may not delete it.
        """
        name = self._topology.database_marker(agent)
        async with self._connection.topology_channel() as channel:
            with translate_errors(f"deleting {name}"):
                try:
                    await channel.exchange_delete(name)
                except ChannelAccessRefused as error:
                    raise ConfigurationError(
                        "mesh.broker_url",
                        f"the login may not delete the exchange {name!r}",
                        "grant it configure on that name",
                    ) from error


class QueueDeclarer:
    """Declares queues, and warns once about each existing queue with different arguments."""

    def __init__(self, connection: Connection, topology: Topology) -> None:
        self._connection, self._topology = connection, topology
        self._with_existing_arguments: set[str] = set()

    async def declare_agent(self, agent: AgentName, shards: int) -> None:
        """Declare the shared queues of `agent`, including its request shards.

        Raises:
            ConfigurationError: the login may not declare or bind a queue.
        """
        for address, arguments in self._topology.queues(agent, shards).items():
            await self._declare(address, arguments, address)

    async def declare_private(
        self, agent: AgentName, replica: ReplicaId, topics: Iterable[Topic] = ()
    ) -> None:
        """Declare the private queue of `replica`; bind it to `topics` and its agent's broadcasts.

        Raises:
            ConfigurationError: the login may not declare or bind the queue.
        """
        address = private_queue(agent, replica)
        keys = address, self._topology.broadcast_key(agent), *topics
        await self._declare(address, self._topology.private_queue_arguments(), *keys)

    async def bind(self, address: Address) -> None:
        """Bind the queue of `address` under its address, even if another process declared it.

        Raises:
            BrokerUnavailable: the queue does not exist, or the login may not bind it.
        """
        async with self._connection.topology_channel() as channel:
            with translate_errors(f"binding {address}"):
                queue = await channel.declare_queue(
                    self._topology.queue_name(address), passive=True
                )
                await queue.bind(self._topology.exchange, address)

    async def _declare(self, address: Address, arguments: FieldTable, *keys: str) -> None:
        name = self._topology.queue_name(address)
        if name in self._with_existing_arguments and await self._bind_existing(name, *keys):
            return
        async with self._connection.topology_channel() as channel:
            with translate_errors(f"declaring {name}"):
                try:
                    queue = await channel.declare_queue(name, durable=True, arguments=arguments)
                    await self._bind(queue, *keys)
                    return
                except (ChannelPreconditionFailed, ChannelAccessRefused) as error:
                    refused = error
        if not await self._bind_existing(name, *keys):
            if isinstance(refused, ChannelPreconditionFailed):
                problem = f"the broker refuses the queue {name!r}: {refused}"
                raise ConfigurationError(
                    "mesh.broker_url", problem, "change its limits or policies"
                ) from refused
            raise _access_refused(name) from refused
        if name not in self._with_existing_arguments:
            log.warning(
                "the queue %s keeps its existing arguments, not the configured ones: %s",
                name,
                refused,
            )
            self._with_existing_arguments.add(name)

    async def _bind_existing(self, name: str, *keys: str) -> bool:
        """Bind the existing queue `name`; `False` if it does not exist."""
        async with self._connection.topology_channel() as channel:
            with translate_errors(f"looking for {name}"):
                try:
                    queue = await channel.declare_queue(name, passive=True)
                except (ChannelNotFoundEntity, ChannelAccessRefused):
                    self._with_existing_arguments.discard(name)
                    return False
                await self._bind(queue, *keys)
        return True

    async def _bind(self, queue: AbstractQueue, *keys: str) -> None:
        for key in keys:
            try:
                await queue.bind(self._topology.exchange, key)
            except ChannelAccessRefused as error:
                raise _access_refused(queue.name) from error


def _access_refused(name: str) -> ConfigurationError:
    return ConfigurationError(
        "mesh.broker_url",
        f"the login may not declare or bind the queue {name!r}",
        "grant it configure and write on the queue and read on the exchange",
    )


async def delete_queues(url: str, topology: Topology, agents: Sequence[AgentName]) -> None:
    """Delete the shared queues of `agents`, and the exchange.

    Private queues expire by themselves.
    """
    connection = await aiormq.connect(url)
    try:
        channel = await connection.channel()
        for agent in agents:
            for address in topology.queues(agent):
                await channel.queue_delete(topology.queue_name(address))
            await channel.exchange_delete(topology.database_marker(agent))
        await channel.exchange_delete(topology.exchange)
    finally:
        await connection.close()
