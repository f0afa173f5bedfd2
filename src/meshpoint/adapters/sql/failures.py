"""What a driver's error means for the caller."""

from __future__ import annotations

import sqlite3
import sys
from enum import Enum, auto

from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from meshpoint.errors import ConfigurationError


class Failure(Enum):
    """What to do about an error."""

    RETRY = auto()  # the database rolled back in favour of another transaction
    UNAVAILABLE = auto()  # no connection, or a server that cannot work now
    BUG = auto()  # the statement is wrong


# The names of wrong credentials, database or role.
_REFUSED = ("28", "3D000", "42501")
# Classes of SQLSTATE: connection, resources, operator intervention, system error; a standby that cannot write; and
# what somebody changed and will change again: a login, a right, a table, a column. No task is to blame for those.
_UNAVAILABLE = ("08", "53", "57", "58", "25006", "55P03", "42P01", "42703", *_REFUSED)
# A prepared statement is missing or exists already: a pooler has switched to another server session.
_POOLER_SWITCHED = ("26000", "42P05")
_POOLER = "a connection pooler does not keep prepared statements"
_POOLER_FIX = "use PgBouncer 1.21 or later with max_prepared_statements above 0, or pool_mode = session"
_ALREADY_EXISTS = ("42P07", "42701", "42710")
_ALREADY_EXISTS_SQLITE = "already exists"
_RETRY = ("40001", "40P01", "23505")
_UNAVAILABLE_SQLITE = ("SQLITE_IOERR", "SQLITE_FULL", "SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PROTOCOL")
_RETRY_SQLITE = ("SQLITE_BUSY", "SQLITE_LOCKED")


def driver_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Errors from SQLAlchemy, its pool and the drivers in use, and `others`.

    SQLAlchemy 2.0 does not wrap a refused connection, and the driver's timeout is an `OSError`.
    """
    return (*others, DBAPIError, PoolTimeout, OSError, *_asyncpg("PostgresError", "InterfaceError"))


def classify(error: BaseException) -> Failure:
    """What `error` means when it came before COMMIT was sent."""
    if isinstance(error, OSError | PoolTimeout):
        return Failure.UNAVAILABLE
    state, sqlite = _sqlstate(error), _sqlite_name(error)
    # Two transactions wrote the first row of one task: the second finds it when it is repeated.
    if state.startswith(_RETRY) or sqlite.startswith(_RETRY_SQLITE) or "cached statement plan" in str(error):
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
    """Whether a pooler has switched this connection to another server session. The statement did not run."""
    return _sqlstate(error) in _POOLER_SWITCHED


def is_duplicate(error: BaseException) -> bool:
    """Whether a row with this key was there already."""
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

    PostgreSQL names the row in the error's context, except when the statement queued behind another waiter.
    """
    return is_lock_timeout(error) and bool(getattr(_driver_error(error), "context", None))


def is_stale(error: BaseException) -> bool:
    """Whether the connection broke, as one does that was pooled while its server restarted."""
    return isinstance(error, DBAPIError) and error.connection_invalidated


def certainly_rolled_back(error: BaseException) -> bool:
    """Whether an error that answered COMMIT is the database's word that nothing was written."""
    if not isinstance(error, DBAPIError):
        return False
    state = _sqlstate(error)
    conflict = state[:2] in {"40", "23"} and state != "40003"
    return conflict or isinstance(error, IntegrityError) or _sqlite_name(error).startswith(_RETRY_SQLITE)


def as_configuration_error(error: BaseException | None) -> ConfigurationError | None:
    """Convert the database's refusal of the URL's user or database name to a configuration error."""
    if error is None:
        return None
    if _sqlite_name(error) == "SQLITE_NOTADB":
        return ConfigurationError(
            "session_db_url", "the file is there and is no SQLite database", "name another file"
        )
    if _is_misconfigured(error):
        return ConfigurationError(
            "session_db_url", f"cannot be used: {summarize(_dbapi_error(error))}", "correct the URL"
        )
    if is_pooler_switch(error):
        return ConfigurationError("session_db_url", _POOLER, _POOLER_FIX)
    if _sqlstate(error).startswith(_REFUSED):
        return ConfigurationError("session_db_url", f"the database refused: {_dbapi_error(error)}", "correct the URL")
    return None


def summarize(error: BaseException) -> str:
    """The driver's own words, on one line."""
    cause = _dbapi_error(error)
    said = str(cause) or ("no answer in time" if isinstance(cause, TimeoutError) else "no reason given")
    words = f"{type(cause).__name__}: {said}".splitlines()[0]
    return f"{words}: {_POOLER}; {_POOLER_FIX}" if is_pooler_switch(error) else words


def _is_misconfigured(error: BaseException) -> bool:
    # SQLAlchemy may have wrapped the driver's error.
    cause = _dbapi_error(error)
    return isinstance(cause, kinds := _asyncpg("ClientConfigurationError")) or isinstance(cause.__cause__, kinds)


def _asyncpg(*names: str) -> tuple[type[Exception], ...]:
    """Exception classes of asyncpg. Empty if it is not loaded: then nothing can raise them."""
    module = sys.modules.get("asyncpg")
    return tuple(kind for name in names if (kind := getattr(module, name, None)) is not None)


def _is_misuse(error: BaseException) -> bool:
    # A value that a driver could not encode; neither driver gives such errors a code.
    cause = _dbapi_error(error)
    return isinstance(cause, ValueError | sqlite3.Error) or isinstance(cause.__cause__, ValueError)


def _driver_error(error: BaseException) -> BaseException:
    """Unwrap the driver's error."""
    original = _dbapi_error(error)
    return original.__cause__ if original is not error and original.__cause__ is not None else original


def _dbapi_error(error: BaseException) -> BaseException:
    return getattr(error, "orig", None) or error


def _sqlstate(error: BaseException) -> str:
    return str(getattr(_dbapi_error(error), "sqlstate", None) or "")


def _sqlite_name(error: BaseException) -> str:
    return str(getattr(_dbapi_error(error), "sqlite_errorname", None) or "")
