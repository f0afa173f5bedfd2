"""The FastAPI application on the page for callers works. FastAPI itself is played by the test."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from code_blocks import code_blocks
from meshpoint import TaskExecutionContext, agent
from meshpoint.local import local_mesh

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "call-from-a-service.md"


@agent("travel")
async def travel(ctx: TaskExecutionContext, city: str) -> str:
    await ctx.status({"looking_for": city})
    return f"a flight to {city} for {ctx.a2a_context.requester}"


class FastAPI:
    """The part of FastAPI that the page uses."""

    def __init__(self, lifespan: Callable[[Any], Any]) -> None:
        self.lifespan = lifespan
        self.routes: dict[str, Callable[..., Any]] = {}

    def post(self, path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def add(route: Callable[..., Any]) -> Callable[..., Any]:
            self.routes[path] = route
            return route

        return add


class StreamingResponse:
    def __init__(self, content: Any, media_type: str) -> None:
        self.content, self.media_type = content, media_type


def load_application(monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    fastapi, responses = ModuleType("fastapi"), ModuleType("fastapi.responses")
    fastapi.__dict__.update(FastAPI=FastAPI, Request=SimpleNamespace)
    responses.__dict__.update(StreamingResponse=StreamingResponse)
    monkeypatch.setitem(sys.modules, "fastapi", fastapi)
    monkeypatch.setitem(sys.modules, "fastapi.responses", responses)
    (code,) = code_blocks(PAGE.read_text(encoding="utf-8"), "py")
    names: dict[str, Any] = {"__name__": "service"}
    exec(code, names)
    app = names["app"]
    assert isinstance(app, FastAPI)
    return app


async def test_the_application_answers_and_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/mesh.db"
    (tmp_path / "mesh.yaml").write_text(
        f"mesh: {{namespace: demo, broker_url: '{url}'}}", encoding="utf-8"
    )
    app = load_application(monkeypatch)
    async with local_mesh(travel, broker_url=url, namespace="demo"), app.lifespan(app) as state:
        request = SimpleNamespace(state=SimpleNamespace(**state))
        planned = await app.routes["/trips/{id}"]("1", "Rome", request)
        assert planned == "a flight to Rome for api"
        response = await app.routes["/trips/{id}/updates"]("2", "Oslo", request)
        assert response.media_type == "text/event-stream"
        events = [event async for event in response.content]
    names = [event.splitlines()[0] for event in events]
    assert names == ["event: status", "event: ended"]
    status, end = (json.loads(event.splitlines()[1].removeprefix("data: ")) for event in events)
    assert status["message"] == {"looking_for": "Oslo"}
    assert end["outcome"]["value"] == "a flight to Oslo for api"
