"""A connection that fails is retried, and the outage is reported at intervals."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from itertools import repeat
from typing import Any

import pytest
from yarl import URL

from meshpoint.adapters.rabbitmq import link as link_module
from meshpoint.adapters.rabbitmq.link import Link
from meshpoint.errors import BrokerUnavailable


async def test_a_long_outage_is_not_logged_at_each_attempt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts, many = 0, asyncio.Event()

    async def refused(*_: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts == 200:
            many.set()
        raise OSError("connection refused")

    def at_once() -> Iterator[float]:
        return repeat(0.0)

    monkeypatch.setattr(link_module, "connect", refused)
    monkeypatch.setattr(link_module, "growing_pauses", at_once)
    link = Link("amqp://guest@localhost", "publishing", timedelta(seconds=1))
    with pytest.raises(BrokerUnavailable):
        await link.open()
    keeping = asyncio.create_task(link._keep())
    await many.wait()
    keeping.cancel()
    assert len(caplog.records) == 1
    assert "publishing: unavailable" in caplog.text


@pytest.mark.parametrize("given", ["", "?name=mine"])
async def test_a_connection_for_one_message_says_so_in_its_name(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    names = list[str]()

    async def refused(url: URL, *_: Any) -> Any:
        names.append(url.query["name"])
        raise OSError("connection refused")

    monkeypatch.setattr(link_module, "connect", refused)
    link = Link(f"amqp://guest@localhost/{given}", "publishing", timedelta(seconds=1))
    for connect in (link.connection, link.apart):
        with pytest.raises(BrokerUnavailable):
            await connect()
    assert names[1] == f"{names[0]} apart"
