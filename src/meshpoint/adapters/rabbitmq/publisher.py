"""Confirmed publishing of many messages at once, with one result per message.

A message that makes the broker close the channel or the connection is `REJECTED` and never retried. The other
messages in flight are sent again under their ids.
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

from meshpoint.adapters.rabbitmq.confirming import ConfirmingChannel, Parcel
from meshpoint.adapters.rabbitmq.connection import Link, Wired, close_quietly, translated
from meshpoint.adapters.rabbitmq.frames import body_room
from meshpoint.adapters.rabbitmq.topology import Topology, declare_exchange
from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.ports.broker import Published

log = logging.getLogger(__name__)

_LONGEST_PROBE = 2.0
"""Seconds to wait for a broker that did not confirm."""

_TOO_LARGE = re.compile(r"message size \d+ is larger than (?:configured )?max size (\d+)")
"""RabbitMQ's error for a body above `max_message_size`, the only place where clients can learn that limit."""

_FAULTS = (
    ChannelPreconditionFailed,
    ConnectionInternalError,
    ConnectionFrameError,
    ConnectionSyntaxError,
    ConnectionCommandInvalid,
    ConnectionUnexpectedFrame,
)
"""Errors with which a broker refuses a message; any other error is an outage."""

_TRIES = 3
"""Internal errors in a row that a message must cause on its own before it is blamed: the broker itself may be
failing."""

_PAUSE = 0.5
"""Seconds before the second try; doubled before the last one."""

_AGAIN = 3
"""Joint retries of messages that shared a channel with a bad one, before they are sent one by one."""

Word = Published | BaseException


class Publisher:
    """Publishes on a channel of its own, which it opens again when it is lost."""

    def __init__(
        self, link: Link, topology: Topology, timeout: timedelta, restore: Callable[[], Awaitable[None]]
    ) -> None:
        self._link = link
        self._topology = topology
        self._restore = restore
        self._probe_timeout = min(timeout.total_seconds() / 4, _LONGEST_PROBE)
        self._timeout = timeout.total_seconds() - 2 * self._probe_timeout
        self._channel: ConfirmingChannel | None = None
        self._opening = asyncio.Lock()
        self._apart = asyncio.Lock()
        self._connection: object = None
        self.max_body: int | None = None
        self.room = body_room(0)

    async def publish(self, parcels: Sequence[Parcel]) -> list[Published]:
        """Send `parcels` and wait for the broker's word on each, in their order.

        A message that the broker does not confirm while it answers otherwise counts as refused for now: a queue
        has lost its leader, which holds up this channel but must not hold up the next.

        Raises:
            BrokerUnavailable: at least one is in doubt; all may be sent again.
            ConfigurationError: the broker knows this login under another name than messages carry.
        """
        words: dict[int, Published] = {}
        left = dict(enumerate(parcels))
        with translated("publishing"):
            for _ in range(_AGAIN):
                await self._ready()
                words |= {place: Published.REJECTED for place, parcel in left.items() if not self._fits(parcel)}
                left = {place: parcel for place, parcel in left.items() if place not in words}
                if not left:
                    break
                said = await self._send(list(left.values()))
                words |= {place: word for place, word in zip(left, said, strict=True) if isinstance(word, Published)}
                left, known = await self._again(left, said)
                if not known:
                    break
            if left:
                words |= zip(left, await self._send_apart(list(left.values())), strict=True)
        return [words[place] for place in range(len(parcels))]

    async def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            self._channel.shut()
            await close_quietly(self._channel.wired.channel)

    def _fits(self, parcel: Parcel) -> bool:
        limit = self.max_body
        return len(parcel.properties) + 12 <= self.room and (limit is None or len(parcel.body) <= limit)

    async def _again(self, left: dict[int, Parcel], said: Sequence[Word]) -> tuple[dict[int, Parcel], bool]:
        """Return the messages to resend, and whether the cause is fixed so that they can be resent together.

        Raises:
            Exception: the channel was lost for a reason unrelated to its messages.
        """
        lost = {place: word for place, word in zip(left, said, strict=True) if not isinstance(word, Published)}
        again = {place: left[place] for place in lost}
        for error in {type(error): error for error in lost.values()}.values():  # usually one
            if isinstance(error, ChannelNotFoundEntity):
                log.warning("the exchange is gone and is declared again: %s", error)
                await self._restore()
            elif isinstance(error, _FAULTS):
                return again, self._learn(error)
            else:
                raise error
        return again, True

    def _learn(self, error: BaseException) -> bool:
        """Learn a limit from `error`; `False` if it contains none."""
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
        self.max_body = int(found[1])
        log.warning("the broker accepts bodies of at most %d bytes", self.max_body)
        return True

    async def _send(self, parcels: Sequence[Parcel]) -> list[Word]:
        end = asyncio.get_running_loop().time() + self._timeout
        channel = await self._ready()
        sent = [channel.send(parcel) for parcel in parcels]
        if not await _answered(sent, end):
            await self._leave(channel, sent)
        return [_word(future) for future in sent]

    async def _send_apart(self, parcels: Sequence[Parcel]) -> list[Published]:
        """Send messages one by one on a separate connection, to find the message that closed a channel."""
        words: list[Published] = []
        blamed = 0
        async with self._apart:
            wired = await self._link.apart()
            try:
                channel = await self._confirming(wired)
                for parcel in parcels:
                    for tried in range(1, _TRIES + 1):
                        if not wired.is_opened:
                            await wired.close()
                            wired = await self._link.apart()
                        if not channel.usable:
                            channel = await self._confirming(wired)
                        word = await self._alone(channel, parcel)
                        if not isinstance(word, ConnectionInternalError) or tried == _TRIES:
                            break
                        await asyncio.sleep(tried * _PAUSE)
                    blamed += isinstance(word, ConnectionInternalError)
                    if blamed > 1:  # several messages failed, so the cause is the broker
                        raise BrokerUnavailable(f"publishing: {word}")
                    words.append(self._verdict(parcel, word))
            finally:
                await wired.close()
        return words

    async def _alone(self, channel: ConfirmingChannel, parcel: Parcel) -> Word:
        future = channel.send(parcel)
        await _answered([future], asyncio.get_running_loop().time() + self._timeout)
        return _word(future)

    def _verdict(self, parcel: Parcel, word: Word) -> Published:
        if isinstance(word, Published):
            return word
        if not isinstance(word, _FAULTS):
            raise word
        self._learn(word)
        log.error("the broker refuses message %s: %s", parcel.message_id, word)
        return Published.REJECTED

    async def _confirming(self, wired: Wired) -> ConfirmingChannel:
        return ConfirmingChannel(await wired.open_channel(self._timeout, confirms=True), self._topology.exchange)

    def _usable(self) -> ConfirmingChannel | None:
        """The channel, as long as nothing is known to be wrong with it."""
        channel = self._channel
        return channel if channel and channel.usable else None

    async def _ready(self) -> ConfirmingChannel:
        if (channel := self._usable()) is not None:
            return channel
        async with asyncio.timeout(self._timeout), self._opening:
            if (channel := self._usable()) is None:
                await declare_exchange(self._link, self._topology)
                opened = await self._link.open_channel(confirms=True)
                channel = self._channel = ConfirmingChannel(opened, self._topology.exchange)
                self.room = channel.room
                if opened.channel.connection is not self._connection:  # maybe another node, other settings
                    self._connection, self.max_body = opened.channel.connection, None
            return channel

    async def _leave(self, channel: ConfirmingChannel, sent: Sequence[asyncio.Future[Published]]) -> None:
        """Give up `channel`, on which a message was not confirmed; its connection too if the broker is silent."""
        asked = self._link.present
        answers = await self._answers()
        if answers:  # a broker that was slow as a whole confirms them now
            await _answered(sent, asyncio.get_running_loop().time() + self._probe_timeout)
        if self._channel is channel:
            self._channel = None
            channel.shut()
            self._link.leave(channel.wired.channel)
        if not answers:
            self._link.drop(asked)  # no-op if another message has replaced it already
            raise BrokerUnavailable("publishing: the broker does not answer")

    async def _answers(self) -> bool:
        """Whether the broker opens a channel. It does not while it holds back this connection."""
        try:
            with translated("probing"):
                async with asyncio.timeout(self._probe_timeout):
                    opened = await self._link.open_channel()
        except BrokerUnavailable:
            return False
        await close_quietly(opened.channel)
        return True


async def _answered(sent: Sequence[asyncio.Future[Published]], end: float) -> bool:
    """Wait until `end` for all answers; `True` if all arrived."""
    now = asyncio.get_running_loop().time
    for future in sent:
        if not future.done():
            await asyncio.wait((future,), timeout=end - now())
            if not future.done():
                return False
    return True


def _word(future: asyncio.Future[Published]) -> Word:
    """The broker's answer; an unconfirmed message counts as refused for now."""
    if not future.done():
        return Published.OVERLOADED
    return future.exception() or future.result()
