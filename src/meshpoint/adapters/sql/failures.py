"""Classification of database drivers' errors by what the caller does next."""

from __future__ import annotations

import sqlite3
import sys
from enum import Enum, auto

from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from meshpoint.errors import ConfigurationError


class Failure(Enum):
    """How to handle an error."""

    RETRY = auto()  # the database rolled back in favor of another transaction
    UNAVAILABLE = auto()  # no connection, or the server cannot execute statements now
    BUG = auto()  # the statement or a value is wrong


# Wrong credentials, a missing database, or missing privileges.
_REFUSED = ("28", "3D000", "42501")
# Connection, resources, operator intervention and system errors; a standby, which cannot write; a
# lock timeout. A missing table, column, login or privilege counts too: an administrator changed it
# and is expected to restore it, and no task caused it.
_UNAVAILABLE = ("08", "53", "57", "58", "25006", "55P03", "42P01", "42703", *_REFUSED)
# A prepared statement is missing or exists already: a pooler has switched to another server
# session.
_POOLER_SWITCHED = ("26000", "42P05")
_POOLER = "a connection pooler does not keep prepared statements"
_POOLER_FIX = (
    "use PgBouncer 1.21 or later with max_prepared_statements above 0, or pool_mode = session"
)
DISK_FULL_FIX = "make room on the disk of the database"
_ALREADY_EXISTS = ("42P07", "42701", "42710")
_ALREADY_EXISTS_SQLITE = "already exists"
"""Part of the message: the error code of SQLite is SQLITE_ERROR, as for any wrong statement."""
_RETRY = ("40001", "40P01", "23505")
_UNAVAILABLE_SQLITE = (
    "SQLITE_IOERR",
    "SQLITE_FULL",
    "SQLITE_CANTOPEN",
    "SQLITE_READONLY",
    "SQLITE_PROTOCOL",
)
_RETRY_SQLITE = ("SQLITE_BUSY", "SQLITE_LOCKED")


def driver_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Exception classes of SQLAlchemy, its pool and the loaded drivers, and `others`.

    `OSError` is among them, because SQLAlchemy 2.0 does not wrap a refused connection, and the
    driver's timeout is an `OSError`. `InternalClientError` is what asyncpg raises for a connection
    that ends while it is set up, and if no host has the role that the URL asks for.
    """
    return (
        *others,
        DBAPIError,
        PoolTimeout,
        OSError,
        *_asyncpg("PostgresError", "InterfaceError", "InternalClientError"),
    )


def classify(error: BaseException) -> Failure:
    """Classify an error that occurred before COMMIT was sent."""
    if isinstance(error, OSError | PoolTimeout):
        return Failure.UNAVAILABLE
    state, sqlite = _sqlstate(error), _sqlite_name(error)
    # A duplicate key is retried: two transactions inserted the row of one task, and the second one
    # finds it when it is repeated.
    if state.startswith(_RETRY) or sqlite.startswith(_RETRY_SQLITE) or _is_outdated_plan(error):
        return Failure.RETRY
    if (
        is_stale(error)
        or is_pooler_switch(error)
        or state.startswith(_UNAVAILABLE)
        or sqlite.startswith(_UNAVAILABLE_SQLITE)
    ):
        return Failure.UNAVAILABLE
    return Failure.BUG if state or sqlite or _is_misuse(error) else Failure.UNAVAILABLE


def is_pooler_switch(error: BaseException) -> bool:
    """Whether a pooler switched to another server session, so that the statement did not run."""
    return _sqlstate(error) in _POOLER_SWITCHED


def is_read_only(error: BaseException) -> bool:
    """Whether the server is a standby, or has become one: another connection may find the primary.

    Nothing was written.
    """
    return _sqlstate(error) == "25006"


def is_duplicate(error: BaseException) -> bool:
    """Whether a row with this key already exists."""
    return _sqlstate(error) == "23505"


def is_already_exists(error: BaseException) -> bool:
    """Whether a statement tried to create a table, column, index or type that already exists."""
    return _sqlstate(error) in _ALREADY_EXISTS or (
        bool(_sqlite_name(error)) and _ALREADY_EXISTS_SQLITE in str(_dbapi_error(error))
    )


def is_lock_timeout(error: BaseException) -> bool:
    """Whether waiting for a lock timed out."""
    return _sqlstate(error) == "55P03"


def is_row_lock_timeout(error: BaseException) -> bool:
    """Whether the statement waited for another transaction's row lock rather than a table lock.

    PostgreSQL names the row in the error's context, except when the statement queued behind
    another waiter.
    """
    return is_lock_timeout(error) and bool(getattr(_driver_error(error), "context", None))


def is_stale(error: BaseException) -> bool:
    """Whether the connection broke, for example in a server restart since its last use."""
    return is_broken(error) or (isinstance(error, DBAPIError) and error.connection_invalidated)


def is_broken(error: BaseException) -> bool:
    """Whether the driver has lost track of the connection's state."""
    return isinstance(_driver_error(error), _asyncpg("InternalClientError"))


def certainly_rolled_back(error: BaseException) -> bool:
    """Whether an error in response to COMMIT proves that nothing was written."""
    if not isinstance(error, DBAPIError):
        return False
    state = _sqlstate(error)
    conflict = state[:2] in {"40", "23"} and state != "40003"
    return (
        conflict
        or isinstance(error, IntegrityError)
        or _sqlite_name(error).startswith(_RETRY_SQLITE)
    )


def is_disk_full(error: BaseException) -> bool:
    """Whether the server has no space left on a disk."""
    return _sqlstate(error) == "53100"


def is_deadlock(error: BaseException) -> bool:
    """Whether the database rolled the transaction back to end a deadlock."""
    return _sqlstate(error) == "40P01"


def as_configuration_error(error: BaseException | None) -> ConfigurationError | None:
    """A configuration error if the database refused the URL's user, name or file, else `None`."""
    if error is None:
        return None
    if _sqlite_name(error) == "SQLITE_NOTADB":
        return ConfigurationError(
            "database", "the file exists but is not a SQLite database", "name another file"
        )
    if _is_misconfigured(error):
        return ConfigurationError(
            "database",
            f"cannot be used: {summarize(_dbapi_error(error))}",
            "correct the URL",
        )
    if is_pooler_switch(error):
        return ConfigurationError("database", _POOLER, _POOLER_FIX)
    if _sqlstate(error).startswith(_REFUSED):
        return ConfigurationError(
            "database", f"the database refused: {_dbapi_error(error)}", "correct the URL"
        )
    return None


def summarize(error: BaseException) -> str:
    """The type and message of the driver's error, on one line."""
    cause = _dbapi_error(error)
    said = str(cause) or (
        "no answer in time" if isinstance(cause, TimeoutError) else "no reason given"
    )
    words = f"{type(cause).__name__}: {said}".splitlines()[0]
    if is_disk_full(error):
        return f"{words}; {DISK_FULL_FIX}"
    return f"{words}: {_POOLER}; {_POOLER_FIX}" if is_pooler_switch(error) else words


def _is_misconfigured(error: BaseException) -> bool:
    # SQLAlchemy may wrap the driver's error.
    cause = _dbapi_error(error)
    return isinstance(cause, kinds := _asyncpg("ClientConfigurationError")) or isinstance(
        cause.__cause__, kinds
    )


def _asyncpg(*names: str) -> tuple[type[Exception], ...]:
    """Exception classes of asyncpg. Empty if it is not loaded, since nothing raises them then."""
    module = sys.modules.get("asyncpg")
    return tuple(kind for name in names if (kind := getattr(module, name, None)) is not None)


def _is_outdated_plan(error: BaseException) -> bool:
    """Whether a migration changed a table after the statement on it was prepared."""
    return isinstance(_driver_error(error), _asyncpg("InvalidCachedStatementError"))


def _is_misuse(error: BaseException) -> bool:
    # Neither driver gives an error code when it cannot encode a value.
    cause = _dbapi_error(error)
    return isinstance(cause, ValueError | sqlite3.Error) or isinstance(cause.__cause__, ValueError)


def _driver_error(error: BaseException) -> BaseException:
    """The error as the driver raised it, without the wrappers of SQLAlchemy and its adapter."""
    original = _dbapi_error(error)
    return (
        original.__cause__
        if original is not error and original.__cause__ is not None
        else original
    )


def _dbapi_error(error: BaseException) -> BaseException:
    return getattr(error, "orig", None) or error


def _sqlstate(error: BaseException) -> str:
    return str(getattr(_dbapi_error(error), "sqlstate", None) or "")


def _sqlite_name(error: BaseException) -> str:
    return str(getattr(_dbapi_error(error), "sqlite_errorname", None) or "")
