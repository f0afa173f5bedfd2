"""Tests that every broker must pass: one per sentence of `meshpoint.ports.broker`.

To test a broker of your own with pytest (and pytest-asyncio, with `asyncio_mode = auto`):

    from meshpoint.testing.conformance.broker import BrokerSuite

    class TestMyBroker(BrokerSuite):
        @pytest.fixture
        async def broker(self, tmp_path: Path) -> AsyncIterator[Broker]:
            broker = MyBroker(tmp_path)
            await broker.open()
            yield broker
            await broker.close()

        @pytest.fixture
        async def other(self, broker: Broker, tmp_path: Path) -> AsyncIterator[Broker]:
            ...  # a second open broker on the same data, as another process would have

        async def break_connection(self, broker: Broker) -> None:
            ...  # make `broker` lose its connection, or its equivalent

Every test needs empty queues, so give each its own file, namespace or exchange. If the broker
itself puts the login on messages, set `verified_user` to the login of `broker`.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    *(f"meshpoint.testing.conformance.broker_{part}" for part in ("case", "messages", "consumers"))
)

from meshpoint.testing.conformance.broker_case import (  # noqa: E402
    AGENT,
    PATIENCE,
    REQUESTS,
    STRANGER,
    Inbox,
    a_message,
    send,
    until_depth,
)
from meshpoint.testing.conformance.broker_consumers import LossSuite, PrefetchSuite, SettleSuite  # noqa: E402
from meshpoint.testing.conformance.broker_messages import (  # noqa: E402
    BroadcastSuite,
    ContentSuite,
    DeclareSuite,
    PublishSuite,
)

__all__ = ["AGENT", "PATIENCE", "REQUESTS", "STRANGER", "BrokerSuite", "Inbox", "a_message", "send", "until_depth"]


class BrokerSuite(
    PublishSuite,
    DeclareSuite,
    ContentSuite,
    BroadcastSuite,
    SettleSuite,
    PrefetchSuite,
    LossSuite,
):
    """Conformance tests for a `Broker`. Subclass it in a test module, where pytest collects it."""
