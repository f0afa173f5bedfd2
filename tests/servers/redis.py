"""A private Redis for tests."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from redis.asyncio import Redis

from .locate import redis_programs
from .process import PrivateServer, ServerFolder, free_port

REDIS_LIMIT = timedelta(minutes=5)
"""The limit of a request to Redis in tests: no busy machine reaches it."""


def redis_client(url: str) -> Redis:
    """A connection of a test's own. By default, redis-py waits for a reply for five seconds."""
    return Redis.from_url(url, socket_timeout=REDIS_LIMIT.total_seconds())


class RedisServer(PrivateServer):
    """A fresh instance that appends writes to a file and syncs every second, as in production."""

    def __init__(self) -> None:
        self._programs = redis_programs()
        super().__init__(ServerFolder("redis", ("redis", "nobody")))
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.folder.path),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
        }
        options = [part for name, value in settings.items() for part in (f"--{name}", value)]
        return [str(self._programs / "redis-server"), *options]

    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.folder.path),
            "LC_ALL": "C",
        }

    def is_ready(self) -> bool:
        try:
            return self._command_succeeds("PING") and self.running
        except OSError:
            return False

    def sync_every_write(self) -> None:
        """Lose nothing at a kill, until the next start.

        With `everysec`, writes wait for a busy disk.
        """
        assert self._command_succeeds("CONFIG SET appendfsync no")

    def _command_succeeds(self, command: str) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=2) as client:
            client.sendall(f"{command}\r\n".encode())
            return client.recv(3) in {b"+PO", b"+OK"}


async def redis_data_key() -> bytes:
    """A key that authenticates the Redis data of tests and benchmarks."""
    return bytes(range(32))
