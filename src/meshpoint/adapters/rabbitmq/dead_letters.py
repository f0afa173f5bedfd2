"""The dead letters of a mesh on RabbitMQ, for operators.

RabbitMQ has no request that only reads a queue. Letters are therefore consumed, held unacked, and
returned when the channel closes, even if this process is killed. Each return counts, and
RabbitMQ 4 drops a message after 20 of them. A letter that was returned often is therefore replaced
by a copy, which has never been returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import aiormq
from aiormq.exceptions import (
    AuthenticationError,
    ChannelAccessRefused,
    ChannelNotFoundEntity,
    ProbableAuthenticationError,
)
from yarl import URL

from meshpoint.adapters.rabbitmq.connection import (
    Connection,
    OpenChannel,
    close_quietly,
    login_refused,
    translate_errors,
)
from meshpoint.adapters.rabbitmq.consumer import Consumer
from meshpoint.adapters.rabbitmq.content import Content, decode
from meshpoint.adapters.rabbitmq.envelope import (
    UnencodableMessage,
    copy_defect,
    count_returns,
    died_in,
    from_dead_letter,
    letter_key,
    to_dead_letter,
    to_message,
    to_properties,
)
from meshpoint.adapters.rabbitmq.frames import RawDelivery, short_string
from meshpoint.adapters.rabbitmq.publisher import OutboundMessage, Publisher
from meshpoint.adapters.rabbitmq.topology import Topology, declare_exchange
from meshpoint.errors import BrokerUnavailable, ConfigurationError, PoisonMessage
from meshpoint.model.dead_letters import (
    UNKNOWN_REASON,
    DeadLetter,
    LetterFilter,
    LetterResult,
    make_letter,
    without_death,
)
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import Header, dead_letter_queue
from meshpoint.ports.broker import PublishResult

_PER_PAGE = 100
"""Letters whose bodies are in memory at once."""
_MAX_RETURNS = 10
"""Returns after which a letter is replaced by a copy: half of what RabbitMQ 4 allows."""
_IDLE_SECONDS = 1.0
"""How long to wait for letters that another program may hold."""
_RETURN_SECONDS = 1.0
"""How long to wait until the broker counts returned letters. It may be busy."""
_POLL_SECONDS = 0.01
_RESULTS = {
    PublishResult.ACCEPTED: LetterResult.DONE,
    PublishResult.UNROUTABLE: LetterResult.NO_QUEUE,
    PublishResult.OVERLOADED: LetterResult.REFUSED,
    PublishResult.REJECTED: LetterResult.REFUSED,
}


class RabbitDeadLetters:
    """`meshpoint.ports.dead_letters.DeadLetters`.

    A replay publishes a message, waits for the confirm and acks the letter. If this process dies
    in between, the letter remains, and another replay sends the message again under the same ids.

    Args:
        url: The broker.
        topology: The names of the mesh's objects.
        agents: The agents whose letters are read unless a filter names others. RabbitMQ does not
            list queues.
        timeout: Limit for connecting, and for each answer.
        warn: Gets one line about letters that cannot be read or kept.
    """

    def __init__(
        self,
        url: str,
        topology: Topology,
        agents: Collection[AgentName],
        timeout: timedelta,
        warn: Callable[[str], None],
    ) -> None:
        self._topology, self._agents, self._timeout = topology, agents, timeout.total_seconds()
        self._warn = warn
        self._user_id = URL(url).user or "guest"
        name = f"{topology.namespace} dead letters"
        self._reading = Connection(url, f"{name} consuming", timeout)
        self._publishing = Connection(url, f"{name} publishing", timeout)
        self._publisher = Publisher(
            self._publishing,
            topology,
            timeout,
            partial(declare_exchange, self._publishing, topology),
        )
        self._queue: _LetterQueue | None = None

    async def open(self) -> None:
        """Connect.

        Raises:
            ConfigurationError: The broker refuses the login.
            BrokerUnavailable: The broker does not answer.
        """
        try:
            await self._reading.open()
            await self._publishing.open()
        except BrokerUnavailable as error:
            await self.close()
            if isinstance(error.__cause__, AuthenticationError | ProbableAuthenticationError):
                raise login_refused() from error
            raise

    async def close(self) -> None:
        """Disconnect."""
        await self._publisher.close()
        await asyncio.gather(self._reading.close(), self._publishing.close())

    async def read(self, where: LetterFilter) -> AsyncGenerator[Sequence[DeadLetter], None]:
        """Yield the letters that match in pages of one agent each, its oldest first.

        Of identical letters, which a crash between a copy and its ack leaves behind, one is
        yielded. It stands for all of them on its page; others stay.
        """
        agents = self._agents if where.agents is None else where.agents
        if not agents:
            raise ConfigurationError(
                "--agent",
                "RabbitMQ does not list queues, and no agent is named",
                "use --agent NAME, or --config FILE with agents",
            )
        for agent in sorted(agents):
            queue = self._queue = await self._attach(agent)
            if queue is None:
                continue
            try:
                while queue.remaining:
                    page = await queue.next_page()
                    try:
                        if matching := [letter for letter in page if where.matches(letter)]:
                            yield matching
                    finally:
                        await self._renew(queue)
            finally:
                await queue.close()
                await self._wait_until_returned(queue)

    async def body(self, letter: DeadLetter) -> bytes | None:
        """The body of a letter; `None` if it was replayed or dropped."""
        held = self._held(letter)
        return None if held is None else held.raw.body

    async def replay(
        self, letters: Sequence[DeadLetter], body: bytes | None = None
    ) -> list[LetterResult]:
        """Publish the messages of letters to the queues they came from, and ack the letters.

        The messages carry this login.
        """
        results = dict.fromkeys(letters, LetterResult.GONE)
        outbound: dict[DeadLetter, OutboundMessage] = {}
        for letter in letters:
            if (held := self._held(letter)) is None:
                continue
            try:
                outbound[letter] = _to_outbound(held, self._user_id, body)
            except PoisonMessage:
                results[letter] = LetterResult.DEFECTIVE
            except UnencodableMessage as error:
                self._warn(f"dead letter {letter.id} cannot be sent: {error}")
                results[letter] = LetterResult.REFUSED
        published = await self._publisher.publish(list(outbound.values()))
        for letter, result in zip(outbound, published, strict=True):
            results[letter] = _RESULTS[result]
        await self._settle([letter for letter in outbound if results[letter] is LetterResult.DONE])
        return list(results.values())

    async def drop(self, letters: Sequence[DeadLetter]) -> list[LetterResult]:
        """Ack letters."""
        held = [self._held(letter) is not None for letter in letters]
        await self._settle(letters)
        return [LetterResult.DONE if each else LetterResult.GONE for each in held]

    def _held(self, letter: DeadLetter) -> _Held | None:
        """The delivery of a letter; `None` if it is settled.

        Raises:
            BrokerUnavailable: The channel was lost, so the broker may have given the letter to
                another process.
        """
        if self._queue is None:
            return None
        self._queue.check_open()
        return self._queue.page.get(letter)

    async def _settle(self, letters: Sequence[DeadLetter]) -> None:
        if self._queue is not None:
            await self._queue.settle(letters)

    async def _attach(self, agent: AgentName) -> _LetterQueue | None:
        """Begin to hold the letters of `agent`. `None` if it has no queue for them.

        Raises:
            ConfigurationError: The login may not read the queue.
        """
        name = self._topology.queue_name(dead_letter_queue(agent))
        opened = await self._reading.open_channel()
        try:
            with translate_errors(f"looking at {name}"):
                async with asyncio.timeout(self._timeout):
                    found = await opened.channel.queue_declare(name, passive=True)
        except BrokerUnavailable as error:
            await close_quietly(opened.channel)
            if isinstance(error.__cause__, ChannelNotFoundEntity):
                return None
            raise _explain(error, name) from error
        if found.consumer_count:
            self._warn(f"another program reads {name}: letters that it holds are not found")
        return _LetterQueue(
            agent, opened, name, self._topology.namespace, found.message_count or 0, self._timeout
        )

    async def _wait_until_returned(self, queue: _LetterQueue) -> None:
        """Wait briefly until the broker counts the returned letters, so that the next read does.

        It does so a moment after it has closed the channel.
        """
        with suppress(BrokerUnavailable, TimeoutError):
            async with asyncio.timeout(_RETURN_SECONDS), self._reading.channel() as channel:
                while queue.unacked:
                    with translate_errors(f"looking at {queue.name}"):
                        found = await channel.queue_declare(queue.name, passive=True)
                    if (found.message_count or 0) >= queue.unacked:
                        break
                    await asyncio.sleep(_POLL_SECONDS)

    async def _renew(self, queue: _LetterQueue) -> None:
        """Replace letters of the page that were returned too often by copies.

        A crash before the ack leaves two identical letters, which count as one.
        """
        worn = [held for held in queue.page.values() if held.letter.deliveries >= _MAX_RETURNS]
        if not worn or queue.lost:
            return
        copies = [self._copy(held) for held in worn]
        results, copied = await self._publisher.publish(copies), list[DeadLetter]()
        for held, result in zip(worn, results, strict=True):
            if result is PublishResult.ACCEPTED:
                copied.append(held.letter)
            else:
                self._warn(
                    f"dead letter {held.letter.id} was read {held.letter.deliveries} times and "
                    "cannot be copied: RabbitMQ 4 drops it after 20 times"
                )
        await queue.settle(copied)

    def _copy(self, held: _Held) -> OutboundMessage:
        shown = from_dead_letter(held.raw, held.content)
        properties = to_dead_letter(
            held.raw,
            held.content,
            str(shown.headers.get(Header.DEAD_REASON.value, UNKNOWN_REASON)),
            self._user_id,
            self._publisher.max_payload,
            died_in(held.content, self._topology.namespace),
        )
        key = short_string(dead_letter_queue(held.letter.agent))
        return OutboundMessage(key, held.content.message_id, properties, held.raw.body)


@dataclass(slots=True, eq=False)
class _Held:
    """An unacked letter. `tags` are its deliveries: several if it has identical copies."""

    letter: DeadLetter
    content: Content
    raw: RawDelivery
    tags: list[int]


class _LetterQueue:
    """One pass over the dead letters of an agent, each of which stays unacked until settled.

    Attributes:
        page: the unsettled letters of the last page.
        remaining: number of letters of later pages.
        unacked: number of letters that the queue gets back at the end.
        name: of the queue.
    """

    def __init__(
        self,
        agent: AgentName,
        opened: OpenChannel,
        name: str,
        namespace: str,
        count: int,
        timeout: float,
    ) -> None:
        self.page: dict[DeadLetter, _Held] = {}
        self.remaining = count
        self._agent, self.name, self.namespace, self._timeout = agent, name, namespace, timeout
        self._inbox = asyncio.Queue[RawDelivery | None]()
        self._channel: aiormq.Channel = opened.channel
        self._consumer = Consumer(
            opened, name, self._inbox.put_nowait, lambda: self._inbox.put_nowait(None)
        )
        self._limit = 0  # unacked letters that the broker delivers at most
        self.unacked = 0
        self._seen = set[str]()

    async def close(self) -> None:
        """Return all unsettled letters to the queue."""
        await self._consumer.close()

    @property
    def lost(self) -> bool:
        """Whether the broker may have returned the letters to the queue."""
        return self._consumer.lost

    def check_open(self) -> None:
        """Check that no other process can have the letters.

        Raises:
            BrokerUnavailable: The channel was lost.
        """
        if self.lost:
            raise BrokerUnavailable(f"reading {self.name}: the channel was lost")

    async def next_page(self) -> Collection[DeadLetter]:
        """Hold the next letters, and release the bodies of the previous ones."""
        count = min(self.remaining, _PER_PAGE)
        self._limit = max(self._limit, self.unacked + count)
        self.page = {}
        try:
            with translate_errors(f"reading {self.name}"):
                async with asyncio.timeout(self._timeout):
                    await self._consumer.adjust(self._limit)
        except BrokerUnavailable as error:
            raise _explain(error, self.name) from error
        raws = await self._receive(count)
        self.remaining = self.remaining - count if len(raws) == count else 0
        by_key: dict[str, _Held] = {}
        for raw in raws:
            held = self._read(raw)
            key = held.letter.key
            if key in by_key:
                by_key[key].tags += held.tags
            # On a later page, it may be a message that was replayed and died again.
            elif key not in self._seen:
                by_key[key] = held
        self._seen.update(by_key)
        self.page = {held.letter: held for held in by_key.values()}
        return self.page.keys()

    async def settle(self, letters: Iterable[DeadLetter]) -> None:
        """Remove letters of the page from the queue, with their copies on the same page.

        Raises:
            BrokerUnavailable: The channel was lost. They may still be in the queue.
        """
        for letter in letters:
            for tag in held.tags if (held := self.page.pop(letter, None)) else ():
                self._consumer.ack(tag)
                self.unacked -= 1
        self.check_open()
        self._consumer.flush_acks()
        with translate_errors(f"removing letters from {self.name}"):
            async with asyncio.timeout(self._timeout):
                await self._channel.flow(active=True)  # the broker handles frames in order

    async def _receive(self, count: int) -> list[RawDelivery]:
        """Wait for `count` letters; for fewer if another program holds or removes the others."""
        raws: list[RawDelivery] = []
        while len(raws) < count:
            self.check_open()
            try:
                async with asyncio.timeout(_IDLE_SECONDS):
                    raw = await self._inbox.get()
            except TimeoutError:
                if not await self._count_ready():
                    break
            else:
                raws += [] if raw is None else [raw]
        self.unacked += len(raws)
        return raws

    async def _count_ready(self) -> int:
        with translate_errors(f"looking at {self.name}"):
            async with asyncio.timeout(self._timeout):
                return (
                    await self._channel.queue_declare(self.name, passive=True)
                ).message_count or 0

    def _read(self, raw: RawDelivery) -> _Held:
        content = decode(raw.header)
        shown, message, defect = from_dead_letter(raw, content), None, copy_defect(content)
        try:
            message = None if defect else replace(to_message(raw, content), body=b"")
        except PoisonMessage as error:
            defect = str(error)
        letter = make_letter(
            self._agent,
            letter_key(shown),
            reason=shown.headers.get(Header.DEAD_REASON.value),
            died_in=died_in(content, self.namespace),
            message=message,
            defect=defect,
            stored=_readable_properties(content),
            deliveries=count_returns(raw, content),
            body_size=len(raw.body),
        )
        return _Held(letter, content, raw, [raw.delivery_tag])


def _readable_properties(content: Content) -> dict[str, object]:
    return {
        "type": content.message_type,
        "message_id": content.message_id,
        "correlation_id": content.correlation_id,
        "app_id": content.app_id,
        "reply_to": content.reply_to,
        "user_id": content.user_id,
        "timestamp": content.timestamp,
        "headers": content.headers,
    }


def _to_outbound(held: _Held, user_id: str, body: bytes | None) -> OutboundMessage:
    """Encode the message of a letter for the queue from which it came.

    Raises:
        PoisonMessage: It cannot be replayed.
        UnencodableMessage: A property cannot be encoded.
    """
    letter = held.letter
    if letter.message is None or letter.queue is None or letter.defect is not None:
        raise PoisonMessage(letter.defect or letter.reason)
    message = without_death(letter.message, held.raw.body if body is None else body)
    properties = to_properties(message, user_id)
    return OutboundMessage(
        short_string(letter.queue), message.message_id, properties, message.body
    )


def _explain(error: BrokerUnavailable, queue: str) -> Exception:
    """The error for the operator: a login without the right is not an outage."""
    if isinstance(error.__cause__, ChannelAccessRefused):
        return ConfigurationError(
            "mesh.broker_url", f"the login may not read {queue}", "grant it read on that name"
        )
    return error
