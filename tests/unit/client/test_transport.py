"""A connection that fails to open leaves nothing open."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshpoint.adapters.inprocess.broker import InProcessBroker, InProcessExchange
from meshpoint.client.transport import Transport
from meshpoint.errors import BrokerUnavailable


class Broker(InProcessBroker):
    """A broker whose `consume` fails; records that it was closed."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(InProcessExchange())
        self.error, self.closed = error, False

    async def consume(self, *_: Any) -> Any:
        raise self.error

    async def close(self) -> None:
        self.closed = True
        await super().close()


@pytest.mark.parametrize(
    "error", [BrokerUnavailable("gone"), asyncio.CancelledError()], ids=["failed", "cancelled"]
)
async def test_a_connection_that_fails_to_open_closes_its_broker(error: BaseException) -> None:
    broker = Broker(error)
    with pytest.raises(type(error)):
        await Transport(broker).open()
    assert broker.closed
