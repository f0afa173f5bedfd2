"""The FastAPI application on the page for callers works, word for word and with FastAPI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from code_blocks import code_blocks
from meshpoint import TaskExecutionContext, agent
from meshpoint.local import local_mesh

found = asyncio.Event()
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "call-from-a-service.md"


@agent("travel")
async def travel(ctx: TaskExecutionContext, city: str) -> str:
    await ctx.update_status({"looking_for": city})
    await found.wait()
    return f"a flight to {city} for {ctx.a2a_context.requester}"


def load_application() -> FastAPI:
    (code,) = code_blocks(PAGE.read_text(encoding="utf-8"), "py")
    names: dict[str, Any] = {"__name__": "service"}
    exec(code, names)
    app = names["app"]
    assert isinstance(app, FastAPI)
    return app


@dataclass
class Event:
    """A server-sent event."""

    id: str
    event: str
    data: dict[str, Any]


class Stream:
    """A response that is read while the application still writes it, as httpx cannot do."""

    def __init__(self, app: Any, path: str, last: str | None = None) -> None:
        headers = [] if last is None else [(b"last-event-id", last.encode())]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
        }
        self.status, self.content_type = 0, ""
        self._left = asyncio.Event()
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._serving = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.content_type = dict(message["headers"])[b"content-type"].decode()
            return
        self._chunks.put_nowait(message.get("body", b""))
        if not message.get("more_body"):
            self._chunks.put_nowait(None)

    async def events(self) -> AsyncIterator[Event]:
        """The events of the stream, until it ends."""
        text = ""
        while (chunk := await self._chunks.get()) is not None:
            text += chunk.decode()
            while "\n\n" in text:
                block, _, text = text.partition("\n\n")
                lines = [line for line in block.splitlines() if not line.startswith(":")]
                fields = dict(line.split(": ", 1) for line in lines)
                if fields:
                    yield Event(fields["id"], fields["event"], json.loads(fields["data"]))

    async def leave(self) -> None:
        """Close the connection before the stream has ended."""
        self._left.set()
        await self._serving


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[Any]:
    """The application with the state of its lifespan, as a server serves it."""
    async with app.router.lifespan_context(app) as state:
        assert state is not None

        async def serve(scope: dict[str, Any], receive: Any, send: Any) -> None:
            await app(scope | {"state": dict(state)}, receive, send)

        yield serve


async def test_the_application_answers_and_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/mesh.db"
    (tmp_path / "mesh.yaml").write_text(
        f"mesh: {{namespace: demo, broker_url: '{url}'}}", encoding="utf-8"
    )
    async with (
        local_mesh(travel, broker_url=url, namespace="demo"),
        serving(load_application()) as app,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://api", timeout=None
        ) as client,
    ):
        started = await client.post("/trips/2", params={"city": "Oslo"})
        assert (started.status_code, started.json()) == (202, "trip-2")
        first = Stream(app, "/trips/2/updates")
        status = await anext(first.events())
        assert (first.status, first.content_type.split(";")[0]) == (200, "text/event-stream")
        await first.leave()
        found.set()
        assert (await client.get("/trips/2")).json() == "a flight to Oslo for api"
        again = Stream(app, "/trips/2/updates", last=status.id)
        (end,) = [event async for event in again.events()]
        whole = [event async for event in Stream(app, "/trips/2/updates").events()]
    assert (status.event, status.data["message"]) == ("status", {"looking_for": "Oslo"})
    assert (end.event, end.data["outcome"]["value"]) == ("ended", "a flight to Oslo for api")
    assert whole[-1].id == end.id
