"""A replica with a database is registered there while it serves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from meshpoint._version import __version__
from meshpoint.adapters.sql import SqlStore
from meshpoint.model.events import Step
from meshpoint.model.replicas import ReplicaState
from meshpoint.model.tasks import plain_format
from meshpoint.settings import load
from meshpoint.wiring import serve
from recorded_events import RecordedEvents


async def test_a_replica_is_registered_while_it_serves(
    tmp_path: Path, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registering.py").write_text(
        "from meshpoint import agent\n"
        '@agent("echo")\n'
        "async def echo(ctx, text: str) -> str:\n"
        "    return text\n"
    )
    (tmp_path / "mesh.yaml").write_text(
        f"mesh: {{namespace: registered, broker_url: 'memory://', database_url: '{sqlite_url}'}}\n"
        "agent: {name: echo, entrypoint: 'registering:echo', max_concurrency: 7,"
        " app_version: '1.2'}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = load([tmp_path / "mesh.yaml"], env={})
    stop, events = asyncio.Event(), RecordedEvents()
    store = SqlStore(sqlite_url, namespace="registered")
    await store.open()
    serving = asyncio.create_task(serve(settings, observer=events, stop=stop))
    (started,) = await events.wait(Step.STARTED)
    while not (found := await store.replicas()):
        await asyncio.wait({serving}, timeout=0)
    (replica,) = found
    assert (replica.id, replica.agent) == (started.replica, "echo")
    assert (replica.state, replica.slots) == (ReplicaState.LIVE, 7)
    assert (replica.app_version, replica.release) == ("1.2", __version__)
    assert set(map(plain_format, replica.formats)) == {"echo/function/1"}
    stop.set()
    await serving
    assert await store.replicas() == []
    await store.close()
