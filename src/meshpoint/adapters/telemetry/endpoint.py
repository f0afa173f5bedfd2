"""A minimal HTTP endpoint for Prometheus and for the probes of an orchestrator.

It runs on the event loop of its process, since that is what `/healthz` tests. Two methods on three
fixed paths need no web framework: nothing of a request but its first line is read, and nothing of
it is repeated.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple, Protocol

from meshpoint.errors import ConfigurationError

log = logging.getLogger("meshpoint.telemetry")

_MAX_HEAD_BYTES = 8192
_MAX_CONNECTIONS = 16
"""Open connections beyond which new ones are closed at once."""
_TIMEOUT = 5.0
"""Seconds for one request and its response."""
_JSON = "application/json"
_HOST_ADVICE = "name an address of this machine, such as 127.0.0.1 or 0.0.0.0"


class _Response(NamedTuple):
    status: HTTPStatus
    content_type: str
    body: bytes


class Page(Protocol):
    """What `/metrics` shows."""

    content_type: str

    def render(self) -> bytes:
        """All values, in Prometheus's text format."""


class Readiness(Protocol):
    """What `/readyz` shows."""

    def find_problem(self) -> str | None:
        """Why this process is not ready; `None` if it is."""


class Endpoint:
    """Serves `/metrics`, `/healthz` and `/readyz` while it is open."""

    def __init__(self, metrics: Page, readiness: Readiness, *, timeout: float = _TIMEOUT) -> None:
        self._metrics, self._readiness, self._timeout = metrics, readiness, timeout
        self._routes: dict[bytes, Callable[[], _Response]] = {
            b"/metrics": self._show_metrics,
            b"/healthz": lambda: _describe(HTTPStatus.OK, {"alive": True}),
            b"/readyz": self._show_readiness,
        }
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int, prefix: str = "--metrics-") -> int:
        """Listen on `host` and `port`, or on any free port if it is 0. Returns the port.

        Errors name the options `{prefix}host` and `{prefix}port`.

        Raises:
            ConfigurationError: The port is in use, or the host is not an address of this machine.
        """
        if not host:  # asyncio would listen on all addresses
            raise ConfigurationError(f"{prefix}host", "is empty", _HOST_ADVICE)
        try:
            self._server = await asyncio.start_server(
                self._accept, host, port, limit=_MAX_HEAD_BYTES
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigurationError(
                    f"{prefix}port", f"port {port} on {host} is in use", "choose another port"
                ) from error
            raise ConfigurationError(
                f"{prefix}host",
                f"cannot listen on {host}, port {port}: {error.strerror or error}",
                _HOST_ADVICE,
            ) from error
        actual_port: int = self._server.sockets[0].getsockname()[1]
        log.info("serving /metrics, /healthz and /readyz on %s, port %d", host, actual_port)
        return actual_port

    async def close(self) -> None:
        """Stop listening, and end open connections."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS:
            writer.close()
            return
        connection = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:  # also TimeoutError
            log.debug("a request to the metrics endpoint failed: %s", type(error).__name__)
            writer.transport.abort()  # do not wait for a client that does not read
        finally:
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        show = self._routes.get(path)
        if show is None:
            response = _describe(HTTPStatus.NOT_FOUND, {"error": "no such page"})
        elif method not in {b"GET", b"HEAD"}:
            response = _describe(HTTPStatus.METHOD_NOT_ALLOWED, {"error": "use GET"})
        else:
            response = show()
        status, content_type, body = response
        fields = [
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"Content-Type: {content_type}",
            f"Content-Length: {len(body)}",
            "Cache-Control: no-store",
            "Connection: close",
        ]
        return "\r\n".join([*fields, "\r\n"]).encode() + (b"" if method == b"HEAD" else body)

    def _show_metrics(self) -> _Response:
        return _Response(HTTPStatus.OK, self._metrics.content_type, self._metrics.render())

    def _show_readiness(self) -> _Response:
        problem = self._readiness.find_problem()
        if problem is None:
            return _describe(HTTPStatus.OK, {"ready": True})
        return _describe(HTTPStatus.SERVICE_UNAVAILABLE, {"ready": False, "reason": problem})


def _describe(status: HTTPStatus, content: dict[str, bool | str]) -> _Response:
    return _Response(status, _JSON, json.dumps(content).encode() + b"\n")
