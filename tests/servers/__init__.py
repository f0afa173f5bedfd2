"""PostgreSQL, RabbitMQ and Redis for tests: taken from the environment or started here.

A missing server fails a test; it never skips it silently.
"""

from .database import Databases, own_database
from .find import ServersMissing
from .fleet import KINDS, Fleet, NamedServer
from .postgres import PostgresServer
from .process import PrivateServer, ServerFailed
from .proxy import Proxy
from .rabbit import RabbitServer
from .redis import RedisServer, copy_key

__all__ = [
    "KINDS",
    "Databases",
    "Fleet",
    "NamedServer",
    "PostgresServer",
    "PrivateServer",
    "Proxy",
    "RabbitServer",
    "RedisServer",
    "ServerFailed",
    "ServersMissing",
    "copy_key",
    "own_database",
]
