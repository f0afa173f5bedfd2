"""One connection to the broker that is made again when it is lost."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from typing import Any

import aiormq
from aiormq.abc import AbstractConnection
from aiormq.exceptions import AMQPError, ChannelInvalidStateError
from yarl import URL

from meshpoint.adapters.rabbitmq.wire import WiredConnection
from meshpoint.errors import BrokerUnavailable

log = logging.getLogger(__name__)

_HEARTBEAT = "30"
"""Seconds. A silent network is noticed after about three; an agent may block its event loop for two."""

_FAREWELL = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turn what a lost connection raises into `BrokerUnavailable`.

    aiormq ends the waiters of a closed channel with `CancelledError`, although nobody cancelled them, and
    those of a connection closed without a reason with a bare `Exception`. To connect to a broker that hangs up at
    once ends with `StopAsyncIteration`.
    """
    try:
        yield
    except (AMQPError, ChannelInvalidStateError, OSError, TimeoutError, StopAsyncIteration) as error:
        raise BrokerUnavailable(f"{doing}: {error or type(error).__name__}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise BrokerUnavailable(f"{doing}: the channel was closed") from error
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise BrokerUnavailable(f"{doing}: the connection was closed") from error


class Link:
    """A connection that is made again, with growing pauses, as long as the link is not closed.

    Whoever finds it lost may also ask at once; attempts are shared.
    """

    def __init__(self, url: str, purpose: str, timeout: timedelta) -> None:
        address = URL(url)
        defaults = {"heartbeat": _HEARTBEAT, "name": f"meshpoint {purpose}"}
        self._url = address.update_query({**defaults, **address.query})
        self._timeout = timeout.total_seconds()
        self._attempt: asyncio.Task[AbstractConnection] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._farewells: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def up(self) -> bool:
        """Whether the connection stands, as far as is known here."""
        return self._attempt is not None and self._attempt.done() and not _over(self._attempt)

    async def open(self) -> None:
        """Connect, and stay connected from then on.

        Raises:
            BrokerUnavailable: the first attempt failed; nothing is tried any more.
        """
        self._closed = False
        await self.connection()
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())

    async def connection(self) -> AbstractConnection:
        """The open connection.

        Raises:
            BrokerUnavailable: this attempt failed, or the link is closed.
        """
        if self._closed:
            raise BrokerUnavailable("the broker is closed")
        if self._attempt is None or _over(self._attempt):
            self._attempt = asyncio.create_task(self._connect())
            self._attempt.add_done_callback(_over)  # whoever asked may have gone: the failure is seen here
        with translated("connecting"):
            return await asyncio.shield(self._attempt)

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[aiormq.Channel]:
        """A channel for one purpose, closed at the end."""
        channel = await self.open_channel()
        try:
            yield channel
        finally:
            await close_quietly(channel)

    async def open_channel(self, *, confirms: bool = False) -> aiormq.Channel:
        """A new channel on the open connection.

        Raises:
            BrokerUnavailable: there is no connection now.
        """
        connection = await self.connection()
        with translated("opening a channel"):
            try:
                channel = await connection.channel(publisher_confirms=confirms, timeout=self._timeout)
            except RuntimeError as error:  # closed between two awaits
                raise BrokerUnavailable(f"opening a channel: {error}") from error
        assert isinstance(channel, aiormq.Channel)
        return channel

    def drop(self) -> None:
        """Give up the present connection, which does not answer. It is closed aside; a new one is made."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        self._part(_close_result(attempt))
        if self._keeper is not None and not self._closed:
            self._keeper.cancel()
            self._keeper = asyncio.create_task(self._keep())

    def leave(self, channel: aiormq.Channel) -> None:
        """Close a channel aside."""
        self._part(close_quietly(channel))

    async def close(self) -> None:
        """Disconnect for good."""
        self._closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            self._keeper = None
        self.drop()
        await asyncio.gather(*self._farewells)

    def _part(self, farewell: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(farewell)
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def _connect(self) -> AbstractConnection:
        async with asyncio.timeout(self._timeout):
            connection = WiredConnection(self._url)
            await connection.connect()
            return connection

    async def _keep(self) -> None:
        pauses = growing_pauses()
        while True:
            try:
                connection = await self.connection()
            except BrokerUnavailable as error:
                log.warning("%s", error)
                await asyncio.sleep(next(pauses))
            else:
                pauses = growing_pauses()
                await asyncio.wait([connection.closing])


def growing_pauses() -> Iterator[float]:
    """Seconds to wait before each attempt, so that a broker that comes back is not run over."""
    pause = _FIRST_PAUSE
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _over(attempt: asyncio.Task[AbstractConnection]) -> bool:
    if not attempt.done():
        return False
    return attempt.cancelled() or attempt.exception() is not None or not attempt.result().is_opened


async def _close_result(attempt: asyncio.Task[AbstractConnection]) -> None:
    if not attempt.done():
        attempt.cancel()
    with suppress(BrokerUnavailable), translated("closing"):
        await close_quietly(await attempt)


async def close_quietly(closable: aiormq.Channel | AbstractConnection) -> None:
    """Close it; that it is lost already does not matter. What is queued on a channel is sent first."""
    if not closable.is_closed:
        with suppress(BrokerUnavailable), translated("closing"):
            async with asyncio.timeout(_FAREWELL):
                await closable.close(BrokerUnavailable("closed"))
