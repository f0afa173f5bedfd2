"""A connection that fails is retried, and the outage is reported at intervals."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from itertools import repeat
from typing import Any

import pytest

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
