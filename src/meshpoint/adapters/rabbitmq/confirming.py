"""A channel with publisher confirms, without the library's bookkeeping."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiormq.exceptions import ChannelInvalidStateError

from meshpoint.adapters.rabbitmq.connection import WiredChannel
from meshpoint.adapters.rabbitmq.content import decode
from meshpoint.adapters.rabbitmq.frames import Confirms, Returned, body_room, published, short_string
from meshpoint.ports.broker import Published


@dataclass(frozen=True, slots=True)
class Parcel:
    """One message, encoded for the wire."""

    key: bytes
    message_id: str | None
    properties: bytes
    body: bytes


@dataclass(slots=True)
class _Open:
    parcel: Parcel
    word: asyncio.Future[Published]
    returned: bool = False


class ConfirmingChannel:
    """Publishes messages and matches them with the broker's confirms.

    The broker returns an unroutable message before it confirms it, in publishing order.
    """

    def __init__(self, wired: WiredChannel, exchange: str) -> None:
        self.wired = wired
        self._number = wired.channel.number
        self._exchange = short_string(exchange)
        self.room = body_room(wired.channel.connection.connection_tune.frame_max or 0)
        self._sent = 0
        self._open: dict[int, _Open] = {}
        self._closed_by: BaseException | None = None
        self._shut = False
        self._confirms = Confirms(self._confirmed, self._returned)
        wired.wire.take(self._number, self._confirms)
        wired.channel.closing.add_done_callback(self._closed)

    @property
    def usable(self) -> bool:
        """Whether the channel is open, as far as this process knows."""
        return self._closed_by is None and not (self._shut or self._confirms.closed) and self.wired.usable

    def shut(self) -> None:
        """Stop sending; the channel is about to be closed."""
        self._shut = True

    def send(self, parcel: Parcel) -> asyncio.Future[Published]:
        """Send `parcel`. The future gets the broker's answer, or the exception that closed the channel."""
        word: asyncio.Future[Published] = asyncio.get_running_loop().create_future()
        if not self.usable:
            word.set_exception(self._closed_by or ChannelInvalidStateError("the channel is closed"))
            return word
        self._sent += 1
        self._open[self._sent] = _Open(parcel, word)
        self.wired.wire.write(
            published(self._number, self._exchange, parcel.key, parcel.properties, parcel.body, self.room)
        )
        return word

    def _confirmed(self, delivery_tag: int, multiple: bool, accepted: bool) -> None:
        if multiple:
            tags = [tag for tag in self._open if tag <= delivery_tag]
        else:
            tags = [delivery_tag] if delivery_tag in self._open else []
        for tag in tags:
            one = self._open.pop(tag)
            if not one.word.done():
                sent = Published.UNROUTABLE if one.returned else Published.ACCEPTED
                one.word.set_result(sent if accepted else Published.OVERLOADED)

    def _returned(self, returned: Returned) -> None:
        message_id = decode(returned.header).message_id
        for one in self._open.values():
            parcel = one.parcel
            if not one.returned and parcel.message_id == message_id and parcel.key[1:] == returned.routing_key:
                one.returned = True
                return

    def _closed(self, closing: asyncio.Future[object]) -> None:
        error = asyncio.CancelledError() if closing.cancelled() else closing.exception()
        self._closed_by = error or ChannelInvalidStateError("the channel was closed")
        if isinstance(self._closed_by, asyncio.CancelledError):
            self._closed_by = ChannelInvalidStateError("the channel was closed")
        for one in self._open.values():
            if not one.word.done():
                one.word.set_exception(self._closed_by)
                one.word.exception()  # mark it as retrieved: the caller may have given up
        self._open.clear()
