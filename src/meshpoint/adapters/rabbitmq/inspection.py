"""What `meshpoint doctor` reads of RabbitMQ.

AMQP has no request for permissions. But RabbitMQ checks them before anything else, so a request
that it must refuse for another reason, or that has nothing to do, shows whether the login has the
right (seen with 3.10).
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import aiormq
from aiormq.exceptions import (
    AuthenticationError,
    ChannelAccessRefused,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ProbableAuthenticationError,
)
from pamqp.commands import Queue
from pamqp.common import FieldTable
from yarl import URL

from meshpoint.adapters.rabbitmq.connection import (
    OpenConnection,
    close_quietly,
    connect,
    login_refused,
    translate_errors,
)
from meshpoint.adapters.rabbitmq.topology import Topology
from meshpoint.errors import BrokerUnavailable
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.model.messages import (
    Address,
    is_dead_letter_queue,
    private_queue,
    response_queue,
)
from meshpoint.ports.inspection import MissingRight, OtherArguments, QueueFacts, Right

_Call = Callable[[aiormq.Channel], Awaitable[Any]]

_NOBODY = ReplicaId("doctor")
_UNUSED_KEY = "meshpoint.doctor"
"""A routing key under which nothing is bound."""
_INVALID_QUEUE: FieldTable = {"x-dead-letter-exchange": 1}
_INVALID_EXCHANGE: FieldTable = {"alternate-exchange": 1}
_INVALID_CONSUMER: FieldTable = {"x-priority": "none"}
"""Arguments of the wrong type: RabbitMQ declares and consumes nothing with them."""
_IN_POLICIES = (
    "max-length",
    "overflow",
    "delivery-limit",
    "dead-letter-exchange",
    "dead-letter-routing-key",
    "dead-letter-strategy",
)
_DIFFERENCE = re.compile(r"inequivalent arg '(?P<name>[^']*)'.*?: (?P<rest>.*)", re.DOTALL)


class RabbitInspection:
    """`meshpoint.ports.inspection.BrokerInspection`.

    Args:
        url: The broker.
        topology: The names and arguments of the mesh's objects.
        timeout: Limit for connecting, and for each request.
    """

    def __init__(self, url: str, topology: Topology, timeout: timedelta) -> None:
        name = {"name": f"meshpoint {topology.namespace} doctor"}
        self._url = URL(url).update_query({**name, **URL(url).query})
        self._topology, self._timeout = topology, timeout.total_seconds()
        self._connection: OpenConnection | None = None

    async def open(self) -> None:
        """Connect.

        Raises:
            ConfigurationError: the broker refuses the login.
            BrokerUnavailable: the broker does not answer.
        """
        with translate_errors("connecting"):
            try:
                self._connection = await connect(self._url)
            except (AuthenticationError, ProbableAuthenticationError) as error:
                raise login_refused() from error

    async def close(self) -> None:
        """Disconnect."""
        if self._connection is not None:
            await self._connection.close()

    async def queue(self, address: Address) -> QueueFacts | None:
        """A queue, or `None` if it does not exist."""
        name = self._topology.queue_name(address)
        found: list[Queue.DeclareOk] = []

        async def look(channel: aiormq.Channel) -> None:
            found.append(await channel.queue_declare(name, passive=True))

        if await self._refusal(look) is not None:
            return None
        return QueueFacts(found[0].message_count or 0, found[0].consumer_count or 0)

    async def replicas(self, agent: AgentName) -> int:
        """Number of consumers of the agent's response queue: one for each replica."""
        found = await self.queue(response_queue(agent))
        return 0 if found is None else found.consumers

    async def has_database_marker(self, agent: AgentName) -> bool:
        """Whether the marker of `agent` is set."""
        return await self._has_exchange(self._topology.database_marker(agent))

    async def missing_rights(self, agent: AgentName, shards: int) -> list[MissingRight]:
        """The rights that replicas of `agent` need and this login lacks.

        An existing object is used as it is, so that only a missing one must be configured.
        """
        missing = await self._missing_exchange_rights(agent)
        private = private_queue(agent, _NOBODY)
        for address in [*self._topology.queues(agent, shards), private]:
            name = self._topology.queue_name(address)
            exists = await self._has_queue(name)
            rights = {
                Right.CONFIGURE: None if exists else _declare(name, _INVALID_QUEUE),
                Right.WRITE: _unbind(name, self._topology.exchange),
                Right.READ: None if is_dead_letter_queue(address) else _consume(name),
            }
            missing += [
                MissingRight(right, f"queue {name}")
                for right, call in rights.items()
                if call is not None and await self._is_refused(call, "queue")
            ]
        return missing

    async def other_arguments(self, agent: AgentName, shards: int) -> list[OtherArguments]:
        """The queues of `agent` that exist with other arguments."""
        found = []
        for address, arguments in self._topology.queues(agent, shards).items():
            name = self._topology.queue_name(address)
            if not await self._has_queue(name):
                continue
            refusal = await self._refusal(_declare(name, arguments))
            if isinstance(refusal, ChannelPreconditionFailed):
                difference, policy = _describe(str(refusal)), _policy(name, arguments, self._url)
                found.append(OtherArguments(name, difference, policy))
        return found

    async def _missing_exchange_rights(self, agent: AgentName) -> list[MissingRight]:
        exchange, marker = self._topology.exchange, self._topology.database_marker(agent)
        private = self._topology.queue_name(private_queue(agent, _NOBODY))
        missing = []
        for name, is_needed in ((exchange, True), (marker, False)):
            if not await self._has_exchange(name) and await self._is_refused(
                _declare_exchange(name), "exchange"
            ):
                missing.append(MissingRight(Right.CONFIGURE, f"exchange {name}", is_needed))
        if await self._is_refused(_unbind(private, exchange), "exchange"):
            missing.append(MissingRight(Right.READ, f"exchange {exchange}"))
        elif await self._is_refused(_unbind_exchange(exchange), "exchange"):
            missing.append(MissingRight(Right.WRITE, f"exchange {exchange}"))
        return missing

    async def _has_exchange(self, name: str) -> bool:
        async def look(channel: aiormq.Channel) -> None:
            await channel.exchange_declare(name, passive=True)

        return await self._refusal(look) is None

    async def _has_queue(self, name: str) -> bool:
        async def look(channel: aiormq.Channel) -> None:
            await channel.queue_declare(name, passive=True)

        return await self._refusal(look) is None

    async def _is_refused(self, call: _Call, kind: str) -> bool:
        """Whether the login lacks the right to an object of this kind that `call` needs."""
        refusal = await self._refusal(call)
        return isinstance(refusal, ChannelAccessRefused) and f"{kind} '" in str(refusal)

    async def _refusal(self, call: _Call) -> Exception | None:
        """Make `call` on a channel of its own, which a refusal closes. Returns the refusal.

        Raises:
            BrokerUnavailable: the broker does not answer.
        """
        assert self._connection is not None
        channel = (await self._connection.open_channel(self._timeout)).channel
        try:
            with translate_errors("asking the broker"):
                await call(channel)
        except BrokerUnavailable as error:
            refusals = (ChannelAccessRefused, ChannelNotFoundEntity, ChannelPreconditionFailed)
            if isinstance(error.__cause__, refusals):
                return error.__cause__
            raise
        finally:
            await close_quietly(channel)
        return None


def _declare(name: str, arguments: FieldTable) -> _Call:
    return lambda channel: channel.queue_declare(name, durable=True, arguments=arguments)


def _declare_exchange(name: str) -> _Call:
    return lambda channel: channel.exchange_declare(
        name, durable=True, arguments=_INVALID_EXCHANGE
    )


def _unbind(name: str, exchange: str) -> _Call:
    """Needs the right to write to the queue, and to read from the exchange."""
    return lambda channel: channel.queue_unbind(name, exchange, _UNUSED_KEY)


def _unbind_exchange(name: str) -> _Call:
    """Needs the rights to write to and to read from the exchange."""
    return lambda channel: channel.exchange_unbind(
        destination=name, source=name, routing_key=_UNUSED_KEY
    )


def _consume(name: str) -> _Call:
    async def ignore(message: object) -> None: ...

    return lambda channel: channel.basic_consume(name, ignore, arguments=_INVALID_CONSUMER)


def _describe(refusal: str) -> str:
    """The broker's text about the first argument that differs."""
    found = _DIFFERENCE.search(refusal)
    return f"{found['name']}: {found['rest']}" if found else refusal


def _policy(queue: str, arguments: FieldTable, url: URL) -> str | None:
    """The command that sets what a policy can set of `arguments`."""
    definition = {key: arguments[f"x-{key}"] for key in _IN_POLICIES if f"x-{key}" in arguments}
    if not definition:
        return None
    vhost = url.path.strip("/") or "/"
    pattern = f"^{re.escape(queue)}$"
    return (
        f"rabbitmqctl set_policy -p '{vhost}' --apply-to queues '{queue}' '{pattern}' "
        f"'{json.dumps(definition)}'"
    )
