"""Connections to a Redis that may be slow, full, unavailable or empty at any time.

A caller waits for at most one timeout. After a failure, further callers fail at once for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypedDict, TypeVar, Unpack
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    NoScriptError,
    RedisError,
    ResponseError,
)

from meshpoint.errors import ConfigurationError, Unavailable

T = TypeVar("T")

_CONNECTION_OPTIONS: dict[str, Any] = {
    "socket_timeout": None,  # `RedisConnection` has its own timeout
    "socket_connect_timeout": None,
    "protocol": 2,  # avoids the HELLO handshake
}

_URL_OPTIONS = frozenset(
    ["username", "password", "db", "client_name", "lib_name", "lib_version", "protocol",
     "decode_responses", "encoding", "encoding_errors", "health_check_interval",
     "max_connections", "retry_on_timeout", "timeout", "socket_connect_timeout",
     "socket_keepalive", "socket_timeout", "ssl_ca_certs", "ssl_ca_data", "ssl_ca_path",
     "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_ciphers",
     "ssl_exclude_verify_flags", "ssl_include_verify_flags", "ssl_keyfile", "ssl_min_version",
     "ssl_password"]
)  # fmt: skip
"""Options that a URL may set. Others of the driver's options take objects, not text."""

_DEFAULT_LIMIT = timedelta(seconds=5)
_PROBE_SCRIPT = "return redis.call('SET', KEYS[1], '', 'PX', 1)"
_EMPTY_SCRIPT = "return 1"

# uvloop raises RuntimeError for a transport that was closed between two awaits. The driver raises
# ValueError if the server is not a Redis.
_DRIVER_ERRORS = (RedisError, OSError, RuntimeError, ValueError, EOFError)


class RequestLimits(TypedDict, total=False):
    """When requests to a Redis fail.

    Attributes:
        timeout: limit for one request; 5 seconds unless the caller says otherwise.
        retry_after: after a failed request, how long Redis is not used, by default 5 seconds. Then
            one request tries it while all others are still refused.
        clock: returns seconds.
        make_timeout: limits a request, in seconds.
    """

    timeout: timedelta
    retry_after: timedelta
    clock: Callable[[], float]
    make_timeout: Callable[[float], asyncio.Timeout]


class RedisConnection:
    """A few connections to one Redis, with a circuit breaker.

    No request is sent twice. For one event loop.

    Args:
        setting: configuration key of the URL, named in errors.
        unavailable: exception class to raise if Redis does not answer.
        connections: maximum number of connections.
        limits: when requests fail.

    Raises:
        ConfigurationError: `url` is not a Redis URL.
    """

    def __init__(
        self,
        url: str,
        *,
        setting: str,
        unavailable: type[Unavailable],
        connections: int,
        **limits: Unpack[RequestLimits],
    ) -> None:
        self._redis = Redis.from_pool(_pool(url, setting, connections))
        self._setting = setting
        self._unavailable = unavailable
        self._timeout = limits.get("timeout", _DEFAULT_LIMIT).total_seconds()
        self._retry_after = limits.get("retry_after", _DEFAULT_LIMIT).total_seconds()
        self._clock = limits.get("clock", time.monotonic)
        self._make_timeout = limits.get("make_timeout", asyncio.timeout)
        self._retry_at: float | None = None  # set while the circuit is open
        self._last_error = ""  # the failure that opened it

    async def execute(self, subject: str, request: Callable[[Redis], Awaitable[T]]) -> T:
        """Return the reply of Redis to `request`. `subject` names the data in errors.

        Raises:
            Unavailable: Redis did not answer, or is not used after a recent failure. The exception
                has the class `unavailable`.
            ResponseError: the value has another type (WRONGTYPE), or a script is unknown
                (NOSCRIPT).
        """
        self.raise_if_unavailable(subject)
        if self._retry_at is not None:
            self._open_circuit()  # for all others while this request tries
        try:
            async with self._make_timeout(self._timeout):
                answer = await request(self._redis)
        except _DRIVER_ERRORS as error:
            if _is_data_error(error):
                self._retry_at = None
                raise
            self._open_circuit()
            problem = (
                f"no answer within {self._timeout} s"
                if type(error) is TimeoutError
                else str(error)
            )
            self._last_error = problem or type(error).__name__
            raise self._unavailable(f"Redis, {subject}: {self._last_error}") from error
        self._retry_at = None
        return answer

    def raise_if_unavailable(self, subject: str) -> None:
        """Raise `unavailable` while the circuit is open."""
        if self._retry_at is not None and self._clock() < self._retry_at:
            raise self._unavailable(f"Redis, {subject}: {self._last_error} (not asked again yet)")

    async def check(self, key: bytes) -> None:
        """Check that Redis runs scripts that write keys like `key`.

        Raises:
            ConfigurationError: Redis refuses the login, or the user lacks a permission.
            Unavailable: Redis does not answer, or cannot write. The exception has the class
                `unavailable`.
        """
        await self._probe(_PROBE_SCRIPT, key)

    async def check_login(self, key: bytes) -> None:
        """Check that the user may run scripts on keys like `key`. Writes nothing.

        Raises:
            ConfigurationError, Unavailable: as for `check`.
        """
        await self._probe(_EMPTY_SCRIPT, key)

    async def _probe(self, script: str, key: bytes) -> None:
        try:
            await self.execute(self._setting, lambda redis: redis.eval(script, 1, key))
        except Unavailable as error:
            if isinstance(error.__cause__, AuthenticationError | NoPermissionError):
                problem = f"Redis refuses: {error.__cause__}"
                fix = (
                    "correct the URL, or allow the user to run scripts "
                    "and write the namespace's keys"
                )
                raise ConfigurationError(self._setting, problem, fix) from error
            raise

    async def close(self) -> None:
        """Release every connection."""
        with suppress(*_DRIVER_ERRORS):
            async with asyncio.timeout(self._timeout):
                await self._redis.aclose()

    def _open_circuit(self) -> None:
        self._retry_at = self._clock() + self._retry_after


def _is_data_error(error: Exception) -> bool:
    """Whether Redis works, and only the requested data or script is at fault."""
    # The driver has no class for WRONGTYPE: its code is the first word of the text.
    return isinstance(error, NoScriptError) or (
        isinstance(error, ResponseError) and str(error).startswith("WRONGTYPE")
    )


def _pool(url: str, setting: str, connections: int) -> BlockingConnectionPool:
    try:
        options = parse_qs(urlsplit(url).query)
        # The option is not named, because it may be part of a password.
        if not _URL_OPTIONS.issuperset(options):
            raise ConfigurationError(
                setting, "has an unknown option", f"use {', '.join(sorted(_URL_OPTIONS))}"
            )
        pool = BlockingConnectionPool.from_url(
            url, max_connections=connections, timeout=None, **_CONNECTION_OPTIONS
        )
        # Values are bytes, even if the URL asks for text.
        pool.connection_kwargs["decode_responses"] = False
        for option in ("encoding", "encoding_errors"):
            pool.connection_kwargs.pop(option, None)
        pool.connection_class(**pool.connection_kwargs)  # validates the options without connecting
    except (RedisError, ValueError, TypeError):
        # The cause is dropped, because its text may contain the password.
        raise ConfigurationError(
            setting,
            "is not a Redis URL",
            "write redis://user:password@host:6379/0, or rediss://… for TLS",
        ) from None
    # The driver must not resend a write, which may already have been executed.
    pool.connection_kwargs.pop("retry_on_timeout", None)
    return pool
