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
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of attempted connections, all of which are refused."""
    tried = list[str]()

    async def refused(url: URL, *_: Any) -> Any:
        tried.append(url.query["name"])
        raise OSError("connection refused")

    monkeypatch.setattr(link_module, "connect", refused)
    return tried


@pytest.mark.parametrize("given", ["", "?name=mine"])
async def test_a_connection_for_one_message_says_so_in_its_name(names: list[str], given: str) -> None:
    link = Connection(f"amqp://guest@localhost/{given}", "publishing", timedelta(seconds=1))
    for connect in (link.ensure_connected, link.open_separate):
        with pytest.raises(BrokerUnavailable):
            await connect()
    assert names[1] == f"{names[0]} apart"


async def test_connections_of_an_isolated_process_say_so_in_their_names(names: list[str]) -> None:
    mesh = MeshSettings(namespace="mesh", broker_url="amqp://guest@localhost")
    for purpose in ("", "isolated"):
        broker = wiring.make_broker(mesh, purpose)
        assert isinstance(broker, RabbitMqBroker)
        with pytest.raises(BrokerUnavailable):
            await broker._publish_connection.ensure_connected()
    assert names == ["meshpoint mesh publishing", "meshpoint mesh isolated publishing"]


@pytest.mark.parametrize("data", ["%ff", "a", "%C3%A9"])
def test_certificates_that_are_not_base64_are_refused_at_once(data: str) -> None:
    with pytest.raises(ConfigurationError, match="cadata that is not base64"):
        Connection(f"amqps://guest:hunter2@localhost/?cadata={data}", "publishing", timedelta(seconds=1))


class SilentConnection:
    """A connection that opens no channels. Each attempt fails once `give_up` is released."""

    is_opened = True

    def __init__(self) -> None:
        self.asked, self.give_up = asyncio.Semaphore(0), asyncio.Semaphore(0)
        self.underlay, self.closing = self, asyncio.get_running_loop().create_future()
        self.closed = False

    async def open_channel(self, *_: object, **__: object) -> Any:
        self.asked.release()
        await self.give_up.acquire()
        raise BrokerUnavailable("opening a channel: no answer in time")

    async def close(self) -> None:
        self.closed = True


async def test_a_silent_broker_costs_one_connection_however_many_messages_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message that times out on the old connection must not close its replacement."""
    made = list[SilentConnection]()

    async def connect(*_: Any) -> Any:
        made.append(SilentConnection())
        return made[-1]

    monkeypatch.setattr(link_module, "connect", connect)
    hour = timedelta(hours=1)
    link = Connection("amqp://guest@localhost", "publishing", hour)
    publisher = Publisher(link, Topology("demo", hour, 20), hour, link.close)
    channel: Any = object()
    await link.open()
    unconfirmed = {asyncio.create_task(publisher._abandon_channel(channel, [])) for _ in range(2)}
    for _ in unconfirmed:
        await made[0].asked.acquire()

    while unconfirmed:
        made[0].give_up.release()
        done, unconfirmed = await asyncio.wait(unconfirmed, return_when=asyncio.FIRST_COMPLETED)
        assert [type(each.exception()) for each in done] == [BrokerUnavailable]
        await link.ensure_connected()

    assert len(made) == 2
    assert not made[1].closed
    await link.close()
