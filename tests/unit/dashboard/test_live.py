"""Pages reach browsers when they change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dashboard.scene import NAMESPACE, Scene, call, respond, wait
from meshpoint.adapters.sql.operator_store import SqlOperatorStore
from meshpoint.dashboard import Dashboard, LocalAccess, live
from meshpoint.dashboard.live import EventStream, Live


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_INTERVAL", 0.0)


class Page:
    """A page that counts how often it is read."""

    def __init__(self) -> None:
        self.content, self.problem, self.reads = "one", "", 0
        self.read = asyncio.Event()

    async def render(self) -> tuple[str, str]:
        self.reads += 1
        self.read.set()
        return self.content, self.problem


async def next_events(stream: AsyncIterator[str]) -> str:
    """The next message of a stream that is no comment."""
    async for event in stream:
        if not event.startswith((":", "retry")):
            return event
    raise AssertionError("the stream has ended")


async def test_a_stream_has_the_page_at_once_and_after_each_change() -> None:
    page, hub = Page(), Live()
    stream = hub.stream("a", page.render, "ada")
    assert await next_events(stream) == ("event: problem\ndata: \n\nevent: content\ndata: one\n\n")
    page.content = "two\r\nlines\r"
    assert "event: content\ndata: two\ndata: lines\n\n" in await next_events(stream)
    page.content, page.problem = "", "away"
    assert "event: problem\ndata: away\n" in await next_events(stream)
    await stream.aclose()  # type: ignore[attr-defined]


async def test_browsers_with_the_same_page_share_its_reads() -> None:
    page, hub = Page(), Live()
    streams = [hub.stream("a", page.render, "ada") for _ in range(3)]
    for each in streams:
        await next_events(each)
    assert len(hub._watches) == 1
    for each in streams:
        await each.aclose()  # type: ignore[attr-defined]
    assert (hub._watches, hub._streams) == ({}, {})
    await asyncio.sleep(0)
    reads = page.reads
    page.read.clear()
    for _ in range(5):
        await asyncio.sleep(0)
    assert page.reads == reads, "nobody watches"


async def test_there_are_not_too_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_STREAMS", 1)
    page, hub = Page(), Live()
    stream = hub.stream("a", page.render, "ada")
    await next_events(stream)
    assert hub.is_full("bob")
    await stream.aclose()  # type: ignore[attr-defined]
    assert not hub.is_full("bob")


async def test_one_user_leaves_streams_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_STREAMS_OF_USER", 1)
    page, hub = Page(), Live()
    stream = hub.stream("a", page.render, "ada")
    await next_events(stream)
    assert (hub.is_full("ada"), hub.is_full("bob")) == (True, False)
    await stream.aclose()  # type: ignore[attr-defined]


async def test_many_pages_are_not_read_at_once() -> None:
    hub, reading, most = Live(), 0, 0

    async def render() -> tuple[str, str]:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        await asyncio.sleep(0)
        reading -= 1
        return "page", ""

    streams = [hub.stream(key, render, "ada") for key in range(20)]
    await asyncio.gather(*map(next_events, streams))
    for each in streams:
        await each.aclose()  # type: ignore[attr-defined]
    assert most == live._MAX_READS


async def test_a_browser_that_takes_nothing_loses_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "_SEND_SECONDS", 0.0)
    hub, never = Live(), asyncio.Event()

    async def wait(*_: object) -> dict[str, object]:
        await never.wait()
        return {}

    response = EventStream(hub.stream("a", Page().render, "ada"))
    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    await response(scope, wait, wait)  # type: ignore[arg-type]
    assert hub._streams == {}


async def test_a_stream_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_STREAM_SECONDS", 0.0)
    hub = Live()
    assert [event async for event in hub.stream("a", Page().render, "ada")] == ["retry: 1000\n\n"]


async def test_the_progress_of_a_task_reaches_the_browser(
    config: object, store: SqlOperatorStore, scene: Scene
) -> None:
    pause = await wait(store, "travel", call("flights"), call("hotels"))
    app = Dashboard(config, access=LocalAccess("ada"))  # type: ignore[arg-type]
    messages: asyncio.Queue[str] = asyncio.Queue()
    closed = asyncio.Event()

    async def receive() -> dict[str, object]:
        await closed.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.body":
            await messages.put(bytes(message["body"]).decode())  # type: ignore[call-overload]
        else:
            assert message["status"] == 200

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "path": f"/m/{NAMESPACE}/live/task",
        "raw_path": b"",
        "query_string": f"id={pause.run.task_id}".encode(),
        "root_path": "",
        "scheme": "http",
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    serving = asyncio.create_task(app(scope, receive, send))  # type: ignore[arg-type]

    async def wait_for(text: str) -> None:
        while text not in await messages.get():
            pass

    await wait_for("0 of 2")
    await respond(store, pause, "hotels")
    await wait_for("1 of 2")
    closed.set()
    await serving
    await app.aclose()
