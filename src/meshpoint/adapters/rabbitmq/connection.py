"""One connection to the broker that is made again when it is lost."""

from __future__ import annotations

import asyncio
import logging
import random
from base64 import b64decode
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any

import aio_pika
import aiormq
from aiormq.exceptions import AMQPConnectionError, AMQPError, ChannelInvalidStateError, InvalidFrameError
from yarl import URL

from meshpoint.adapters.rabbitmq.wire import FrameTransport
from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.model.outage import Outage

log = logging.getLogger(__name__)

_HEARTBEAT = "30"
"""Seconds. A silent network is noticed after about three; an agent may block its event loop for two."""

_OPEN_TIMEOUT, _CLOSE_TIMEOUT, _ABORT_TIMEOUT = 10.0, 5.0, 0.5
_MIN_BACKOFF, _MAX_BACKOFF = 0.1, 5.0

MakeConnection = Callable[[URL], aio_pika.Connection]
"""Returns an aio-pika connection, not yet connected and not robust: robust ones hide that deliveries were lost."""


@contextmanager
def translate_errors(action: str) -> Iterator[None]:
    """Turn what a lost connection raises into `BrokerUnavailable`.

    aiormq ends the waiters of a closed channel with `CancelledError`, although nobody cancelled them, and
    those of a connection closed without a reason with a bare `Exception`. To connect to a broker that hangs up at
    once ends with `StopAsyncIteration`.
    """
    try:
        yield
    except (AMQPError, ChannelInvalidStateError, OSError, TimeoutError, StopAsyncIteration) as error:
        raise BrokerUnavailable(f"{action}: {_describe_error(error)}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise BrokerUnavailable(f"{action}: the channel was closed") from error
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise BrokerUnavailable(f"{action}: the connection was closed") from error


def _describe_error(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    return str(error) or type(error).__name__


@dataclass(frozen=True, slots=True)
class OpenConnection:
    """An open connection: the aio-pika object, its aiormq connection, and the wire underneath."""

    connection: aio_pika.Connection
    underlay: aiormq.Connection
    transport: FrameTransport

    @property
    def is_opened(self) -> bool:
        """Whether the connection is open, as far as this process knows."""
        return self.underlay.is_opened

    async def open_channel(self, timeout: float = _OPEN_TIMEOUT, *, confirms: bool = False) -> OpenChannel:
        """A new aiormq channel.

        Raises:
            BrokerUnavailable: the connection is lost.
        """
        with translate_errors("opening a channel"):
            try:
                channel = await self.underlay.channel(publisher_confirms=confirms, timeout=timeout)
            except RuntimeError as error:  # closed meanwhile
                raise BrokerUnavailable(f"opening a channel: {error}") from error
        assert isinstance(channel, aiormq.Channel)
        return OpenChannel(channel, self.transport)

    async def close(self) -> None:
        """Close it, ignoring errors if it is already lost. If the broker does not answer, drop the connection."""
        closing = asyncio.create_task(self.connection.close(BrokerUnavailable("closed")))
        closing.add_done_callback(_retrieve_exception)
        try:
            await asyncio.wait({closing}, timeout=_CLOSE_TIMEOUT)
        finally:
            if not closing.done():  # cancelled halfway, the library would leave its tasks behind
                self.transport.abort()
                await asyncio.wait({closing}, timeout=_ABORT_TIMEOUT)
            while not closing.done():  # the library waits for tasks that were cancelled with the event loop
                closing.cancel()
                await asyncio.wait({closing}, timeout=_ABORT_TIMEOUT)


@dataclass(frozen=True, slots=True)
class OpenChannel:
    """An aiormq channel and the wire that bypasses the library."""

    channel: aiormq.Channel
    transport: FrameTransport

    @property
    def usable(self) -> bool:
        """Whether the channel is open, as far as this process knows."""
        return not self.channel.is_closed and self.channel.connection.is_opened


async def connect(url: str | URL, make_connection: MakeConnection | None = None) -> OpenConnection:
    """Connect to `url` such that no message content can close the connection.

    A message that the library could not decode arrives with its readable properties and the header
    `x-dead-reason`.
    """
    transport = FrameTransport()
    connection = (make_connection or aio_pika.Connection)(URL(url))
    connection.kwargs["transport_factory"] = transport
    opening = asyncio.create_task(connection.connect())
    try:
        await asyncio.shield(opening)
        underlay = connection.transport and connection.transport.connection
        assert isinstance(underlay, aiormq.Connection)
        return OpenConnection(connection, underlay, transport)
    except InvalidFrameError as error:  # the library expected another frame and drops the broker's reason
        await connection.close()
        raise AMQPConnectionError(transport.close_reason or str(error)) from error
    except asyncio.CancelledError:
        # The library, cancelled just after the handshake, would leave an open connection behind.
        if not transport.abort():
            opening.cancel()
        opening.add_done_callback(lambda opened: opened.cancelled() or opened.exception())
        await asyncio.wait({opening}, timeout=_CLOSE_TIMEOUT)
        opening.cancel()
        await connection.close()
        raise
    except BaseException:
        await connection.close()
        raise


class Connection:
    """A connection that is made again, with growing pauses, as long as the link is not closed.

    Whoever finds it lost may also ask at once; attempts are shared.
    """

    def __init__(
        self, url: str, purpose: str, timeout: timedelta, make_connection: MakeConnection | None = None
    ) -> None:
        address = URL(url)
        _check_certificates(address)
        defaults = {"heartbeat": _HEARTBEAT, "name": f"meshpoint {purpose}"}
        self._url = address.update_query({**defaults, **address.query})
        self._make_connection = make_connection
        self._purpose = purpose
        self._outage = Outage(monotonic)
        self._timeout = timeout.total_seconds()
        self._connecting: asyncio.Task[OpenConnection] | None = None
        self._reconnect_task: asyncio.Task[None] | None = None
        self._closing_tasks: set[asyncio.Task[None]] = set()
        self._declare_lock = asyncio.Lock()
        self._open_topology_channel: tuple[OpenConnection, aio_pika.abc.AbstractChannel] | None = None
        self._closed = False

    @property
    def up(self) -> bool:
        """Whether the connection stands, as far as is known here."""
        return self._connecting is not None and self._connecting.done() and not _is_lost(self._connecting)

    async def open(self) -> None:
        """Connect, and stay connected from then on.

        Raises:
            BrokerUnavailable: the first attempt failed; nothing is tried any more.
        """
        self._closed = False
        await self.ensure_connected()
        if self._reconnect_task is None:
            self._reconnect_task = asyncio.create_task(self._keep_connected())

    async def ensure_connected(self) -> OpenConnection:
        """The open connection.

        Raises:
            BrokerUnavailable: this attempt failed, or the link is closed.
        """
        if self._closed:
            raise BrokerUnavailable("the broker is closed")
        if self._connecting is not None and _is_lost(self._connecting):
            self._discard_attempt()
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(self._url))
            self._connecting.add_done_callback(_is_lost)  # whoever asked may have gone: the failure is seen here
        with translate_errors("connecting"):
            return await asyncio.shield(self._connecting)

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[aiormq.Channel]:
        """Open an aiormq channel for the duration of a block."""
        opened = await self.open_channel()
        try:
            yield opened.channel
        finally:
            await close_quietly(opened.channel)

    @asynccontextmanager
    async def topology_channel(self) -> AsyncIterator[aio_pika.abc.AbstractChannel]:
        """Borrow the aio-pika channel for declarations; one user at a time.

        It stays open: aio-pika keeps memory for each closed channel until the connection closes (as of 10.2.1).
        """
        async with self._declare_lock:
            opened = await self.ensure_connected()
            connection, channel = self._open_topology_channel or (None, None)
            if channel is None or connection is not opened or channel.is_closed:
                channel = await self._create_topology_channel(opened)
                self._open_topology_channel = opened, channel
            try:
                with translate_errors("declaring"):
                    async with asyncio.timeout(self._timeout):
                        yield channel
            except BaseException:  # after any error, the next user gets a new channel
                self._open_topology_channel = None
                self._run_in_background(_close_topology_channel(channel))
                raise

    async def _create_topology_channel(self, opened: OpenConnection) -> aio_pika.abc.AbstractChannel:
        with translate_errors("opening a channel"):
            try:
                channel = opened.connection.channel(publisher_confirms=False)
                async with asyncio.timeout(self._timeout):
                    await channel.initialize()
            except RuntimeError as error:  # closed meanwhile
                raise BrokerUnavailable(f"opening a channel: {error}") from error
        return channel

    async def open_channel(self, *, confirms: bool = False) -> OpenChannel:
        """A new aiormq channel on the open connection.

        Raises:
            BrokerUnavailable: there is no connection now.
        """
        return await (await self.ensure_connected()).open_channel(self._timeout, confirms=confirms)

    async def open_separate(self) -> OpenConnection:
        """Open an additional connection for risky messages, whose name ends in "apart"; the caller closes it.

        Raises:
            BrokerUnavailable: the connection could not be opened.
        """
        with translate_errors("connecting"):
            return await self._connect(self._url.update_query(name=f"{self._url.query['name']} apart"))

    @property
    def current(self) -> OpenConnection | None:
        """The current connection, or `None` if it is known to be down."""
        return self._connecting.result() if self._connecting is not None and self.up else None

    def drop(self, unresponsive: OpenConnection | None) -> None:
        """Replace the connection `unresponsive` and close it in the background. No-op unless it is current."""
        if unresponsive is None or unresponsive is not self.current:
            return
        self._discard_attempt()
        if self._reconnect_task is not None:
            self._reconnect_task.cancel()
            self._reconnect_task = asyncio.create_task(self._keep_connected())

    def close_in_background(self, channel: aiormq.Channel) -> None:
        """Close a channel aside."""
        self._run_in_background(close_quietly(channel))

    async def close(self) -> None:
        """Disconnect for good."""
        self._closed = True
        if self._reconnect_task is not None:
            self._reconnect_task.cancel()
            self._reconnect_task = None
        self._discard_attempt()
        await asyncio.gather(*self._closing_tasks)

    def _discard_attempt(self) -> None:
        attempt, self._connecting = self._connecting, None
        if attempt is not None:
            self._run_in_background(_close_attempt(attempt))

    def _run_in_background(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(closing)
        self._closing_tasks.add(task)
        task.add_done_callback(self._closing_tasks.discard)

    async def _connect(self, url: URL) -> OpenConnection:
        async with asyncio.timeout(self._timeout):
            return await connect(url, self._make_connection)

    async def _keep_connected(self) -> None:
        delays = backoff_delays()
        while True:
            try:
                opened = await self.ensure_connected()
            except BrokerUnavailable as error:
                if (seconds := self._outage.failed()) is not None:
                    log.warning("%s: unavailable for %.0f s: %s", self._purpose, seconds, error)
                await asyncio.sleep(next(delays))
            else:
                seconds, reported = self._outage.over()
                if reported:
                    log.warning("%s: reconnected after %.0f s", self._purpose, seconds)
                delays = backoff_delays()
                await asyncio.wait([opened.underlay.closing])


def _check_certificates(url: URL) -> None:
    """Refuse what the library would raise `ValueError` for, at each attempt to connect."""
    try:
        b64decode(url.query.get("cadata", ""))
    except ValueError as error:
        problem = "has a cadata that is not base64"
        raise ConfigurationError("mesh.broker_url", problem, "write cafile=, with the path of a PEM file") from error


def backoff_delays() -> Iterator[float]:
    """Seconds to wait before each attempt, so that a broker that comes back is not run over."""
    delay = _MIN_BACKOFF
    while True:
        yield delay * random.uniform(0.5, 1.0)
        delay = min(2 * delay, _MAX_BACKOFF)


def _is_lost(attempt: asyncio.Task[OpenConnection]) -> bool:
    if not attempt.done():
        return False
    return attempt.cancelled() or attempt.exception() is not None or not attempt.result().is_opened


async def _close_attempt(attempt: asyncio.Task[OpenConnection]) -> None:
    if not attempt.done():
        attempt.cancel()
    with suppress(Exception), translate_errors("closing"):  # callers waiting for the connection already got the error
        await (await attempt).close()


async def _close_topology_channel(channel: aio_pika.abc.AbstractChannel) -> None:
    await _wait_closed(channel.close())


async def close_quietly(channel: aiormq.Channel) -> None:
    """Close it after sending queued frames, ignoring errors if it is already lost."""
    if not channel.is_closed:
        await _wait_closed(channel.close(BrokerUnavailable("closed")))


_CLOSING = set[asyncio.Future[object]]()


async def _wait_closed(closing: Awaitable[object]) -> None:
    """Wait a while for the broker to close a channel.

    A slow broker closes it later. If cancelled, the library would close the channel once more, and for that RabbitMQ
    closes the whole connection.
    """
    task = asyncio.ensure_future(closing)
    _CLOSING.add(task)
    task.add_done_callback(_CLOSING.discard)
    task.add_done_callback(_retrieve_exception)
    await asyncio.wait({task}, timeout=_CLOSE_TIMEOUT)


def _retrieve_exception(task: asyncio.Future[Any]) -> BaseException | None:
    """The failure of a task that has ended, which then is not reported as unseen."""
    return None if task.cancelled() else task.exception()
