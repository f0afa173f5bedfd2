"""A client that treats cookies and forms as a browser does, without a network."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlencode

import httpx

from meshpoint.dashboard.guard import TOKEN_FIELD

_TOKEN = re.compile(rf'name="{TOKEN_FIELD}" value="(\w+)"')


class Browser:
    """A client that keeps cookies and sends forms as a browser does."""

    def __init__(
        self, app: Any, *, host: str = "localhost:8400", client: str = "127.0.0.1"
    ) -> None:
        transport = httpx.ASGITransport(app=app, client=(client, 1))
        self._token = ""
        self.http = httpx.AsyncClient(transport=transport, base_url=f"http://{host}")

    async def get(self, path: str, /, **query: object) -> httpx.Response:
        return await self.http.get(_with_query(path, query))

    async def submit(
        self, path: str, fields: dict[str, Any] | None = None, /, **query: object
    ) -> httpx.Response:
        """Load a page, and send the form on it, or with the token of an earlier one."""
        url = _with_query(path, query)
        found = _TOKEN.search((await self.http.get(url)).text)
        self._token = found[1] if found else self._token
        data = {TOKEN_FIELD: self._token, **(fields or {})}
        return await self.http.post(url, data=data)


def _with_query(path: str, query: dict[str, object]) -> str:
    return f"{path}?{urlencode(query)}" if query else path
