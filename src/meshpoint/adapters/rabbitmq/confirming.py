"""A channel with publisher confirms, without the library's bookkeeping."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiormq.exceptions import ChannelInvalidStateError

from meshpoint.adapters.rabbitmq.connection import OpenChannel
from meshpoint.adapters.rabbitmq.content import decode
from meshpoint.adapters.rabbitmq.frames import (
    ConfirmHandler,
    ReturnedMessage,
    encode_publish,
    max_frame_payload,
    short_string,
)
from meshpoint.ports.broker import Published


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
    confirmation: asyncio.Future[Published]
    returned: bool = False


class ConfirmingChannel:
    """Publishes messages and matches the broker's confirms to them.

    The broker returns an unroutable message before it confirms it, in publishing order.
    """

    def __init__(self, opened: OpenChannel, exchange: str) -> None:
        self.opened = opened
        self._number = opened.channel.number
        self._exchange = short_string(exchange)
        self.max_payload = max_frame_payload(opened.channel.connection.connection_tune.frame_max or 0)
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
            self._close_error is None and not (self._stopped or self._confirm_handler.closed) and self.opened.usable
        )

    def stop_sending(self) -> None:
        """Refuse further messages, because the channel is about to be closed."""
        self._stopped = True

    def send(self, message: OutboundMessage) -> asyncio.Future[Published]:
        """Send `message`. The future gets its result, or the error that closed the channel."""
        confirmation: asyncio.Future[Published] = asyncio.get_running_loop().create_future()
        if not self.usable:
            confirmation.set_exception(self._close_error or ChannelInvalidStateError("the channel is closed"))
            return confirmation
        self._last_tag += 1
        self._unconfirmed[self._last_tag] = _Unconfirmed(message, confirmation)
        self.opened.transport.write(
            encode_publish(
                self._number, self._exchange, message.routing_key, message.properties, message.body, self.max_payload
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
                sent = Published.UNROUTABLE if entry.returned else Published.ACCEPTED
                entry.confirmation.set_result(sent if accepted else Published.OVERLOADED)

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
                entry.confirmation.exception()  # mark it as retrieved: the caller may have given up
        self._unconfirmed.clear()
