"""Checks each request before a page sees it, and adds security headers to each response."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Collection
from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import parse_qs, quote, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshpoint.dashboard.access import Access, User, form_token

NONCE_COOKIE = "meshpoint_form"
TOKEN_FIELD = "form_token"
_MAX_FORM_BYTES = 1_000_000
_MAX_FIELDS = 1_000
_OPEN_PATHS = ("/login", "/healthz")
_READING = {"GET", "HEAD"}
_SAME_SITE = {"same-origin", "none"}

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with `no-referrer`, forms would have no Origin
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class Guard:
    """Middleware between the network and the pages.

    It refuses hosts that the dashboard is not known by (DNS rebinding), people without access,
    posts from other sites, posts without the token of a form, and posts of people who may only
    view. What passes has a user and a form token in its state.

    Args:
        app: The pages.
        access: Who may do what.
        hosts: The names by which browsers reach the dashboard, besides IP addresses and localhost.
        secure: Whether browsers reach it by HTTPS, so that cookies must not go elsewhere.
    """

    def __init__(
        self, app: ASGIApp, access: Access, hosts: Collection[str], *, secure: bool
    ) -> None:
        self._app, self._access, self._secure = app, access, secure
        self._hosts = frozenset(each.lower() for each in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        nonce = request.cookies.get(NONCE_COOKIE, "")
        is_new = not nonce
        nonce = nonce or secrets.token_urlsafe(16)

        # Routers change the scope before there is a response.
        root, is_static = scope.get("root_path", ""), _path(scope).startswith("/static/")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("Cache-Control", "no-cache" if is_static else "no-store")
                self._add_headers(headers)
                if is_new and not is_static:
                    self._set_nonce(headers, nonce, root or "/")
            await send(message)

        response = await self._check(request, nonce)
        await (response or self._app)(scope, receive, send_with_headers)

    async def _check(self, request: Request, nonce: str) -> Response | None:
        """The response that refuses a request, or `None`."""
        path = _path(request.scope)
        if not self._is_known_host(request.headers.get("host", "")):
            return _refuse(
                HTTPStatus.MISDIRECTED_REQUEST,
                "unknown host name: start the dashboard with --allow-host NAME to use it by name",
            )
        if "\0" in path or "%00" in request.url.query:
            return _refuse(HTTPStatus.BAD_REQUEST, "a name with a null character")
        user = self._access.identify(request)
        request.state.user = user
        request.state.form_token = form_token(self._access, nonce, user.name if user else "")
        if path.startswith("/static/") or path == "/healthz":
            return None if request.method in _READING else _refuse(HTTPStatus.METHOD_NOT_ALLOWED)
        if request.method == "POST":
            return await self._check_post(request, path, user)
        if request.method not in _READING:
            return _refuse(HTTPStatus.METHOD_NOT_ALLOWED)
        if user is None and path not in _OPEN_PATHS:
            return self._ask_to_log_in(request, path)
        return None

    async def _check_post(self, request: Request, path: str, user: User | None) -> Response | None:
        if not _is_same_origin(request):
            return _refuse(HTTPStatus.FORBIDDEN, "this form was sent by another site")
        if user is None and path not in _OPEN_PATHS:
            return _refuse(HTTPStatus.FORBIDDEN, "log in first")
        form = await _read_form(request)
        if form is None:
            return _refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the form is too large")
        request.state.form = form
        given = form.get(TOKEN_FIELD, [""])[0]
        expected: str = request.state.form_token
        if not hmac.compare_digest(given.encode(), expected.encode()):
            return _refuse(HTTPStatus.FORBIDDEN, "the form has expired: go back and reload it")
        if path not in {*_OPEN_PATHS, "/logout"} and not (user and user.can_operate):
            return _refuse(HTTPStatus.FORBIDDEN, "you may only view: ask for the role operate")
        return None

    def _ask_to_log_in(self, request: Request, path: str) -> Response:
        if not self._access.has_login:
            return _refuse(HTTPStatus.FORBIDDEN, "you have no access to this dashboard")
        query = f"?{request.url.query}" if request.url.query else ""
        root = request.scope.get("root_path", "")
        return RedirectResponse(
            f"{root}/login?next={quote(path + query, safe='')}", HTTPStatus.SEE_OTHER
        )

    def _is_known_host(self, host: str) -> bool:
        """Whether a page of another site cannot have this host name.

        An address that such a page resolves to this host still has the name of that site.
        """
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower().rstrip(".")
        except ValueError:
            return False
        if name == "localhost" or name in self._hosts:
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True

    def _add_headers(self, headers: MutableHeaders) -> None:
        for name, value in _HEADERS.items():
            headers[name] = value
        if self._secure:
            headers["Strict-Transport-Security"] = "max-age=31536000"

    def _set_nonce(self, headers: MutableHeaders, nonce: str, path: str) -> None:
        secure = "; Secure" if self._secure else ""
        cookie = f"{NONCE_COOKIE}={nonce}; Path={path}; HttpOnly; SameSite=Strict{secure}"
        headers.append("Set-Cookie", cookie)


def _path(scope: Scope) -> str:
    """The path below the place where the dashboard is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if root else path


def _is_same_origin(request: Request) -> bool:
    """Whether a page of this dashboard sent a post, as far as the browser says."""
    site = request.headers.get("sec-fetch-site")
    if site is not None and site not in _SAME_SITE:
        return False
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")


async def _read_form(request: Request) -> dict[str, list[str]] | None:
    """The fields of a posted form; `None` if it is too large."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_FORM_BYTES:
            return None
    try:
        return parse_qs(
            body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=_MAX_FIELDS
        )
    except ValueError:
        return None


def _refuse(status: HTTPStatus, text: str = "") -> Response:
    return PlainTextResponse(text or status.phrase, status)
