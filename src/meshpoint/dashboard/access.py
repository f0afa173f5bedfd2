"""Who may open the dashboard, and who may change something there."""

from __future__ import annotations

import hmac
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from time import time
from typing import Protocol

from starlette.requests import HTTPConnection

from meshpoint.errors import ConfigurationError
from meshpoint.files import read_bounded

SESSION_COOKIE = "meshpoint_session"
SESSION_SECONDS = 12 * 3600
MIN_TOKEN_LENGTH = 20
_MAX_FILE_BYTES = 1_000_000
_NAME = re.compile(r"[\w@.+-]{1,64}")
_TOKEN_FIX = "write lines of NAME ROLE TOKEN, such as: ada operate 4f0c…"


class Role(StrEnum):
    """What a user may do."""

    VIEW = "view"
    OPERATE = "operate"  # also change tasks and dead letters


@dataclass(frozen=True, slots=True)
class User:
    """A person who uses the dashboard. The audit has the name."""

    name: str
    role: Role

    @property
    def can_operate(self) -> bool:
        """Whether the user may change tasks and dead letters."""
        return self.role is Role.OPERATE


class Access(Protocol):
    """Decides who the user of a request is.

    Attributes:
        secret: the key of the tokens in forms.
        has_login: whether people can log in with a token.
    """

    secret: bytes
    has_login: bool

    def identify(self, connection: HTTPConnection) -> User | None:
        """The user of a request, or `None` if it is refused."""

    def log_in(self, token: str) -> tuple[User, str] | None:
        """The user with this token and the value of the session's cookie, or `None`."""


_FORWARDING = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
"""Headers of requests that a proxy on this host passes on from elsewhere."""


class LocalAccess:
    """Everybody on this host has the same role. Requests from elsewhere are refused."""

    has_login = False

    def __init__(self, name: str, role: Role = Role.OPERATE) -> None:
        self.secret = secrets.token_bytes()
        self._user = User(name, role)

    def identify(self, connection: HTTPConnection) -> User | None:
        """The user, if the client is on this host."""
        client = connection.client
        if client is None or not is_loopback(client.host):
            return None
        is_forwarded = any(name in connection.headers for name in _FORWARDING)
        return None if is_forwarded else self._user

    def log_in(self, token: str) -> None:
        """No one logs in."""


class ProxyAccess:
    """A proxy authenticates people, and names them in a header.

    Args:
        header: The header with the name. The proxy must remove it from requests of its clients.
        proxies: The IP addresses of the proxy. Requests from elsewhere are refused.
        operators: The names that may change something. All others may only view.

    Raises:
        ConfigurationError: There is no header or no address.
    """

    has_login = False

    def __init__(
        self, header: str, proxies: Iterable[str], operators: Collection[str] = ()
    ) -> None:
        self.secret = secrets.token_bytes()
        self._header, self._operators = header, frozenset(operators)
        try:
            self._proxies = {ip_address(each) for each in proxies}
        except ValueError as error:
            raise ConfigurationError("proxy", str(error), "write 10.0.0.5") from error
        if not (header and self._proxies):
            problem = "a header names users, but not the proxy that sets it"
            raise ConfigurationError("proxy", problem, "give the proxy's IP address")

    def identify(self, connection: HTTPConnection) -> User | None:
        """The user that the proxy names."""
        names = connection.headers.getlist(self._header)
        client = connection.client
        if client is None or len(names) != 1 or not _NAME.fullmatch(names[0]):
            return None
        try:
            if ip_address(client.host) not in self._proxies:
                return None
        except ValueError:
            return None
        role = Role.OPERATE if names[0] in self._operators else Role.VIEW
        return User(names[0], role)

    def log_in(self, token: str) -> None:
        """No one logs in."""


class TokenAccess:
    """People log in with tokens of their own, and have a session in a cookie.

    The cookie is authenticated with the user's token: a changed or deleted token ends the
    sessions at the next start, on every process that has the same tokens.

    Args:
        users: Each token's user.

    Raises:
        ConfigurationError: There is no token, one is too short, or two users have the same name.
    """

    has_login = True

    def __init__(self, users: dict[str, User]) -> None:
        names = [user.name for user in users.values()]
        if not users or len(set(names)) < len(names):
            problem = "two users have the same name" if users else "there is no token"
            raise ConfigurationError("tokens", problem, _TOKEN_FIX)
        if any(len(token) < MIN_TOKEN_LENGTH for token in users):
            problem = f"a token has fewer than {MIN_TOKEN_LENGTH} characters"
            raise ConfigurationError("tokens", problem, "run: openssl rand -hex 24")
        self._tokens = {user.name: token.encode() for token, user in users.items()}
        self._users = {user.name: user for user in users.values()}
        self.secret = sha256(b"\0".join(sorted(self._tokens.values()))).digest()

    @classmethod
    def from_file(cls, path: Path | str, *, read_only: bool = False) -> TokenAccess:
        """Read the users from a file of lines `NAME ROLE TOKEN`. With `read_only`, all only view.

        Raises:
            ConfigurationError: A line is invalid, or others than the owner can read the file.
        """
        path = Path(path)
        try:
            content = read_bounded(path, _MAX_FILE_BYTES).decode()
            mode = path.stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(str(path), f"cannot be read: {error}", _TOKEN_FIX) from error
        if mode & 0o077:
            problem = "others than its owner can read it"
            raise ConfigurationError(str(path), problem, f"run: chmod 600 {path}")
        return cls.from_text(content, str(path), read_only=read_only)

    @classmethod
    def from_text(
        cls, content: str, key: str = "tokens", *, read_only: bool = False
    ) -> TokenAccess:
        """Read the users from lines `NAME ROLE TOKEN`. With `read_only`, all of them only view.

        Raises:
            ConfigurationError: A line is invalid. The message does not show its token.
        """
        users: dict[str, User] = {}
        for number, line in enumerate(content.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 3 or words[1] not in set(Role) or not _NAME.fullmatch(words[0]):
                raise ConfigurationError(f"{key}, line {number}", "is not a user", _TOKEN_FIX)
            if words[2] in users:
                raise ConfigurationError(
                    f"{key}, line {number}", "has the token of another user", _TOKEN_FIX
                )
            users[words[2]] = User(words[0], Role.VIEW if read_only else Role(words[1]))
        return cls(users)

    def identify(self, connection: HTTPConnection) -> User | None:
        """The user of the session in the cookie."""
        try:
            encoded, expires, mac = connection.cookies[SESSION_COOKIE].split(".")
            name = urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
            user = self._users[name]
            is_valid = hmac.compare_digest(mac, self._mac(user, expires)) and (
                int(expires) > time()
            )
        except (KeyError, ValueError, TypeError):
            return None
        return user if is_valid else None

    def log_in(self, token: str) -> tuple[User, str] | None:
        """The user with this token and the value of the session's cookie, or `None`."""
        given = sha256(token.encode("utf-8", "replace")).digest()
        found: User | None = None
        for name, known in self._tokens.items():  # all of them, so that the time says nothing
            if hmac.compare_digest(sha256(known).digest(), given):
                found = self._users[name]
        if found is None:
            return None
        expires = str(int(time()) + SESSION_SECONDS)
        encoded = urlsafe_b64encode(found.name.encode()).decode().rstrip("=")
        return found, f"{encoded}.{expires}.{self._mac(found, expires)}"

    def _mac(self, user: User, expires: str) -> str:
        text = f"session {user.role} {expires} {user.name}".encode()
        return hmac.new(self._tokens[user.name], text, sha256).hexdigest()


def form_token(access: Access, nonce: str, name: str) -> str:
    """The token that a form of the user `name` must send along with the cookie `nonce`."""
    return hmac.new(access.secret, f"form {nonce} {name}".encode(), sha256).hexdigest()


def is_loopback(host: str) -> bool:
    """Whether an address is this host's own. Names other than localhost are not."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
