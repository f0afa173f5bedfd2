"""A connection to the broker that reconnects when it is lost."""

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
from aiormq.exceptions import (
    AMQPConnectionError,
    AMQPError,
    ChannelInvalidStateError,
    InvalidFrameError,
)
from yarl import URL

from meshpoint.adapters.rabbitmq.frames import FrameTransport
from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.ports.clock import OutageTracker

log = logging.getLogger(__name__)

_HEARTBEAT = "30"
"""Seconds.

A dead network is detected after about three of them. An agent may block its event loop for two."""

_OPEN_TIMEOUT, _CLOSE_TIMEOUT, _ABORT_TIMEOUT = 10.0, 5.0, 0.5
_MIN_BACKOFF, _MAX_BACKOFF = 0.1, 5.0

MakeConnection = Callable[[URL], aio_pika.Connection]
"""Returns an unconnected aio-pika connection. Not a robust one: it would hide lost deliveries."""


@contextmanager
def translate_errors(action: str) -> Iterator[None]:
    """Turn the errors of a lost connection into `BrokerUnavailable`.

    aiormq raises `CancelledError` in the waiters of a closed channel although they were not
    cancelled, and a bare `Exception` if the connection was closed without a reason. If the broker
    hangs up at once, connecting raises `StopAsyncIteration`.
    """
    try:
        yield
    except (
        AMQPError,
        ChannelInvalidStateError,
        OSError,
        TimeoutError,
        StopAsyncIteration,
    ) as error:
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
    """An open connection: the aio-pika object, its aiormq connection, and their transport."""

    connection: aio_pika.Connection
    underlay: aiormq.Connection
    transport: FrameTransport

    @property
    def is_opened(self) -> bool:
        """Whether the connection is open, as far as this process knows."""
        return self.underlay.is_opened

    async def open_channel(
        self, timeout: float = _OPEN_TIMEOUT, *, confirms: bool = False
    ) -> OpenChannel:
        """Open a new aiormq channel.

        Raises:
            BrokerUnavailable: the connection is lost, or the broker does not answer in time.
        """
        with translate_errors("opening a channel"):
            try:
                channel = await self.underlay.channel(publisher_confirms=confirms, timeout=timeout)
            except RuntimeError as error:  # closed meanwhile
                raise BrokerUnavailable(f"opening a channel: {error}") from error
        assert isinstance(channel, aiormq.Channel)
        return OpenChannel(channel, self.transport)

    async def close(self) -> None:
        """Close the connection. Ignores errors, and aborts if the broker does not answer."""
        closing = asyncio.create_task(self.connection.close(BrokerUnavailable("closed")))
        closing.add_done_callback(_retrieve_exception)
        try:
            await asyncio.wait({closing}, timeout=_CLOSE_TIMEOUT)
        finally:
            # If this is cancelled halfway, the library would leave its tasks behind.
            if not closing.done():
                self.transport.abort()
                await asyncio.wait({closing}, timeout=_ABORT_TIMEOUT)
            # The library also waits for tasks that were cancelled together with the event loop.
            while not closing.done():
                closing.cancel()
                await asyncio.wait({closing}, timeout=_ABORT_TIMEOUT)


@dataclass(frozen=True, slots=True)
class OpenChannel:
    """An aiormq channel and the transport for frames that bypass the library."""

    channel: aiormq.Channel
    transport: FrameTransport


async def connect(url: str | URL, make_connection: MakeConnection | None = None) -> OpenConnection:
    """Connect to `url` in a way that no message content can close the connection.

    A message that the library cannot decode is delivered with its readable properties and the
    header `x-dead-reason`.
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
    # The library expected another frame and drops the broker's reason.
    except InvalidFrameError as error:
        await connection.close()
        raise AMQPConnectionError(transport.close_reason or str(error)) from error
    except asyncio.CancelledError:
        # If cancelled just after the handshake, the library would leave an open connection behind.
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
    """Connects, and reconnects with growing delays until it is closed.

    Callers may also trigger an attempt at once; concurrent callers share one attempt.
    """

    def __init__(
        self,
        url: str,
        purpose: str,
        timeout: timedelta,
        make_connection: MakeConnection | None = None,
    ) -> None:
        address = URL(url)
        _check_certificates(address)
        defaults = {"heartbeat": _HEARTBEAT, "name": f"meshpoint {purpose}"}
        self._url = address.update_query({**defaults, **address.query})
        self._make_connection = make_connection
        self._purpose = purpose
        self._outage = OutageTracker(monotonic)
        self._timeout = timeout.total_seconds()
        self._connecting: asyncio.Task[OpenConnection] | None = None
        self._reconnect_task: asyncio.Task[None] | None = None
        self._closing_tasks: set[asyncio.Task[None]] = set()
        self._declare_lock = asyncio.Lock()
        self._open_topology_channel: tuple[OpenConnection, aio_pika.abc.AbstractChannel] | None = (
            None
        )
        self._closed = False

    @property
    def up(self) -> bool:
        """Whether the connection is open, as far as this process knows."""
        return (
            self._connecting is not None
            and self._connecting.done()
            and not _is_lost(self._connecting)
        )

    async def open(self) -> None:
        """Connect, and reconnect whenever the connection is lost.

        Raises:
            BrokerUnavailable: the first attempt failed, and no other will be made.
        """
        self._closed = False
        await self.ensure_connected()
        if self._reconnect_task is None:
            self._reconnect_task = asyncio.create_task(self._keep_connected())

    async def ensure_connected(self) -> OpenConnection:
        """Return the open connection, connecting if necessary.

        Raises:
            BrokerUnavailable: this attempt failed, or `close` was called.
        """
        if self._closed:
            raise BrokerUnavailable("the broker is closed")
        if self._connecting is not None and _is_lost(self._connecting):
            self._discard_attempt()
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(self._url))
            # Retrieve the failure here, because the callers may have been cancelled.
            self._connecting.add_done_callback(_is_lost)
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
        """Borrow the aio-pika channel for declarations. Only one caller holds it at a time.

        The channel stays open: aio-pika keeps memory for each closed channel until the connection
        closes (as of 10.2.1).
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
                self._run_in_background(_wait_closed(channel.close()))
                raise

    async def _create_topology_channel(
        self, opened: OpenConnection
    ) -> aio_pika.abc.AbstractChannel:
        with translate_errors("opening a channel"):
            try:
                channel = opened.connection.channel(publisher_confirms=False)
                async with asyncio.timeout(self._timeout):
                    await channel.initialize()
            except RuntimeError as error:  # closed meanwhile
                raise BrokerUnavailable(f"opening a channel: {error}") from error
        return channel

    async def open_channel(self, *, confirms: bool = False) -> OpenChannel:
        """Open a new aiormq channel on the open connection.

        Raises:
            BrokerUnavailable: the connection could not be opened or is lost.
        """
        return await (await self.ensure_connected()).open_channel(self._timeout, confirms=confirms)

    async def open_separate(self) -> OpenConnection:
        """Open an additional connection for risky messages. The caller closes it.

        Its name at the broker ends in "single-message".

        Raises:
            BrokerUnavailable: the connection could not be opened.
        """
        with translate_errors("connecting"):
            return await self._connect(
                self._url.update_query(name=f"{self._url.query['name']} single-message")
            )

    @property
    def current(self) -> OpenConnection | None:
        """The current connection, or `None` if it is known to be down."""
        return self._connecting.result() if self._connecting is not None and self.up else None

    def drop(self, unresponsive: OpenConnection | None) -> None:
        """Replace the connection `unresponsive` and close it in the background.

        No-op unless it is current.
        """
        if unresponsive is None or unresponsive is not self.current:
            return
        self._discard_attempt()
        if self._reconnect_task is not None:
            self._reconnect_task.cancel()
            self._reconnect_task = asyncio.create_task(self._keep_connected())

    def close_in_background(self, channel: aiormq.Channel) -> None:
        """Close `channel` without waiting for it."""
        self._run_in_background(close_quietly(channel))

    async def close(self) -> None:
        """Disconnect and stop reconnecting."""
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
                if (seconds := self._outage.record_failure()) is not None:
                    log.warning("%s: unavailable for %.0f s: %s", self._purpose, seconds, error)
                await asyncio.sleep(next(delays))
            else:
                seconds, reported = self._outage.record_success()
                if reported:
                    log.warning("%s: reconnected after %.0f s", self._purpose, seconds)
                delays = backoff_delays()
                await asyncio.wait([opened.underlay.closing])


def login_refused() -> ConfigurationError:
    """The error for a login that the broker does not accept."""
    return ConfigurationError(
        "mesh.broker_url", "the broker refuses the login", "check user, password and virtual host"
    )


def _check_certificates(url: URL) -> None:
    """Reject a URL for which the library would raise `ValueError` at each attempt to connect."""
    try:
        b64decode(url.query.get("cadata", ""))
    except ValueError as error:
        problem = "has a cadata that is not base64"
        raise ConfigurationError(
            "mesh.broker_url", problem, "write cafile=, with the path of a PEM file"
        ) from error


def backoff_delays() -> Iterator[float]:
    """Seconds to wait before each attempt, growing so as not to overload a recovering broker."""
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
    # Callers that waited for the connection have already received the error.
    with suppress(Exception), translate_errors("closing"):
        await (await attempt).close()


async def close_quietly(channel: aiormq.Channel) -> None:
    """Close `channel` after sending queued frames. Ignores errors."""
    if not channel.is_closed:
        await _wait_closed(channel.close(BrokerUnavailable("closed")))


_CLOSING = set[asyncio.Future[object]]()


async def _wait_closed(closing: Awaitable[object]) -> None:
    """Wait up to 5 seconds for the broker to close a channel.

    A slower broker closes it later. Cancelling the call would make the library close the channel
    again, and RabbitMQ closes the whole connection for that.
    """
    task = asyncio.ensure_future(closing)
    _CLOSING.add(task)
    task.add_done_callback(_CLOSING.discard)
    task.add_done_callback(_retrieve_exception)
    await asyncio.wait({task}, timeout=_CLOSE_TIMEOUT)


def _retrieve_exception(task: asyncio.Future[Any]) -> BaseException | None:
    """Retrieve the exception of a finished task, or asyncio would log it as unretrieved."""
    return None if task.cancelled() else task.exception()
