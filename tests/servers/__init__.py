"""PostgreSQL, RabbitMQ and Redis for tests: taken from the environment or started here.

A missing server fails a test; it never skips it silently.
"""

from .database import DatabasePool, own_database
from .locate import ServersMissing
from .postgres import PostgresServer
from .process import PrivateServer, ServerFailed
from .proxy import Proxy
from .rabbit import RabbitServer
from .redis import RedisServer, redis_data_key
from .session_servers import KINDS, NamedServer, SessionServers

__all__ = [
    "KINDS",
    "DatabasePool",
    "NamedServer",
    "PostgresServer",
    "PrivateServer",
    "Proxy",
    "RabbitServer",
    "RedisServer",
    "ServerFailed",
    "ServersMissing",
    "SessionServers",
    "own_database",
    "redis_data_key",
]
