"""Confirmed publishing of message batches, with one result per message.

A message that makes the broker close the channel or the connection is `REJECTED` and never
retried. Other messages in flight are sent again under the same ids.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta

from aiormq.exceptions import (
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ConnectionCommandInvalid,
    ConnectionFrameError,
    ConnectionInternalError,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
)

from meshpoint.adapters.rabbitmq.confirming import ConfirmingChannel, OutboundMessage
from meshpoint.adapters.rabbitmq.connection import Connection, OpenConnection, close_quietly, translate_errors
from meshpoint.adapters.rabbitmq.frames import max_frame_payload
from meshpoint.adapters.rabbitmq.topology import Topology, declare_exchange
from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.ports.broker import Published

log = logging.getLogger(__name__)

_MAX_PROBE_TIMEOUT = 2.0
"""Maximum seconds to wait for the answer of a broker that did not confirm a message."""

_TOO_LARGE = re.compile(r"message size \d+ is larger than (?:configured )?max size (\d+)")
"""RabbitMQ's error for a body above `max_message_size`, the only source of that limit."""

_MESSAGE_ERRORS = (
    ChannelPreconditionFailed,
    ConnectionInternalError,
    ConnectionFrameError,
    ConnectionSyntaxError,
    ConnectionCommandInvalid,
    ConnectionUnexpectedFrame,
)
"""Errors with which a broker refuses a message. Any other error is an outage."""

_MAX_ATTEMPTS = 3
"""Consecutive internal errors that a message must cause on its own before it is rejected.

Fewer may be the broker's own failure."""

_RETRY_DELAY = 0.5
"""Seconds before the second attempt; twice as long before the third."""

_MAX_BATCH_ATTEMPTS = 3
"""Attempts to resend messages together after one closed their channel. Then each is sent alone."""

PublishResult = Published | BaseException


class Publisher:
    """Publishes on its own channel, which it reopens when it is lost."""

    def __init__(
        self, connection: Connection, topology: Topology, timeout: timedelta, redeclare: Callable[[], Awaitable[None]]
    ) -> None:
        self._connection = connection
        self._topology = topology
        self._redeclare = redeclare
        self._probe_timeout = min(timeout.total_seconds() / 4, _MAX_PROBE_TIMEOUT)
        self._timeout = timeout.total_seconds() - 2 * self._probe_timeout
        self._channel: ConfirmingChannel | None = None
        self._open_lock = asyncio.Lock()
        self._separate_lock = asyncio.Lock()
        self._last_connection: object = None
        self.max_body_bytes: int | None = None
        self.max_payload = max_frame_payload(0)

    async def publish(self, messages: Sequence[OutboundMessage]) -> list[Published]:
        """Send `messages` and wait for the result of each, in order.

        A message that is not confirmed although the broker answers otherwise counts as overloaded.
        Its queue has probably lost its leader, which blocks this channel but must not block the
        next.

        Raises:
            BrokerUnavailable: the result of at least one message is unknown; all may be sent
                again.
            ConfigurationError: messages name another user than the login's.
        """
        results: dict[int, Published] = {}
        remaining = dict(enumerate(messages))
        with translate_errors("publishing"):
            for _ in range(_MAX_BATCH_ATTEMPTS):
                await self._ensure_channel()
                results |= {
                    place: Published.REJECTED for place, parcel in remaining.items() if not self._fits(parcel)
                }
                remaining = {place: parcel for place, parcel in remaining.items() if place not in results}
                if not remaining:
                    break
                batch_results = await self._send_batch(list(remaining.values()))
                results |= {
                    place: word
                    for place, word in zip(remaining, batch_results, strict=True)
                    if isinstance(word, Published)
                }
                remaining, limit_learned = await self._plan_resend(remaining, batch_results)
                if not limit_learned:
                    break
            if remaining:
                results |= zip(remaining, await self._send_separately(list(remaining.values())), strict=True)
        return [results[index] for index in range(len(messages))]

    async def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            self._channel.stop_sending()
            await close_quietly(self._channel.opened.channel)

    def _fits(self, message: OutboundMessage) -> bool:
        limit = self.max_body_bytes
        return len(message.properties) + 12 <= self.max_payload and (limit is None or len(message.body) <= limit)

    async def _plan_resend(
        self, remaining: dict[int, OutboundMessage], batch_results: Sequence[PublishResult]
    ) -> tuple[dict[int, OutboundMessage], bool]:
        """Return the messages to resend, and whether they can be resent together.

        They can if the cause of the failure has been fixed.

        Raises:
            Exception: the channel was lost for a reason unrelated to its messages.
        """
        lost = {
            place: word
            for place, word in zip(remaining, batch_results, strict=True)
            if not isinstance(word, Published)
        }
        resend = {index: remaining[index] for index in lost}
        for error in {type(error): error for error in lost.values()}.values():  # usually one
            if isinstance(error, ChannelNotFoundEntity):
                log.warning("the exchange is gone and is declared again: %s", error)
                await self._redeclare()
            elif isinstance(error, _MESSAGE_ERRORS):
                return resend, self._learn_limit(error)
            else:
                raise error
        return resend, True

    def _learn_limit(self, error: BaseException) -> bool:
        """Learn the size limit from `error`. Returns `False` if it states none."""
        text = str(error)
        if isinstance(error, ChannelPreconditionFailed) and "user_id" in text:
            raise ConfigurationError(
                "mesh.broker_url",
                f"the broker does not know this login by the name that messages carry ({error})",
                "name the user in the URL",
            ) from error
        found = _TOO_LARGE.search(text)
        if found is None:
            log.warning("the broker closed a channel because of one message: %s", text)
            return False
        self.max_body_bytes = int(found[1])
        log.warning("the broker accepts bodies of at most %d bytes", self.max_body_bytes)
        return True

    async def _send_batch(self, messages: Sequence[OutboundMessage]) -> list[PublishResult]:
        end = asyncio.get_running_loop().time() + self._timeout
        channel = await self._ensure_channel()
        sent = [channel.send(parcel) for parcel in messages]
        if not await _wait_for_all(sent, end):
            await self._abandon_channel(channel, sent)
        return [_result_of(future) for future in sent]

    async def _send_separately(self, messages: Sequence[OutboundMessage]) -> list[Published]:
        """Send messages one by one on a separate connection, after a message closed their channel."""
        results: list[Published] = []
        blamed = 0
        async with self._separate_lock:
            opened = await self._connection.open_separate()
            try:
                channel = await self._open_confirming(opened)
                for message in messages:
                    for attempt in range(1, _MAX_ATTEMPTS + 1):
                        if not opened.is_opened:
                            await opened.close()
                            opened = await self._connection.open_separate()
                        if not channel.usable:
                            channel = await self._open_confirming(opened)
                        result = await self._send_one(channel, message)
                        if not isinstance(result, ConnectionInternalError) or attempt == _MAX_ATTEMPTS:
                            break
                        await asyncio.sleep(attempt * _RETRY_DELAY)
                    blamed += isinstance(result, ConnectionInternalError)
                    if blamed > 1:  # several messages failed, so the broker is at fault
                        raise BrokerUnavailable(f"publishing: {result}")
                    results.append(self._to_published(message, result))
            finally:
                await opened.close()
        return results

    async def _send_one(self, channel: ConfirmingChannel, message: OutboundMessage) -> PublishResult:
        future = channel.send(message)
        await _wait_for_all([future], asyncio.get_running_loop().time() + self._timeout)
        return _result_of(future)

    def _to_published(self, message: OutboundMessage, result: PublishResult) -> Published:
        if isinstance(result, Published):
            return result
        if not isinstance(result, _MESSAGE_ERRORS):
            raise result
        self._learn_limit(result)
        log.error("the broker refuses message %s: %s", message.message_id, result)
        return Published.REJECTED

    async def _open_confirming(self, opened: OpenConnection) -> ConfirmingChannel:
        return ConfirmingChannel(await opened.open_channel(self._timeout, confirms=True), self._topology.exchange)

    def _usable_channel(self) -> ConfirmingChannel | None:
        """The channel if it is open, as far as this process knows."""
        channel = self._channel
        return channel if channel and channel.usable else None

    async def _ensure_channel(self) -> ConfirmingChannel:
        if (channel := self._usable_channel()) is not None:
            return channel
        async with asyncio.timeout(self._timeout), self._open_lock:
            if (channel := self._usable_channel()) is None:
                await declare_exchange(self._connection, self._topology)
                opened = await self._connection.open_channel(confirms=True)
                channel = self._channel = ConfirmingChannel(opened, self._topology.exchange)
                self.max_payload = channel.max_payload
                # This may be another node, with other settings.
                if opened.channel.connection is not self._last_connection:
                    self._last_connection, self.max_body_bytes = opened.channel.connection, None
            return channel

    async def _abandon_channel(self, channel: ConfirmingChannel, sent: Sequence[asyncio.Future[Published]]) -> None:
        """Abandon a channel that did not confirm a message, or its connection if it is silent."""
        connection = self._connection.current
        responds = await self._probe()
        if responds:  # a broker that was slow overall confirms them now
            await _wait_for_all(sent, asyncio.get_running_loop().time() + self._probe_timeout)
        if self._channel is channel:
            self._channel = None
            channel.stop_sending()
            self._connection.close_in_background(channel.opened.channel)
        if not responds:
            self._connection.drop(connection)  # no-op if already replaced
            raise BrokerUnavailable("publishing: the broker does not answer")

    async def _probe(self) -> bool:
        """Whether the broker opens a channel. While it blocks this connection, it does not."""
        try:
            with translate_errors("probing"):
                async with asyncio.timeout(self._probe_timeout):
                    opened = await self._connection.open_channel()
        except BrokerUnavailable:
            return False
        await close_quietly(opened.channel)
        return True


async def _wait_for_all(sent: Sequence[asyncio.Future[Published]], end: float) -> bool:
    """Wait until `end` for all results. Returns `True` if all arrived."""
    now = asyncio.get_running_loop().time
    for future in sent:
        if not future.done():
            await asyncio.wait((future,), timeout=end - now())
            if not future.done():
                return False
    return True


def _result_of(future: asyncio.Future[Published]) -> PublishResult:
    """The broker's answer. An unconfirmed message counts as overloaded."""
    if not future.done():
        return Published.OVERLOADED
    return future.exception() or future.result()
