"""A failed connection is retried, and the outage is reported at intervals."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from itertools import repeat
from typing import Any

import pytest
from yarl import URL

from meshpoint import wiring
from meshpoint.adapters.rabbitmq import RabbitMqBroker
from meshpoint.adapters.rabbitmq import connection as link_module
from meshpoint.adapters.rabbitmq.connection import Connection
from meshpoint.adapters.rabbitmq.publisher import Publisher
from meshpoint.adapters.rabbitmq.topology import Topology
from meshpoint.errors import BrokerUnavailable, ConfigurationError
from meshpoint.settings.mesh import MeshSettings


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
    monkeypatch.setattr(link_module, "backoff_delays", at_once)
    link = Connection("amqp://guest@localhost", "publishing", timedelta(seconds=1))
    with pytest.raises(BrokerUnavailable):
        await link.open()
    keeping = asyncio.create_task(link._keep_connected())
    await many.wait()
    keeping.cancel()
    assert len(caplog.records) == 1
    assert "publishing: unavailable" in caplog.text


@pytest.fixture
def attempted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of attempted connections, all of which are refused."""
    attempted_names = list[str]()

    async def refused(url: URL, *_: Any) -> Any:
        attempted_names.append(url.query["name"])
        raise OSError("connection refused")

    monkeypatch.setattr(link_module, "connect", refused)
    return attempted_names


@pytest.mark.parametrize("given", ["", "?name=mine"])
async def test_a_connection_for_one_message_says_so_in_its_name(
    attempted: list[str], given: str
) -> None:
    link = Connection(f"amqp://guest@localhost/{given}", "publishing", timedelta(seconds=1))
    for connect in (link.ensure_connected, link.open_separate):
        with pytest.raises(BrokerUnavailable):
            await connect()
    assert attempted[1] == f"{attempted[0]} single-message"


async def test_connections_of_an_isolated_process_say_so_in_their_names(
    attempted: list[str],
) -> None:
    mesh = MeshSettings(namespace="mesh", broker_url="amqp://guest@localhost")
    for purpose in ("", "isolated"):
        broker = wiring._make_clear_broker(mesh, purpose)
        assert isinstance(broker, RabbitMqBroker)
        with pytest.raises(BrokerUnavailable):
            await broker._publish_connection.ensure_connected()
    assert attempted == ["meshpoint mesh publishing", "meshpoint mesh isolated publishing"]


@pytest.mark.parametrize("data", ["%ff", "a", "%C3%A9"])
def test_certificates_that_are_not_base64_are_refused_at_once(data: str) -> None:
    with pytest.raises(ConfigurationError, match="cadata that is not base64"):
        Connection(
            f"amqps://guest:hunter2@localhost/?cadata={data}", "publishing", timedelta(seconds=1)
        )


class SilentConnection:
    """A connection that opens no channels. Each attempt fails once `abort` is released."""

    is_opened = True

    def __init__(self) -> None:
        self.is_requested, self.abort = asyncio.Semaphore(0), asyncio.Semaphore(0)
        self.underlay, self.closing = self, asyncio.get_running_loop().create_future()
        self.closed = False

    async def open_channel(self, *_: object, **__: object) -> Any:
        self.is_requested.release()
        await self.abort.acquire()
        raise BrokerUnavailable("opening a channel: no answer in time")

    async def close(self) -> None:
        self.closed = True


async def test_a_silent_broker_costs_one_connection_for_all_waiting_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message that times out on the old connection must not close its replacement."""
    connections = list[SilentConnection]()

    async def connect(*_: Any) -> Any:
        connections.append(SilentConnection())
        return connections[-1]

    monkeypatch.setattr(link_module, "connect", connect)
    hour = timedelta(hours=1)
    link = Connection("amqp://guest@localhost", "publishing", hour)
    publisher = Publisher(link, Topology("demo", hour, 20), hour, link.close)
    channel: Any = object()
    await link.open()
    unconfirmed = {asyncio.create_task(publisher._abandon_channel(channel, [])) for _ in range(2)}
    for _ in unconfirmed:
        await connections[0].is_requested.acquire()

    while unconfirmed:
        connections[0].abort.release()
        done, unconfirmed = await asyncio.wait(unconfirmed, return_when=asyncio.FIRST_COMPLETED)
        assert [type(outcome.exception()) for outcome in done] == [BrokerUnavailable]
        await link.ensure_connected()

    assert len(connections) == 2
    assert not connections[1].closed
    await link.close()
