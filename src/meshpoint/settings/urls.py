"""Validate the URLs of databases and brokers, and resolve relative files."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from meshpoint import extras
from meshpoint.errors import ConfigurationError

_DATABASE_FIX = "use postgresql://user@host/name, or sqlite:///meshpoint.db on one host"
_BROKER_FIX = (
    "use amqp://user:password@host/ (RabbitMQ), postgresql://user@host/name, or"
    " sqlite:///meshpoint.db on one host"
)
_MAX_URL_LENGTH = 4096  # characters
_DATABASE_SCHEMES = ("postgresql", "postgresql+asyncpg", "sqlite", "sqlite+aiosqlite")
_BROKER_SCHEMES = ("amqp", "amqps", "postgresql", "postgresql+asyncpg", "sqlite", "memory")
_UNSUPPORTED_NAMES = {
    "mysql": "MySQL",
    "mariadb": "MariaDB",
    "mssql": "SQL Server",
    "oracle": "Oracle",
    "redis": "Redis",
}
_DRIVERS = {"postgresql": extras.POSTGRESQL, "amqp": extras.RABBITMQ, "amqps": extras.RABBITMQ}


def database_url(url: str, key: str) -> str:
    """Validate `url` and resolve a relative SQLite file against the working directory.

    Raises:
        ConfigurationError: It is neither PostgreSQL nor a SQLite file. The message never contains
            the URL, which may contain a password.
    """
    scheme = _validate_scheme(url, key, _DATABASE_SCHEMES, _DATABASE_FIX)
    return _resolve_file(url, key) if scheme.startswith("sqlite") else url


def broker_url(url: str, key: str) -> str:
    """Validate `url` and resolve a relative SQLite file against the working directory.

    Raises:
        ConfigurationError: It is not a supported broker.
    """
    scheme = _validate_scheme(url, key, _BROKER_SCHEMES, _BROKER_FIX)
    if scheme == "sqlite" and "?" in url:
        raise ConfigurationError(key, "takes no options after '?'", "write sqlite:///meshpoint.db")
    return _resolve_file(url, key) if scheme == "sqlite" else url


def require_driver(url: str, key: str) -> None:
    """Check that the driver for `url` is installed, without importing it.

    Raises:
        ConfigurationError: The driver is missing. The message names the extra.
    """
    driver = _DRIVERS.get(url.partition(":")[0].partition("+")[0])
    if driver is not None:
        driver.require(key)


def redact_url(url: str) -> str:
    """Return `url` without its password and its options, which may also contain one."""
    scheme, mark, rest = url.partition("://")
    rest, _, options = rest.partition("?")
    if "@" in options and "@" not in rest:  # the `?` may be part of the password
        return f"{scheme}{mark}…"
    credentials, at, location = rest.rpartition("@")
    user = credentials.partition(":")[0]
    return f"{scheme}{mark}{user}{at}{location}"


def _validate_scheme(url: str, key: str, accepted: tuple[str, ...], fix: str) -> str:
    scheme, colon, _ = url.partition("://")
    if not colon:
        raise ConfigurationError(key, "is not a URL", fix)
    if not url.isprintable() or len(url) > _MAX_URL_LENGTH:
        problem = f"has unprintable characters or more than {_MAX_URL_LENGTH} characters"
        raise ConfigurationError(key, problem, fix)
    if scheme not in accepted:
        name = _UNSUPPORTED_NAMES.get(scheme.partition("+")[0], f"the scheme {scheme!r}")
        raise ConfigurationError(key, f"{name} is not supported", fix)
    if not scheme.startswith(("sqlite", "memory")):
        _check_server(url, key, fix)
    return scheme


def _check_server(url: str, key: str, fix: str) -> None:
    """Check host and port, which drivers parse late and with unclear errors."""
    if " " in url:
        raise ConfigurationError(key, "has a space", "write %20 instead")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:  # its message may contain the password
        raise ConfigurationError(key, "has an invalid host or port", fix) from error
    if port == 0:
        raise ConfigurationError(key, "has port 0", fix)
    try:
        (parts.hostname or "").encode("idna").decode("idna")
    except UnicodeError as error:
        raise ConfigurationError(
            key, f"{parts.hostname!r:.80} is not a valid host name", fix
        ) from error


def _resolve_file(url: str, key: str) -> str:
    scheme, _, rest = url.partition("://")
    file, separator, query = rest.partition("?")
    if "%00" in file:
        raise ConfigurationError(
            key, "contains a NUL character", f"write {scheme}:///meshpoint.db"
        )
    if not file.startswith("/"):
        example = (
            file if file and "@" not in file else "meshpoint.db"
        )  # text before an @ may contain a password
        problem = "needs three slashes before its file" if file else "does not name a file"
        raise ConfigurationError(key, problem, f"write {scheme}:///{example}")
    if file in {"/", "/:memory:"}:
        raise ConfigurationError(key, "does not name a file", f"write {scheme}:///meshpoint.db")
    return f"{scheme}:///{Path.cwd() / file[1:]}{separator}{query}"
