"""Confirmed publishing: many messages on the wire at once, the broker's word on each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from aiormq import Channel
from aiormq.exceptions import ChannelPreconditionFailed, DeliveryError, PublishError

from meshpoint.adapters.rabbitmq.envelope import Properties
from meshpoint.adapters.rabbitmq.link import Link, close_quietly, translated
from meshpoint.adapters.rabbitmq.topology import Topology, declare_exchange
from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.ports.broker import Published

_WINDOW = 256
"""Messages of one call that wait for their confirms at a time."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """One message as it goes on the wire."""

    key: str
    properties: Properties
    body: bytes


class Publisher:
    """Publishes on a channel of its own, which it opens again when it is lost."""

    def __init__(self, link: Link, topology: Topology, timeout: timedelta) -> None:
        self._link = link
        self._topology = topology
        self._timeout = timeout.total_seconds()
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()
        self._on_the_wire: dict[str, asyncio.Event] = {}
        self._last_word = 0.0

    async def publish(self, parcels: Sequence[Parcel]) -> list[Published]:
        """Send `parcels` and wait for the broker's word on each, in their order.

        Raises:
            BrokerUnavailable: at least one is in doubt; all may be sent again.
            ConfigurationError: the broker knows this login under another name than messages carry.
        """
        started = asyncio.get_running_loop().time()
        try:
            with translated("publishing"):
                async with asyncio.timeout(self._timeout):
                    channel = await self._ready()
                    return [word for batch in _batches(parcels) for word in await self._send(channel, batch)]
        except BrokerUnavailable as error:
            if isinstance(error.__cause__, TimeoutError) and self._last_word < started:
                await self._link.drop()  # not one confirm in all that time: the connection is dead or blocked
            raise

    async def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            await close_quietly(self._channel)

    async def _ready(self) -> Channel:
        async with self._opening:
            if self._channel is None or self._channel.is_closed or not self._channel.connection.is_opened:
                await declare_exchange(self._link, self._topology)
                self._channel = await self._link.open_channel(confirms=True)
            return self._channel

    async def _send(self, channel: Channel, parcels: Sequence[Parcel]) -> list[Published]:
        words = await asyncio.gather(*(self._send_one(channel, parcel) for parcel in parcels), return_exceptions=True)
        for word in words:
            if isinstance(word, BaseException):
                raise word
        return [word for word in words if isinstance(word, Published)]

    async def _send_one(self, channel: Channel, parcel: Parcel) -> Published:
        # aiormq finds a returned message by its message id: two of one id must not be on the wire together.
        while (sooner := self._on_the_wire.get(parcel.properties.message_id or "")) is not None:
            await sooner.wait()
        gone = self._on_the_wire[parcel.properties.message_id or ""] = asyncio.Event()
        try:
            return await self._confirmed(channel, parcel)
        finally:
            del self._on_the_wire[parcel.properties.message_id or ""]
            gone.set()

    async def _confirmed(self, channel: Channel, parcel: Parcel) -> Published:
        try:
            await channel.basic_publish(
                parcel.body,
                exchange=self._topology.exchange,
                routing_key=parcel.key,
                properties=parcel.properties,
                mandatory=True,
                wait=False,
            )
            word = Published.ACCEPTED
        except PublishError:
            word = Published.UNROUTABLE
        except DeliveryError:
            word = Published.OVERLOADED
        except ChannelPreconditionFailed as error:
            if "user_id" not in str(error):
                raise
            raise ConfigurationError(
                "mesh.broker_url",
                f"the broker does not know this login by the name that messages carry ({error})",
                "name the user in the URL",
            ) from error
        self._last_word = asyncio.get_running_loop().time()
        return word


def _batches(parcels: Sequence[Parcel]) -> list[Sequence[Parcel]]:
    return [parcels[start : start + _WINDOW] for start in range(0, len(parcels), _WINDOW)]
