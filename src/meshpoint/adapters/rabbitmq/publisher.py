"""Confirmed publishing of message batches, with one result per message.

A message that makes the broker close the channel or the connection is `REJECTED` and never
retried. Other messages in flight are sent again under the same ids.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from aiormq.exceptions import (
    ChannelInvalidStateError,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ConnectionCommandInvalid,
    ConnectionFrameError,
    ConnectionInternalError,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
)

from meshpoint.adapters.rabbitmq.connection import (
    Connection,
    OpenChannel,
    OpenConnection,
    close_quietly,
    translate_errors,
)
from meshpoint.adapters.rabbitmq.content import decode
from meshpoint.adapters.rabbitmq.frames import (
    ConfirmHandler,
    ReturnedMessage,
    encode_publish,
    max_frame_payload,
    short_string,
)
from meshpoint.adapters.rabbitmq.topology import Topology, declare_exchange
from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.ports.broker import PublishResult

log = logging.getLogger(__name__)

_MAX_PROBE_TIMEOUT = 2.0
"""Maximum seconds to wait for the answer of a broker that did not confirm a message."""

_TOO_LARGE = re.compile(r"message size \d+ is larger than (?:configured )?max size (\d+)")
"""RabbitMQ's error for a body above `max_message_size`.

AMQP has only code 406 and this text for it, and no other source of the limit.
"""

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

_Outcome = PublishResult | BaseException


@dataclass(frozen=True, slots=True)
class OutboundMessage:
    """One message, encoded for the wire."""

    routing_key: bytes
    message_id: str | None
    properties: bytes
    body: bytes


@dataclass(slots=True)
class _Unconfirmed:
    message: OutboundMessage
    confirmation: asyncio.Future[PublishResult]
    returned: bool = False


class _ConfirmingChannel:
    """Publishes messages and matches the broker's confirms to them.

    The broker returns an unroutable message before it confirms it, in publishing order.
    """

    def __init__(self, opened: OpenChannel, exchange: str) -> None:
        self.opened = opened
        self._number = opened.channel.number
        self._exchange = short_string(exchange)
        self.max_payload = max_frame_payload(
            opened.channel.connection.connection_tune.frame_max or 0
        )
        self._last_tag = 0
        self._unconfirmed: dict[int, _Unconfirmed] = {}
        self._close_error: BaseException | None = None
        self._stopped = False
        self._confirm_handler = ConfirmHandler(self._on_confirm, self._on_return)
        opened.transport.route(self._number, self._confirm_handler)
        opened.channel.closing.add_done_callback(self._on_closed)

    @property
    def usable(self) -> bool:
        """Whether the channel is open, as far as this process knows."""
        return (
            self._close_error is None
            and not (self._stopped or self._confirm_handler.closed)
            and not self.opened.channel.is_closed
            and self.opened.channel.connection.is_opened
        )

    def stop_sending(self) -> None:
        """Refuse further messages, because the channel is about to be closed."""
        self._stopped = True

    def send(self, message: OutboundMessage) -> asyncio.Future[PublishResult]:
        """Send `message`. The future gets its result, or the error that closed the channel."""
        confirmation: asyncio.Future[PublishResult] = asyncio.get_running_loop().create_future()
        if not self.usable:
            confirmation.set_exception(
                self._close_error or ChannelInvalidStateError("the channel is closed")
            )
            return confirmation
        self._last_tag += 1
        self._unconfirmed[self._last_tag] = _Unconfirmed(message, confirmation)
        self.opened.transport.write(
            encode_publish(
                self._number,
                self._exchange,
                message.routing_key,
                message.properties,
                message.body,
                self.max_payload,
            )
        )
        return confirmation

    def _on_confirm(self, delivery_tag: int, multiple: bool, accepted: bool) -> None:
        if multiple:
            tags = [tag for tag in self._unconfirmed if tag <= delivery_tag]
        else:
            tags = [delivery_tag] if delivery_tag in self._unconfirmed else []
        for tag in tags:
            entry = self._unconfirmed.pop(tag)
            if not entry.confirmation.done():
                sent = PublishResult.UNROUTABLE if entry.returned else PublishResult.ACCEPTED
                entry.confirmation.set_result(sent if accepted else PublishResult.OVERLOADED)

    def _on_return(self, returned: ReturnedMessage) -> None:
        message_id = decode(returned.header).message_id
        for entry in self._unconfirmed.values():
            message = entry.message
            if (
                not entry.returned
                and message.message_id == message_id
                and message.routing_key[1:] == returned.routing_key
            ):
                entry.returned = True
                return

    def _on_closed(self, closing: asyncio.Future[object]) -> None:
        error = asyncio.CancelledError() if closing.cancelled() else closing.exception()
        self._close_error = error or ChannelInvalidStateError("the channel was closed")
        if isinstance(self._close_error, asyncio.CancelledError):
            self._close_error = ChannelInvalidStateError("the channel was closed")
        for entry in self._unconfirmed.values():
            if not entry.confirmation.done():
                entry.confirmation.set_exception(self._close_error)
                # Mark it as retrieved: the caller may have given up.
                entry.confirmation.exception()
        self._unconfirmed.clear()


class Publisher:
    """Publishes on its own channel, which it reopens when it is lost."""

    def __init__(
        self,
        connection: Connection,
        topology: Topology,
        timeout: timedelta,
        redeclare: Callable[[], Awaitable[None]],
    ) -> None:
        self._connection = connection
        self._topology = topology
        self._redeclare = redeclare
        self._probe_timeout = min(timeout.total_seconds() / 4, _MAX_PROBE_TIMEOUT)
        self._timeout = timeout.total_seconds() - 2 * self._probe_timeout
        self._channel: _ConfirmingChannel | None = None
        self._open_lock = asyncio.Lock()
        self._separate_lock = asyncio.Lock()
        self._last_connection: object = None
        self.max_body_bytes: int | None = None
        self.max_payload = max_frame_payload(0)

    async def publish(self, messages: Sequence[OutboundMessage]) -> list[PublishResult]:
        """Send `messages` and wait for the result of each, in order.

        A message that is not confirmed although the broker answers otherwise counts as overloaded.
        Its queue has probably lost its leader, which blocks this channel but must not block the
        next.

        Raises:
            BrokerUnavailable: the result of at least one message is unknown; all may be sent
                again.
            ConfigurationError: messages name another user than the login's.
        """
        results = [PublishResult.OVERLOADED] * len(messages)
        remaining = dict(enumerate(messages))
        with translate_errors("publishing"):
            for _ in range(_MAX_BATCH_ATTEMPTS):
                errors = await self._send_batch(remaining, results)
                if not remaining or not await self._remove_cause(errors):
                    break
            if remaining:
                separate = await self._send_separately(list(remaining.values()))
                for place, result in zip(remaining, separate, strict=True):
                    results[place] = result
        return results

    async def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            self._channel.stop_sending()
            await close_quietly(self._channel.opened.channel)

    def _fits(self, message: OutboundMessage) -> bool:
        limit = self.max_body_bytes
        return len(message.properties) + 12 <= self.max_payload and (
            limit is None or len(message.body) <= limit
        )

    async def _remove_cause(self, errors: Sequence[BaseException]) -> bool:
        """Remove the cause of `errors`, so that their messages can be resent together.

        Returns `False` if a message is the cause.

        Raises:
            Exception: the channel was lost for a reason unrelated to its messages.
        """
        for error in {type(error): error for error in errors}.values():  # usually one
            if isinstance(error, ChannelNotFoundEntity):
                log.warning("the exchange is gone and is declared again: %s", error)
                await self._redeclare()
            elif isinstance(error, _MESSAGE_ERRORS):
                return self._learn_limit(error)
            else:
                raise error
        return True

    def _learn_limit(self, error: BaseException) -> bool:
        """Learn the size limit from `error`. Returns `False` if it states none."""
        text = str(error)  # AMQP has the same code for every failed precondition
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

    async def _send_batch(
        self, remaining: dict[int, OutboundMessage], results: list[PublishResult]
    ) -> list[BaseException]:
        """Send the messages in `remaining`, and move those with a result to `results`.

        Returns the errors of the messages that are still in `remaining`.
        """
        channel = await self._ensure_channel()
        end = asyncio.get_running_loop().time() + self._timeout
        sent: dict[int, asyncio.Future[PublishResult]] = {}
        for place, message in list(remaining.items()):
            if self._fits(message):
                sent[place] = channel.send(message)
            else:
                results[place] = PublishResult.REJECTED
                del remaining[place]
        if not await _wait_for_all(sent.values(), end):
            await self._abandon_channel(channel, sent.values())
        errors: list[BaseException] = []
        for place, future in sent.items():
            outcome = _outcome_of(future)
            if isinstance(outcome, PublishResult):
                results[place] = outcome
                del remaining[place]
            else:
                errors.append(outcome)
        return errors

    async def _send_separately(self, messages: Sequence[OutboundMessage]) -> list[PublishResult]:
        """Send messages one by one on a separate connection after one closed their channel."""
        results: list[PublishResult] = []
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
                        if (
                            not isinstance(result, ConnectionInternalError)
                            or attempt == _MAX_ATTEMPTS
                        ):
                            break
                        await asyncio.sleep(attempt * _RETRY_DELAY)
                    blamed += isinstance(result, ConnectionInternalError)
                    if blamed > 1:  # several messages failed, so the broker is at fault
                        raise BrokerUnavailable(f"publishing: {result}")
                    results.append(self._to_published(message, result))
            finally:
                await opened.close()
        return results

    async def _send_one(self, channel: _ConfirmingChannel, message: OutboundMessage) -> _Outcome:
        future = channel.send(message)
        await _wait_for_all([future], asyncio.get_running_loop().time() + self._timeout)
        return _outcome_of(future)

    def _to_published(self, message: OutboundMessage, result: _Outcome) -> PublishResult:
        if isinstance(result, PublishResult):
            return result
        if not isinstance(result, _MESSAGE_ERRORS):
            raise result
        self._learn_limit(result)
        log.error("the broker refuses message %s: %s", message.message_id, result)
        return PublishResult.REJECTED

    async def _open_confirming(self, opened: OpenConnection) -> _ConfirmingChannel:
        return _ConfirmingChannel(
            await opened.open_channel(self._timeout, confirms=True), self._topology.exchange
        )

    async def _ensure_channel(self) -> _ConfirmingChannel:
        if (channel := self._channel) is not None and channel.usable:
            return channel
        async with asyncio.timeout(self._timeout), self._open_lock:
            if (channel := self._channel) is None or not channel.usable:
                await declare_exchange(self._connection, self._topology)
                opened = await self._connection.open_channel(confirms=True)
                channel = self._channel = _ConfirmingChannel(opened, self._topology.exchange)
                self.max_payload = channel.max_payload
                # This may be another node, with other settings.
                if opened.channel.connection is not self._last_connection:
                    self._last_connection, self.max_body_bytes = opened.channel.connection, None
            return channel

    async def _abandon_channel(
        self, channel: _ConfirmingChannel, sent: Iterable[asyncio.Future[PublishResult]]
    ) -> None:
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


async def _wait_for_all(sent: Iterable[asyncio.Future[PublishResult]], end: float) -> bool:
    """Wait until `end` for all results. Returns `True` if all arrived."""
    now = asyncio.get_running_loop().time
    for future in sent:
        if not future.done():
            await asyncio.wait((future,), timeout=end - now())
            if not future.done():
                return False
    return True


def _outcome_of(future: asyncio.Future[PublishResult]) -> _Outcome:
    """The broker's answer. An unconfirmed message counts as overloaded."""
    if not future.done():
        return PublishResult.OVERLOADED
    return future.exception() or future.result()
