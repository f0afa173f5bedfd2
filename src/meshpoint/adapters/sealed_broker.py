"""A broker whose messages have sealed bodies, and dead letters that open them.

The key is the mesh's: any agent may have to read what another one wrote. A body is bound to its
namespace and to the ids and the sender of its message, which stay the same in a dead letter and
when that is replayed. Properties and headers stay readable: brokers route by them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshpoint.adapters.encryption import compress, expand, is_envelope, missing_key
from meshpoint.errors import KeyMissing
from meshpoint.model.dead_letters import DeadLetter, LetterFilter, LetterResult
from meshpoint.model.hand_over import HandOver
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.messages import Address, Message, Topic
from meshpoint.model.options import Options
from meshpoint.ports.broker import (
    Broker,
    Delivery,
    OnDelivery,
    PublishResult,
    RequestSearch,
    Subscription,
)
from meshpoint.ports.dead_letters import DeadLetters
from meshpoint.ports.hand_over import AckingPublisher, HandOverBroker
from meshpoint.ports.sealer import Place, Sealer

_log = logging.getLogger(__name__)

OVERHEAD = 64
"""Bytes that sealing adds to a body, at most."""
RETURN_SECONDS = 30.0
"""How long a message whose key is missing is held, before another replica may get it."""
_MAX_RETURNS = 5

MAX_BODY = Options().max_message_bytes
"""Bytes of a body, by default."""

SETTING = "mesh.encryption_keys"


class Envelopes:
    """Seals and opens the bodies of messages. Without a sealer, it opens only clear bodies."""

    def __init__(
        self, sealer: Sealer | None, namespace: str, max_body_bytes: int = MAX_BODY
    ) -> None:
        self._sealer, self._namespace = sealer, namespace
        self._max_body_bytes = max_body_bytes
        self.seals = sealer is not None and sealer.key_id() is not None

    def seal(self, message: Message) -> Message:
        """The message with a sealed body."""
        if self._sealer is None or not self.seals or not message.body:
            return message
        sealed = self._sealer.seal(compress(message.body), self._place(message))
        return _with_body(message, sealed)

    def open(self, message: Message) -> Message:
        """The message with its body as it was sent.

        Raises:
            KeyMissing: The ring lacks the key of the body.
            ValueError: The body was changed, belongs to another message, or is too large.
        """
        if not is_envelope(message.body):
            return message
        if self._sealer is None:
            raise missing_key(message.body, setting=SETTING)
        opened = self._sealer.open(message.body, self._place(message))
        return _with_body(message, expand(opened, self._max_body_bytes))

    def _place(self, message: Message) -> Place:
        ids = (message.message_id, message.correlation_id, message.app_id)
        return ("message", self._namespace, message.type.value, *ids)


def _with_body(message: Message, body: bytes) -> Message:
    """The message with another body. For each message twice, so it is spelled out."""
    return Message(
        message.type,
        body,
        message.message_id,
        message.correlation_id,
        message.app_id,
        message.reply_to,
        message.user_id,
        message.headers,
        message.timestamp,
    )


class _OpenedDelivery:
    """A delivery with its body opened. Settling it settles the sealed one."""

    def __init__(self, delivery: Delivery, message: Message) -> None:
        self.sealed, self.message = delivery, message

    @property
    def address(self) -> Address:
        return self.sealed.address

    @property
    def delivery_count(self) -> int:
        return self.sealed.delivery_count

    @property
    def lost(self) -> bool:
        return self.sealed.lost

    async def ack(self) -> bool:
        return await self.sealed.ack()

    async def requeue(self) -> bool:
        return await self.sealed.requeue()

    async def dead_letter(self, reason: str) -> bool:
        return await self.sealed.dead_letter(reason)


def _sealed(deliveries: Sequence[Delivery]) -> list[Delivery]:
    """The deliveries of the broker below."""
    return [each.sealed if isinstance(each, _OpenedDelivery) else each for each in deliveries]


class SealedBroker:
    """A `meshpoint.ports.broker.Broker` that seals the bodies of messages, if it has a sealer.

    Bodies in the clear are accepted. A body whose key is missing is returned to its queue, for a
    replica that has the key; after some returns it becomes a dead letter, to be replayed once the
    key is there. A body that would expand to more than `max_body_bytes` is a dead letter at once.
    """

    def __init__(
        self, broker: Broker, sealer: Sealer | None, namespace: str, max_body_bytes: int = MAX_BODY
    ) -> None:
        self._broker, self._envelopes = broker, Envelopes(sealer, namespace, max_body_bytes)
        self._returning: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        """See `Broker`."""
        return self._broker.connected

    @property
    def can_publish(self) -> bool:
        """See `Broker`."""
        return self._broker.can_publish

    def is_consuming(self, address: Address) -> bool:
        """See `Broker`."""
        return self._broker.is_consuming(address)

    @property
    def max_message_bytes(self) -> int | None:
        """See `Broker`."""
        limit = self._broker.max_message_bytes
        return limit - OVERHEAD if limit is not None and self._envelopes.seals else limit

    async def open(self) -> None:
        """See `Broker`."""
        await self._broker.open()

    async def close(self) -> None:
        """See `Broker`."""
        for task in tuple(self._returning):
            task.cancel()
        await asyncio.gather(*self._returning, return_exceptions=True)
        await self._broker.close()

    async def declare(
        self, agent: AgentName, replica: ReplicaId | None = None, *, shards: int = 1
    ) -> None:
        """See `Broker`."""
        await self._broker.declare(agent, replica, shards=shards)

    async def mark_database(self, agent: AgentName) -> bool:
        """See `Broker`."""
        return await self._broker.mark_database(agent)

    async def has_database_marker(self, agent: AgentName) -> bool:
        """See `Broker`."""
        return await self._broker.has_database_marker(agent)

    async def remove_database_marker(self, agent: AgentName) -> None:
        """See `Broker`."""
        await self._broker.remove_database_marker(agent)

    async def publish(self, messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        """See `Broker`."""
        if not self._envelopes.seals:
            return await self._broker.publish(messages)
        seal = self._envelopes.seal
        return await self._broker.publish([(to, seal(message)) for to, message in messages])

    async def publish_acking(
        self, envelope: tuple[Address, Message], deliveries: Sequence[Delivery]
    ) -> PublishResult:
        """See `AckingPublisher`. Other brokers only publish."""
        address, message = envelope
        sealed = (address, self._envelopes.seal(message))
        if isinstance(self._broker, AckingPublisher):
            return await self._broker.publish_acking(sealed, _sealed(deliveries))
        (result,) = await self._broker.publish([sealed])
        return result

    @property
    def lease_id(self) -> int | None:
        """See `HandOverBroker`."""
        return self._broker.lease_id if isinstance(self._broker, HandOverBroker) else None

    async def prepare_hand_over(
        self, envelopes: Sequence[tuple[Address, Message]], deliveries: Sequence[Delivery]
    ) -> HandOver | None:
        """See `HandOverBroker`."""
        if not isinstance(self._broker, HandOverBroker):
            return None
        seal = self._envelopes.seal
        return await self._broker.prepare_hand_over(
            [(to, seal(message)) for to, message in envelopes], _sealed(deliveries)
        )

    async def broadcast(self, agent: AgentName, message: Message) -> None:
        """See `Broker`."""
        await self._broker.broadcast(agent, self._envelopes.seal(message))

    async def subscribe(
        self, agent: AgentName, replica: ReplicaId, topics: Sequence[Topic]
    ) -> None:
        """See `Broker`."""
        await self._broker.subscribe(agent, replica, topics)

    async def announce(self, topic: Topic, message: Message) -> None:
        """See `Broker`."""
        await self._broker.announce(topic, self._envelopes.seal(message))

    async def consume(
        self, address: Address, prefetch: int, on_delivery: OnDelivery
    ) -> Subscription:
        """See `Broker`."""

        def on_sealed(delivery: Delivery) -> None:
            if (opened := self._opened(delivery)) is not None:
                on_delivery(opened)

        return await self._broker.consume(address, prefetch, on_sealed)

    async def depth(self, address: Address) -> int | None:
        """See `Broker`."""
        return await self._broker.depth(address)

    async def find_request(self, agent: AgentName, task_id: TaskId) -> RequestSearch:
        """See `Broker`."""
        return await self._broker.find_request(agent, task_id)

    def deny_request(self, agent: AgentName, task_id: TaskId) -> Mapping[Address, int]:
        """See `Broker`."""
        return self._broker.deny_request(agent, task_id)

    def _opened(self, delivery: Delivery) -> Delivery | None:
        """The delivery with its body; `None` if it cannot be opened and is settled here."""
        message = delivery.message
        if not is_envelope(message.body):
            return delivery
        try:
            return _OpenedDelivery(delivery, self._envelopes.open(message))
        except KeyMissing as error:
            _log.error("message %s in %s is %s", message.message_id, delivery.address, error)
            if delivery.delivery_count >= _MAX_RETURNS:
                self._run(delivery.dead_letter(f"its body is {error}; then replay it"))
            else:
                self._run(_return_later(delivery.requeue))
        except ValueError as error:
            _log.error("message %s in %s: %s", message.message_id, delivery.address, error)
            self._run(delivery.dead_letter(str(error)))
        return None

    def _run(self, settling: Coroutine[Any, Any, object]) -> None:
        async def settle() -> None:
            try:
                await settling
            except Exception as error:  # the broker redelivers it
                _log.warning("cannot settle a message that does not open: %s", error)

        task = asyncio.create_task(settle())
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)


async def _return_later(requeue: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    await asyncio.sleep(RETURN_SECONDS)
    await requeue()


class SealedDeadLetters:
    """A `meshpoint.ports.dead_letters.DeadLetters` whose bodies are opened.

    Replaying a letter moves its body as it is. Without a sealer, only clear bodies are readable.
    """

    def __init__(
        self,
        letters: DeadLetters,
        sealer: Sealer | None,
        namespace: str,
        max_body_bytes: int = MAX_BODY,
    ) -> None:
        self._letters, self._envelopes = letters, Envelopes(sealer, namespace, max_body_bytes)

    async def open(self) -> None:
        """See `DeadLetters`."""
        await self._letters.open()

    async def close(self) -> None:
        """See `DeadLetters`."""
        await self._letters.close()

    def read(self, where: LetterFilter) -> AsyncGenerator[Sequence[DeadLetter], None]:
        """See `DeadLetters`."""
        return self._letters.read(where)

    async def body(self, letter: DeadLetter) -> bytes | None:
        """See `DeadLetters`.

        Raises:
            KeyMissing: The ring lacks the key of the body.
        """
        body = await self._letters.body(letter)
        if body is None or letter.message is None or not is_envelope(body):
            return body
        try:
            return self._envelopes.open(replace(letter.message, body=body)).body
        except ValueError:  # changed: it is shown as it is
            return body

    async def replay(
        self, letters: Sequence[DeadLetter], body: bytes | None = None
    ) -> list[LetterResult]:
        """See `DeadLetters`."""
        if body is None:
            return await self._letters.replay(letters)
        results: list[LetterResult] = []
        for letter in letters:  # each has a body of its own
            sealed = body
            if letter.message is not None:
                sealed = self._envelopes.seal(replace(letter.message, body=body)).body
            results += await self._letters.replay([letter], sealed)
        return results

    async def drop(self, letters: Sequence[DeadLetter]) -> list[LetterResult]:
        """See `DeadLetters`."""
        return await self._letters.drop(letters)
