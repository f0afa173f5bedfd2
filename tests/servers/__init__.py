"""PostgreSQL, RabbitMQ and Redis for tests: taken from the environment or started here.

A missing server fails a test; it never skips it silently.
"""

from .database import DatabasePool, create_database, drop_database, own_database, url_on
from .locate import ServersMissing
from .postgres import PostgresServer
from .process import PrivateServer, ServerFailed
from .proxy import Proxy
from .rabbit import RabbitServer
from .redis import REDIS_LIMIT, RedisServer, redis_client, redis_data_key
from .session_servers import KINDS, NamedServer, SessionServers

__all__ = [
    "KINDS",
    "REDIS_LIMIT",
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
    "create_database",
    "drop_database",
    "own_database",
    "redis_client",
    "redis_data_key",
    "url_on",
]
