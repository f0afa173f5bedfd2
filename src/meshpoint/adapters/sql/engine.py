"""SQLAlchemy engines for PostgreSQL and SQLite, with the session settings that the store needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, event
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from meshpoint import extras
from meshpoint.errors import ConfigurationError
from meshpoint.files import create_private

MAX_ATTEMPTS = 5
"""Maximum attempts of a transaction that conflicts with others."""

TRANSACTION_TIMEOUT = timedelta(seconds=10)
"""How long a process may be idle in a transaction before PostgreSQL frees its locks."""

_SET_CONFIG = """
SELECT set_config(name, value, false) FROM unnest($1::text[], $2::text[]) AS given(name, value)
 WHERE pg_backend_pid() = $3::int
   AND (name <> 'synchronous_commit' OR current_setting('synchronous_commit') IN ('off', 'local'))
"""

LOCK_TIMEOUT = timedelta(seconds=1)
"""How long a statement waits for a lock.

Replicas hold locks only for one commit. A longer lock belongs to an open transaction of another
program, so the step is repeated without the locked rows.
"""

_SQLITE_BUSY_MS = 8
"""How long SQLite itself waits for a lock; after that, the store repeats the statement.

SQLite's own pauses grow to 100 ms (`sqliteDefaultBusyCallback` in main.c), so a connection that
waits longer rarely gets a contended lock.
"""

_SQLITE_CACHE_KIB = 512
"""A quarter of the default.

The writes of other connections empty the cache, and a long log that is read through a small one
stays in the processor's own caches.
"""

FAST_PATH_CONNECTIONS = 6
"""Connections that a store on PostgreSQL keeps for its fast path, in addition to its pool."""

_FIX = "use postgresql://user@host/name, or sqlite:///meshpoint.db on one host"
_POSTGRES_OPTIONS = frozenset(
    {"host", "port", "ssl", "sslmode", "passfile", "target_session_attrs", "krbsrvname", "gsslib"}
)
_SQLITE_OPTIONS = frozenset({"timeout"})
_SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_DRIVERS = {
    "postgresql": "postgresql+asyncpg",
    "postgres": "postgresql+asyncpg",
    "sqlite": "sqlite+aiosqlite",
}


def async_url(url: str) -> URL:
    """Parse `url` and set the driver that Meshpoint uses.

    Raises:
        ConfigurationError: The URL names neither PostgreSQL nor a SQLite file, has an unknown or
            invalid option, or needs a driver that is not installed.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ConfigurationError("database", "is not a database URL", _FIX) from error
    name = parsed.drivername
    if name not in {*_DRIVERS, *_DRIVERS.values()}:
        raise ConfigurationError("database", f"{name!r} is not supported", _FIX)
    if name.startswith("sqlite") and (parsed.database or ":memory:") == ":memory:":
        raise ConfigurationError("database", "names no file", _FIX)
    _check_options(parsed, _SQLITE_OPTIONS if name.startswith("sqlite") else _POSTGRES_OPTIONS)
    if "sslmode" in parsed.query:  # libpq's name for the option
        parsed = parsed.difference_update_query(["sslmode"]).update_query_dict(
            {"ssl": parsed.query["sslmode"]}
        )
    if parsed.get_backend_name() == "postgresql":
        extras.POSTGRESQL.require("database")
    return parsed.set(drivername=_DRIVERS.get(name, name))


def _check_options(url: URL, known: frozenset[str]) -> None:
    """Reject options unknown to the driver, which would raise `TypeError` for each connection."""
    for name, value in url.query.items():
        if name not in known:
            problem = f"has the unknown option {name!r:.80}"
            raise ConfigurationError("database", problem, f"use {', '.join(sorted(known))}")
        if name in {"ssl", "sslmode"} and value not in _SSL_MODES:
            raise ConfigurationError(
                "database", f"has no such {name}", f"use {', '.join(_SSL_MODES)}"
            )
        numbers = [value] if isinstance(value, str) else value
        if name in {"port", "timeout"} and not all(each.isdecimal() for each in numbers):
            raise ConfigurationError("database", f"has a {name} that is not a whole number", _FIX)


def engine_for(
    url: str,
    *,
    command_timeout: timedelta,
    transaction_timeout: timedelta = TRANSACTION_TIMEOUT,
    lock_timeout: timedelta = LOCK_TIMEOUT,
    pool_size: int,
    in_key_order: bool = False,
) -> AsyncEngine:
    """Create an engine whose connections are in autocommit mode.

    The store sends BEGIN and COMMIT itself. It therefore knows when COMMIT was sent, and returning
    a connection to the pool costs no ROLLBACK. `in_key_order` is for queues: PostgreSQL reads
    messages in the order of their keys, even if it expects so few that sorting would be cheaper.
    """
    parsed = async_url(url)
    if parsed.get_backend_name() == "sqlite":
        engine = create_async_engine(parsed, **_sqlite_options(command_timeout))
        _prepare_sqlite(engine.sync_engine, command_timeout)
        return engine
    return _postgres(
        parsed,
        command_timeout,
        transaction_timeout,
        lock_timeout,
        pool_size,
        {"enable_bitmapscan": "off", "enable_sort": "off"} if in_key_order else {},
    )


def _postgres(
    url: URL,
    command_timeout: timedelta,
    transaction_timeout: timedelta,
    lock_timeout: timedelta,
    pool_size: int,
    more_settings: Mapping[str, str],
) -> AsyncEngine:
    seconds = command_timeout.total_seconds()
    session = {
        # A process that freezes inside a transaction would keep its row locks and block its tasks.
        "idle_in_transaction_session_timeout": str(
            math.ceil(transaction_timeout.total_seconds() * 1000)
        ),
        # All statements look up rows by key, so a plan for a small table also fits a large one.
        "plan_cache_mode": "force_generic_plan",
        "enable_seqscan": "off",
        "jit": "off",
        "application_name": "meshpoint",  # for people who look at the sessions of a server
    }
    engine = create_async_engine(
        url,
        isolation_level="AUTOCOMMIT",
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=seconds,
        pool_reset_on_return=None,
        skip_autocommit_rollback=True,
        pool_use_lifo=True,
        connect_args={
            "timeout": min(seconds, 10.0),
            "command_timeout": seconds,
            "server_settings": session,
        },
    )
    settings = {
        # Overrides the defaults of the server, the database and the role.
        "default_transaction_isolation": "read committed",
        "default_transaction_read_only": "off",
        "standard_conforming_strings": "on",
        "statement_timeout": str(math.ceil(seconds * 1000)),
        # One locked row must not delay the other statements of a connection.
        "lock_timeout": str(math.ceil(lock_timeout.total_seconds() * 1000)),
        # A COMMIT must be on disk before it is acknowledged. Stricter values are kept.
        "synchronous_commit": "on",
        **more_settings,
    }

    @event.listens_for(engine.sync_engine, "connect")
    def prepare(connection: Any, record: object) -> None:
        # Does nothing if a pooler shares the session with others.
        connection.run_async(
            lambda driver: driver.fetch(
                _SET_CONFIG, list(settings), list(settings.values()), driver.get_server_pid()
            )
        )

    return engine


def sqlite_engine(url: str, command_timeout: timedelta) -> Engine:
    """Create an engine for a SQLite file with one connection, and `sqlite3` as its driver."""
    engine = create_engine(
        async_url(url).set(drivername="sqlite+pysqlite"),
        connect_args={"check_same_thread": False},
        **_sqlite_options(command_timeout),
    )
    _prepare_sqlite(engine, command_timeout)
    return engine


def _sqlite_options(command_timeout: timedelta) -> dict[str, Any]:
    return {
        "isolation_level": "AUTOCOMMIT",
        "pool_size": 1,
        "max_overflow": 0,
        "pool_timeout": command_timeout.total_seconds(),
        "pool_reset_on_return": None,
        "skip_autocommit_rollback": True,
    }


def _prepare_sqlite(engine: Engine, command_timeout: timedelta) -> None:
    make_files_private(engine)
    opening_ms = math.ceil(command_timeout / MAX_ATTEMPTS / timedelta(milliseconds=1))

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, record: object) -> None:
        cursor = connection.cursor()
        busy = f"busy_timeout = {_SQLITE_BUSY_MS}"
        for pragma in (
            f"busy_timeout = {opening_ms}",
            "journal_mode = WAL",
            "synchronous = FULL",
            "foreign_keys = ON",  # off by default, and set for each connection
            f"cache_size = -{_SQLITE_CACHE_KIB}",
            busy,
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()


def _require_regular_file(path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigurationError("database", f"there is no folder {path.parent}", "create it")
    if path.exists() and not path.is_file():
        raise ConfigurationError("database", f"{path} is not a regular file", "name another file")


def make_files_private(engine: Engine) -> None:
    """Make a SQLite file that `engine` creates accessible only to its owner.

    SQLite gives the WAL and shared-memory files the same permissions.
    """

    @event.listens_for(engine, "do_connect")
    def create(
        dialect: object, record: object, arguments: list[Any], options: dict[str, Any]
    ) -> None:
        path = str(arguments[0] if arguments else options.get("database", ""))
        if not path.startswith("file:"):
            _require_regular_file(Path(path))
            try:
                create_private(Path(path))
            except FileExistsError as error:
                raise ConfigurationError("database", str(error), "name another file") from error
            except OSError:
                return  # SQLite has the better error message
