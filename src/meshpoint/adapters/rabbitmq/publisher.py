"""Confirmed publishing: many messages on the wire at once, the broker's word on each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from aiormq import Channel
from aiormq.exceptions import ChannelPreconditionFailed, DeliveryError, PublishError

from meshpoint.adapters.rabbitmq.envelope import Properties
from meshpoint.adapters.rabbitmq.link import Link, close_quietly, translated
from meshpoint.adapters.rabbitmq.topology import Topology, declare_exchange
from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.ports.broker import Published

_LONGEST_PROBE = 2.0
"""Seconds to wait for a broker that did not confirm."""


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
        self._probe_timeout = min(timeout.total_seconds() / 4, _LONGEST_PROBE)
        self._timeout = timeout.total_seconds() - self._probe_timeout
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()
        self._on_the_wire: dict[str, asyncio.Event | None] = {}

    async def publish(self, parcels: Sequence[Parcel]) -> list[Published]:
        """Send `parcels` and wait for the broker's word on each, in their order.

        A message that the broker does not confirm while it answers otherwise counts as refused for now: a queue
        has lost its leader, which holds up this channel but must not hold up the next.

        Raises:
            BrokerUnavailable: at least one is in doubt; all may be sent again.
            ConfigurationError: the broker knows this login under another name than messages carry.
        """
        end = asyncio.get_running_loop().time() + self._timeout
        with translated("publishing"):
            channel = self._usable() or await self._opened(end)
            if len(parcels) == 1:  # as most come: a task for each would cost as much as all the rest of this
                return [await self._word(channel, parcels[0], end)]
            return await self._words(channel, parcels, end)

    async def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            await close_quietly(self._channel)

    def _usable(self) -> Channel | None:
        """The channel, as long as nothing is known to be wrong with it."""
        channel = self._channel
        return channel if channel and not channel.is_closed and channel.connection.is_opened else None

    async def _opened(self, end: float) -> Channel:
        async with asyncio.timeout_at(end), self._opening:
            if (channel := self._usable()) is None:
                await declare_exchange(self._link, self._topology)
                channel = self._channel = await self._link.open_channel(confirms=True)
            return channel

    async def _word(self, channel: Channel, parcel: Parcel, end: float) -> Published:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(end):
                return await self._send_one(channel, parcel)
        await self._leave(channel)
        return Published.OVERLOADED

    async def _words(self, channel: Channel, parcels: Sequence[Parcel], end: float) -> list[Published]:
        sending = [asyncio.create_task(self._send_one(channel, parcel)) for parcel in parcels]
        try:
            if sending:
                await asyncio.wait(sending, timeout=end - asyncio.get_running_loop().time())
            silent = {task for task in sending if not task.done()}
            if silent:
                await self._leave(channel)
            return [Published.OVERLOADED if task in silent else task.result() for task in sending]
        finally:
            await _abandon(sending)

    async def _leave(self, channel: Channel) -> None:
        """Give up `channel`, on which a message was not confirmed; its connection too if the broker is silent."""
        answers = await self._answers()
        if self._channel is channel:
            self._channel = None
            self._link.leave(channel)
        if not answers:
            self._link.drop()
            raise BrokerUnavailable("publishing: the broker does not answer")

    async def _answers(self) -> bool:
        """Whether the broker opens a channel. It does not while it holds back this connection."""
        try:
            with translated("probing"):
                async with asyncio.timeout(self._probe_timeout):
                    channel = await self._link.open_channel()
        except BrokerUnavailable:
            return False
        await close_quietly(channel)
        return True

    async def _send_one(self, channel: Channel, parcel: Parcel) -> Published:
        # aiormq finds a returned message by its message id: two of one id must not be on the wire together.
        id_ = parcel.properties.message_id or ""
        while id_ in self._on_the_wire:
            sooner = self._on_the_wire[id_] = self._on_the_wire[id_] or asyncio.Event()
            await sooner.wait()
        self._on_the_wire[id_] = None
        try:
            return await self._confirmed(channel, parcel)
        finally:
            if (waited_for := self._on_the_wire.pop(id_)) is not None:
                waited_for.set()

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
        except PublishError:
            return Published.UNROUTABLE
        except DeliveryError:
            return Published.OVERLOADED
        except ChannelPreconditionFailed as error:
            if "user_id" not in str(error):
                raise
            raise ConfigurationError(
                "mesh.broker_url",
                f"the broker does not know this login by the name that messages carry ({error})",
                "name the user in the URL",
            ) from error
        return Published.ACCEPTED


async def _abandon(sending: Sequence[asyncio.Task[Published]]) -> None:
    """Let no task outlive the call: also when it was cancelled, or when one of many failed."""
    for task in sending:
        task.cancel()
    await asyncio.gather(*sending, return_exceptions=True)
