"""The servers of a test session: each starts at most once, and all stop at its end."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass

from .postgres import PostgresServer
from .process import PrivateServer
from .rabbit import RabbitServer
from .redis import RedisServer


@dataclass(frozen=True)
class NamedServer:
    """A server named by the environment: used, never stopped."""

    url: str


KINDS: dict[str, type[PostgresServer] | type[RabbitServer] | type[RedisServer]] = {
    "postgres_server": PostgresServer,
    "rabbit_server": RabbitServer,
    "redis_server": RedisServer,
    "own_postgres_server": PostgresServer,
    "own_rabbit_server": RabbitServer,
    "own_redis_server": RedisServer,
}
VARIABLES = {
    "postgres_server": "MESHPOINT_TEST_PG_URL",
    "rabbit_server": "MESHPOINT_TEST_AMQP_URL",
    "redis_server": "MESHPOINT_TEST_REDIS_URL",
}


class SessionServers:
    """Servers by the name of their fixture."""

    def __init__(self) -> None:
        self._servers: dict[str, PrivateServer] = {}
        atexit.register(self.close)

    def named_server(self, fixture: str) -> NamedServer | None:
        """The server that the environment names for `fixture`."""
        url = os.environ.get(VARIABLES.get(fixture, ""))
        return NamedServer(url) if url else None

    def launch(self, fixture: str) -> PrivateServer:
        """Start the server of `fixture` without waiting for it.

        Raises:
            ServersMissing: its program is not installed and cannot be.
        """
        if fixture not in self._servers:
            server = self._servers[fixture] = KINDS[fixture]()
            server.launch()
        return self._servers[fixture]

    def close(self) -> None:
        """Stop every server."""
        atexit.unregister(self.close)
        while self._servers:
            _, server = self._servers.popitem()
            server.close()
