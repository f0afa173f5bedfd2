"""A Redis that may be slow, full, away or empty at any time.

Whoever asks it then waits for one timeout at most; for a while after it, nobody waits at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import AuthenticationError, NoPermissionError, NoScriptError, RedisError, ResponseError

from meshpoint.errors import ConfigurationError, Unavailable

T = TypeVar("T")

_CONNECTION_OPTIONS: dict[str, Any] = {
    "socket_timeout": None,  # the timeout is ours
    "socket_connect_timeout": None,
    "protocol": 2,  # needs no greeting
}

_URL_OPTIONS = frozenset(
    ["username", "password", "db", "client_name", "lib_name", "lib_version", "protocol", "decode_responses",
     "encoding", "encoding_errors", "health_check_interval", "max_connections", "retry_on_timeout", "timeout",
     "socket_connect_timeout", "socket_keepalive", "socket_timeout", "ssl_ca_certs", "ssl_ca_data", "ssl_ca_path",
     "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_ciphers", "ssl_exclude_verify_flags",
     "ssl_include_verify_flags", "ssl_keyfile", "ssl_min_version", "ssl_password"]
)  # fmt: skip
"""What a URL can set. The driver takes more, of which a URL gives a text where it needs an object."""

_PROBE_SCRIPT = "return redis.call('SET', KEYS[1], '', 'PX', 1)"

# uvloop raises RuntimeError for a transport that was closed between two awaits; the driver ValueError where something
# that is no Redis answers.
_DRIVER_ERRORS = (RedisError, OSError, RuntimeError, ValueError, EOFError)


class RedisConnection:
    """A few connections to one Redis, and a circuit that opens when it fails.

    A request takes `timeout` at most. After one that failed, Redis is not asked for `retry_after`; then one request
    tries, while the others are still refused. `clock` counts seconds. No request is sent twice. For one event loop.

    `setting` is the configuration key of the URL. `unavailable` is raised when Redis does not answer. `make_timeout`
    limits a request, in seconds.

    Raises:
        ConfigurationError: `url` is none of a Redis.
    """

    def __init__(
        self,
        url: str,
        *,
        setting: str,
        unavailable: type[Unavailable],
        timeout: timedelta,
        retry_after: timedelta,
        clock: Callable[[], float],
        connections: int,
        make_timeout: Callable[[float], asyncio.Timeout] = asyncio.timeout,
    ) -> None:
        self._redis = Redis.from_pool(_pool(url, setting, connections))
        self._setting = setting
        self._unavailable = unavailable
        self._timeout = timeout.total_seconds()
        self._retry_after = retry_after.total_seconds()
        self._clock = clock
        self._make_timeout = make_timeout
        self._retry_at: float | None = None  # set while Redis is taken to be away
        self._last_error = ""  # why

    async def execute(self, subject: str, request: Callable[[Redis], Awaitable[T]]) -> T:
        """What Redis answers to `request`, which is about `subject`.

        Raises:
            Unavailable: the class that was given: it did not answer, or is not asked now.
            ResponseError: what stands there is of another kind (WRONGTYPE), or a script is not known (NOSCRIPT).
        """
        self.raise_if_unavailable(subject)
        if self._retry_at is not None:
            self._open_circuit()  # for the others, while this one tries
        try:
            async with self._make_timeout(self._timeout):
                answer = await request(self._redis)
        except _DRIVER_ERRORS as error:
            if _is_data_error(error):
                self._retry_at = None
                raise
            self._open_circuit()
            problem = f"no answer within {self._timeout} s" if type(error) is TimeoutError else str(error)
            self._last_error = problem or type(error).__name__
            raise self._unavailable(f"Redis, {subject}: {self._last_error}") from error
        self._retry_at = None
        return answer

    def raise_if_unavailable(self, subject: str) -> None:
        """Raise that Redis is unavailable while it is not asked."""
        if self._retry_at is not None and self._clock() < self._retry_at:
            raise self._unavailable(f"Redis, {subject}: {self._last_error} (not asked again yet)")

    async def check(self, key: bytes) -> None:
        """Check that Redis runs scripts that write keys like `key`.

        Raises:
            ConfigurationError: it refuses the login, or the login lacks a right.
            Unavailable: the class that was given: it does not answer, or cannot write.
        """
        try:
            await self.execute(self._setting, lambda redis: redis.eval(_PROBE_SCRIPT, 1, key))
        except Unavailable as error:
            if isinstance(error.__cause__, AuthenticationError | NoPermissionError):
                problem = f"Redis refuses: {error.__cause__}"
                fix = "correct the URL, or grant the user scripts and writes on the keys of the namespace"
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
    """Whether Redis is well, and only what it was asked for is not."""
    return isinstance(error, NoScriptError) or (
        isinstance(error, ResponseError) and str(error).startswith("WRONGTYPE")
    )


def _pool(url: str, setting: str, connections: int) -> BlockingConnectionPool:
    try:
        options = parse_qs(urlsplit(url).query)
        if not _URL_OPTIONS.issuperset(options):  # not named, because it may be a part of the password
            raise ConfigurationError(setting, "has an unknown option", f"use {', '.join(sorted(_URL_OPTIONS))}")
        pool = BlockingConnectionPool.from_url(url, max_connections=connections, timeout=None, **_CONNECTION_OPTIONS)
        pool.connection_kwargs["decode_responses"] = False  # whatever the URL says
        for option in ("encoding", "encoding_errors"):
            pool.connection_kwargs.pop(option, None)
        pool.connection_class(**pool.connection_kwargs)  # refuses unknown options; connects nowhere
    except (RedisError, ValueError, TypeError):
        # The cause is not told: it may hold the password.
        raise ConfigurationError(
            setting,
            "is no URL of a Redis",
            "write redis://user:password@host:6379/0, or rediss://… for TLS",
        ) from None
    pool.connection_kwargs.pop("retry_on_timeout", None)  # a write that is sent again may be done twice
    return pool
